"""`nearkin demo`: the whole way on the built-in data, from drawing it to a page to look at."""

from __future__ import annotations

from pathlib import Path

from nearkin import recipes
from nearkin.progress import Reporter
from nearkin.report.page import write_page
from nearkin.runs import Run
from nearkin.train import fit


def run_demo(runs: Path, *, page: Path | None, device: str, reporter: Reporter) -> tuple[Run, Path]:
    """Train `glyphs_small`, judge it, write its page; returns the run and the page's path."""
    run = fit(recipes.glyphs_small(), runs, device=device, reporter=reporter)
    return run, write_page(run, page, reporter=reporter)


NEXT = """\
Try next
  nearkin train glyphs_small --loss multi_similarity --miner multi_similarity   another loss, same data
  nearkin train --data FOLDER      your own images, one folder per class
  nearkin losses                   the losses there are"""
