"""Evaluation: of the validation classes during training, and once of the sealed test classes."""

import io
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nearkin._common.files import NPZ_ERRORS, atomic_write
from nearkin._common.progress import Reporter
from nearkin.config.recipe import EvalConfig, Recipe
from nearkin.data.images import Rows
from nearkin.data.own import as_table
from nearkin.data.splits import Holdout
from nearkin.data.table import Table
from nearkin.errors import RunError
from nearkin.metrics.scores import Scores, compare, score
from nearkin.models.embedder import Embedder
from nearkin.models.frozen import FrozenFeatures
from nearkin.training.distributed import gather_rows, rank_slice, world_size
from nearkin.training.run import Run

DEFAULT_KS = (1, 2, 4, 8)
DATASET_KS = {"sop": (1, 10, 100, 1000), "inshop": (1, 10, 20, 30, 40, 50)}  # as in the papers
COMPARED_METRICS = ("R@1", "MAP@R")  # in which the trained model is compared with every baseline
MIN_VAL_CLASSES = 8  # with fewer, R@1 is often 100 % from the start and distinguishes no epochs
TEST_SELECTED = "THE TEST CLASSES: optimistic, and not comparable with other protocols"
SAVED_EMBEDDINGS = "vectors.npz"  # of the test images, in the run folder, so that a report needs no forward pass


def reported_metrics(config: EvalConfig, source: str) -> tuple[str, ...]:
    """Return the metrics of results and tables, in their order: R@1 and those of the recipe, or the dataset's usual."""
    ks = config.ks or (() if config.metrics else DATASET_KS.get(source, DEFAULT_KS))
    others = config.metrics or ("MAP@R", f"nDCG@{max(ks)}")
    return tuple(dict.fromkeys(["R@1", *(f"R@{k}" for k in ks), *others]))


def ks_of(metrics: Sequence[str]) -> tuple[int, ...]:
    """Return the k that metrics name, in increasing order."""
    return tuple(sorted({int(k) for name in metrics for k in re.findall(r"@(\d+)", name)}))


def evaluate(
    model: Embedder,
    data: Any,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    similarity: str = "cosine",
    reporter: Reporter | None = None,
) -> Scores:
    """Compute the retrieval metrics of data that no training has seen.

    Args:
        model: Embeds the images, or the features that the data carry.
        data: Rows that query each other, or a query part and a gallery part: a table, or data of your own as
            `nearkin.data.as_table` takes them.
        ks: The k of R@k and other metrics.
        similarity: "cosine", or "euclidean" for distances of the raw embeddings.
        reporter: Where progress is printed.

    Returns:
        The scores, with the value of every query.
    """
    table = as_table(data, model.data_config(), channels=model.channels, reporter=reporter)
    return score_embeddings(table, embed_table(model, table, raw=True, reporter=reporter), ks, similarity)


def embed_table(model: Embedder, table: Table, *, raw: bool = False, reporter: Reporter | None = None) -> Tensor:
    """Embed a table's rows; of several processes each embeds its share. Returns [N, dim], on every process."""
    part = table if world_size() == 1 else table.take(np.arange(len(table))[rank_slice(len(table))])
    inputs = part.images if part.features is None else part.features
    return gather_rows(model.embed(inputs, raw=raw, reporter=reporter))


def score_embeddings(
    table: Table, embeddings: Tensor, ks: Sequence[int] = DEFAULT_KS, similarity: str = "cosine"
) -> Scores:
    """Score a table's embeddings: among themselves, or its queries against its gallery if it has both (In-Shop)."""
    return _score_parts(embeddings, table.labels, table.part, ks, "cosine" if similarity == "both" else similarity)


def _score_parts(vectors: Any, labels: Any, part: Any, ks: Sequence[int], similarity: str) -> Scores:
    options: dict[str, Any] = {"ks": ks, "similarity": similarity}
    query, gallery = (np.flatnonzero(np.asarray(part) == name) for name in ("query", "gallery"))
    if not len(query) or not len(gallery):
        return score(vectors, labels, **options)
    return score(vectors[query], labels[query], vectors[gallery], labels[gallery], **options)


def query_and_gallery_rows(table: Table) -> tuple[Rows, Rows] | tuple[None, None]:
    """Return the rows of the query and of the gallery part, or None twice if the data has no such parts."""
    if not {"query", "gallery"} <= set(table.parts):
        return None, None
    assert table.part is not None
    return np.flatnonzero(table.part == "query"), np.flatnonzero(table.part == "gallery")


def evaluate_final(
    run: Run, holdout: Holdout, *, initial_model: Embedder, frozen_features: FrozenFeatures | None, reporter: Reporter
) -> dict[str, Any]:
    """Open the sealed test classes and evaluate the run's best epoch together with its baselines.

    The baselines are "raw pixels" (no network), "raw backbone" (pretrained features without a head; "tuned backbone"
    if its weights are those of other runs) and "untrained" or
    "whitened start" (the model before its first step). The value of every query is written to per_query.npz, and the
    embeddings of a fine-tuned network are saved for the report.

    Args:
        run: The run, which records that the holdout was opened.
        holdout: The test classes.
        initial_model: The model before its first step.
        frozen_features: The features of its backbone, if it is pretrained or frozen.
        reporter: Where progress is printed.

    Returns:
        "test": mean and interval of each reported metric for the model and each baseline; "differences": the paired
        difference of the model from each baseline in R@1 and MAP@R; "euclidean": the metrics of the model by Euclidean
        distance, if the recipe wants both; "notes".
    """
    metrics = reported_metrics(run.recipe.eval, run.recipe.data.source)
    settings = ks_of(metrics), run.recipe.eval.similarity
    run.log(event="holdout_opened", images=holdout.num_images, classes=holdout.num_classes)
    test = holdout.open()
    reporter.info(f"final evaluation: {len(test):,} images of {test.num_classes} classes never seen in training")
    trained_model = run.embedder(initial_model if initial_model.own else None).to(initial_model.mean.device)
    with_features = test if frozen_features is None else frozen_features.add_to(test)
    is_frozen = initial_model.backbone is None or initial_model.model.freeze == "backbone"
    scores: dict[str, Scores] = {}
    if test.images.is_pixels:
        scores["raw pixels"] = score_embeddings(test, raw_pixels(test), *settings)
    if with_features.features is not None:
        name = "tuned backbone" if has_tuned_weights(run.recipe) else "raw backbone"
        scores[name] = score_embeddings(test, torch.from_numpy(with_features.features), *settings)
    initial_name = "whitened start" if initial_model.model.head_init == "whitened" else "untrained"
    initial = embed_table(initial_model, with_features, raw=True, reporter=reporter)
    scores[initial_name] = score_embeddings(test, initial, *settings)
    embeddings = embed_table(trained_model, with_features if is_frozen else test, raw=True, reporter=reporter)
    scores["trained"] = score_embeddings(test, embeddings, *settings)
    if run.is_writer:
        scores["trained"].save(run.path / "per_query.npz")
    save_embeddings(run, "test", test, embeddings)
    other = {}
    if settings[1] == "both":
        other = {"euclidean": summarize_scores(score_embeddings(test, embeddings, settings[0], "euclidean"), metrics)}
    return {
        "test": {name: summarize_scores(values, metrics) for name, values in scores.items()},
        **other,
        "differences": {
            name: {metric: _difference(values, scores["trained"], metric) for metric in COMPARED_METRICS}
            for name, values in scores.items()
            if name != "trained"
        },
        "notes": scores["trained"].notes,
    }


def _difference(baseline: Scores, trained: Scores, metric: str) -> dict[str, Any]:
    # Paired by query and clustered by class: far more powerful than checking whether two intervals overlap.
    found = compare(baseline, trained, metric)
    return {"mean": found.difference, "interval": [found.low, found.high], "p": found.p_value}


def save_embeddings(run: Run, part: str, table: Table, embeddings: Tensor) -> None:
    """Save the best epoch's raw embeddings of a table, for reports and other metrics; ignored on a full disk."""
    if not run.is_writer:
        return
    buffer = io.BytesIO()
    try:
        tag = _tag(run, part, table)
        part_column = np.array([] if table.part is None else table.part)
        arrays: dict[str, Any] = {"labels": table.labels, "part": part_column, "rows": table.row_numbers, "of": tag}
        np.savez(buffer, allow_pickle=False, vectors=embeddings.cpu().float().numpy(), **arrays)
        atomic_write(run.path / SAVED_EMBEDDINGS, buffer.getvalue())
    except OSError:
        return


def load_embeddings(run: Run, part: str, table: Table) -> Tensor | None:
    """Load saved embeddings, if they belong to this part, data and weights."""
    try:
        # Opened here: np.load does not close a file that proves broken.
        with (run.path / SAVED_EMBEDDINGS).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if not np.array_equal(stored["rows"], table.row_numbers) or str(stored["of"]) != _tag(run, part, table):
                return None
            return torch.from_numpy(stored["vectors"])
    except NPZ_ERRORS:
        return None


def _tag(run: Run, part: str, table: Table) -> str:
    weights = zlib.crc32((run.path / "best.pt").read_bytes())
    return f"raw, {part} of {table.fingerprint} by {weights:08x}"


def saved_embeddings(run: Run) -> tuple[Any, Any, Any]:
    """Return vectors [N, dim], labels [N] and parts ([N] or empty) of the test embeddings that a run saved."""
    path = run.path / SAVED_EMBEDDINGS
    problem = "this run has no saved embeddings (its study has keep_models = false)" if not path.exists() else ""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if not str(stored["of"]).startswith("raw, test"):
                problem = "its saved embeddings are not those of the test classes, or of an older version of nearkin"
            vectors, labels, part = (stored[name] for name in ("vectors", "labels", "part"))
    except NPZ_ERRORS:
        problem = problem or "its saved embeddings cannot be read"
    if problem:
        raise RunError(f"{run.path}: {problem}. Train it again with `nearkin train` to evaluate it differently.")
    return vectors, labels, part


def score_saved(run: Run, ks: Sequence[int], similarity: str) -> Scores:
    """Score the test embeddings that a run saved, without its data and its weights."""
    return _score_parts(*saved_embeddings(run), ks, similarity)


def raw_pixels(table: Table, max_side: int = 40) -> Tensor:
    """Return the images as vectors, each minus its mean: else cosine similarity would mostly compare brightness."""
    parts = []
    for rows in np.array_split(np.arange(len(table)), max(1, len(table) // 512)):
        images = table.images.read(rows).float()
        if max(images.shape[2:]) > max_side:
            images = F.adaptive_avg_pool2d(images, max_side)
        parts.append(images.flatten(1))
    flat = torch.cat(parts)
    return flat - flat.mean(dim=1, keepdim=True)


def summarize_scores(scores: Scores, metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return mean and 95 % interval over classes of each metric, as plain numbers for result.json."""
    return {name: {"mean": scores[name], "interval": list(scores.interval(name))} for name in metrics}


def has_tuned_weights(recipe: Recipe) -> bool:
    """Whether the backbone starts from the weights of other runs."""
    return any(Path(name, "recipe.toml").exists() for name in recipe.model.weights.split(","))


def selection_metrics(num_classes: int, select_by: str = "auto") -> tuple[str, str]:
    """Return the metric that selects the epoch on this many validation classes, and the one that breaks its ties."""
    by_recall = select_by == "R@1" or (select_by == "auto" and num_classes >= MIN_VAL_CLASSES)
    return ("R@1", "MAP@R") if by_recall else ("MAP@R", "R@1")


def describe_protocol(
    recipe: Recipe, train: Table, val: Table | None, holdout: Holdout, *, epoch: int
) -> dict[str, Any]:
    """Describe how the result was obtained: the data, the classes of each part, and how the epoch was selected."""
    selected_on = "validation classes" if recipe.data.select_on == "validation" else TEST_SELECTED
    metric, tie_break = selection_metrics(val.num_classes if val else 0, recipe.eval.select_by)
    return {
        **train.protocol(),
        "classes": {"train": train.num_classes, "val": val.num_classes if val else 0, "test": holdout.num_classes},
        "epoch_selected_by": f"{metric} (then {tie_break}) on {selected_on}" if val else "nothing: the last epoch",
        "epoch": epoch,
        "epochs": recipe.train.epochs,
        **({"tuned_weights": True} if has_tuned_weights(recipe) else {}),
    }
