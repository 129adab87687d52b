"""The commands of the benchmark: parse, call one function, print."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.cli._arguments import leading, parse, show
from nearkin.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from nearkin.bench.study import Study
    from nearkin.bench.trials import StudyFolder


@dataclass(frozen=True)
class StudyArgs:
    """What `plan` and `run` share: flags that narrow or widen a study."""

    data: Path | None = None
    """With a study by name: its data (features: an .npz file; thesis: the folder that holds cub, cars and sop)."""
    out: Path | None = None
    """Folder of the study; by default studies/NAME, where NAME is the study's own."""
    losses: tuple[str, ...] = ()
    """Only these methods."""
    sizes: tuple[int, ...] = ()
    """These embedding sizes instead of the study's."""
    seeds: tuple[int, ...] = ()
    """These seeds instead of the study's; more can be added later, what is done stays done."""


@dataclass(frozen=True)
class PlanArgs(StudyArgs):
    """Print every trial of a study with an estimate of its time and disk; nothing is run.

    nearkin bench plan tiny

    nearkin bench plan thesis --tflops 60     (for a GPU that reaches 60 TFLOP/s in the training precision)
    """

    tflops: float | None = None
    """Estimate for a device of this speed instead of this machine."""
    workers: int = 0
    """Trials at a time; 0 takes one per GPU, or one per core where there is none."""
    full: bool = False
    """List every trial, not a line per experiment."""


@dataclass(frozen=True)
class RunArgs(StudyArgs):
    """Run a study: every trial that has no outcome yet. The same command again goes on.

    nearkin bench run tiny                    (the built-in glyphs; see also: features, thesis)

    nearkin bench run features --data features.npz

    nearkin bench run study.toml --workers 2
    """

    runs: Path = Path("runs")
    """Folder in which run folders are kept; studies share them."""
    workers: int = 0
    """Processes that train at a time; 0 takes one per GPU, or one per core where there is none."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""
    retry_failed: bool = False
    """Run trials again that have failed."""
    quiet: bool = False
    """Print the final table only."""


@dataclass(frozen=True)
class WorkArgs:
    """Take trials of a study that was begun, until none is left. Start as many as you like, on any machine that shares
    the folder.

    nearkin bench work studies/tiny
    """

    runs: Path = Path("runs")
    """Folder in which run folders are kept: the same for all workers."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""
    detached: bool = False
    """Go on when the input ends. Without it a worker stops with the process that started it."""


@dataclass(frozen=True)
class StatusArgs:
    """How far a study is, what failed and why, and the time the rest will take.

    nearkin bench status studies/tiny
    """


def run(argv: list[str]) -> None:
    """`nearkin bench plan|run|status|work`."""
    actions = {"plan": plan, "run": run_study, "status": status, "work": work}
    if argv[:1] in ([], ["-h"], ["--help"]):
        from nearkin.bench.presets import PRESETS

        print("usage: nearkin bench plan STUDY | run STUDY | status FOLDER | work FOLDER   (each has --help)\n")
        print("STUDY is a .toml file, the folder of a study that was begun, or one of these:")
        for name, make in PRESETS.items():
            print(f"  {name:10} {make.__doc__}")
        return
    if argv[0] not in actions:
        hint = did_you_mean(argv[0], actions) or f" There are: {', '.join(actions)}."
        raise ConfigError(f"nearkin bench: no action named '{argv[0]}'.{hint}")
    actions[argv[0]](argv[1:])


def plan(argv: list[str]) -> None:
    prog = "nearkin bench plan STUDY"
    target, flags = leading(argv, "a study's name or .toml file", prog, PlanArgs)
    args = parse(PlanArgs, flags, prog)
    if args.tflops is not None and not args.tflops > 0:
        raise ConfigError(f"--tflops: expected a speed above 0, got {args.tflops:g}.")
    from nearkin.bench.estimates import Estimate
    from nearkin.bench.trials import StudyFolder
    from nearkin.report.study_overview import plan_grid, plan_totals
    from nearkin.report.study_tables import rich_table

    study = _study(target, args)
    folder = StudyFolder(args.out or _place(target, study), study)
    at_a_time = _workers(args.workers, "auto" if args.tflops is None else "cuda:0")
    estimate = Estimate(folder.trials, folder.outcomes(), workers=at_a_time, tflops=args.tflops)
    show(rich_table(plan_grid(folder, estimate, full=args.full)))
    print(plan_totals(folder, estimate, workers=at_a_time))


def run_study(argv: list[str]) -> None:
    prog = "nearkin bench run STUDY"
    target, flags = leading(argv, "a study's name or .toml file", prog, RunArgs)
    args = parse(RunArgs, flags, prog)
    from nearkin._common.progress import Reporter
    from nearkin.bench import workers
    from nearkin.bench.estimates import Estimate
    from nearkin.bench.trials import StudyFolder
    from nearkin.data import sources
    from nearkin.report.study_overview import plan_totals, write_outcome
    from nearkin.training.factory import choose_device

    choose_device(args.device)
    reporter = Reporter(quiet=args.quiet)
    study = _study(target, args)
    folder = StudyFolder.begin(args.out or _place(target, study), study)
    if args.retry_failed:
        reporter.info(f"{folder.forget_failures()} failed trials are run again")
    at_a_time = _workers(args.workers, args.device)
    estimate = Estimate(folder.trials, folder.outcomes(), workers=at_a_time)
    reporter.info(plan_totals(folder, estimate, workers=at_a_time))
    for data in {trial.dataset: trial.recipe.data for trial in folder.trials}.values():
        study.protocol.check_table(sources.load(data, reporter))  # what is amiss is said once, now
    workers.run(folder, args.runs, estimate, workers=at_a_time, device=args.device, reporter=reporter)
    _show_outcome(folder, write_outcome(folder))


def work(argv: list[str]) -> None:
    prog = "nearkin bench work FOLDER"
    target, flags = leading(argv, "the folder of a study", prog, WorkArgs)
    args = parse(WorkArgs, flags, prog)
    from nearkin.bench import workers
    from nearkin.bench.trials import StudyFolder

    workers.serve_as_worker(StudyFolder.open(target), args.runs, args.device, detached=args.detached)


def status(argv: list[str]) -> None:
    prog = "nearkin bench status FOLDER"
    target, flags = leading(argv, "the folder of a study", prog, StatusArgs)
    parse(StatusArgs, flags, prog)
    from nearkin.bench.trials import StudyFolder
    from nearkin.report.study_overview import status_grid, status_lines
    from nearkin.report.study_tables import rich_table

    folder = StudyFolder.open(target)
    show(rich_table(status_grid(folder)))
    print(status_lines(folder))


def _study(target: str, args: StudyArgs) -> Study:
    """The study that is named, narrowed by flags."""
    from nearkin.bench.presets import find_study

    study = find_study(target, args.data)
    if args.losses:
        known = study.names
        for name in args.losses:
            if name not in known:
                raise ConfigError(f"--losses: the study has no method '{name}'.{did_you_mean(name, known)}")
        own = {name: values for name, values in study.methods.items() if name in args.losses}
        study = dataclasses.replace(study, losses=args.losses, methods=own)
    return dataclasses.replace(study, sizes=args.sizes or study.sizes, seeds=args.seeds or study.seeds)


def _place(target: str, study: Study) -> Path:
    from nearkin.bench.presets import PRESETS

    begun = target not in PRESETS and Path(target).is_dir()
    return Path(target) if begun else Path("studies") / study.name.replace("/", "-")


def _workers(asked: int, device: str) -> int:
    from nearkin.bench.machine import default_workers

    if asked < 0:
        raise ConfigError(f"--workers: expected 0 or more, got {asked}.")
    return default_workers(asked, device)


def _show_outcome(folder: StudyFolder, written: list[Path]) -> None:
    from nearkin.report.study_overview import outcome_parts

    show(*outcome_parts(folder))
    print(f"files: {folder.path}/  ({', '.join(path.name for path in written)})")
    print(f"page:  nearkin report --study {shlex.quote(str(folder.path))}")
