"""The command `nearkin report`: parse, call, print."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nearkin.cli._arguments import leading, parse
from nearkin.errors import ConfigError, RunError


@dataclass(frozen=True)
class ReportArgs:
    """Write one self-contained HTML page for a finished run, or for runs judged on the same images.

    nearkin report runs/<key>

    nearkin report runs/<first> runs/<second> -o comparison.html   (the second against the first)

    nearkin report runs/<key> --figures figures --tables tables    (for a paper)

    nearkin report --study studies/tiny                            (a study: ranks, intervals, what failed)
    """

    study: Path | None = None
    """Folder of a study instead of runs."""

    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Where to write the page; by default report.html in the folder of the (first) run."""
    tsne: bool = False
    """Add a t-SNE map beside the PCA map; takes a minute for some thousand images."""
    figures: Path | None = None
    """Folder for figures as PNG and SVG."""
    tables: Path | None = None
    """Folder for the table of numbers as Markdown and LaTeX."""
    json: Path | None = None
    """Write the data behind the page to this file."""
    quiet: bool = False
    """Print the paths of the written files only."""


def run(argv: list[str]) -> None:
    """`nearkin report RUN [RUN ...]`."""
    prog = "nearkin report RUN [RUN ...]"
    if any(word == "--study" or word.startswith("--study=") for word in argv):
        _study(parse(ReportArgs, argv, "nearkin report --study STUDY"))
        return
    first, rest = leading(argv, "a run folder", prog, ReportArgs)
    targets = [first]
    while rest and not rest[0].startswith("-"):
        targets.append(rest.pop(0))
    args = parse(ReportArgs, rest, prog)
    from nearkin._common.progress import Reporter
    from nearkin.report.figures import write_figures
    from nearkin.report.page import build_report, write_report
    from nearkin.report.tables import write_tables
    from nearkin.training.run import Run

    runs = [Run(target) for target in targets]
    made = build_report(runs, tsne=args.tsne, reporter=Reporter(quiet=args.quiet))
    print(write_report(made, args.out or runs[0].path / "report.html"))
    if args.json is not None:
        _write_json(made.to_dict(), args.json)
        print(args.json)
    for path in write_tables(made, args.tables) if args.tables is not None else []:
        print(path)
    for path in write_figures(made, args.figures) if args.figures is not None else []:
        print(path)


def _study(args: ReportArgs) -> None:
    from nearkin.report.study import build_study_report, write_study_page
    from nearkin.report.study_figures import write_study_figures

    assert args.study is not None
    if args.tsne or args.tables is not None:
        given = "--tsne" if args.tsne else "--tables"
        raise ConfigError(f"{given}: not with --study; its tables lie in {args.study}/tournament.")
    made = build_study_report(args.study)
    print(write_study_page(made, args.out or args.study / "report.html"))
    if args.json is not None:
        _write_json(made.to_dict(), args.json)
        print(args.json)
    for path in write_study_figures(made, args.figures) if args.figures is not None else []:
        print(path)


def _write_json(values: object, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}). Choose another place with --json.") from None
