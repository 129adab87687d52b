"""Checks of inputs, and whether a value may be read: on an accelerator reading one waits for all work queued on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nearkin.errors import DataError

_plain = False


@contextmanager
def plain() -> Iterator[None]:
    """Compute as on an accelerator: no value is read, shapes do not depend on data, and no CPU kernel is used.

    Returns:
        A context manager.

    Example:
        >>> with plain():
        ...     print(on_host(torch.zeros(1)))
        False
    """
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def on_host(x: Tensor) -> bool:
    """Whether values of x may be read at no cost: on the CPU, outside `torch.compile`, `torch.func` and `plain`."""
    if torch.compiler.is_compiling() or _plain:
        return False
    return x.device.type == "cpu" and not torch._C._are_functorch_transforms_active()


def check_finite(x: Tensor) -> None:
    """Raise DataError if a row holds NaN or infinity; off the host these propagate into the loss instead."""
    if on_host(x) and not torch.isfinite(x.detach().sum()):
        raise_if_not_finite(x)


def raise_if_not_finite(x: Tensor) -> None:
    """Raise DataError with the number of rows that hold NaN or infinity, if there are any."""
    bad = torch.nonzero(~torch.isfinite(x.detach()).reshape(-1, x.shape[-1]).all(1)).flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} of {x[..., 0].numel()} rows hold NaN or infinity (first: row {bad[0]}). "
            "Check the learning rate, the mixed precision and the inputs of the network."
        )


def squared_norms(x: Tensor, degree: int = 2) -> Tensor:
    """Return the squared lengths of rows [N]; DataError if they are not finite, or too large for sums of products.

    Products have two factors from x, or as many as the degree.
    """
    square = x.square().sum(1)
    limit = torch.finfo(x.dtype).max ** (1.6 / degree)
    if on_host(x) and not (longest := float(square.detach().max())) <= limit:
        raise_if_not_finite(x)
        raise DataError(
            f"emb: the longest row has a squared length of {longest:.3g}, too large for products in {x.dtype}. "
            "Scale the embeddings down, or use a loss on cosines."
        )
    return square


def check_range(x: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Check that labels are in 0..num_classes-1, and return x.

    On the host a DataError is raised, on a GPU or compiled an assertion fails when the device gets there, and where
    neither is possible x becomes NaN.
    """
    expected = f"labels: expected 0 to {num_classes - 1} for {num_classes} classes"
    if on_host(labels):
        low, high = torch.aminmax(labels)
        if low < 0 or high >= num_classes:
            raise DataError(
                f"{expected}, got {int(low)} to {int(high)}. "
                "Number the training classes from 0, or increase num_classes."
            )
        return x
    ok = ((labels >= 0) & (labels < num_classes)).all()
    if x.device.type in ("cpu", "cuda") and not torch._C._are_functorch_transforms_active():
        torch._assert_async(ok, expected)
        return x
    return torch.where(ok, x, float("nan"))
