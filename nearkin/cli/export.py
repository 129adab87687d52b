"""`nearkin export`: export a trained model to a file that runs without nearkin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nearkin._common.progress import Reporter
from nearkin.cli._arguments import Quiet, parse_target
from nearkin.errors import ConfigError, require_extra
from nearkin.training.run import Run


@dataclass(frozen=True)
class ExportArgs:
    """Export a trained model to a single file that runs without nearkin, preprocessing included.

    nearkin export runs/<key> --to onnx -o birds.onnx

    nearkin export runs/<key> --to torch -o birds.pt2

    nearkin export runs/<key> --to hub -o USER/NAME      (the Hugging Face Hub; load it with nk.load("hf:USER/NAME"))

    The file takes images as uint8 [B, 3, H, W] (RGB) and returns the model's vectors. It is compared with the model
    before it is saved. The Hub gets the model as nearkin loads it, and a card with its protocol and metrics.
    """

    to: Literal["onnx", "torch", "hub"]
    """onnx: for ONNX Runtime and others. torch: a torch.export program (.pt2). hub: the Hugging Face Hub."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """File to write; its metadata are written next to it, to FILE.json. For the Hub: USER/NAME."""
    images: Path | None = None
    """Folder of images to compare on; by default the run's validation images, or random images if they are gone."""
    private: bool = False  # Whether only you can see a repository that is made on the Hub.
    quiet: Quiet = False


def run(argv: list[str]) -> None:
    target, args = parse_target(ExportArgs, argv, "nearkin export RUN --to onnx|torch|hub -o FILE", "a run folder")
    require_extra("export", "PIL")
    if args.to == "onnx":
        require_extra("export", "onnxscript", "onnxruntime")
    unused = ("--images", args.images) if args.to == "hub" else ("--private", args.private)
    if unused[1]:
        raise ConfigError(f"{unused[0]}: has no effect with --to {args.to}. Remove it.")
    if args.to == "hub":
        from nearkin.deploy.model_card import model_card

        trained, repo = Run(Path(target)), args.out.as_posix()
        print(trained.embedder().push_to_hub(repo, card=model_card(trained, repo), private=args.private))
        return
    from nearkin.deploy.export import export_run

    print(export_run(Path(target), args.to, args.out, images=args.images, reporter=Reporter(quiet=args.quiet)))
