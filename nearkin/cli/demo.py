"""`nearkin demo`: train, evaluate and report on the built-in data."""

from dataclasses import dataclass
from pathlib import Path

from nearkin._common.progress import Reporter
from nearkin.cli._arguments import Device, Quiet, Runs, command_line, parse, show
from nearkin.errors import require_extra
from nearkin.report.baselines import headline
from nearkin.report.tables import result_table
from nearkin.training import recipes

NEXT = {  # commands that work as they are printed
    "another loss, same data": "train glyphs_small --loss multi_similarity --miner multi_similarity",
    "the available losses": "losses",
    "your own images, one folder per class (write its name for FOLDER)": "train --data FOLDER",
}


@dataclass(frozen=True)
class DemoArgs:
    """Train on the built-in glyphs, evaluate on characters never seen in training, and write an HTML report."""

    runs: Runs = Path("runs")
    page: Path | None = None  # File of the HTML report; by default report.html in the run folder.
    device: Device = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> None:
    args = parse(DemoArgs, argv, "nearkin demo")
    require_extra("images", "PIL", "jinja2", "matplotlib")
    from nearkin.report.page import write_page
    from nearkin.training.loop import fit

    reporter = Reporter(quiet=args.quiet)
    run = fit(recipes.glyphs_small(), args.runs, device=args.device, reporter=reporter)
    page = write_page(run, args.page, reporter=reporter)
    show(result_table(run), headline(run), f"\nreport: {page}\nrun:    {run.path}\n", _next_steps())


def _next_steps() -> str:
    lines = [f"# {what}\n{command_line(*command.split())}" for what, command in NEXT.items()]
    return "\n".join(["Try next", *lines])
