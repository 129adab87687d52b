"""`nearkin tournament`: rank methods over experiments."""

from dataclasses import dataclass
from pathlib import Path

from nearkin.bench.papers import thesis_results
from nearkin.bench.results import read_results
from nearkin.bench.summary import summarize
from nearkin.bench.tournament import run_tournament
from nearkin.cli._arguments import parse_target, show
from nearkin.errors import ConfigError, require_extra
from nearkin.report.tournament import pairs_grid, standings_grid, write_files


@dataclass(frozen=True)
class TournamentArgs:
    """Rank methods over experiments and report which differences are significant.

    nearkin tournament papers                        (the thesis's CUB tables: 10 losses, 12 experiments)

    nearkin tournament studies/tiny                  (the finished trials of `nearkin bench run`)

    nearkin tournament papers --dataset cars --metric R@2

    nearkin tournament studies/thesis --dataset cub --backbone resnet50

    nearkin tournament results.csv --out tournament  (columns experiment, method, seed, value, reason; or .json)

    A row without a value is a failed run; it is counted and shown, never scored.
    """

    out: Path | None = None  # Folder for tables (CSV, Markdown, LaTeX) and the critical-difference diagram (PNG, SVG).
    alpha: float = 0.05  # Significance level (family-wise error rate).
    draws: int = 10_000  # Number of bootstrap samples of the experiments.
    seed: int = 0  # Seed of the bootstrap.
    pairs: bool = False  # Also print the table of all pairs.
    dataset: str | None = None  # Rank on this dataset only; with `papers`: cub (the default), cars or sop.
    backbone: str | None = None  # Rank with this backbone only (of a study).
    metric: str | None = None  # Metric to rank by, such as R@2; default: that of the study, with `papers` R@1.


def run(argv: list[str]) -> None:
    prog = "nearkin tournament papers|STUDY|FILE"
    what = "'papers', the folder of a study, or a .csv or .json file"
    target, args = parse_target(TournamentArgs, argv, prog, what, exists=argv[:1] != ["papers"])
    require_extra("bench", "scipy")

    is_study = target != "papers" and Path(target).is_dir()
    for flag in ("dataset", "backbone", "metric"):
        if getattr(args, flag) and not is_study and (target != "papers" or flag == "backbone"):
            what = "'papers' cannot be narrowed by it" if target == "papers" else "a file is ranked by its own values"
            raise ConfigError(f"--{flag}: {what}.")
    failures = ""
    if target == "papers":
        results = thesis_results(args.dataset or "cub", args.metric or "R@1")
    elif is_study:
        from nearkin.bench.aggregate import available_results
        from nearkin.bench.trials import StudyFolder
        from nearkin.report.study_overview import failure_line

        folder = StudyFolder.open(target)
        failures = failure_line(folder)
        results = available_results(folder, dataset=args.dataset, backbone=args.backbone, metric=args.metric)
    else:
        results = read_results(Path(target))
    tournament = run_tournament(results, alpha=args.alpha, draws=args.draws, seed=args.seed)
    written = write_files(tournament, args.out) if args.out is not None else []
    grids = [standings_grid(tournament), *([pairs_grid(tournament)] if args.pairs else [])]
    show(*grids, summarize(tournament), *filter(None, [failures]), *written)
