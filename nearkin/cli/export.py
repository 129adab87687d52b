"""`nearkin export`: a trained model as one file that runs without nearkin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nearkin.cli._arguments import leading, parse

EXPORT = "nearkin export RUN --to onnx|torch -o FILE"


@dataclass(frozen=True)
class ExportArgs:
    """Write a trained model as one file that runs without nearkin, preprocessing included.

    nearkin export runs/<key> --to onnx -o birds.onnx

    nearkin export runs/<key> --to torch -o birds.pt2

    The file takes pictures as uint8 [B, 3, H, W] (red, green, blue) and gives the model's vectors. It is compared
    with the model before it is kept.
    """

    to: Literal["onnx", "torch"]
    """onnx: a file for ONNX Runtime and others. torch: a torch.export program (.pt2)."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The file to write; the facts about it go beside it, as FILE.json."""
    images: Path | None = None
    """Folder of images to compare on; by default the run's own validation images, or random pictures if they are
    gone."""
    quiet: bool = False
    """Print the summary only."""


def run(argv: list[str]) -> None:
    target, flags = leading(argv, "a run folder", EXPORT, ExportArgs)
    args = parse(ExportArgs, flags, EXPORT)
    from nearkin._common.progress import Reporter
    from nearkin.deploy.export import export_run

    print(export_run(Path(target), args.to, args.out, images=args.images, reporter=Reporter(quiet=args.quiet)))
