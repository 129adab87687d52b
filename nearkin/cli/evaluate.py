"""`nearkin evaluate`: retrieval metrics of a run or of a file of features."""

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
    """Retrieval metrics in percent, each with its 95 % interval over classes.

    nearkin evaluate features.npz           (arrays `features` [N, D] and `labels` [N])

    nearkin evaluate runs/<key>             (the stored values of a finished run)
    """

    ks: tuple[int, ...] = ()
    """The k of R@k and nDCG@k; 1 2 4 8 when left out, and for a run those that it stored."""
    out: Path | None = None
    """Write the value of every query to this .npz file."""


def run(argv: list[str]) -> None:
    target, flags = leading(argv, "a run folder or a features.npz", "nearkin evaluate PATH", EvaluateArgs)
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
    """What a run stored when its test classes were opened, at these k or at all that it has."""
    from nearkin.metrics.scores import Scores
    from nearkin.training.run import Run

    if Run(folder).result is None:
        raise RunError(f"{folder}: this run is not finished. Run its training command again to go on.")
    scores = Scores.load(folder / "per_query.npz")
    if not set(ks) <= set(scores.ks):
        has = " ".join(str(k) for k in scores.ks)
        raise ConfigError(f"--ks: the run stored k = {has}. For others embed the images and evaluate a features.npz.")
    scores.ks = ks or scores.ks
    return scores
