"""`nearkin data list|check|get`: benchmarks and your own images."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nearkin.cli._arguments import leading, parse, show
from nearkin.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class DataListArgs:
    """List the sources that nearkin reads: images, classes, and where to get them."""


@dataclass(frozen=True)
class DataCheckArgs:
    """Say what is off with images before they are trained on, worst first; exit code 1 if a number would be wrong.

    nearkin data check photos/ --json report.json

    nearkin data check photos.csv

    nearkin data check cub --root data
    """

    root: Path = Path("data")
    """Where a benchmark named by its name lies."""
    json: Path | None = None
    """Write the whole report, every case named, to this file."""
    cases: int = 3
    """How many cases of each kind are printed."""
    quiet: bool = False
    """Print the report only."""


@dataclass(frozen=True)
class GetArgs:
    """Download and unpack a benchmark, or unpack archives that you have. Run again, it goes on where it stopped.

    nearkin data get cub --root data

    nearkin data get inshop --from img.zip list_eval_partition.txt
    """

    root: Path = Path("data")
    """The folder in which the benchmark's own folder is made."""
    from_: Annotated[tuple[Path, ...], tyro.conf.arg(name="from")] = ()
    """Archives that are on the disk already, instead of a download."""
    sha256: str | None = None
    """Refuse an archive whose SHA-256 differs from this one (for a source of one archive)."""
    quiet: bool = False
    """Say nothing but the result."""


def run(argv: list[str]) -> None:
    actions = {"list": data_list, "check": data_check, "get": data_get}
    if argv[:1] in ([], ["-h"], ["--help"]):
        print("usage: nearkin data list | check NAME|FOLDER|FILE | get NAME   (each has --help)")
        return
    if argv[0] not in actions:
        hint = did_you_mean(argv[0], actions) or f" There are: {', '.join(actions)}."
        raise ConfigError(f"nearkin data: no action named '{argv[0]}'.{hint}")
    actions[argv[0]](argv[1:])


def data_list(argv: list[str]) -> None:
    parse(DataListArgs, argv, "nearkin data list")
    show(source_table())


def source_table() -> Any:
    """What `nearkin data list` shows."""
    from rich.table import Table as RichTable

    from nearkin.data.benchmarks import BENCHMARKS

    table = RichTable(box=None, padding=(0, 2, 0, 0))
    for heading in ("source", "images", "classes", "where to get it"):
        table.add_column(heading, justify="right" if heading in ("images", "classes") else "left")
    table.add_row("glyphs", "about 11,000", "about 230", "built in: drawn from fonts")
    for name, benchmark in BENCHMARKS.items():
        by_hand = not all(archive.urls for archive in benchmark.archives)
        how = f"nearkin data get {name}" + (" (tells whom to ask)" if by_hand else "")
        table.add_row(name, f"{benchmark.total.images:,}", f"{benchmark.total.classes:,}", how)
    table.add_row("folder", "yours", "", "--data FOLDER: one folder of images per class")
    table.add_row("table", "yours", "", "--data FILE.csv: columns path and label")
    return table


def data_check(argv: list[str]) -> None:
    target, flags = leading(argv, "a benchmark, a folder or a file", "nearkin data check NAME|PATH", DataCheckArgs)
    args = parse(DataCheckArgs, flags, "nearkin data check NAME|PATH")
    from nearkin._common.progress import Reporter
    from nearkin.data.check import check_target, render, write_json

    report = check_target(target, args.root, Reporter(quiet=args.quiet))
    show(render(report, cases=args.cases))
    if args.json is not None:
        write_json(report, args.json)
        print(f"report: {args.json}")
    if not report.ok:
        sys.exit(1)


def data_get(argv: list[str]) -> None:
    name, flags = leading(argv, "a benchmark's name", "nearkin data get NAME", GetArgs)
    args = parse(GetArgs, flags, "nearkin data get NAME")
    from nearkin._common.progress import Reporter
    from nearkin.data.get import get_dataset

    print(get_dataset(name, args.root, given=args.from_, sha256=args.sha256, reporter=Reporter(quiet=args.quiet)))
