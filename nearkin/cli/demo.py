"""`nearkin demo`: the whole way on the built-in data, from drawing it to a page to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nearkin.cli._arguments import parse, show

NEXT = """\
Try next
  nearkin train glyphs_small --loss multi_similarity --miner multi_similarity   another loss, same data
  nearkin train --data FOLDER      your own images, one folder per class
  nearkin losses                   the losses there are"""


@dataclass(frozen=True)
class DemoArgs:
    """Train on the built-in glyphs, judge on characters never seen in training, and write a page to look at."""

    runs: Path = Path("runs")
    """Folder in which run folders are kept."""
    page: Path | None = None
    """Where to write the HTML page; by default report.html in the run folder."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""
    quiet: bool = False
    """Print the final table only."""


def run(argv: list[str]) -> None:
    """`nearkin demo`."""
    args = parse(DemoArgs, argv, "nearkin demo")
    from nearkin._common.progress import Reporter
    from nearkin.report.page import write_page
    from nearkin.report.text import headline, result_table
    from nearkin.training import recipes
    from nearkin.training.loop import fit

    reporter = Reporter(quiet=args.quiet)
    run = fit(recipes.glyphs_small(), args.runs, device=args.device, reporter=reporter)
    page = write_page(run, args.page, reporter=reporter)
    show(result_table(run), headline(run), f"\npage: {page}\nrun:  {run.path}\n", NEXT)
