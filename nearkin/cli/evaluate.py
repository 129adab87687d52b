"""`nearkin evaluate`: retrieval metrics of a run or of a file of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.cli._arguments import leading, parse
from nearkin.errors import ConfigError, RunError

if TYPE_CHECKING:
    from nearkin.metrics.scores import Scores


@dataclass(frozen=True)
class EvaluateArgs:
    """Print retrieval metrics in percent, with 95 % confidence intervals over classes.

    nearkin evaluate features.npz           (arrays `features` [N, D] and `labels` [N])

    nearkin evaluate runs/<key>             (the stored metrics of a finished run)
    """

    ks: tuple[int, ...] = ()
    """Values of k for R@k and nDCG@k; by default 1 2 4 8, or for a run the stored ones."""
    out: Path | None = None
    """Write the metrics of every query to this .npz file."""


def run(argv: list[str]) -> None:
    """Run `nearkin evaluate`."""
    target, flags = leading(
        argv, "a run folder or a features.npz", "nearkin evaluate PATH", EvaluateArgs, must_exist=True
    )
    args = parse(EvaluateArgs, flags, "nearkin evaluate PATH")
    from nearkin.metrics.scores import score_file

    if Path(target).is_dir():
        scores = _stored_scores(Path(target), args.ks)
    else:
        scores = score_file(target, **({"ks": args.ks} if args.ks else {}))
    print(scores.table())
    if args.out is not None:
        scores.save(args.out)
        print(f"per query: {args.out}")


def _stored_scores(folder: Path, ks: tuple[int, ...]) -> Scores:
    """Load the test metrics that a run stored, at these k or at all that it has."""
    from nearkin.metrics.scores import Scores
    from nearkin.training.run import Run

    if Run(folder).result is None:
        raise RunError(f"{folder}: this run is not finished. Repeat its training command to resume it.")
    scores = Scores.load(folder / "per_query.npz")
    if not set(ks) <= set(scores.ks):
        stored = " ".join(str(k) for k in scores.ks)
        raise ConfigError(f"--ks: the run stored k = {stored}. For others, evaluate a features.npz of the embeddings.")
    scores.ks = ks or scores.ks
    return scores
