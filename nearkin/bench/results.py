"""Results of a benchmark: one value per experiment, method and seed, and the table that a tournament is held on.

An experiment is a setting in which all methods meet: a dataset, a network, a size. An method is what is compared,
most often a loss. A run that failed has no value but a reason; it is counted and shown, never scored.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import DataError, did_you_mean

Floats = NDArray[np.float64]
COLUMNS = ("experiment", "method", "seed", "value", "reason")
# Values that differ by less are the same value: means over seeds carry rounding, and a rank must not hang on it.
DIGITS = 10


@dataclass(frozen=True)
class Result:
    """One run of one method in one experiment; higher is better. One that failed has no value but a `reason`."""

    experiment: str
    method: str
    seed: int = 0
    value: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        where = f"{self.experiment}, {self.method}, seed {self.seed}"
        if not self.experiment or not self.method:
            raise DataError(f"A result needs an experiment and an method; got '{self.experiment}' and '{self.method}'.")
        if self.value is not None and not math.isfinite(self.value):
            raise DataError(f"{where}: the value is {self.value}. A run that failed has no value but a reason.")
        if self.value is not None and self.reason:
            raise DataError(f"{where}: both a value ({self.value:g}) and a reason for failing ('{self.reason}').")
        if self.value is None and not self.reason:
            object.__setattr__(self, "reason", "no reason given")


@dataclass(frozen=True, eq=False)
class Table:
    """Experiments [E] by methods [K]: the mean over the seeds that gave a value, NaN where none did."""

    experiments: tuple[str, ...]
    methods: tuple[str, ...]
    means: Floats
    """[E, K]"""
    runs: Mapping[tuple[str, str], Mapping[int, float]]
    """(experiment, method) -> seed -> value."""
    failures: tuple[Result, ...]

    @property
    def complete(self) -> NDArray[np.bool_]:
        """[E]: experiments in which every method has a value."""
        return np.asarray(np.isfinite(self.means).all(axis=1))

    @property
    def seeds(self) -> int:
        """The largest number of seeds of any cell."""
        return max(len(runs) for runs in self.runs.values())

    def failed(self, method: str) -> int:
        """How many of an method's runs failed."""
        return sum(result.method == method for result in self.failures)

    def without(self, method: str) -> Table:
        """The table that is left when an method withdraws."""
        stays = [name != method for name in self.methods]
        return Table(
            experiments=self.experiments,
            methods=tuple(name for name in self.methods if name != method),
            means=self.means[:, stays],
            runs={key: runs for key, runs in self.runs.items() if key[1] != method},
            failures=tuple(result for result in self.failures if result.method != method),
        )


def tabulate(results: Iterable[Result]) -> Table:
    """Results as a table, in the order in which experiments and methods are first met.

    >>> table = tabulate([Result("cub", "a", 0, 60.0), Result("cub", "a", 1, 62.0), Result("cub", "b", 0, None, "NaN")])
    >>> table.means
    array([[61., nan]])
    >>> table.failed("b"), bool(table.complete[0])
    (1, False)
    """
    given = list(results)
    if not given:
        raise DataError("A tournament needs results; got none.")
    twice = [key for key, count in Counter((r.experiment, r.method, r.seed) for r in given).items() if count > 1]
    if twice:
        experiment, method, seed = twice[0]
        raise DataError(f"{experiment}, {method}, seed {seed}: given more than once. Give every run its own seed.")
    experiments = tuple(dict.fromkeys(r.experiment for r in given))
    methods = tuple(dict.fromkeys(r.method for r in given))
    runs: dict[tuple[str, str], dict[int, float]] = {(e, k): {} for e in experiments for k in methods}
    for result in given:
        if result.value is not None:
            runs[result.experiment, result.method][result.seed] = result.value
    means = np.full((len(experiments), len(methods)), np.nan)
    for i, experiment in enumerate(experiments):
        for j, method in enumerate(methods):
            if values := runs[experiment, method].values():
                means[i, j] = round(math.fsum(values) / len(values), DIGITS)
    return Table(experiments, methods, means, runs, tuple(r for r in given if r.value is None))


# --- files -----------------------------------------------------------------------------------------------------------


def read_results(path: Path) -> list[Result]:
    """Results from a .csv file with a head, or a .json file that holds a list of objects.

    Columns: experiment, method, value; seed (0 if absent) and reason may be left out. No value means failed.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file. Give 'papers', or a .csv or .json file of results.")
    if path.suffix.lower() not in {".csv", ".json"}:
        raise DataError(f"{path}: expected a .csv or .json file, got '{path.suffix}'.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = _json_rows(path, text) if path.suffix.lower() == ".json" else _csv_rows(path, text)
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]}: {error}.") from None
    if not rows:
        raise DataError(f"{path}: there are no results in it.")
    return [_result(f"{path}, {where}", row) for where, row in rows]


def _csv_rows(path: Path, text: str) -> list[tuple[str, dict[Any, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    _check_columns(path, [name or "" for name in reader.fieldnames or []])
    return [(f"line {reader.line_num}", row) for row in reader]


def _json_rows(path: Path, text: str) -> list[tuple[str, dict[Any, Any]]]:
    rows = json.loads(text)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a list of objects with {', '.join(COLUMNS)}.")
    for row in rows:
        _check_columns(path, row)
    return [(f"entry {number}", row) for number, row in enumerate(rows, 1)]


def _check_columns(path: Path, names: Iterable[str]) -> None:
    given = list(names)
    for name in given:
        if name not in COLUMNS:
            hint = did_you_mean(name, COLUMNS) or f" There are: {', '.join(COLUMNS)}."
            raise DataError(f"{path}: no column '{name}' is known.{hint}")
    for name in ("experiment", "method", "value"):
        if name not in given:
            raise DataError(f"{path}: the column '{name}' is missing; found {', '.join(given) or 'none'}.")


def _result(where: str, row: dict[Any, Any]) -> Result:
    if None in row:
        raise DataError(f"{where}: more cells than the head has columns.")
    cells = {str(name): "" if cell is None else " ".join(str(cell).split()) for name, cell in row.items()}
    value = _number(where, "value", cells["value"])
    seed = _seed(where, cells.get("seed") or "0")
    failed = value is None or not math.isfinite(value)
    reason = cells.get("reason") or (f"the value is {value}" if value is not None else "no reason given")
    try:
        return Result(
            experiment=cells["experiment"],
            method=cells["method"],
            seed=seed,
            value=None if failed else value,
            reason=reason if failed else cells.get("reason") or None,
        )
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _seed(where: str, text: str) -> int:
    try:
        return int(text)  # of any size; a fraction would round large ones
    except ValueError:
        number = _number(where, "seed", text)
    if number is None or not number.is_integer():
        raise DataError(f"{where}: seed: expected a whole number, got '{text}'.")
    return int(number)


def _number(where: str, column: str, text: str) -> float | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{where}: {column}: expected a number, got '{text}'.") from None
