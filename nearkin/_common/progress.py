"""What long work shows: a bar with the time left on a terminal, a line every few seconds when piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

LINE_EVERY = 5.0  # seconds between lines when the output is not a terminal


class ProgressBar:
    """How far a piece of work is; made by `Reporter.track`."""

    def __init__(self, label: str, total: int, unit: str, out: TextIO | None, progress: Progress | None) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self._began = self._last_line = time.monotonic()
        self._out, self._progress = out, progress
        self._task: TaskID | None = progress.add_task(label, total=total, note="") if progress else None

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        now = time.monotonic()
        rate = self.done / max(now - self._began, 1e-9)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=count, note=f"{rate:,.1f} {self.unit}/s  {note}")
        elif self._out is not None and now - self._last_line >= LINE_EVERY and self.done < self.total:
            self._last_line = now
            left = format_duration((self.total - self.done) / rate)
            shown = f"{self.label}  {self.done / self.total:4.0%}  {rate:,.1f} {self.unit}/s  {left} left  {note}"
            print(shown.rstrip(), file=self._out, flush=True)


class Reporter:
    """Says what is going on, on standard error; `quiet=True` says nothing."""

    def __init__(self, *, quiet: bool = False, out: TextIO | None = None) -> None:
        self.quiet = quiet
        self._out = out if out is not None else sys.stderr
        self._console = Console(file=self._out, highlight=False, soft_wrap=True)

    def info(self, line: str) -> None:
        if not self.quiet:
            self._console.print(line, markup=False)

    @contextmanager
    def track(self, label: str, total: int, unit: str = "it") -> Iterator[ProgressBar]:
        if self.quiet or not self._console.is_terminal:
            yield ProgressBar(label, total, unit, None if self.quiet else self._out, None)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(compact=True),
            TextColumn("[dim]{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield ProgressBar(label, total, unit, None, progress)


class Pace:
    """How fast work that spans several bars goes in this sitting, and how long the rest will take."""

    def __init__(self, *, done: int, total: int) -> None:
        self.first, self.done, self.total = done, done, total
        self._began = time.monotonic()

    def reach(self, done: int) -> None:
        self.done = done

    @property
    def rate(self) -> float:
        return (self.done - self.first) / max(time.monotonic() - self._began, 1e-9)

    @property
    def left(self) -> str:
        return format_duration((self.total - self.done) / self.rate) if self.rate else "?"


def format_duration(seconds: float) -> str:
    """A time for people.

    >>> format_duration(8.2), format_duration(95), format_duration(3700), format_duration(200000)
    ('8 s', '95 s', '62 min', '56 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
