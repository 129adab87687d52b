"""What four papers published: every value with its source, so that any result of ours can be set beside it.

    ice             Instance Cross Entropy for Deep Metric Learning
    cross_entropy   A unifying mutual information view of metric learning
    thesis          Metric Learning: A Deep Dive
    mpa             Multi Proxy Anchor Family Loss

The values stand in papers.toml as printed. Where a value is known to be wrong or in doubt, a remark says so beside it;
the printed one is kept. Papers choose epochs on the test classes, quote each other's figures, and mix networks and
sizes: read `setup`, `own` and `note` before comparing.
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

# As printed, without references and marks -> the registered loss. Methods that are no single loss are left out.
_LOSSES = {
    "Contrastive": "contrastive",
    "Triplet": "triplet",
    "LiftedStructure": "lifted_structure",
    "Lifted Structure": "lifted_song",  # the original of Song et al., which the thesis changes
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

# The thesis's tables that hold ten losses at four sizes.
_BY_SIZE = {"cub": ("6", "7", "8"), "cars": ("9", "20", "21"), "sop": ("10",)}


@dataclass(frozen=True)
class Paper:
    """A paper, and what its figures as a whole suffer from."""

    name: str
    title: str
    authors: str
    year: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """One printed value. None and empty text mean that the paper does not say."""

    paper: str
    table: str
    """As printed, with the letter of its part: "7c"."""
    dataset: str
    network: str | None
    dim: int | None
    method: str
    """As printed, with the reference it is quoted from."""
    loss: str | None
    """The registered loss of that name, if it is one."""
    metric: str
    printed: float
    """In percent."""
    own: bool
    """A run of the paper itself, not quoted from another."""
    setup: str
    distance: str = ""
    variant: str = ""
    """What was varied: a number of proxies, a fold, a share of validation classes."""
    split: str = "test"
    spread: float | None = None
    """The standard deviation printed with the value."""
    repeats: str = ""
    """The table that this one prints again."""
    note: str = ""
    corrected: float | None = None
    usable: bool = True
    """False where the value cannot be right and nothing better is known."""

    @property
    def percent(self) -> float | None:
        """The value to compare with: the corrected one, else the printed one if it can be right."""
        if self.corrected is not None:
            return self.corrected
        return self.printed if self.usable else None

    @property
    def source(self) -> str:
        """Where it stands, for a table of ours: "thesis, table 7c"."""
        return f"{self.paper}, {self.table}" if " " in self.table else f"{self.paper}, table {self.table}"


@dataclass(frozen=True)
class PrintedStanding:
    """A row of the thesis's table 11, with what it should have said."""

    method: str
    loss: str
    total: float
    mean: float
    std: float
    corrected_mean: float
    corrected_std: float
    note: str = ""


@dataclass(frozen=True)
class Searched:
    """A row of the thesis's table 15: a setting searched on fixed validation classes, one at a time."""

    method: str
    loss: str
    printed: str
    setting: str | None
    """Our name for it: a setting of the loss, or of the miner of the same name; None for a learning rate."""
    low: float
    high: float
    low_included: bool
    step: float
    best: float


@dataclass(frozen=True)
class Gap:
    """A table of which the text that we read has no body."""

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
    """The printed values of a cell; what is not given is not asked for. Most cells were never published: [] is usual.

    loss       a registered name, or the method as printed; here as everywhere case, spaces, - and _ do not matter
    own        True for the papers' own runs alone, False for quoted values alone
    split      "test", or "validation" where a paper prints that too
    repeats    also tables that print another one again

    >>> [(p.source, p.printed) for p in published(dataset="cub", loss="proxy_anchor", network="bn_inception", dim=512)]
    [('thesis, table 7c', 68.11), ('thesis, table 12', 66.32), ('thesis, table 16', 66.56), ('mpa, table 4', 68.6)]
    """
    asked = {"dataset": dataset, "network": network, "metric": metric, "paper": paper, "split": split}
    same = {name: _plain(value) for name, value in asked.items() if value is not None}
    names = None if loss is None else _plain(loss)
    return [
        p
        for p in everything()
        if all(_plain(getattr(p, name) or "") == value for name, value in same.items())
        and (names is None or names in {_plain(name) for name in (p.loss, p.method, _bare(p.method)) if name})
        and (dim is None or p.dim == dim)
        and (own is None or p.own == own)
        and (repeats or not p.repeats)
    ]


def as_results(values: Iterable[Published]) -> list[Result]:
    """Published values as results of a tournament: an experiment is a (part of a) table, an method a registered loss.

    A value that cannot be right counts as failed, with its remark as the reason.
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
    """The thesis's ten losses over every network and size it ran: for CUB the 12 experiments of its tournament."""
    if dataset not in _BY_SIZE:
        raise ConfigError(f"dataset: the thesis has no tables of '{dataset}'. There are: {', '.join(_BY_SIZE)}.")
    values = published(dataset=dataset, metric=metric, paper="thesis")
    if not values:
        known = dict.fromkeys(p.metric for p in published(dataset=dataset, metric=None, paper="thesis"))
        raise ConfigError(f"metric: the thesis has no {metric} of {dataset}. There are: {', '.join(known)}.")
    return as_results(p for p in values if p.table.rstrip("abcd") in _BY_SIZE[dataset])


@cache
def papers() -> dict[str, Paper]:
    """The four papers by name."""
    return {
        name: Paper(name, entry["title"], entry["authors"], entry["year"], tuple(entry["notes"]))
        for name, entry in _read()["paper"].items()
    }


@cache
def everything() -> tuple[Published, ...]:
    """Every printed value, in the order of the papers.toml."""
    values = [value for table in _read()["table"] for value in _values(table)]
    for remark in _read()["remark"]:
        values = _remarked(values, remark)
    return tuple(values)


@cache
def table_11() -> tuple[PrintedStanding, ...]:
    """The thesis's tournament as printed, with the three misprints corrected beside."""
    out = []
    corrected = _read()["standings"]["corrected"]
    for method, total, mean, std in _cells(_read()["standings"]["rows"]):
        better = corrected.get(method, {})
        row = PrintedStanding(
            method=method,
            loss=_LOSSES[method],
            total=float(total),
            mean=float(mean),
            std=float(std),
            corrected_mean=better.get("mean", float(mean)),
            corrected_std=better.get("std", float(std)),
            note=better.get("note", ""),
        )
        out.append(row)
    return tuple(out)


@cache
def table_15() -> tuple[Searched, ...]:
    """The thesis's searched settings: range, step and best value of each."""
    out = []
    for method, printed, setting, span, step, best in _cells(_read()["search"]["rows"]):
        low, high = (float(end) for end in span[1:-1].split(","))
        out.append(
            Searched(
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
    return tuple(out)


@cache
def gaps() -> tuple[Gap, ...]:
    """What could not be read."""
    return tuple(Gap(**gap) for gap in _read()["gap"])


# --- reading papers.toml ---------------------------------------------------------------------------------------------


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads((files("nearkin.bench") / "papers.toml").read_text(encoding="utf-8"))


def _cells(rows: str) -> Iterator[list[str]]:
    for line in rows.strip().splitlines():
        yield [cell.strip() for cell in line.split("|")]


def _values(table: dict[str, Any]) -> Iterator[Published]:
    """The values of a table, one block of metrics for each of its sizes."""
    paper = _read()["paper"][table["paper"]]
    columns = table.get("columns", "method").split()
    metrics = table["metrics"].split()
    dims: list[int | None] = table.get("dims", [None])
    for row in _cells(table["rows"]):
        said = {**table, **dict(zip(columns, row, strict=False))}
        blocks = row[len(columns) :]
        assert len(blocks) == len(dims), (table["table"], row)
        method = said["method"]
        own = "[" not in method
        loss = _LOSSES.get(_bare(method))
        for part, (dim, block) in enumerate(zip(dims, blocks, strict=True)):
            for metric, text in zip(metrics, block.split(), strict=True):
                if text == "-":
                    continue
                value, _, spread = text.partition("±")
                yield Published(
                    paper=table["paper"],
                    table=table["table"] + ("abcd"[part] if len(dims) > 1 else ""),
                    dataset=table["dataset"],
                    network=said.get("network", paper.get("network") if own else None),
                    dim=dim or (paper.get("dim") if own else None),
                    method=method,
                    loss=loss,
                    metric=metric.removeprefix("val:"),
                    printed=float(value),
                    own=own,
                    setup=table.get("setup", paper["setup"]) if own else "quoted",
                    distance=said.get("distance", "cosine" if own else ""),
                    variant=said.get("variant", ""),
                    split="validation" if metric.startswith("val:") else "test",
                    spread=float(spread) if spread else None,
                    repeats="" if method == "OurLoss" else table.get("repeats", ""),
                )


def _remarked(values: list[Published], remark: dict[str, Any]) -> list[Published]:
    """The values, with a remark on those it is about; one that is about none is a mistake in papers.toml."""
    where = {name: remark[name] for name in ("paper", "table", "dataset", "method", "metric") if name in remark}
    change = {name: remark[name] for name in ("corrected", "usable") if name in remark}
    about = [all(getattr(p, name) == value for name, value in where.items()) for p in values]
    assert any(about), remark
    assert all(p.printed == remark.get("printed", p.printed) for p, hit in zip(values, about, strict=True) if hit), (
        remark
    )
    return [
        replace(p, note=f"{p.note} {remark['note']}".strip(), **change) if hit else p
        for p, hit in zip(values, about, strict=True)
    ]


def _bare(method: str) -> str:
    """The method without its reference, and without the mark of a rerun."""
    return re.sub(r"\s*(\[.*\]|\(our\))$", "", method)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
