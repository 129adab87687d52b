"""`nearkin evaluate`: retrieval metrics of a run or of a file of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nearkin.cli._arguments import parse_target
from nearkin.errors import RunError
from nearkin.training.run import Run

if TYPE_CHECKING:
    from nearkin.metrics.scores import Scores


@dataclass(frozen=True)
class EvaluateArgs:
    """Print retrieval metrics in percent, with 95 % confidence intervals over classes.

    nearkin evaluate features.npz           (arrays `features` [N, D] and `labels` [N])

    nearkin evaluate runs/<key>             (the stored metrics of a finished run)

    nearkin evaluate runs/<key> --ks 10 100 --similarity euclidean      (from its saved embeddings)
    """

    ks: tuple[int, ...] = ()  # Values of k for R@k and nDCG@k; by default 1 2 4 8, or for a run those of its recipe.
    metrics: tuple[str, ...] = ()
    """Metrics to print, such as nDCG@4 or MAP@R; by default R@k, RP, MAP@R, nDCG at the largest k and MRR."""
    similarity: Literal["cosine", "euclidean"] | None = None
    """cosine, or euclidean: distances of the raw embeddings; by default cosine, or for a run that of its recipe."""
    out: Path | None = None  # Write the metrics of every query to this .npz file.


def run(argv: list[str]) -> None:
    what = "a run folder or a features.npz"
    target, args = parse_target(EvaluateArgs, argv, "nearkin evaluate PATH", what)
    from nearkin.metrics.retrieval import check_metric
    from nearkin.metrics.scores import score_file

    for name in args.metrics:
        check_metric(name)
    if Path(target).is_dir():
        scores = _run_scores(Path(target), args)
    else:
        chosen: dict[str, Any] = {"ks": args.ks, "similarity": args.similarity}
        scores = score_file(target, **{name: value for name, value in chosen.items() if value})
    print(scores.table(metrics=args.metrics))
    if args.out is not None:
        scores.save(args.out)
        print(f"per query: {args.out}")


def _run_scores(folder: Path, args: EvaluateArgs) -> Scores:
    """Return the stored test metrics of a run, or score its saved embeddings if it did not store what is wanted."""
    from nearkin.metrics.scores import Scores
    from nearkin.training.evaluation import ks_of, score_saved

    run = Run(folder)
    if run.result is None:
        raise RunError(f"{folder}: this run is not finished. Repeat its training command to resume it.")
    scores = Scores.load(folder / "per_query.npz")
    similarity, ks = args.similarity or scores.similarity, args.ks or scores.ks
    wanted = {*ks, *ks_of(args.metrics)}
    if similarity != scores.similarity or not wanted <= set(scores.ks) or not set(args.metrics) <= set(scores):
        return score_saved(run, sorted(wanted), similarity)
    scores.ks = ks
    return scores
