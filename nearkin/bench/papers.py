"""Published results of four papers, every value with its source, for comparison with our own.

papers.toml has the values as printed; where one is wrong or doubtful, a note says so. Papers choose epochs on the test
classes, quote each other, and mix backbones and embedding sizes: read `setup`, `own` and `note` before comparing.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

from nearkin.bench.results import Result
from nearkin.errors import ConfigError


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

    None selects all; case, spaces, - and _ do not matter. `loss` is a registered loss or a method as printed, `own`
    selects the papers' own runs or quoted values, `repeats` adds tables that reprint another one.

    Example:
        >>> cell = published(dataset="cub", loss="proxy_anchor", network="bn_inception", dim=512)
        >>> [(p.source, p.printed) for p in cell]
        [('thesis, table 7c', 68.11), ('thesis, table 12', 66.32), ('thesis, table 16', 66.56), ('mpa, table 4', 68.6)]
    """
    filters = {"dataset": dataset, "network": network, "metric": metric, "paper": paper, "split": split}
    normalized = {name: _normalize(value) for name, value in filters.items() if value is not None}

    def matches(p: Published) -> bool:
        names = {_normalize(name) for name in (p.loss, p.method, _bare_name(p.method)) if name}
        return (
            all(_normalize(getattr(p, name) or "") == value for name, value in normalized.items())
            and (loss is None or _normalize(loss) in names)
            and (dim is None or p.dim == dim)
            and (own is None or p.own == own)
            and (repeats or not p.repeats)
        )

    return [p for p in all_values() if matches(p)]


def thesis_results(dataset: str = "cub", metric: str = "R@1") -> list[Result]:
    """Return the results of the thesis's ten losses over all its backbones and embedding sizes on cub, cars or sop."""
    # Its tables of ten losses at four embedding sizes have parts a to d.
    values = [p for p in published(metric=None, paper="thesis") if p.table[-1] in "abcd"]
    if dataset not in (datasets := list(dict.fromkeys(p.dataset for p in values))):
        raise ConfigError(f"dataset: the thesis has no tables for '{dataset}'. Available: {', '.join(datasets)}.")
    values = [p for p in values if p.dataset == dataset]
    if metric not in (metrics := list(dict.fromkeys(p.metric for p in values))):
        raise ConfigError(f"metric: the thesis has no {metric} for {dataset}. Available: {', '.join(metrics)}.")
    results = []
    for p in values:
        if p.metric == metric:  # an unusable value counts as failed, its note is the reason
            reason = None if p.percent is not None else f"{p.source}: {p.note}"
            experiment = f"{p.source}: {p.dataset} {p.network} {p.dim}"
            results.append(Result(experiment, p.loss or p.method, value=p.percent, reason=reason))
    return results


def papers() -> dict[str, SimpleNamespace]:
    """Return title, authors, year and notes (known issues that affect all of its values) of the four papers by name."""
    return {name: SimpleNamespace(name=name, **entry) for name, entry in _read()["paper"].items()}


@cache
def all_values() -> tuple[Published, ...]:
    values = [value for table in _read()["table"] for value in _table_values(table)]
    for remark in _read()["remark"]:
        values = _apply_remark(values, remark)
    return tuple(values)


def table_11() -> list[SimpleNamespace]:
    """Return the thesis's tournament as printed, best first; the corrected_ values differ where a `note` says so."""
    rows = [
        {"corrected_mean": row["mean"], "corrected_std": row["std"], "note": ""} | row for row in _rows("standings")
    ]
    return [SimpleNamespace(**row) for row in rows]


def table_15() -> list[SimpleNamespace]:
    """Return the settings that the thesis searched, with range, step and best value, as `printed` and by our name."""
    return [SimpleNamespace(**row) for row in _rows("search")]


def gaps() -> list[SimpleNamespace]:
    """Return paper, table and contents (`what`) of the tables that are missing from the texts we have."""
    return [SimpleNamespace(**gap) for gap in _read()["gap"]]


# --- reading papers.toml ---------------------------------------------------------------------------------------------


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads((files("nearkin.bench") / "papers.toml").read_text(encoding="utf-8"))


def _rows(table: str) -> list[dict[str, Any]]:
    return [{**row, "loss": _read()["losses"][row["method"]]} for row in _read()[table]["rows"]]


def _table_values(table: dict[str, Any]) -> Iterator[Published]:
    """Parse a table: each row has one block of metrics per embedding size."""
    paper = _read()["paper"][table["paper"]]
    columns = table.get("columns", "method").split()
    metrics = table["metrics"].split()
    dims: list[int | None] = table.get("dims", [None])
    for line in table["rows"].strip().splitlines():
        row = [cell.strip() for cell in line.split("|")]
        fields = {**table, **dict(zip(columns, row, strict=False))}
        blocks = row[len(columns) :]
        assert len(blocks) == len(dims), (table["table"], row)
        method = fields["method"]
        own = "[" not in method
        loss = _read()["losses"].get(_bare_name(method))
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


def study_entries() -> dict[str, dict[str, Any]]:
    """Read paper_studies.toml: the tables and figures of the papers by the name of their study."""
    return tomllib.loads((files("nearkin.bench") / "paper_studies.toml").read_text(encoding="utf-8"))
