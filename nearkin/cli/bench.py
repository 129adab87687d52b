"""`nearkin bench`: plan and run studies."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from nearkin._common.words import counted
from nearkin.bench.presets import PRESETS, check_study_name, find_study, with_data
from nearkin.cli import _arguments as arguments
from nearkin.cli._arguments import Device, Quiet, Runs, command_line, parse, show
from nearkin.errors import ConfigError, require_extra

if TYPE_CHECKING:
    from nearkin.bench.study import Study

T = TypeVar("T")
USAGE = """\
usage: nearkin bench plan STUDY | run STUDY | status FOLDER | work FOLDER   (each has --help)

STUDY is a .toml file, the folder of an existing study, a table or figure of a paper (nearkin papers
lists them), or a preset:"""


@dataclass(frozen=True)
class StudyArgs:
    """Flags shared by `plan` and `run`."""

    data: Path | None = None
    """Data: the folder of the benchmarks (CUB_200_2011, cars196, ...) or of one of them; your own images or features
    for a study of a single dataset."""
    weights: tuple[str, ...] = ()
    """Initial weights of a backbone as BACKBONE=FILE, such as bn_inception=bn_inception-52deb4733.pth."""
    out: Path | None = None  # Folder of the study; default: studies/NAME, with the name of the study.
    protocol: Literal["last_epoch", "best_on_test", "kfold", "fixed", "query_gallery"] | None = None
    """Protocol, instead of that of the study; fixed selects the epoch on validation classes, best_on_test on the test
    classes, as most papers do."""
    datasets: tuple[str, ...] = ()
    """Run only these datasets, or transfer the study of a paper to another benchmark: cub, cars, sop or inshop."""
    backbones: tuple[str, ...] = ()  # Backbones, instead of those of the study.
    losses: tuple[str, ...] = ()  # Run only these losses or methods of the study.
    sizes: tuple[int, ...] = ()  # Embedding sizes, instead of those of the study.
    seeds: tuple[int, ...] = ()
    """Seeds, instead of those of the study; you can add more later without repeating finished trials."""
    change: tuple[str, ...] = ()
    """Settings of every trial as KEY=VALUE, as in a recipe: train.epochs=5 data.image_size=128."""
    rehearse: bool = False
    """Run the same study in about a minute, on a few built-in glyphs (or --data) with a tiny network. It shows that the
    study works; its values mean nothing, and all outputs say so."""


@dataclass(frozen=True)
class PlanArgs(StudyArgs):
    """Print the trials of a study with an estimate of time and disk space, without running them.

    nearkin bench plan tiny

    nearkin bench plan thesis --tflops 60     (a GPU that reaches 60 TFLOP/s in the training precision)

    nearkin bench plan mpa-table7             (a table of a paper; nearkin papers lists them)
    """

    tflops: float | None = None  # Estimate for a device with this throughput in TFLOP/s, instead of this machine.
    workers: int = 0  # Number of parallel trials; 0: one per GPU, or one per core without a GPU.
    full: bool = False  # List every trial instead of one line per experiment.


@dataclass(frozen=True)
class RunArgs(StudyArgs):
    """Run all trials of a study that are not finished. Run the same command again to resume.

    nearkin bench run tiny                    (the built-in glyphs; see also: features, thesis)

    nearkin bench run features --data features.npz

    nearkin bench run features --data photos/ (your images: their features are computed first, into photos.npz)

    nearkin bench run study.toml --workers 2

    nearkin bench run mpa-table7 --data CUB_200_2011 --weights bn_inception=FILE   (see: nearkin papers)

    nearkin bench run mpa-table7 --rehearse   (the same with tiny data and network, in less than a minute)
    """

    runs: Runs = Path("runs")
    workers: int = 0  # Worker processes; 0: one per GPU, or one per core without a GPU.
    device: Device = "auto"
    retry_failed: bool = False  # Run failed trials again.
    quiet: Quiet = False


@dataclass(frozen=True)
class WorkArgs:
    """Run trials of an existing study until none is left. Start any number of workers, on any machine that shares the
    folder.

    nearkin bench work studies/tiny
    """

    runs: Runs = Path("runs")
    device: Device = "auto"
    detached: bool = False
    """Continue when standard input closes. Otherwise a worker stops with the process that started it."""


@dataclass(frozen=True)
class StatusArgs:
    """Show the progress of a study, failed trials with their reasons, and the time left.

    nearkin bench status studies/tiny
    """


def run(argv: list[str]) -> None:
    actions = {"plan": plan, "run": run_study, "status": status, "work": work}
    presets = [f"  {name:10} {build.__doc__}" for name, build in PRESETS.items()]
    arguments.run_action("bench", actions, argv, "\n".join([USAGE, *presets]))


def _parse(action: str, args_type: type[T], argv: list[str]) -> tuple[str, T]:
    prog, is_folder = f"nearkin bench {action}", action.endswith("FOLDER")
    what = "the folder of a study" if is_folder else "the name of a study or a .toml file"
    target, flags = arguments.leading(args_type, argv, prog, what, exists=is_folder)
    args = parse(args_type, _join_repeated(flags, "--weights", "--change"), prog)
    if args_type is not StatusArgs:
        require_extra("bench", "scipy")
    return target, args


def _join_repeated(words: list[str], *names: str) -> list[str]:
    """Collect the values of flags that may be given several times: the parser keeps only the last one."""
    rest: list[str] = []
    values: dict[str, list[str]] = {name: [] for name in names}
    current = rest
    for word in words:
        flag, equals, value = word.partition("=")
        is_flag = word.startswith("--")
        if is_flag:
            current = values.get(flag, rest)
        if not is_flag or current is rest:
            current.append(word)
        elif equals:
            current.append(value)
    return rest + [word for name, found in values.items() if found for word in (name, *found)]


def plan(argv: list[str]) -> None:
    target, args = _parse("plan STUDY", PlanArgs, argv)
    if args.tflops is not None and not args.tflops > 0:
        raise ConfigError(f"--tflops: expected a speed above 0, got {args.tflops:g}.")
    study = _study(target, args)  # a wrong name is refused before torch is imported
    from nearkin.bench import estimates, executor, narrow, trials
    from nearkin.report import study_overview

    if study is None:
        print(f"{target}: nothing to train; `nearkin bench run {target}` computes it.")
        return
    folder = trials.StudyFolder(args.out or _study_path(target, study), study)
    workers = executor.default_workers(args.workers, "auto" if args.tflops is None else "cuda:0")
    estimate = estimates.Estimate(folder.trials, folder.outcomes(), workers=workers, tflops=args.tflops)
    show(study_overview.plan_grid(folder, estimate, full=args.full))
    print(study_overview.plan_totals(folder, estimate, workers=workers))
    for line in narrow.requirements(study, folder.trials):
        print(f"needed before it can run: {line}")


def run_study(argv: list[str]) -> None:
    target, args = _parse("run STUDY", RunArgs, argv)
    study = _study(target, args)  # a wrong name is refused before torch is imported
    from nearkin._common.progress import Reporter
    from nearkin.bench import estimates, executor, narrow, paper_studies, trials
    from nearkin.cli import papers
    from nearkin.data import sources
    from nearkin.report import paper_computed, study_overview
    from nearkin.training.device import choose_device
    from nearkin.training.features import cache_features

    choose_device(args.device)
    reporter = Reporter(quiet=args.quiet)
    if study is None:
        papers.compute_paper(target, args)
        return
    if needed := narrow.requirements(study, study.trials()):
        raise ConfigError("\n".join([f"{study.name}: cannot run yet.", *needed]))
    folder = trials.StudyFolder.begin(args.out or _study_path(target, study), study)
    if args.retry_failed:
        reporter.info(f"running {counted(folder.forget_failures(), 'failed trial')} again")
    workers, total = executor.default_workers(args.workers, args.device), len(folder.trials)
    estimate = estimates.Estimate(folder.trials, folder.outcomes(), workers=workers)
    reporter.info(study_overview.plan_totals(folder, estimate, workers=workers))
    for data in {trial.dataset: trial.recipe.data for trial in folder.trials}.values():
        study.protocol.check_table(sources.load(data, reporter))  # fail here rather than in every worker
    for recipe in {(trial.dataset, trial.backbone): trial.recipe for trial in folder.unfinished()}.values():
        cache_features(recipe, test=True, device=args.device, reporter=reporter)
    if study.paper and paper_studies.paper_studies()[study.paper].computed == "grid_search":
        grid = paper_computed.grid_search_table(folder, device=args.device, reporter=reporter)
        papers.write_computed(grid, folder.path)
        return
    if done := len(folder.outcomes()):
        reporter.info(f"{done} of {counted(total, 'trial')} already complete")
    seconds = {trial.id: estimate.seconds(trial) for trial in folder.trials}
    task = functools.partial(trials.work, folder, args.runs, seconds=seconds)
    if study.rehearsal:  # a worker process would take longer to start than to run them
        task(device=args.device, reporter=reporter)
    else:
        executor.run_workers(task, workers, lambda: len(folder.unfinished()), total, args.device, reporter)
    written = study_overview.write_report_files(folder)
    show(*study_overview.terminal_report(folder))
    print(f"files: {folder.path}/  ({', '.join(path.name for path in written)})")
    print(f"page:  {command_line('report', '--study', str(folder.path))}")


def work(argv: list[str]) -> None:
    target, args = _parse("work FOLDER", WorkArgs, argv)
    from nearkin._common.progress import Reporter
    from nearkin.bench import executor, trials

    def wait_for_parent() -> None:
        # Returns when the parent closes the pipe or dies. Not through sys.stdin: a thread that waits in its buffer
        # makes Python abort when the worker exits first, and an ordinary error would look like a kill.
        while os.read(0, 1):
            pass

    folder = trials.StudyFolder.open(target)
    executor.stop_after(None if args.detached else wait_for_parent)
    trials.work(folder, args.runs, device=args.device, reporter=Reporter(quiet=True))


def status(argv: list[str]) -> None:
    target, _ = _parse("status FOLDER", StatusArgs, argv)
    from nearkin.bench.trials import StudyFolder
    from nearkin.report import study_overview

    folder = StudyFolder.open(target)
    show(study_overview.status_grid(folder), study_overview.status_lines(folder))


def _study(target: str, args: StudyArgs) -> Study | None:
    """Find a study and apply the flags that change it; None for a table that nothing is trained for."""
    data = args.data
    if data is not None:
        arguments.require_path(data, "the data of the study")
    check_study_name(target)  # before torch is imported
    is_preset = target in PRESETS
    if is_preset:  # their methods are losses
        arguments.require_names("loss", args.losses)
    from nearkin.bench.narrow import narrow
    from nearkin.bench.paper_studies import paper_studies

    if target in paper_studies() and not paper_studies()[target].study:
        return None
    if target == "features" and data is not None:  # the features of images are computed first
        from nearkin.cli.features import features_of

        data = features_of(data, device=getattr(args, "device", "auto"), quiet=getattr(args, "quiet", False))
    flags = {flag.name: getattr(args, flag.name) for flag in fields(StudyArgs) if flag.name not in ("data", "out")}
    study = narrow(find_study(target, data if is_preset else None), **flags)
    # Narrowed first: --data need only contain the datasets that are left.
    return study if is_preset or data is None else with_data(study, data.resolve())


def _study_path(target: str, study: Study) -> Path:
    from nearkin.bench.paper_studies import paper_studies

    exists = target not in PRESETS and target not in paper_studies() and Path(target).is_dir()
    name = study.name.replace("/", "-") + ("-rehearsal" if study.rehearsal else "")
    return Path(target) if exists else Path("studies") / name
