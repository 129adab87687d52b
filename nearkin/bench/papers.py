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
    """A paper."""

    name: str  # our short name
    title: str
    authors: str
    year: int
    notes: tuple[str, ...]  # known issues that affect all of its values


@dataclass(frozen=True)
class Published:
    """One published value. None and "" mean that the paper does not say."""

    paper: str
    table: str  # the table as printed, with the letter of its part: "7c"
    dataset: str
    network: str | None
    dim: int | None
    method: str  # the method as printed, with the reference it is quoted from
    loss: str | None  # the registered loss; None if it is not one
    metric: str
    printed: float  # the value as printed, in percent
    own: bool  # True for a run of the paper itself, False for a value quoted from another
    setup: str  # how the value was obtained
    distance: str = ""
    variant: str = ""  # what was varied: the number of proxies, a fold, a share of validation classes
    split: str = "test"  # "test" or "validation"
    spread: float | None = None  # the standard deviation printed with the value
    repeats: str = ""  # the table that this one reprints
    note: str = ""  # known issues of this value
    corrected: float | None = None  # what the value should be, where that is known
    usable: bool = True  # False where the value cannot be right and no correction is known

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
    """A row of the thesis's table 11."""

    method: str  # the method as printed
    loss: str
    total: float  # sum of its ranks, as printed
    mean: float  # mean rank, as printed
    std: float  # standard deviation of its ranks, as printed
    corrected_mean: float
    corrected_std: float
    note: str = ""  # what is wrong with the printed row


@dataclass(frozen=True)
class SearchedSetting:
    """A row of the thesis's table 15: a setting searched on fixed validation classes."""

    method: str  # the method as printed
    loss: str
    printed: str  # the setting as printed
    setting: str | None  # our name: a setting of the loss, or of the miner of the same name; None for a learning rate
    low: float
    high: float
    low_included: bool  # whether the lower end belongs to the range
    step: float
    best: float  # the value reported as best


@dataclass(frozen=True)
class MissingTable:
    """A table whose body is missing from the text we have."""

    paper: str
    table: str
    what: str  # what the table shows


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
    """Convert published values to results of a tournament; an unusable value counts as failed, its note the reason."""
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
    """Return the results of the thesis's ten losses over all its backbones and embedding sizes."""
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
