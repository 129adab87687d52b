"""What of a training run must survive an interruption, in one place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from nearkin._common.progress import Reporter
from nearkin.errors import RunError
from nearkin.models.weights import load_checkpoint
from nearkin.training.run import Run


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped by Ctrl-C, after its checkpoint was written."""


@dataclass
class TrainingState:
    """The learned and moving parts of a run, and how far it is. `save` then `restore` changes no later number.

    The order of the images and every random draw need no state of their own: they are functions of the seed, the epoch
    and the step. The checkpoint before the last is kept as well, for the case that the last one is damaged.
    """

    model: nn.Module
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: nn.Module | None = None  # the running mean of the weights, where the recipe asks for one
    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the current epoch
    loss_sum: float = 0.0  # over those steps
    best: float = -1.0  # validation R@1 of best_epoch
    best_map: float = -1.0  # its MAP@R, which decides between epochs of equal R@1
    best_epoch: int = 0
    seconds: float = 0.0  # spent training, over all sittings

    _PLAIN = ("epoch", "step", "loss_sum", "best", "best_map", "best_epoch", "seconds")

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / max(self.step, 1)

    def stepped(self, loss: float) -> None:
        self.step += 1
        self.loss_sum += loss

    def next_epoch(self) -> None:
        self.epoch, self.step, self.loss_sum = self.epoch + 1, 0, 0.0

    def save(self, run: Run) -> None:
        state: dict[str, Any] = {name: getattr(self, name) for name in self._PLAIN}
        state |= {
            "model": self.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.state_dict() if self.average is not None else None,
            "events_size": run.events_size(),
        }
        run.save("last.pt", state, keep="previous.pt")

    def restore(self, run: Run, reporter: Reporter) -> bool:
        """Take up the run's last checkpoint, or the one before if that is damaged; False when there is none."""
        state = None
        there = [path for path in (run.path / "last.pt", run.path / "previous.pt") if path.exists()]
        for path in there:
            try:
                state = load_checkpoint(path)
                break
            except RunError as error:
                before = (
                    "Going back to the checkpoint before it" if path != there[-1] else "Starting from the beginning"
                )
                reporter.info(f"{error} {before}.")
        if state is None:
            run.rewind_events(0)
            return False
        for name in self._PLAIN:
            setattr(self, name, state[name])
        self.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        run.rewind_events(state["events_size"])
        return True


@contextmanager
def defer_sigint() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag that the loop reads between steps; a second one stops at once.

    A KeyboardInterrupt in the middle of an optimizer step would leave half of the weights moved.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
