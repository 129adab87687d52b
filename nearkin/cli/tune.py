"""`nearkin tune`: search the settings of losses."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nearkin._common.progress import Reporter
from nearkin._common.words import counted
from nearkin.bench.executor import Slurm, run_workers, submit
from nearkin.bench.tune_storage import is_database, without_password
from nearkin.cli._arguments import Device, Quiet, command_line, parse, parse_known, require_names, show
from nearkin.cli.train import TrainArgs, parse_train
from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, did_you_mean, require_extra

if TYPE_CHECKING:
    from rich.table import Table

    from nearkin.bench.tune import Search, Standing


@dataclass(frozen=True)
class TuneArgs:
    """Search the settings of losses on validation classes, with the same number of trials per loss.

    nearkin tune glyphs_small --losses proxy_anchor multi_similarity --trials 20 --out tuned

    nearkin tune --data features.npz --losses all --workers 2 --out tuned

    nearkin tune --data photos/ --losses all --out tuned   (the features of your images are computed first)

    nearkin tune thesis_multi_similarity:cub:bn_inception:512 --data CUB_200_2011 --weights FILE --mode thesis_grid

    RECIPE and its flags are those of nearkin train (see its --help): --data, --train.epochs, --model.dim ... The search
    covers lr, class_lr and the settings of each loss (ranges: nearkin losses NAME). The test classes stay sealed.

    Run the same command again to resume a search, to join a running one, or to print the results; on another machine
    with the same --storage it adds workers. A failed trial is counted and shown, never scored.
    """

    out: Path = Path("tuned")  # Folder for the best recipes, the run folders and the journal of the search.
    losses: tuple[str, ...] = ()  # Losses by name, or all; default: the recipe's loss.
    trials: int | None = None
    """Trials per loss; default: 20, or as in the existing search, which a larger number extends."""
    mode: Literal["optuna", "thesis_grid", "thesis_grid_coarse"] = "optuna"
    """optuna: sample the declared ranges; thesis_grid: one setting at a time on the grids of the thesis's table 15;
    thesis_grid_coarse: the same with three values of each setting."""
    prune: bool = True
    """Stop trials whose validation score is below the median of earlier trials at the same epoch (optuna only)."""
    shorten: float | None = None
    """Fraction of the recipe's epochs to train in each trial; default: 1, or 0.25 with thesis_grid."""
    workers: int = 1  # Worker processes on this machine, or cluster jobs; 0 only prints the progress of the search.
    storage: str | None = None
    """postgresql+psycopg://USER@HOST/DATABASE for workers on several machines; default: a journal file in --out."""
    launch: Literal["here", "slurm", "local"] = "here"
    """here: workers are processes; slurm: workers are cluster jobs; local: run the same jobs here, as a test."""
    slurm: Slurm = field(default_factory=Slurm)
    device: Device = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> None:
    recipe, args = parse_tune(argv)
    from nearkin.bench.tune import plan, standings, write_recipes

    reporter = Reporter(quiet=args.quiet)
    flags = {name: getattr(args, name) for name in ("losses", "trials", "mode", "storage", "prune", "shorten")}
    search = plan(recipe, args.out, **flags, begin=args.workers > 0, reporter=reporter)
    results = standings(search)
    left = sum(standing.left for standing in results)
    if not left:
        reporter.info(f"search already complete: all {search.total} trials in {search.out}")
    elif args.workers:
        command = ["nearkin", "tune", *argv]
        budget = ", ".join(f"{loss} {search.budget(loss)}" for loss in search.losses)
        if search.mode == "optuna":
            budget = f"{search.trials} per loss ({', '.join(search.losses)})"
        reporter.info(f"{left} of {counted(search.total, 'trial')} to run: {budget}")
        if args.storage is not None and is_database(search.address):
            command = [word.replace(args.storage, without_password(search.address)) for word in command]
            reporter.info(f"to add another machine, run there:\n  {shlex.join(command)}")
        if args.launch == "here":
            from nearkin.training.features import cache_features

            cache_features(recipe, test=False, device=args.device, reporter=reporter)
        _run_search(search, args, reporter)
        if args.launch == "slurm":
            print(f"progress: {shlex.join([*command, '--workers', '0'])}")
            return
        results = standings(search)
    written = write_recipes(search, results)
    show(results_table(results), *footer(search, results, written))


def _run_search(search: Search, args: TuneArgs, reporter: Reporter) -> None:
    from nearkin.bench.tune import standings, work

    if args.launch != "here":
        task = functools.partial(work, dataclasses.replace(search, out=search.out.resolve()), device=args.device)
        jobs = submit(task, args.workers, args.slurm, search.out / "jobs", cluster=args.launch)
        print(f"jobs: {' '.join(jobs)} (logs: {search.out / 'jobs'})")
    elif args.workers == 1:
        work(search, device=args.device, reporter=reporter)
    else:

        def unfinished() -> int:
            return sum(standing.left for standing in standings(search))

        task = functools.partial(work, search)
        run_workers(task, args.workers, unfinished, search.total, args.device, reporter)


def parse_tune(argv: list[str]) -> tuple[Recipe, TuneArgs]:
    argv = list(argv)
    prog = "nearkin tune [RECIPE]"
    recipe_name = [argv.pop(0)] if argv and not argv[0].startswith("-") else []
    if "-h" in argv or "--help" in argv:
        parse(TuneArgs, ["--help"], prog)
    args, rest = parse_known(TuneArgs, argv, prog)
    tune_flags = [f"--{entry.name}" for entry in dataclasses.fields(TuneArgs)]
    train_names = {entry.name for entry in dataclasses.fields(TrainArgs)} | {"weights", "freeze"}
    for word in rest:
        flag = word.partition("=")[0].partition(".")[0]
        if flag in ("--runs", "--log", "--show"):
            where = "give it to nearkin train" if flag == "--show" else "its runs are stored in --out"
            raise ConfigError(f"{flag}: not available for a search; {where}.")
        unknown = flag.startswith("--") and flag.removeprefix("--") not in train_names
        if unknown and (hint := did_you_mean(flag, tune_flags)):
            raise ConfigError(f"{flag}: no such setting.{hint} See: nearkin tune --help.")
    if args.workers < 0:
        raise ConfigError(f"--workers: expected 0 or more, got {args.workers}.")
    require_extra("bench", "optuna")
    require_names("loss", [name for name in args.losses if name != "all"])
    recipe, _ = parse_train([*recipe_name, *rest, *(["--quiet"] if args.quiet else [])])
    return recipe, args


def results_table(results: Sequence[Standing]) -> Table:
    """Build the table of the best trials; below each loss its best settings."""
    from nearkin.report.tables import Grid, rich_table
    from nearkin.training.evaluation import MIN_VAL_CLASSES, selection_metrics

    classes = max(standing.classes for standing in results)
    few = f", unreliable with only {classes} of them" if classes < MIN_VAL_CLASSES else ""
    title = f"Best trials on {classes} validation classes, percent" if classes else "No finished trials yet"
    caption = f"small: 95 % interval over validation classes{few}. The best of many trials is optimistic."
    rows = []
    for s in results:
        settings = "  ".join(f"{name.partition('.')[2]} {_format(v)}" for name, v in (s.settings or {}).items())
        best = "-" if s.best is None else f"{100 * s.best:.1f}"
        interval = "-".join(f"{100 * end:.1f}" for end in s.interval or ())
        states = {"done": s.done, "pruned": s.pruned, "FAILED": s.failed, "left": s.left}
        counts = [f"{count} {state}" for state, count in states.items() if count or state == "done"]
        rows.append((f"{s.loss}\n{settings}", f"{best}\n{interval}", ", ".join(counts)))
    head = ("loss, settings", f"val {selection_metrics(classes)[0]}", "trials")
    return rich_table(Grid(title, head, rows, caption=caption if classes else "", bold=None))


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def footer(search: Search, results: Sequence[Standing], written: dict[str, Path]) -> list[str]:
    """Build the lines below the table: why trials failed, and the commands that train the best settings."""
    lines = [f"{s.loss}: {s.failed} of {s.budget} trials failed (first: {s.reasons[0]})" for s in results if s.reasons]
    if written:
        lines.append("to train the best settings of a loss and evaluate them once on the sealed test classes:")
    full = f"   # shortened as in the search; --train.epochs {search.full_epochs} for the full length"
    comment = full if search.recipe.train.epochs != search.full_epochs else ""
    return lines + [f"  {command_line('train', str(path))}{comment}" for path in written.values()]
