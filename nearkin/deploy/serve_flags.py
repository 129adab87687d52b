"""What `nearkin serve` and `nearkin export` take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class ServeArgs:
    """Serve an index as a web page and a JSON API.

    nearkin serve photos.index                          (then open the address it prints)

    nearkin serve photos.index --host 0.0.0.0 --token-file token.txt

    The API describes itself at /openapi.json. Ctrl-C stops it. A running server does not see changes of the index.
    """

    host: str = "127.0.0.1"
    """The address to listen on; by default only this machine can reach it."""
    port: int = 8000
    """The port; 0 takes any that is free."""
    token_file: Path | None = None
    """File whose first line every request for data must bear (Authorization: Bearer). Or set NEARKIN_TOKEN."""
    allow_host: tuple[str, ...] = ()
    """Further names by which the server may be called, for example behind a proxy; any, unless it listens on a loopback
    address."""
    workers: int = 2
    """Pictures worked on at once."""
    upload_bytes: int = 20_000_000
    """Largest upload."""
    pixels: int = 50_000_000
    """Largest picture, by width times height."""
    upload_seconds: float = 20.0
    """Time within which an upload must arrive."""
    work_seconds: float = 30.0
    """Time within which an answer must be found."""
    waiting: int = 64
    """Requests under way at once; further ones are told to come back."""
    run: Path | None = None
    """The run folder of the model, where it is not at the place that the index names."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""


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
