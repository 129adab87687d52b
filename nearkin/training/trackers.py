"""Experiment trackers besides events.jsonl: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from nearkin.errors import ConfigError, did_you_mean, import_extra
from nearkin.training.run import Run

TRACKERS = ("tensorboard", "wandb")


class Tracker:
    """Sends the metrics of each epoch to all chosen trackers."""

    def __init__(self, sinks: Sequence[Any]) -> None:
        self.sinks = sinks

    def log(self, event: Mapping[str, Any]) -> None:
        """Send one epoch's event."""
        for sink in self.sinks:
            sink(int(event["epoch"]), scalars(event))


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalar metrics of an epoch's event, named by their path.

    >>> scalars({"epoch": 2, "loss": 0.5, "val": {"R@1": 0.7}, "diagnosis": {"hubness": 1.0, "histogram": [1]}})
    {'loss': 0.5, 'val/R@1': 0.7, 'diagnosis/hubness': 1.0}
    """
    flat: dict[str, float] = {}
    for name, value in event.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": v for inner, v in scalars(value).items()}
        elif isinstance(value, int | float) and name != "epoch":
            flat[name] = float(value)
    return flat


def check_trackers(names: Sequence[str]) -> None:
    """Refuse an unknown tracker, with a suggestion."""
    for name in names:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS) or f" Available: {', '.join(TRACKERS)}."
            raise ConfigError(f"No tracker named '{name}'.{hint}")


@contextmanager
def open_trackers(names: Sequence[str], run: Run) -> Iterator[Tracker]:
    """Open trackers for a run and close them at the end; only the process that writes the run has any."""
    check_trackers(names)
    with ExitStack() as stack:
        sinks = [stack.enter_context(_OPEN[name](run)) for name in names] if run.is_writer else []
        yield Tracker(sinks)


@contextmanager
def _tensorboard(run: Run) -> Iterator[Any]:
    import_extra("tensorboard", extra="tensorboard")
    writer = import_extra("torch.utils.tensorboard", extra="tensorboard").SummaryWriter(run.path / "tensorboard")

    def log(epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, epoch)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(run: Run) -> Iterator[Any]:
    """Online or offline by W&B's own settings (WANDB_MODE=offline writes to the run folder only)."""
    wandb = import_extra("wandb", extra="wandb")
    session = wandb.init(
        project="nearkin",
        name=run.path.name,
        id=run.path.name,
        dir=run.path,
        resume="allow",
        config=run.recipe.to_dict(),
    )
    try:
        yield lambda epoch, values: session.log(dict(values), step=epoch)
    finally:
        session.finish()


_OPEN = {"tensorboard": _tensorboard, "wandb": _wandb}
