"""Both libraries side by side: the same code with the modules of each, on the same batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MODULES = ("losses", "miners", "reducers", "distances", "regularizers", "samplers")
UTILS = ("accuracy_calculator", "inference", "distributed")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
DIM, CLASSES = 6, 7


def library(package: str) -> SimpleNamespace:
    """The modules of pytorch_metric_learning, or of nearkin.compat.pml."""
    modules = {name: importlib.import_module(f"{package}.{name}") for name in MODULES}
    utils = {name: importlib.import_module(f"{package}.utils.{name}") for name in UTILS}
    return SimpleNamespace(**modules, utils=SimpleNamespace(**utils))


def batch(seed: int, dtype: torch.dtype, *, copies: bool = True, n: int = 21) -> tuple[Tensor, Tensor]:
    """Unbalanced classes, two singletons, and two pairs of equal rows."""
    g = torch.Generator().manual_seed(seed)
    emb = torch.randn(n, DIM, generator=g, dtype=torch.float64)
    labels = torch.multinomial(torch.tensor([8.0, 4, 2, 2, 1]), n, replacement=True, generator=g)
    labels[:2] = torch.tensor([5, 6])
    if copies:
        emb[6], emb[7] = emb[5], emb[4]
    return emb.to(dtype), labels


def balanced(seed: int, dtype: torch.dtype, classes: int = 4, each: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    emb = torch.randn(classes * each, DIM, generator=g, dtype=torch.float64)
    return emb.to(dtype), torch.arange(classes).repeat_interleave(each)


def pair_indices(labels: Tensor, ref_labels: Tensor, seed: int, *, same: bool) -> tuple[Tensor, ...]:
    """Random positive and negative pairs, some of them twice."""
    g = torch.Generator().manual_seed(seed + 50)
    match = labels[:, None] == ref_labels
    pos = match.clone().fill_diagonal_(False) if same else match
    found = []
    for mask in (pos, ~match):
        pairs = mask.nonzero()
        chosen = pairs[torch.randint(0, len(pairs), (min(30, len(pairs)),), generator=g)]
        found += [chosen[:, 0], chosen[:, 1]]
    return tuple(found)


def triplet_indices(labels: Tensor, ref_labels: Tensor, seed: int, *, same: bool) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed + 60)
    match = labels[:, None] == ref_labels
    pos = match.clone().fill_diagonal_(False) if same else match
    triplets = (pos[:, :, None] & ~match[:, None]).nonzero()
    return tuple(triplets[torch.randint(0, len(triplets), (40,), generator=g)].t())


def assert_close(got: Any, want: Any, tolerance: float, what: str) -> None:
    got, want = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
    assert got.dtype == want.dtype, f"{what}: {got.dtype} is not {want.dtype}"
    assert got.numel() == want.numel(), f"{what}: {got.shape} is not {want.shape}"
    got, want = got.double(), want.double()
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    error = float((got.reshape(want.shape) - want).abs().max()) if want.numel() else 0.0
    assert error <= tolerance * scale, f"{what}: off by {error:.2g} of {scale:.2g}\n{got}\n{want}"


def compare_losses(
    build: Callable[[SimpleNamespace], torch.nn.Module],
    libraries: tuple[SimpleNamespace, SimpleNamespace],
    emb: Tensor,
    labels: Tensor | None,
    *others: Any,
    refs: Tensor | None = None,
    ref_labels: Tensor | None = None,
    tolerance: float | None = None,
) -> None:
    """Values, gradients of embeddings and references, parameters and their gradients are equal."""
    tolerance = tolerance or TOLERANCE[emb.dtype]
    found = []
    for lib in libraries:
        torch.manual_seed(0)
        loss = build(lib)
        leaf, ref = emb.clone().requires_grad_(), None if refs is None else refs.clone().requires_grad_()
        given = () if refs is None else (ref, ref_labels)
        torch.manual_seed(1)
        value = loss(leaf, labels, *(others or (None,) * bool(given)), *given)
        value.sum().backward()
        found.append((value, leaf.grad, None if ref is None else ref.grad, loss))
    (ours, ours_grad, ours_ref, our_loss), (theirs, their_grad, their_ref, their_loss) = found
    assert_close(ours, theirs, tolerance, "value")
    assert_close(ours_grad, their_grad, tolerance, "gradient")
    if their_ref is not None:
        assert_close(ours_ref, their_ref, tolerance, "gradient of the references")
    params = dict(our_loss.named_parameters())
    assert list(params) == list(dict(their_loss.named_parameters()))
    for name, parameter in their_loss.named_parameters():
        bound = max(tolerance, TOLERANCE[parameter.dtype])
        assert_close(params[name], parameter, bound, name)
        assert (params[name].grad is None) == (parameter.grad is None)
        if parameter.grad is not None:
            assert_close(params[name].grad, parameter.grad, bound, f"gradient of {name}")
