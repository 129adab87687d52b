"""From a model and images to numbers: `evaluate` for validation, `evaluate_final` once for the sealed test classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nearkin._common.progress import Reporter
from nearkin.data.images import Rows
from nearkin.data.splits import Holdout
from nearkin.data.table import Table
from nearkin.metrics.scores import Scores, compare, score
from nearkin.models.embedder import Embedder
from nearkin.models.frozen import FrozenFeatures
from nearkin.training.distributed import gather_rows, rank_slice, world_size
from nearkin.training.embedding_cache import save_embeddings
from nearkin.training.run import Run

DEFAULT_KS = (1, 2, 4, 8)
HEADLINE_METRICS = ("R@1", "R@2", "R@4", "R@8", "MAP@R", "nDCG@8")  # what tables show, in this order


def evaluate(model: Embedder, table: Table, *, reporter: Reporter | None = None) -> Scores:
    """How well each image's nearest neighbours among the others (or in the gallery) are of its class."""
    return score_embeddings(table, embed_table(model, table, reporter=reporter))


def embed_table(model: Embedder, table: Table, *, raw: bool = False, reporter: Reporter | None = None) -> Tensor:
    """The vectors of a table's rows [N, dim]; of several processes each embeds its share.

    Where a table carries features, they are taken for what the model's backbone makes of its images.
    """
    part = table if world_size() == 1 else table.take(np.arange(len(table))[rank_slice(len(table))])
    given = part.images if part.features is None else part.features
    return gather_rows(model.embed(given, raw=raw, reporter=reporter))


def score_embeddings(table: Table, vectors: Tensor) -> Scores:
    """The scores of a table's rows, given as vectors: among themselves, or of its queries in its gallery (In-Shop)."""
    asking, searched = query_and_gallery_rows(table)
    if asking is None or searched is None:
        return score(vectors, table.labels, ks=DEFAULT_KS)
    return score(vectors[asking], table.labels[asking], vectors[searched], table.labels[searched], ks=DEFAULT_KS)


def query_and_gallery_rows(table: Table) -> tuple[Rows, Rows] | tuple[None, None]:
    """The rows that ask and the rows that are searched, where the source tells them apart."""
    if not {"query", "gallery"} <= set(table.parts):
        return None, None
    assert table.part is not None
    return np.flatnonzero(table.part == "query"), np.flatnonzero(table.part == "gallery")


def evaluate_final(
    run: Run, holdout: Holdout, *, start: Embedder, known: FrozenFeatures | None, reporter: Reporter
) -> dict[str, Any]:
    """Open the test classes and judge the run's best epoch, with yardsticks beside it.

    "raw pixels" is no network at all, "raw backbone" the pretrained features as they came, "untrained" (or "whitened
    start") the model before its first step: a trained number means little without them. All come from one opening;
    per_query.npz keeps the trained values of every query, and vectors.npz the vectors of a fine-tuned network.

    start   the model before its first step; known: the features of its backbone, where it is pretrained or frozen
    """
    run.log(event="holdout_opened", images=holdout.num_images, classes=holdout.num_classes)
    test = holdout.open()
    reporter.info(f"final: {len(test):,} images of {test.num_classes} classes never seen in training")
    trained = run.embedder().to(start.mean.device)
    with_features = test if known is None else known.add_to(test)
    frozen = start.backbone is None or start.model.freeze == "backbone"
    scores: dict[str, Scores] = {}
    if start.backbone is not None:
        scores["raw pixels"] = score_embeddings(test, raw_pixels(test))
    if with_features.features is not None:
        scores["raw backbone"] = score_embeddings(test, torch.from_numpy(with_features.features))
    yardstick = list(scores)[-1]
    beginning = "whitened start" if start.model.head_init == "whitened" else "untrained"
    scores[beginning] = evaluate(start, with_features, reporter=reporter)
    vectors = embed_table(trained, with_features if frozen else test, reporter=reporter)
    scores["trained"] = score_embeddings(test, vectors)
    if run.is_writer:
        scores["trained"].save(run.path / "per_query.npz")
    if not frozen:
        save_embeddings(run, "test", test, vectors)
    gain = compare(scores[yardstick], scores["trained"], "R@1")
    return {
        "test": {name: summary(values) for name, values in scores.items()},
        # Paired by query and clustered by class: far sharper than asking whether two intervals overlap.
        "gain": {"over": yardstick, "mean": gain.difference, "interval": [gain.low, gain.high], "p": gain.p_value},
        "notes": scores["trained"].notes,
    }


def raw_pixels(table: Table, most: int = 40) -> Tensor:
    """The images themselves as vectors, shrunk to at most `most` pixels a side, each less its own mean.

    Without the last, cosine similarity would mostly compare brightness, and the yardstick would be too low.
    """
    parts = []
    for rows in np.array_split(np.arange(len(table)), max(1, len(table) // 512)):
        images = table.images.read(rows).float()
        if max(images.shape[2:]) > most:
            images = F.adaptive_avg_pool2d(images, most)
        parts.append(images.flatten(1))
    flat = torch.cat(parts)
    return flat - flat.mean(dim=1, keepdim=True)


def summary(scores: Scores) -> dict[str, dict[str, Any]]:
    """Mean and 95 % interval over classes of each headline metric, as plain numbers for result.json."""
    return {name: {"mean": scores[name], "interval": list(scores.interval(name))} for name in HEADLINE_METRICS}
