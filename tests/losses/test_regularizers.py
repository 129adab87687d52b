"""Regularisers: values and gradients of pytorch-metric-learning (PML) and of float64 loops, and what is refused."""

from __future__ import annotations

import doctest

import pytest
import torch
from pytorch_metric_learning import regularizers as pml
from pytorch_metric_learning.losses import ThresholdConsistentMarginLoss
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor

import nearkin as nk
from nearkin.errors import ConfigError
from nearkin.losses import LOSSES, REGULARIZERS, regularizer, regularizers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # from PML
N, C, K, DIM = 12, 5, 3, 4
DOUBLE = torch.float64


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return embeddings, labels, proxies and several centres."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((N, DIM), (C, DIM), (C, K, DIM))
    emb, proxies, centers = (torch.randn(shape, generator=g, dtype=DOUBLE, requires_grad=True) for shape in shapes)
    return emb, torch.randint(0, C, (N,), generator=g), proxies, centers


THEIRS = {
    "lp": lambda emb, *_: pml.LpRegularizer(reducer=MeanReducer())(emb),
    "zero_mean": lambda emb, *_: pml.ZeroMeanRegularizer(reducer=MeanReducer())(emb),
    "regular_face": lambda _, __, proxies, ___: pml.RegularFaceRegularizer(reducer=MeanReducer())(proxies),
    "center_invariant": lambda _, __, proxies, ___: pml.CenterInvariantRegularizer(reducer=MeanReducer())(proxies),
    "sparse_centers": lambda *given: pml.SparseCentersRegularizer(C, K)(given[3].flatten(0, 1)),
    "threshold_consistent_margin": lambda emb, labels, *_: ThresholdConsistentMarginLoss()(emb, labels),
}


def test_every_regularizer_has_an_oracle() -> None:
    assert set(THEIRS) == set(REGULARIZERS)


@pytest.mark.parametrize("name", THEIRS)
def test_value_and_gradient_are_those_of_pml(name: str) -> None:
    entry = REGULARIZERS[name]
    for seed in range(10):
        emb, labels, proxies, centers = given = inputs(seed)
        by_name = {"emb": emb, "labels": labels, "proxies": proxies, "centers": centers}
        leaves = [by_name[key] for key in entry.inputs if key != "labels"]
        ours, theirs = entry.function(**{key: by_name[key] for key in entry.inputs}), THEIRS[name](*given)
        # PML adds 1e-7 below the root of sparse centres.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
        for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_loops() -> None:
    """What PML does not have: another power, and several centres."""
    emb, _, _, centers = inputs()
    want = sum(sum(abs(x) ** 3 for x in row) ** (2 / 3) for row in emb.tolist()) / N
    assert float(nk.losses.lp(emb, p=3.0, power=2.0)) == pytest.approx(want)
    rows = [(c, torch.nn.functional.normalize(v, dim=0)) for c in range(C) for v in centers.detach()[c]]
    nearest = [max(float(v @ w) for other, w in rows if other != c) for c, v in rows]
    assert float(nk.losses.regular_face(centers)) == pytest.approx(sum(nearest) / len(nearest))
    squares = [sum(x * x for x in v) for row in centers.tolist() for v in row]
    mean = sum(squares) / len(squares)
    want = sum((s - mean) ** 2 for s in squares) / len(squares) / 4
    assert float(nk.losses.center_invariant(centers)) == pytest.approx(want)


def test_degenerate_inputs_have_finite_gradients() -> None:
    zeros = torch.zeros(3, DIM, dtype=DOUBLE, requires_grad=True)
    one = torch.ones(1, DIM, dtype=DOUBLE, requires_grad=True)
    for value, leaf in (
        (nk.losses.lp(zeros), zeros),
        (nk.losses.regular_face(zeros), zeros),
        (nk.losses.regular_face(one), one),
        (nk.losses.sparse_centers(zeros[:, None].expand(3, 2, DIM)), zeros),
    ):
        assert float(value) == 0
        assert torch.autograd.grad(value, leaf)[0].isfinite().all()


@pytest.mark.parametrize("loss", ["contrastive", "proxy_anchor", "soft_triple", "softmax"])
@pytest.mark.parametrize("name", THEIRS)
def test_objective_adds_the_weighted_regularizer(loss: str, name: str) -> None:
    needed = REGULARIZERS[name].inputs
    options = {"num_classes": C, "dim": DIM, **({"dropout": 0.0} if loss == "softmax" else {})}
    if ("proxies" in needed and loss == "contrastive") or ("centers" in needed and loss != "soft_triple"):
        with pytest.raises(ConfigError, match=f"regularizers: {name} needs .*{loss}"):
            nk.Objective(loss, regularizers={name: 0.5}, **options)
        return
    torch.manual_seed(0)
    objective = nk.Objective(loss, regularizers={name: 0.5, "zero_mean": 2}, **options).double()
    plain = nk.Objective(loss, **options).double()
    for value in objective.parameters():
        torch.nn.init.normal_(value)
    plain.load_state_dict(objective.state_dict())
    emb, labels, *_ = inputs()
    vectors = objective.weight if loss == "softmax" else getattr(objective, "proxies", None)
    given = {"emb": emb, "labels": labels, "proxies": vectors, "centers": vectors}
    term = REGULARIZERS[name].function(**{key: given[key] for key in needed})
    want = plain(emb, labels) + (2 * term if name == "zero_mean" else 0.5 * term + 2 * emb.sum(1).abs().mean())
    torch.testing.assert_close(objective(emb, labels), want)
    assert f"regularizers={{'{name}'" in repr(objective)


def test_matryoshka_sizes_are_regularised_once() -> None:
    emb, labels, *_ = inputs()
    plain, regularised = (
        nk.Objective("contrastive", matryoshka_dims=(2, 4), **o) for o in ({}, {"regularizers": {"lp": 1}})
    )
    torch.testing.assert_close(regularised(emb, labels) - plain(emb, labels), emb.norm(dim=1).mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regularizers": {"l2": 0.1}}, r"No regularizer named 'l2'"),
        ({"regularizers": {"lp": -1}}, r"the weight of lp must be a number, 0 or above; got -1"),
        ({"regularizers": {"lp": "a"}}, r"the weight of lp must be a number"),
        ({"regularizers": {"lp": 0.1}, "reduction": "none"}, r"lp has no value per sample"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(nk.UserError, match=message):
        nk.Objective("contrastive", **options)


def test_one_centre_and_missing_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match="sparse_centers needs several centres per class"):
        nk.Objective("soft_triple", num_classes=C, dim=DIM, centers=1, regularizers={"sparse_centers": 1})
    emb, labels, *_ = inputs()
    objective = nk.Objective("contrastive", regularizers={"threshold_consistent_margin": 1.0})
    masks = (labels[:, None] == labels) & ~torch.eye(N, dtype=torch.bool), labels[:, None] != labels
    with pytest.raises(ConfigError, match="threshold_consistent_margin needs one label per sample"):
        objective(emb, pairs=masks)
    levels = torch.stack([labels, labels // 2], 1)
    want = torch.stack([objective(emb, level) for level in levels.unbind(1)]).mean()
    torch.testing.assert_close(objective(emb, levels), want)


def test_own_regularizer() -> None:
    @regularizer
    def squared_length(emb: Tensor) -> Tensor:
        """Keep embeddings short."""
        return emb.square().sum(1).mean()

    try:
        emb, labels, *_ = inputs()
        assert REGULARIZERS["squared_length"].summary == "Keep embeddings short."
        both = nk.Objective("contrastive", regularizers={"squared_length": 1.0})
        torch.testing.assert_close(both(emb, labels) - nk.Objective("contrastive")(emb, labels), squared_length(emb))
    finally:
        del REGULARIZERS["squared_length"]


def test_examples() -> None:
    scope = {**vars(regularizers), "torch": torch}
    assert doctest.testmod(regularizers, globs=scope, optionflags=doctest.ELLIPSIS).failed == 0
    assert not set(REGULARIZERS) & set(LOSSES) - {"threshold_consistent_margin"}
