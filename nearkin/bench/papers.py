"""Published results of four papers, every value with its source, for comparison with our own.

    ice             Instance Cross Entropy for Deep Metric Learning
    cross_entropy   A unifying mutual information view of metric learning
    thesis          Metric Learning: A Deep Dive
    mpa             Multi Proxy Anchor Family Loss

papers.toml has the values as printed. Where a value is wrong or doubtful, a note says so and the printed value stays.
Papers choose epochs on the test classes, quote each other, and mix backbones and embedding sizes: read `setup`, `own`
and `note` before comparing.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from nearkin.bench.results import Result
from nearkin.errors import ConfigError

# Printed name, without references and marks -> registered loss. Methods that are not a single loss are left out.
_LOSSES = {
    "Contrastive": "contrastive",
    "Triplet": "triplet",
    "LiftedStructure": "lifted_structure",
    "Lifted Structure": "lifted_song",  # the original of Song et al.; the thesis uses a variant
    "NPair": "npair",
    "ProxyNCA": "proxy_nca",
    "Proxy-NCA": "proxy_nca",
    "Margin": "margin",
    "ArcFace": "arcface",
    "MultiSimilarity": "multi_similarity",
    "Multi-Similarity": "multi_similarity",
    "MS": "multi_similarity",
    "SoftTriple": "soft_triple",
    "ProxyAnchor": "proxy_anchor",
    "OurLoss": "proxy_repulsion_batch",  # "the second variation"
    "NormSoftmax": "norm_softmax",
    "Cross-Entropy": "softmax",
    "MPA": "mpa",
    "MPA-DW": "mpa_dw",
    "MPA-AP": "mpa_ap",
    "ICE": "ice",
}

# The thesis's tables of ten losses at four embedding sizes.
_SIZE_TABLES = {"cub": ("6", "7", "8"), "cars": ("9", "20", "21"), "sop": ("10",)}


@dataclass(frozen=True)
class Paper:
    """A paper.

    Attributes:
        name: Our short name.
        title: Its title.
        authors: Its authors.
        year: Year of publication.
        notes: Known issues that affect all of its values.
    """

    name: str
    title: str
    authors: str
    year: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """One published value. None and "" mean that the paper does not say.

    Attributes:
        paper: Name of the paper.
        table: The table as printed, with the letter of its part: "7c".
        dataset: The dataset.
        network: The backbone.
        dim: The embedding size.
        method: The method as printed, with the reference it is quoted from.
        loss: The registered loss; None if it is not one.
        metric: The metric.
        printed: The value as printed, in percent.
        own: True for a run of the paper itself, False for a value quoted from another.
        setup: How the value was obtained.
        distance: The distance used for retrieval.
        variant: What was varied: the number of proxies, a fold, a share of validation classes.
        split: "test" or "validation".
        spread: The standard deviation printed with the value.
        repeats: The table that this one reprints.
        note: Known issues of this value.
        corrected: What the value should be, where that is known.
        usable: False where the value cannot be right and no correction is known.
    """

    paper: str
    table: str
    dataset: str
    network: str | None
    dim: int | None
    method: str
    loss: str | None
    metric: str
    printed: float
    own: bool
    setup: str
    distance: str = ""
    variant: str = ""
    split: str = "test"
    spread: float | None = None
    repeats: str = ""
    note: str = ""
    corrected: float | None = None
    usable: bool = True

    @property
    def percent(self) -> float | None:
        """The value to compare with: corrected, else as printed; None if it is not usable."""
        if self.corrected is not None:
            return self.corrected
        return self.printed if self.usable else None

    @property
    def source(self) -> str:
        """Where it was published: "thesis, table 7c"."""
        return f"{self.paper}, {self.table}" if " " in self.table else f"{self.paper}, table {self.table}"


@dataclass(frozen=True)
class PrintedStanding:
    """A row of the thesis's table 11.

    Attributes:
        method: The method as printed.
        loss: The registered loss.
        total: Sum of its ranks, as printed.
        mean: Mean rank, as printed.
        std: Standard deviation of its ranks, as printed.
        corrected_mean: The correct mean.
        corrected_std: The correct standard deviation.
        note: What is wrong with the printed row.
    """

    method: str
    loss: str
    total: float
    mean: float
    std: float
    corrected_mean: float
    corrected_std: float
    note: str = ""


@dataclass(frozen=True)
class SearchedSetting:
    """A row of the thesis's table 15: a setting searched on fixed validation classes.

    Attributes:
        method: The method as printed.
        loss: The registered loss.
        printed: The setting as printed.
        setting: Our name: a setting of the loss, or of the miner of the same name; None for a learning rate.
        low: Lower end of the range.
        high: Upper end of the range.
        low_included: Whether the lower end belongs to the range.
        step: Step of the grid.
        best: The value reported as best.
    """

    method: str
    loss: str
    printed: str
    setting: str | None
    low: float
    high: float
    low_included: bool
    step: float
    best: float


@dataclass(frozen=True)
class MissingTable:
    """A table whose body is missing from the text we have.

    Attributes:
        paper: Name of the paper.
        table: The table.
        what: What the table shows.
    """

    paper: str
    table: str
    what: str


def published(
    *,
    dataset: str | None = None,
    loss: str | None = None,
    network: str | None = None,
    dim: int | None = None,
    metric: str | None = "R@1",
    paper: str | None = None,
    own: bool | None = None,
    split: str = "test",
    repeats: bool = False,
) -> list[Published]:
    """Find published values. Most combinations were never published: an empty list is common.

    Args:
        dataset: Only this dataset. Here and below case, spaces, - and _ do not matter.
        loss: Only this registered loss, or method as printed.
        network: Only this backbone.
        dim: Only this embedding size.
        metric: Only this metric; None for all.
        paper: Only this paper.
        own: True for the papers' own runs, False for quoted values.
        split: "test", or "validation" where a paper prints that too.
        repeats: Include tables that reprint another one.

    Returns:
        The values, in the order of papers.toml.

    Example:
        >>> cell = published(dataset="cub", loss="proxy_anchor", network="bn_inception", dim=512)
        >>> [(p.source, p.printed) for p in cell]
        [('thesis, table 7c', 68.11), ('thesis, table 12', 66.32), ('thesis, table 16', 66.56), ('mpa, table 4', 68.6)]
    """
    filters = {"dataset": dataset, "network": network, "metric": metric, "paper": paper, "split": split}
    normalized = {name: _normalize(value) for name, value in filters.items() if value is not None}
    wanted = None if loss is None else _normalize(loss)
    return [
        p
        for p in all_values()
        if all(_normalize(getattr(p, name) or "") == value for name, value in normalized.items())
        and (
            wanted is None or wanted in {_normalize(name) for name in (p.loss, p.method, _bare_name(p.method)) if name}
        )
        and (dim is None or p.dim == dim)
        and (own is None or p.own == own)
        and (repeats or not p.repeats)
    ]


def as_results(values: Iterable[Published]) -> list[Result]:
    """Convert published values to results of a tournament.

    Args:
        values: Published values.

    Returns:
        Results whose experiment is a (part of a) table and whose method is a registered loss. A value that is not
        usable counts as failed, with its note as the reason.
    """
    return [
        Result(
            experiment=f"{p.source}: {p.dataset} {p.network} {p.dim}",
            method=p.loss or p.method,
            value=p.percent,
            reason=None if p.percent is not None else f"{p.source}: {p.note}",
        )
        for p in values
    ]


def thesis_results(dataset: str = "cub", metric: str = "R@1") -> list[Result]:
    """Return the results of the thesis's ten losses over all its backbones and embedding sizes.

    Args:
        dataset: cub (the 12 experiments of its tournament), cars or sop.
        metric: A recall that its tables have.

    Returns:
        The results.

    Raises:
        ConfigError: The thesis has no such table.
    """
    if dataset not in _SIZE_TABLES:
        raise ConfigError(f"dataset: the thesis has no tables for '{dataset}'. Available: {', '.join(_SIZE_TABLES)}.")
    values = published(dataset=dataset, metric=metric, paper="thesis")
    if not values:
        known = dict.fromkeys(p.metric for p in published(dataset=dataset, metric=None, paper="thesis"))
        raise ConfigError(f"metric: the thesis has no {metric} for {dataset}. Available: {', '.join(known)}.")
    return as_results(p for p in values if p.table.rstrip("abcd") in _SIZE_TABLES[dataset])


@cache
def papers() -> dict[str, Paper]:
    """Return the four papers by name."""
    return {
        name: Paper(name, entry["title"], entry["authors"], entry["year"], tuple(entry["notes"]))
        for name, entry in _read()["paper"].items()
    }


@cache
def all_values() -> tuple[Published, ...]:
    """Return every published value, in the order of papers.toml."""
    values = [value for table in _read()["table"] for value in _table_values(table)]
    for remark in _read()["remark"]:
        values = _apply_remark(values, remark)
    return tuple(values)


@cache
def table_11() -> tuple[PrintedStanding, ...]:
    """Return the thesis's tournament as printed, with corrections of its three misprints."""
    rows = []
    corrections = _read()["standings"]["corrected"]
    for method, total, mean, std in _cells(_read()["standings"]["rows"]):
        correction = corrections.get(method, {})
        row = PrintedStanding(
            method=method,
            loss=_LOSSES[method],
            total=float(total),
            mean=float(mean),
            std=float(std),
            corrected_mean=correction.get("mean", float(mean)),
            corrected_std=correction.get("std", float(std)),
            note=correction.get("note", ""),
        )
        rows.append(row)
    return tuple(rows)


@cache
def table_15() -> tuple[SearchedSetting, ...]:
    """Return the settings that the thesis searched: range, step and best value."""
    rows = []
    for method, printed, setting, span, step, best in _cells(_read()["search"]["rows"]):
        low, high = (float(end) for end in span[1:-1].split(","))
        rows.append(
            SearchedSetting(
                method=method,
                loss=_LOSSES[method],
                printed=printed,
                setting=None if setting == "-" else setting,
                low=low,
                high=high,
                low_included=span.startswith("["),
                step=float(step),
                best=float(best),
            )
        )
    return tuple(rows)


@cache
def gaps() -> tuple[MissingTable, ...]:
    """Return the tables that are missing from the texts we have."""
    return tuple(MissingTable(**gap) for gap in _read()["gap"])


# --- reading papers.toml ---------------------------------------------------------------------------------------------


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads((files("nearkin.bench") / "papers.toml").read_text(encoding="utf-8"))


def _cells(rows: str) -> Iterator[list[str]]:
    for line in rows.strip().splitlines():
        yield [cell.strip() for cell in line.split("|")]


def _table_values(table: dict[str, Any]) -> Iterator[Published]:
    """Parse a table: each row has one block of metrics per embedding size."""
    paper = _read()["paper"][table["paper"]]
    columns = table.get("columns", "method").split()
    metrics = table["metrics"].split()
    dims: list[int | None] = table.get("dims", [None])
    for row in _cells(table["rows"]):
        fields = {**table, **dict(zip(columns, row, strict=False))}
        blocks = row[len(columns) :]
        assert len(blocks) == len(dims), (table["table"], row)
        method = fields["method"]
        own = "[" not in method
        loss = _LOSSES.get(_bare_name(method))
        for part, (dim, block) in enumerate(zip(dims, blocks, strict=True)):
            for metric, text in zip(metrics, block.split(), strict=True):
                if text == "-":
                    continue
                value, _, spread = text.partition("±")
                yield Published(
                    paper=table["paper"],
                    table=table["table"] + ("abcd"[part] if len(dims) > 1 else ""),
                    dataset=table["dataset"],
                    network=fields.get("network", paper.get("network") if own else None),
                    dim=dim or (paper.get("dim") if own else None),
                    method=method,
                    loss=loss,
                    metric=metric.removeprefix("val:"),
                    printed=float(value),
                    own=own,
                    setup=table.get("setup", paper["setup"]) if own else "quoted",
                    distance=fields.get("distance", "cosine" if own else ""),
                    variant=fields.get("variant", ""),
                    split="validation" if metric.startswith("val:") else "test",
                    spread=float(spread) if spread else None,
                    repeats="" if method == "OurLoss" else table.get("repeats", ""),
                )


def _apply_remark(values: list[Published], remark: dict[str, Any]) -> list[Published]:
    """Attach a remark to the values it matches; it must match at least one."""
    where = {name: remark[name] for name in ("paper", "table", "dataset", "method", "metric") if name in remark}
    change = {name: remark[name] for name in ("corrected", "usable") if name in remark}
    matches = [all(getattr(p, name) == value for name, value in where.items()) for p in values]
    matched = [p for p, match in zip(values, matches, strict=True) if match]
    assert matched, remark
    assert all(p.printed == remark.get("printed", p.printed) for p in matched), remark
    return [
        replace(p, note=f"{p.note} {remark['note']}".strip(), **change) if match else p
        for p, match in zip(values, matches, strict=True)
    ]


def _bare_name(method: str) -> str:
    """Strip the reference, and the mark of a rerun, from a printed method."""
    return re.sub(r"\s*(\[.*\]|\(our\))$", "", method)


def _normalize(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
