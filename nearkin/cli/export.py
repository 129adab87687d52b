"""`nearkin export`: export a trained model to a file that runs without nearkin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nearkin.cli._arguments import Quiet, parse_target
from nearkin.errors import require_extra

EXPORT = "nearkin export RUN --to onnx|torch -o FILE"


@dataclass(frozen=True)
class ExportArgs:
    """Export a trained model to a single file that runs without nearkin, preprocessing included.

    nearkin export runs/<key> --to onnx -o birds.onnx

    nearkin export runs/<key> --to torch -o birds.pt2

    The file takes images as uint8 [B, 3, H, W] (RGB) and returns the model's vectors. It is compared with the model
    before it is saved.
    """

    to: Literal["onnx", "torch"]
    """onnx: for ONNX Runtime and others. torch: a torch.export program (.pt2)."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """File to write; its metadata are written next to it, to FILE.json."""
    images: Path | None = None
    """Folder of images to compare on; by default the run's validation images, or random images if they are gone."""
    quiet: Quiet = False


def run(argv: list[str]) -> None:
    target, args = parse_target(ExportArgs, argv, EXPORT, "a run folder", must_exist=True)
    require_extra("export", "PIL")
    if args.to == "onnx":
        require_extra("export", "onnxscript", "onnxruntime")
    from nearkin._common.progress import Reporter
    from nearkin.deploy.export import export_run

    print(export_run(Path(target), args.to, args.out, images=args.images, reporter=Reporter(quiet=args.quiet)))
