"""`nearkin report`: HTML pages, figures, tables and JSON of runs and studies."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nearkin._common.progress import Reporter
from nearkin.cli._arguments import Quiet, leading, parse, require_path
from nearkin.errors import ConfigError, require_extra
from nearkin.training.run import Run


@dataclass(frozen=True)
class ReportArgs:
    """Write one self-contained HTML page for a finished run, or for several runs evaluated on the same images.

    nearkin report runs/<key>

    nearkin report runs/<first> runs/<second> -o comparison.html   (compare two runs)

    nearkin report runs/<key> --figures figures --tables tables    (for a paper)

    nearkin report --study studies/tiny                            (a study: results, ranks, failures)
    """

    study: Path | None = None  # Folder of a study, instead of runs.
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """File of the page; by default report.html in the folder of the (first) run or of the study."""
    tsne: bool = False
    """Add a t-SNE projection to the map (PCA is always there); takes about a minute for a few thousand images."""
    figures: Path | None = None  # Write figures as PNG and SVG to this folder.
    tables: Path | None = None  # Write the results as Markdown and LaTeX tables to this folder.
    json: Path | None = None  # Write the data behind the page to this file.
    quiet: Quiet = False


def run(argv: list[str]) -> None:
    prog = "nearkin report RUN [RUN ...]"
    if any(word == "--study" or word.startswith("--study=") for word in argv):
        _report_study(parse(ReportArgs, argv, "nearkin report --study STUDY"))
        return
    first, rest = leading(ReportArgs, argv, prog, "a run folder", exists=False)
    targets = [first]
    while rest and not rest[0].startswith("-"):
        targets.append(rest.pop(0))
    args = parse(ReportArgs, rest, prog)
    require_extra("images", "PIL", "jinja2")
    if args.figures is not None:
        require_extra("images", "matplotlib")
    if args.tsne:
        require_extra("bench", "sklearn")

    runs = [Run(target) for target in targets]  # before torch is imported
    from nearkin.report import page, print_figures

    report = page.build_report(runs, tsne=args.tsne, reporter=Reporter(quiet=args.quiet))
    print(page.write_report(report, args.out or runs[0].path / "report.html"))
    _write_data(report, args.json, (page.write_tables, args.tables), (print_figures.write_figures, args.figures))


def _report_study(args: ReportArgs) -> None:
    require_extra("bench", "scipy", "jinja2")
    assert args.study is not None
    require_path(args.study, "the folder of a study (nearkin bench run makes one)")
    from nearkin.report import study

    if args.tsne or args.tables is not None:
        flag = "--tsne" if args.tsne else "--tables"
        raise ConfigError(f"{flag}: cannot be used with --study. The tables of a study are in {args.study}/tournament.")
    report = study.build_study_report(args.study)
    print(study.write_study_page(report, args.out or args.study / "report.html"))
    _write_data(report, args.json, (study.write_study_figures, args.figures))


def _write_data(report: Any, path: Path | None, *writers: tuple[Callable[..., Sequence[Path]], Path | None]) -> None:
    """Write the data behind the page to a file, its tables and figures to folders if given; print the paths."""
    if path is not None:
        from nearkin.report.html import writing

        with writing("file", path, " Choose another path with --json."):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False), encoding="utf-8")
        print(path)
    for write, folder in writers:
        for written in write(report, folder) if folder is not None else []:
            print(written)
