"""Experiment trackers besides events.jsonl: TensorBoard and Weights & Biases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from nearkin._common.registry import Registry
from nearkin.errors import import_extra
from nearkin.training.run import Run

Log = Callable[[Mapping[str, Any]], None]
Sink = Callable[[dict[str, float], int], None]  # takes the metrics and the epoch
TRACKERS: Registry[Callable[[Run], AbstractContextManager[Sink]]] = Registry("tracker")


@contextmanager
def open_trackers(names: Sequence[str], run: Run) -> Iterator[Log]:
    """Open trackers for a run, and yield a function that sends them an epoch's event; only the run's writer has any."""
    chosen = [TRACKERS[name] for name in names]
    with ExitStack() as stack:
        sinks = [stack.enter_context(tracker(run)) for tracker in chosen if run.is_writer]

        def log(event: Mapping[str, Any]) -> None:
            for sink in sinks:
                sink(scalars(event), event["epoch"])

        yield log


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


@contextmanager
def _tensorboard(run: Run) -> Iterator[Sink]:
    import_extra("tensorboard", extra="tensorboard")
    with import_extra("torch.utils.tensorboard", extra="tensorboard").SummaryWriter(run.path / "tensorboard") as writer:

        def log(values: dict[str, float], epoch: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, epoch)

        yield log


@contextmanager
def _wandb(run: Run) -> Iterator[Sink]:
    """Online or offline by W&B's own settings (WANDB_MODE=offline writes to the run folder only)."""
    name = run.path.name
    session = import_extra("wandb", extra="wandb").init(
        project="nearkin", name=name, id=name, dir=run.path, resume="allow", config=run.recipe.to_dict()
    )
    try:
        yield session.log
    finally:
        session.finish()


TRACKERS.add("tensorboard", _tensorboard)
TRACKERS.add("wandb", _wandb)
