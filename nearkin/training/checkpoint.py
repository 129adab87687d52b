"""What of a training run must survive an interruption, and how Ctrl-C is handled."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from nearkin._common.progress import Reporter
from nearkin.errors import RunError
from nearkin.losses.weighted_sum import AnyObjective
from nearkin.models.embedder import Embedder
from nearkin.models.weights import load_checkpoint
from nearkin.training.distributed import world_size
from nearkin.training.run import Run


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped by Ctrl-C, after its checkpoint was written."""


@dataclass
class TrainingState:
    """What a run must not lose. Random draws need no state: they are functions of the seed, the epoch and the step."""

    model: Embedder  # the network
    objective: AnyObjective  # the loss with its class parameters and memory
    optimizer: torch.optim.Optimizer  # of both
    scaler: torch.amp.GradScaler  # the gradient scaler of fp16 training
    ema_model: Embedder | None = None  # the moving average of the network, if the recipe has one
    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the current epoch
    loss_sum: float = 0.0  # sum of the losses of those steps
    best: dict[str, float] = field(default_factory=dict)  # validation metrics of `best_epoch`
    latest: dict[str, float] = field(default_factory=dict)  # validation metrics of the latest epoch; not saved
    best_epoch: int = 0  # the epoch whose weights are in best.pt
    seconds: float = 0.0  # time spent training, over all interruptions
    processes: list[int] = field(default_factory=lambda: [world_size()])  # their number, and others after a resume

    _PARTS = ("model", "objective", "optimizer", "scaler", "ema_model")
    _COUNTERS = ("epoch", "step", "loss_sum", "best", "best_epoch", "seconds", "processes")

    def __post_init__(self) -> None:
        self.start_timer()

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / max(self.step, 1)

    def start_timer(self) -> None:
        self._timer = time.monotonic()

    @property
    def num_bytes(self) -> int:
        """Approximate size of the checkpoint and of the best model, with the optimizer's moments of later steps."""
        modules = [part for part in (self.model, self.objective, self.ema_model) if part is not None]
        tensors = [tensor for part in (*modules, self.model) for tensor in part.state_dict().values()]
        tensors += 2 * [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def save(self, run: Run) -> None:
        now = time.monotonic()
        self.seconds, self._timer = self.seconds + now - self._timer, now
        state: dict[str, Any] = {name: getattr(self, name) for name in self._COUNTERS}
        for name in self._PARTS:
            part = getattr(self, name)
            state[name] = None if part is None else part.state_dict()
        state["events_size"] = run.events_size()
        run.save("last.pt", state, keep="previous.pt")

    def restore(self, run: Run, reporter: Reporter) -> bool:
        """Load the run's last checkpoint, or the previous one if that is damaged."""
        state = None
        checkpoints = [path for path in (run.path / "last.pt", run.path / "previous.pt") if path.exists()]
        for path in checkpoints:
            try:
                state = load_checkpoint(path, keys=(*self._PARTS, *self._COUNTERS, "events_size"))
                break
            except RunError as error:
                is_last = path == checkpoints[-1]
                fallback = "Starting from the beginning" if is_last else "Using the previous checkpoint"
                reporter.info(f"{error} {fallback}.")
        if state is None:
            run.rewind_events(0)
            return False
        for name in self._COUNTERS:
            setattr(self, name, state[name])
        for name in self._PARTS:
            if state[name] is not None:
                getattr(self, name).load_state_dict(state[name])
        run.rewind_events(state["events_size"])
        return True


@contextmanager
def defer_sigint() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag: interrupted, an optimiser step would update half of the weights."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
