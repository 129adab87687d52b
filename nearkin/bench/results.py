"""Benchmark results: one value per experiment, method and seed, and the table that a tournament ranks.

An experiment is a setting in which all methods are compared: a dataset, a backbone, an embedding size. A method is what
is compared, usually a loss. A failed run has a reason instead of a value; it is counted and shown, never scored.
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import DataError, did_you_mean

Floats = NDArray[np.float64]
COLUMNS = ("experiment", "method", "seed", "value", "reason")
VALIDATION_COLUMN = "val R@1"
DIGITS = 10  # decimals that count: means over seeds carry rounding errors, which must not decide a rank


@dataclass(frozen=True)
class Result:
    """One run of one method in one experiment.

    Attributes:
        experiment: Name of the experiment.
        method: Name of the method.
        seed: Seed of the run; runs of different methods are paired by it.
        value: The score, higher is better; None if the run failed.
        reason: Why the run failed; None if it did not.
    """

    experiment: str
    method: str
    seed: int = 0
    value: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        where = f"{self.experiment}, {self.method}, seed {self.seed}"
        if not self.experiment or not self.method:
            raise DataError(f"A result needs an experiment and a method; got '{self.experiment}' and '{self.method}'.")
        if self.value is not None and not math.isfinite(self.value):
            raise DataError(f"{where}: the value is {self.value}. Give a failed run a reason and no value.")
        if self.value is not None and self.reason:
            raise DataError(f"{where}: both a value ({self.value:g}) and a reason for failing ('{self.reason}').")
        if self.value is None and not self.reason:
            object.__setattr__(self, "reason", "no reason given")


@dataclass(frozen=True, eq=False)
class Table:
    """Results as a table of experiments [E] by methods [K]."""

    experiments: tuple[str, ...]  # names [E]
    methods: tuple[str, ...]  # names [K]
    means: Floats  # [E, K] mean over the seeds with a value; NaN where there is none
    runs: Mapping[tuple[str, str], Mapping[int, float]]  # (experiment, method) -> seed -> value
    failures: tuple[Result, ...]  # the results without a value

    @property
    def complete(self) -> NDArray[np.bool_]:
        """[E] experiments in which every method has a value."""
        return np.asarray(np.isfinite(self.means).all(axis=1))

    @property
    def seeds(self) -> int:
        """The largest number of seeds of any cell."""
        return max(len(runs) for runs in self.runs.values())


def tabulate(results: Iterable[Result]) -> Table:
    results = list(results)
    if not results:
        raise DataError("A tournament needs results; got none.")
    ((experiment, method, seed), count), *_ = Counter((r.experiment, r.method, r.seed) for r in results).most_common(1)
    if count > 1:
        raise DataError(f"{experiment}, {method}, seed {seed}: given more than once. Give every run its own seed.")
    experiments = tuple(dict.fromkeys(r.experiment for r in results))
    methods = tuple(dict.fromkeys(r.method for r in results))
    runs: dict[tuple[str, str], dict[int, float]] = {(e, k): {} for e in experiments for k in methods}
    for result in results:
        if result.value is not None:
            runs[result.experiment, result.method][result.seed] = result.value
    means = [round(math.fsum(r.values()) / len(r), DIGITS) if r else math.nan for r in runs.values()]
    return Table(
        experiments,
        methods,
        means=np.array(means).reshape(len(experiments), len(methods)),
        runs=runs,
        failures=tuple(r for r in results if r.value is None),
    )


def read_results(path: Path) -> list[Result]:
    """Read results from a .csv file with a header, or a .json file with a list of objects.

    Args:
        path: The file. Columns: experiment, method, value, and optionally seed (default 0) and reason. A row without
            a value is a failed run.

    Returns:
        One result per row.

    Raises:
        DataError: The file cannot be read, or a column or value is invalid.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file. Expected 'papers', the folder of a study, or a .csv or .json file.")
    if path.suffix.lower() not in {".csv", ".json"}:
        raise DataError(f"{path}: expected a .csv or .json file, got '{path.suffix}'.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".json":
            entries = json.loads(text)
            if not isinstance(entries, list) or not all(isinstance(row, dict) for row in entries):
                raise DataError(f"{path}: expected a list of objects with {', '.join(COLUMNS)}.")
            heads = [list(row) for row in entries]
            rows = [(f"entry {number}", row) for number, row in enumerate(entries, 1)]
        else:
            reader = csv.DictReader(io.StringIO(text, newline=""))
            heads = [[name or "" for name in reader.fieldnames or []]]
            rows = [(f"line {reader.line_num}", row) for row in reader]
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a valid {path.suffix[1:]} file: {error}.") from None
    for names in heads:
        _check_columns(path, names)
    if not rows:
        raise DataError(f"{path}: contains no results.")
    return [_parse_row(f"{path}, {where}", row) for where, row in rows]


def _check_columns(path: Path, names: list[str]) -> None:
    for name in names:
        if name not in (*COLUMNS, VALIDATION_COLUMN) and "@" not in name:  # further metrics of a study's results.csv
            hint = did_you_mean(name, COLUMNS) or f" Known columns: {', '.join(COLUMNS)}."
            raise DataError(f"{path}: unknown column '{name}'.{hint}")
    for name in ("experiment", "method", "value"):
        if name not in names:
            raise DataError(f"{path}: the column '{name}' is missing; found {', '.join(names) or 'none'}.")


def _parse_row(where: str, row: dict[Any, Any]) -> Result:
    if None in row:
        raise DataError(f"{where}: more cells than the header has columns.")
    cells = {str(name): "" if cell is None else " ".join(str(cell).split()) for name, cell in row.items()}
    try:
        value = float(cells["value"]) if cells["value"] else None
    except ValueError:
        raise DataError(f"{where}: value: expected a number, got '{cells['value']}'.") from None
    reason = cells.get("reason") or None
    if value is not None and not math.isfinite(value):
        value, reason = None, reason or f"the value is {value}"
    try:
        seed = Decimal(cells.get("seed") or "0")  # 1.0 is a seed too; a float would round large ones
        if seed % 1:
            raise ValueError
        return Result(cells["experiment"], cells["method"], int(seed), value, reason)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except (ArithmeticError, ValueError):
        raise DataError(f"{where}: seed: expected an integer, got '{cells['seed']}'.") from None
