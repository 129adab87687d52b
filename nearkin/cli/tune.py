"""`nearkin tune`: parse, plan, run, and show what was found."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nearkin.bench.launch import Slurm, run_local, submit
from nearkin.bench.storage import is_database, without_password
from nearkin.cli._arguments import parse, show
from nearkin.cli.train import TrainArgs, parse_train
from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

    from nearkin.bench.tune import Search, Standing

FEW = 10  # classes below which an interval over them is itself a guess


@dataclass(frozen=True)
class TuneArgs:
    """Search the settings of losses on validation classes, with the same number of trials for each.

    nearkin tune glyphs_small --losses proxy_anchor multi_similarity --trials 20 --out tuned

    nearkin tune --data features.npz --losses all --workers 2 --out tuned

    nearkin tune thesis_proxy_anchor --data CUB_200_2011 --mode thesis_grid --out grid

    RECIPE and its flags are those of nearkin train (see its --help): --data, --train.epochs, --model.dim ... What is
    searched beside lr and class_lr is each loss's own (nearkin losses NAME). The test classes stay sealed.

    The same command again goes on where it was stopped, joins a search that runs, or says what was found; on another
    machine with the same --storage it helps. A trial that failed is counted and shown, never scored.
    """

    out: Path = Path("tuned")
    """Folder for the best recipes, the run folders and the journal of the search."""
    losses: tuple[str, ...] = ()
    """Losses by name, or all; by default the recipe's own."""
    trials: int | None = None
    """Trials of each loss; by default 20, or as many as the search has. More prolong it, fewer shorten it."""
    mode: Literal["optuna", "thesis_grid"] = "optuna"
    """optuna: the declared ranges; thesis_grid: one setting at a time on the grids of the thesis's table 15."""
    prune: bool = True
    """Stop trials whose validation R@1 is below the median of earlier ones at the same epoch (optuna only)."""
    shorten: float | None = None
    """Share of the recipe's epochs that a trial trains; by default all, with thesis_grid a quarter."""
    workers: int = 1
    """Processes on this machine, or jobs of a cluster; 0 only says how far the search is."""
    storage: str | None = None
    """postgresql+psycopg://USER@HOST/DATABASE for workers on several machines; by default a journal file in --out."""
    launch: Literal["here", "slurm", "local"] = "here"
    """slurm: send the workers to the cluster as jobs; local: the same on this machine, to try it out."""
    slurm: Slurm = field(default_factory=Slurm)
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""
    quiet: bool = False
    """Print the final table only."""


def run(argv: list[str]) -> None:
    """`nearkin tune [RECIPE]`."""
    recipe, args = parse_tune(argv)
    from nearkin._common.progress import Reporter
    from nearkin.bench.tune import plan, standings, write_recipes

    reporter = Reporter(quiet=args.quiet)
    search = plan(
        recipe,
        args.out,
        losses=args.losses,
        trials=args.trials,
        mode=args.mode,
        storage=args.storage,
        prune=args.prune,
        shorten=args.shorten,
        begin=args.workers > 0,
        reporter=reporter,
    )
    found = standings(search)
    left = sum(standing.left for standing in found)
    if not left:
        reporter.info(f"done already: all {search.total} trials of {search.out}")
    elif args.workers:
        reporter.info(f"{left} of {search.total} trials to run: {_budget(search)}")
        if is_database(search.address):
            reporter.info(f"on each further machine:\n  {shlex.join(['nearkin', 'tune', *_printable(argv, search)])}")
        if args.launch == "here":
            run_local(search, args.workers, device=args.device, quiet=args.quiet)
        else:
            jobs = submit(search, args.workers, args.slurm, cluster=args.launch, device=args.device)
            print(f"jobs: {' '.join(jobs)} (what they say: {search.out / 'jobs'})")
            if args.launch == "slurm":
                words = ["nearkin", "tune", *_printable(argv, search), "--workers", "0"]
                print(f"how far they are: {shlex.join(words)}")
                return
        found = standings(search)
    written = write_recipes(search, found)
    show(table(search, found), *closing(search, found, written))


def parse_tune(argv: list[str]) -> tuple[Recipe, TuneArgs]:
    """The recipe to start from, read as `nearkin train` reads it, and the flags of the search itself."""
    import tyro

    argv = list(argv)
    prog = "nearkin tune [RECIPE]"
    named = [argv.pop(0)] if argv and not argv[0].startswith("-") else []
    if "-h" in argv or "--help" in argv:
        parse(TuneArgs, ["--help"], prog)
    args, rest = tyro.cli(TuneArgs, args=argv, prog=prog, return_unknown_args=True)
    own = [f"--{entry.name}" for entry in dataclasses.fields(TuneArgs)]
    trained = {entry.name for entry in dataclasses.fields(TrainArgs)} | {"weights", "freeze"}
    for word in rest:
        flag = word.partition("=")[0].partition(".")[0]
        if flag in ("--runs", "--log"):
            raise ConfigError(f"{flag}: not a setting of a search; its runs are kept in --out.")
        if flag.startswith("--") and flag.removeprefix("--") not in trained and (hint := did_you_mean(flag, own)):
            raise ConfigError(f"{flag}: no such setting.{hint} See: nearkin tune --help.")
    if args.workers < 0:
        raise ConfigError(f"--workers: expected 0 or more, got {args.workers}.")
    recipe, _ = parse_train([*named, *rest, *(["--quiet"] if args.quiet else [])])
    return recipe, args


def _printable(argv: Sequence[str], search: Search) -> list[str]:
    """The command without the database's password."""
    shown = without_password(search.address)
    words = list(argv)
    for place, word in enumerate(words):
        if word.startswith("--storage="):
            words[place] = f"--storage={shown}"
        elif place and words[place - 1] == "--storage":
            words[place] = shown
    return words


def _budget(search: Search) -> str:
    if search.mode == "optuna":
        return f"{search.trials} of each loss ({', '.join(search.losses)})"
    return ", ".join(f"{loss} {search.budget(loss)}" for loss in search.losses)


# --- what is shown ---------------------------------------------------------------------------------------------------


def table(search: Search, found: Sequence[Standing]) -> Table:
    """The best of each loss with its interval, its settings, and how its trials ended."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    classes = max(standing.classes for standing in found)
    few = f"; over only {classes} it says little" if classes < FEW else ""
    shown = Table(
        box=box.SIMPLE_HEAD,
        title=f"Chosen on {classes} validation classes, percent" if classes else "Nothing found yet",
        title_style="bold",
        title_justify="left",
        caption=f"small: 95 % interval over validation classes{few}. The best of many looks better than it is."
        if classes
        else None,
        caption_justify="left",
    )
    shown.add_column("loss", no_wrap=True)
    shown.add_column("val R@1", justify="right", no_wrap=True)
    shown.add_column("trials", justify="right", no_wrap=True)
    shown.add_column("settings")
    for s in found:
        best = Text("-")
        if s.best is not None and s.interval is not None:
            best = Text(f"{100 * s.best:.1f}\n") + Text(f"{100 * s.interval[0]:.1f}-{100 * s.interval[1]:.1f}", "dim")
        ended = {"done": s.done, "pruned": s.pruned, "FAILED": s.failed, "left": s.left}
        counts = [f"{count} {how}" for how, count in ended.items() if count or how == "done"]
        settings = "  ".join(f"{name.partition('.')[2]} {_number(v)}" for name, v in (s.settings or {}).items())
        shown.add_row(s.loss, best, "\n".join(counts), settings)
    return shown


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def closing(search: Search, found: Sequence[Standing], written: dict[str, Path]) -> list[str]:
    """Why trials failed, and the commands that replay the best."""
    lines = [f"{s.loss}: {s.failed} of {s.budget} trials failed, first: {s.reasons[0]}" for s in found if s.reasons]
    if written:
        lines.append("to train the best of a loss and judge it once on the sealed test classes:")
        longer = ""
        if search.recipe.train.epochs != search.full_epochs:
            longer = f"   # as searched; --train.epochs {search.full_epochs} for the whole length"
        lines += [f"  {shlex.join(['nearkin', 'train', str(path)])}{longer}" for path in written.values()]
    return lines
