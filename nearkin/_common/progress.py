"""Progress of long work: a bar with the remaining time on a terminal, a line every few seconds when piped."""

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

# A colour as rich writes it, or any control character but tabs and line ends.
_CONTROLS = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FIRST_LINE, LINE_INTERVAL = 2.0, 5.0  # seconds before the first line and between lines, if not on a terminal


class ProgressBar:
    """Progress of one task: `done` of `total` units; made by `Reporter.track`."""

    def __init__(self, label: str, total: int, unit: str, out: TextIO | None, progress: Progress | None) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.note = 0, ""
        self._start = time.monotonic()
        self._out, self._progress = out, progress
        self._task: TaskID | None = progress.add_task(label, total=total, note="") if progress else None

    def advance(self, count: int = 1, note: str = "") -> None:
        sys.audit("nearkin.step")  # where tests/torture may kill this process
        self.done, self.note = self.done + count, note
        if self._progress is not None and self._task is not None:
            rate = self.done / max(time.monotonic() - self._start, 1e-9)
            self._progress.update(self._task, advance=count, note=f"{format_rate(rate, self.unit)}  {note}")

    def print_lines(self, finished: threading.Event) -> None:
        """Print a line every few seconds, also while no unit completes."""
        wait = FIRST_LINE
        while not finished.wait(wait):
            print(self._line(), file=self._out, flush=True)
            wait = LINE_INTERVAL

    def _line(self) -> str:
        elapsed, done = time.monotonic() - self._start, self.done
        if not done:
            return f"{self.label}    0%  {self.total:,} {self.unit}, after {format_duration(elapsed)}"
        rate, left = format_rate(done / elapsed, self.unit), format_duration((self.total - done) * elapsed / done)
        return f"{self.label}  {done / self.total:4.0%}  {rate}  {left} left  {self.note}".rstrip()


class Reporter:
    def __init__(self, *, quiet: bool = False, out: TextIO | None = None) -> None:
        self.quiet = quiet
        self._out = out if out is not None else sys.stderr
        self._console = Console(file=self._out, highlight=False, soft_wrap=True)

    def info(self, line: str) -> None:
        if not self.quiet:
            self._console.print(escape_controls(line), markup=False)

    @contextmanager
    def track(self, label: str, total: int, unit: str = "it") -> Iterator[ProgressBar]:
        """Show the progress of a task while the block runs. Yields the bar to `advance`."""
        if self.quiet:
            yield ProgressBar(label, total, unit, None, None)
            return
        if not self._console.is_terminal:
            bar, finished = ProgressBar(label, total, unit, self._out, None), threading.Event()
            thread = threading.Thread(target=bar.print_lines, args=[finished], daemon=True)
            thread.start()
            try:
                yield bar
            finally:
                finished.set()
                thread.join()
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
    """Rate and remaining time of work that spans several progress bars."""

    def __init__(self, *, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._initial, self._start = done, time.monotonic()

    @property
    def rate(self) -> float:
        return (self.done - self._initial) / max(time.monotonic() - self._start, 1e-9)

    @property
    def eta(self) -> str:
        """Estimated remaining time for people; "?" before the first unit."""
        return format_duration((self.total - self.done) / self.rate) if self.rate else "?"


def format_rate(rate: float, unit: str) -> str:
    """Format a speed for people: "412.2 img/s", or "20.0 s/step" if that is more than a second."""
    return f"{rate:,.1f} {unit}/s" if rate >= 1 or not rate else f"{1 / rate:,.1f} s/{unit}"


def escape_controls(text: str, *, keep_colours: bool = False) -> str:
    r"""Write control characters as text: those in file names could change the terminal or hide output."""
    return _CONTROLS.sub(lambda m: m[0] if keep_colours and m[1] else m[0].encode("unicode_escape").decode(), text)


def format_duration(seconds: float) -> str:
    """Format a duration for people: "95 s", "62 min" or "56 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
