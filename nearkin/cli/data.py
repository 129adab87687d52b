"""`nearkin data list|check|get`: list sources, validate data, download benchmarks."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nearkin._common.progress import Reporter
from nearkin.cli._arguments import Quiet, parse, parse_target, run_action, show
from nearkin.data.benchmarks import BENCHMARKS, require_target
from nearkin.data.get import get_benchmark
from nearkin.errors import require_extra
from nearkin.report.tables import Grid


@dataclass(frozen=True)
class DataListArgs:
    """List the data sources: numbers of images and classes, and how to get them."""


@dataclass(frozen=True)
class DataCheckArgs:
    """Check data before training and report problems, most severe first. Exit code 1 if there are errors.

    nearkin data check photos/ --json report.json

    nearkin data check photos.csv

    nearkin data check cub --root data
    """

    root: Path = Path("data")  # Folder of the benchmark, if one is checked by name.
    json: Path | None = None  # Write the full report, with every case, to this file.
    cases: int = 3  # Maximum number of cases to print for each problem.
    quiet: Quiet = False


@dataclass(frozen=True)
class GetArgs:
    """Download and unpack a benchmark, or unpack archives that you have. An interrupted download is resumed.

    nearkin data get cub --root data

    nearkin data get inshop --from img.zip list_eval_partition.txt
    """

    root: Path = Path("data")  # Folder in which the benchmark's own folder is created.
    from_: Annotated[tuple[Path, ...], tyro.conf.arg(name="from")] = ()
    """Archives on disk, to use instead of downloading."""
    sha256: str | None = None  # Expected SHA-256 of the archive (only for a benchmark with one archive).
    quiet: Quiet = False


def run(argv: list[str]) -> None:
    actions = {"list": data_list, "check": data_check, "get": data_get}
    usage = "usage: nearkin data list | check NAME|FOLDER|FILE | get NAME   (see --help of each)"
    run_action("data", actions, argv, usage)


def data_list(argv: list[str]) -> None:
    parse(DataListArgs, argv, "nearkin data list")
    rows = [("glyphs", "built in: drawn from fonts", "about 11,000", "about 230")]
    for name, benchmark in BENCHMARKS.items():
        on_request = not all(archive.urls for archive in benchmark.archives)
        command = f"nearkin data get {name}" + (" (on request)" if on_request else "")
        rows.append((name, command, f"{benchmark.total.images:,}", f"{benchmark.total.classes:,}"))
    rows.append(("folder", "--data FOLDER: one folder of images per class", "yours", ""))
    rows.append(("table", "--data FILE.csv: columns path and label", "yours", ""))
    show(Grid("", ("source", "how to get it", "images", "classes"), rows, names=2))


def data_check(argv: list[str]) -> None:
    what = "a benchmark, a folder or a file"
    target, args = parse_target(DataCheckArgs, argv, "nearkin data check NAME|PATH", what, exists=False)
    require_extra("images", "PIL")
    require_target(target)  # before torch is imported
    from nearkin.data.check import check_target, write_json
    from nearkin.report.data_check import render

    report = check_target(target, args.root, Reporter(quiet=args.quiet))
    show(render(report, cases=args.cases))
    if args.json is not None:
        write_json(report, args.json)
        print(f"report: {args.json}")
    if not report.ok:
        sys.exit(1)


def data_get(argv: list[str]) -> None:
    name, args = parse_target(GetArgs, argv, "nearkin data get NAME", "a benchmark's name", exists=False)
    reporter = Reporter(quiet=args.quiet)
    print(get_benchmark(BENCHMARKS[name], args.root, files=args.from_, sha256=args.sha256, reporter=reporter))
