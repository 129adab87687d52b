"""Functions computed by blocks of rows: the values and all derivatives of one call with all rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nearkin.ops import row_blocks
from nearkin.ops.row_blocks import by_rows, per_row


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "_rows_per_block", lambda x, width: 3)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_value(x: Tensor, scale: Tensor, shared: Tensor) -> Tensor:
    return (torch.sin(x) * scale[:, None] * shared).sum(1)


def several_values(x: Tensor, scale: Tensor, shared: Tensor) -> Tensor:
    return torch.sin(x) * scale[:, None] * shared


@pytest.mark.parametrize("function", [one_value, several_values])
@pytest.mark.parametrize("learn_shared", [False, True], ids=["constant", "learned"])
def test_values_and_derivatives(function: Callable[..., Tensor], learn_shared: bool) -> None:
    x, scale, shared = randn(8, 5).requires_grad_(), randn(8, seed=1).requires_grad_(), randn(5, seed=2)
    shared.requires_grad_(learn_shared)
    inputs = [x, scale, *[shared] * learn_shared]

    def blocks(*_: Tensor) -> Tensor:
        return by_rows(function, x, scale, shared=(shared,))

    want = function(x, scale, shared)
    weight = randn(*want.shape, seed=3)
    torch.testing.assert_close(blocks(), want)
    for got, expected in zip(
        torch.autograd.grad(blocks(), inputs, weight), torch.autograd.grad(want, inputs, weight), strict=True
    ):
        torch.testing.assert_close(got, expected)
    assert torch.autograd.gradcheck(blocks, inputs)
    assert torch.autograd.gradgradcheck(blocks, inputs)


def test_a_function_sees_blocks_and_without_gradients_as_well() -> None:
    sizes = []

    def function(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x.sum(1)

    torch.testing.assert_close(by_rows(function, randn(8, 5)), randn(8, 5).sum(1))
    assert sizes == [3, 3, 2]


def test_a_learned_scalar_gets_its_gradient() -> None:
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    x = randn(8, 5)
    by_rows(lambda x, s: (x * s[:, None]).sum(1), x, per_row(scale, x)).sum().backward()
    torch.testing.assert_close(scale.grad, x.sum())
