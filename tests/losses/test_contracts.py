"""Contract tests: what every registered loss must do.

Each contract is a function of a name and runs on every registered loss. A new loss fails one of them, `has_a_row`,
until it has a row in tests/helpers/rows.py; a toy loss below proves that.
"""

from __future__ import annotations

import doctest
import inspect
import pickle
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.rows import ROWS
from torch import Tensor

import nearkin as nk
from nearkin.errors import ConfigError, DataError, UserError
from nearkin.losses import LOSSES, linear, loss
from nearkin.ops.pairs import Pairs
from nearkin.report.losses import settings_table

CLASSES, DIM = 6, 8


def batch(n: int = 20, seed: int = 0, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    emb = torch.randn(n, DIM, generator=g, dtype=torch.float64)
    return emb, torch.randint(0, classes, (n,), generator=g)


def make(name: str, **options: object) -> nk.Objective:
    """Return the objective in float64 with random class parameters, without dropout."""
    objective = nk.Objective(name, num_classes=CLASSES, dim=DIM, **options).double().eval()
    g = torch.Generator().manual_seed(1)
    for value in objective.parameters():
        if value.dim():
            value.data = torch.randn(value.shape, generator=g, dtype=torch.float64)
    return objective


def run(objective: nk.Objective, emb: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = emb.detach().clone().requires_grad_()
    value = objective(leaf, labels)
    value.backward()
    assert leaf.grad is not None, "the loss is not attached to the embeddings"
    return value.detach(), leaf.grad


# --- contracts --------------------------------------------------------------------------------------------------------


def has_a_row(name: str) -> None:
    assert name in {row.name for row in ROWS}, f"{name} has no row in tests/helpers/rows.py"


def is_documented(name: str) -> None:
    entry = LOSSES[name]
    text = inspect.getdoc(entry.function) or ""
    assert entry.summary.endswith("."), "the first line of the docstring is not a sentence"
    for section in ("Args:", "Returns:", "Example:"):
        assert f"\n\n{section}\n" in text, f"the docstring has no section {section}"
    assert ">>>" in text, "the docstring has no example"
    for key, _, _, explanation in settings_table(entry):
        assert explanation, f"the docstring does not explain {key}"
    assert entry.paper
    assert entry.formula
    assert entry.use
    assert entry.cost


def example_runs(name: str) -> None:
    function = LOSSES[name].function
    scope = {**vars(sys.modules[function.__module__]), "torch": torch, "pair_up": nk.pair_up, name: public(name)}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in finder.find(function, name, globs=scope):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


def public(name: str) -> Callable[..., Tensor]:
    function = LOSSES[name].function
    return getattr(sys.modules[function.__module__], name)


def settings_are_ranged(name: str) -> None:
    entry = LOSSES[name]
    for key, value in entry.settings.items():
        if isinstance(value, float):
            assert key in entry.space, f"{key} has no search range"
        if key in entry.space:
            assert value in entry.space[key], f"the default {key}={value} is outside its range {entry.space[key]}"


def returns_a_finite_scalar_with_gradient(name: str) -> None:
    value, grad = run(make(name), *batch())
    assert value.shape == ()
    assert value.dtype == torch.float64
    assert torch.isfinite(value)
    assert torch.isfinite(grad).all()
    assert grad.abs().max() > 0


def is_finite_on_degenerate_batches(name: str) -> None:
    emb, labels = batch(6)
    duplicate = emb[:1].expand(6, DIM)
    hole = emb.clone()
    hole[2] = 0
    for what, x, y in (
        ("single class", emb, torch.full_like(labels, 3)),
        ("batch of one", emb[:1], labels[:1]),
        ("every class once", emb, torch.arange(6)),
        ("all embeddings equal", duplicate, torch.tensor([0, 0, 1, 1, 2, 2])),
        ("antiparallel", torch.cat([emb[:3], -emb[:3]]), torch.tensor([0, 1, 2, 0, 1, 2])),
        ("a zero vector", hole, torch.tensor([0, 0, 1, 1, 2, 2])),
        ("all zero", torch.zeros_like(emb), torch.tensor([0, 0, 1, 1, 2, 2])),
    ):
        value, grad = run(make(name), x, y)
        assert torch.isfinite(value), what
        assert torch.isfinite(grad).all(), what
        assert grad.abs().max() < 1e6, f"{what}: the gradient explodes"


def is_finite_in_half_precision(name: str) -> None:
    emb, labels = batch()
    for dtype in (torch.float16, torch.bfloat16):
        x = (emb * 64).to(dtype).requires_grad_()
        value = make(name).float()(x, labels)
        value.backward()
        assert value.dtype == torch.float32
        assert torch.isfinite(value)
        assert torch.isfinite(x.grad).all()


def ignores_autocast(name: str) -> None:
    emb, labels = batch()
    objective, x = make(name).float(), emb.float()
    want, want_grad = run(objective, x, labels)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = objective(leaf, labels)
    got.backward()
    assert torch.equal(got, want)
    assert torch.equal(leaf.grad, want_grad)


def agrees_in_float32(name: str) -> None:
    emb, labels = batch()
    want, want_grad = run(make(name), emb, labels)
    got, got_grad = run(make(name).float(), emb.float(), labels)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-4, atol=1e-4 * float(want_grad.abs().max()))


def does_not_depend_on_the_order_of_the_batch(name: str) -> None:
    emb, labels = batch()
    # Reorder classes but not the samples within a class: some losses use the first samples of a class.
    order = torch.argsort(torch.tensor([3, 1, 5, 0, 4, 2])[labels], stable=True)
    want, want_grad = run(make(name), emb, labels)
    got, got_grad = run(make(name), emb[order], labels[order])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got_grad, want_grad[order], rtol=1e-7, atol=1e-12)


def does_not_depend_on_the_numbering_of_the_classes(name: str) -> None:
    emb, labels = batch()
    new = torch.tensor([4, 2, 0, 5, 1, 3])
    objective, renamed = make(name), make(name)
    for param in LOSSES[name].inputs.params:
        getattr(renamed, param.name).data[new] = getattr(objective, param.name).data
    want, want_grad = run(objective, emb, labels)
    got, got_grad = run(renamed, emb, new[labels])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-7, atol=1e-12)


def takes_labels_of_any_integer_dtype(name: str) -> None:
    emb, labels = batch()
    want = make(name)(emb, labels)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(make(name)(emb, labels.to(dtype)), want)
    assert torch.equal(make(name)(emb, labels.tolist()), want)


def supports_its_reductions(name: str) -> None:
    emb, labels = batch()
    allowed = LOSSES[name].reductions
    assert "mean" in allowed
    for reduction in {"sum", "none"} - set(allowed):
        with pytest.raises(ConfigError, match="reduction must be"):
            make(name, reduction=reduction)
    if "none" in allowed:
        values = make(name, reduction="none")(emb, labels)
        assert values.dim() == 1
        torch.testing.assert_close(values.sum(), make(name, reduction="sum")(emb, labels))
    with pytest.raises(ConfigError, match="reduction must be"):
        make(name, reduction="average")


def rejects_invalid_inputs(name: str) -> None:
    emb, labels = batch(12)
    objective = make(name)
    with pytest.raises(DataError, match="12 embeddings but 11 labels"):
        objective(emb, labels[:11])
    with pytest.raises(DataError, match=r"expected integers, got torch\.float32"):
        objective(emb, labels.float())
    with pytest.raises(DataError, match=r"expected integers, got torch\.bool"):
        objective(emb, labels > 0)
    with pytest.raises(DataError, match="expected one per row"):
        objective(emb, labels[:, None])
    with pytest.raises(DataError, match="dimensions"):
        objective(emb[:, :5], labels)
    for bad in (float("nan"), float("inf")):
        broken = emb.clone()
        broken[3, 2] = bad
        with pytest.raises(DataError, match=r"1 of 12 rows hold NaN or infinity \(first: row 3\)"):
            nk.Objective(name, num_classes=CLASSES, dim=DIM)(broken, torch.arange(12) // 2)
    with pytest.raises(ConfigError, match=f"{name}: no setting 'alfa'"):
        make(name, alfa=1.0)
    for key, default in LOSSES[name].settings.items():
        with pytest.raises(ConfigError, match=f"{name}: {key} must be"):
            make(name, **{key: "much"})
        if not isinstance(default, bool):
            with pytest.raises(ConfigError, match=f"{name}: {key} must be"):
                make(name, **{key: float("nan")})
    for key, span in LOSSES[name].space.items():
        illegal = {"log": -1.0, "integer": 0}.get(span.kind)
        if illegal is not None:
            with pytest.raises(ConfigError, match=f"{name}: {key} must be in"):
                make(name, **{key: illegal})


def rejects_labels_out_of_range(name: str) -> None:
    if not LOSSES[name].inputs.params:
        return
    emb, labels = batch()
    for bad in (CLASSES, -1):
        wrong = labels.clone()
        wrong[3] = bad
        with pytest.raises(DataError, match="labels: expected 0 to 5 for 6 classes"):
            make(name)(emb, wrong)
    for missing in ("num_classes", "dim"):
        options = {"num_classes": CLASSES, "dim": DIM}
        del options[missing]
        with pytest.raises(ConfigError, match=f"pass {missing}="):
            nk.Objective(name, **options)


def is_restored_by_its_state_dict(name: str) -> None:
    emb, labels = batch()
    objective = make(name)
    other = nk.Objective(name, num_classes=CLASSES, dim=DIM).double().eval()
    other.load_state_dict(objective.state_dict())
    assert torch.equal(objective(emb, labels), other(emb, labels))
    again = pickle.loads(pickle.dumps(objective))
    assert torch.equal(objective(emb, labels), again(emb, labels))
    groups = objective.param_groups(lr=0.1)
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in objective.parameters()}
    assert all(g["lr"] >= 0.1 for g in groups)


CONTRACTS = [
    has_a_row,
    is_documented,
    example_runs,
    settings_are_ranged,
    returns_a_finite_scalar_with_gradient,
    is_finite_on_degenerate_batches,
    is_finite_in_half_precision,
    ignores_autocast,
    agrees_in_float32,
    does_not_depend_on_the_order_of_the_batch,
    does_not_depend_on_the_numbering_of_the_classes,
    takes_labels_of_any_integer_dtype,
    supports_its_reductions,
    rejects_invalid_inputs,
    rejects_labels_out_of_range,
    is_restored_by_its_state_dict,
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize("name", list(LOSSES))
def test_contract(name: str, contract: Callable[[str], None]) -> None:
    contract(name)


def test_a_new_loss_fails_only_for_its_missing_row() -> None:
    @loss(family="toy", paper="none", formula="1 - mean positive cosine", use="Never.", space={"margin": linear(0, 1)})
    def toy(p: Pairs, *, margin: float = 0.2) -> Tensor:
        """The mean shortfall of the positives.

        Args:
            p: Cosines [N, M] with masks.
            margin: Shortfall that is ignored.

        Returns:
            One value per anchor [N].

        Example:
            >>> float(toy(pair_up(torch.eye(2), torch.tensor([0, 0])), margin=0.5))
            0.5
        """
        return (torch.relu(1 - margin - p.sim) * p.pos).sum(1)

    toy_module = sys.modules[__name__]
    toy_module.toy = toy  # the public function, where a module-level loss would be
    try:
        failed = []
        for contract in CONTRACTS:
            try:
                contract("toy")
            except (AssertionError, UserError, ValueError, TypeError) as error:
                failed.append((contract.__name__, error))
        assert [name for name, _ in failed] == ["has_a_row"], failed
    finally:
        del LOSSES["toy"], toy_module.toy


def test_names_and_default_settings_are_stable() -> None:
    """They are public API."""
    want = {
        "contrastive": {"margin": 0.5},
        "contrastive_l2": {"margin": 1.0, "normalize": True},
        "triplet": {"margin": 0.1},
        "lifted_structure": {"margin": 0.5},
        "lifted_song": {"margin": 1.0},
        "npair": {},
        "npair_mc": {"l2": 0.005},
        "margin": {"alpha": 0.2, "beta": 1.2, "learn_beta": False},
        "margin_similarity": {"margin": 0.2, "beta": 0.28},
        "multi_similarity": {"alpha": 2.0, "beta": 50.0, "base": 0.5},
        "snca": {"sigma": 0.05},
        "nca": {},
        "ice": {"scale": 64.0, "anchor_grad": True},
        "softmax": {"smoothing": 0.1, "dropout": 0.5},
        "norm_softmax": {"temperature": 0.05},
        "proxy_nca": {"scale": 1.0, "include_positive": False},
        "arcface": {"margin_degrees": 28.6, "scale": 64.0},
        "soft_triple": {"scale": 20.0, "gamma": 0.1, "margin": 0.01, "tau": 0.2, "centers": 10},
        "proxy_anchor": {"alpha": 32.0, "margin": 0.1},
        "mpa": {"alpha": 32.0, "margin": 0.1, "gamma": 0.1, "tau": 0.2, "centers": 10},
        "mpa_dw": {"alpha": 32.0, "margin": 0.1, "gamma": 0.1, "tau": 0.2, "centers": 10},
        "mpa_ap": {"alpha": 32.0, "margin": 0.1, "gamma": 0.1, "tau": 0.2, "centers": 10},
        "proxy_repulsion": {"alpha": 32.0, "margin": 0.1},
        "proxy_repulsion_batch": {"alpha": 32.0, "margin": 0.1, "average": False},
        "center": {"strength": 0.003},
        "pce": {"lam": 1.0},
        "spce": {},
        "supcon": {"temperature": 0.1},
        "nt_xent": {"temperature": 0.07},
        "info_nce": {"temperature": 0.07, "learn_temperature": False},
        "siglip": {"scale": 10.0, "bias": -10.0, "learn_scale": False},
        "vicreg": {"invariance": 25.0, "variance": 25.0, "covariance": 1.0},
        "prototypical": {"scale": 10.0, "learn_scale": False},
        "cosface": {"margin": 0.35, "scale": 64.0},
        "sphereface": {"margin": 4, "scale": 1.0},
        "large_margin_softmax": {"margin": 4, "scale": 1.0},
        "subcenter_arcface": {"margin_degrees": 28.6, "scale": 64.0, "centers": 3},
        "dynamic_arcface": {"strength": 0.5, "power": 0.25, "base": 0.05, "scale": 45.0},
        "adaface": {"margin": 0.4, "h": 0.333, "scale": 64.0, "momentum": 0.99},
        "curricularface": {"margin_degrees": 28.6, "scale": 64.0, "momentum": 0.01},
        "magface": {"low": 0.45, "high": 0.8, "strength": 35.0, "scale": 64.0},
        "p2sgrad": {},
        "instance": {"gamma": 64.0},
        "smooth_ap": {"temperature": 0.01, "with_query": False},
        "recall_surrogate": {"temperature": 0.01, "rank_width": 1.0, "k_max": 16},
        "sup_ap": {"temperature": 0.01, "slope": 100.0, "weight": 0.5},
        "pnp": {"temperature": 0.01, "alpha": 1.0, "b": 2.0, "variant": "Dq", "with_query": False},
        "fast_ap": {"bins": 10},
        "histogram": {"bins": 100},
        "ranked_list": {"alpha": 1.2, "margin": 0.4, "temperature": 10.0, "balance": 0.5},
        "circle": {"margin": 0.4, "scale": 80.0},
        "angular": {"angle_degrees": 40.0},
        "tuplet_margin": {"margin_degrees": 5.73, "scale": 64.0},
        "dynamic_soft_margin": {"momentum": 0.1, "edges": 11},
        "hierarchical_triplet": {"margin": 0.1},
        "intra_pair_variance": {"pos_epsilon": 0.01, "neg_epsilon": 0.01},
        "threshold_consistent_margin": {"pos_margin": 0.9, "neg_margin": 0.5, "pos_weight": 1.0, "neg_weight": 1.0},
        "snr_contrastive": {"pos_margin": 0.0, "neg_margin": 1.0},
        "hyperbolic": {"temperature": 0.2, "curvature": 0.1, "radius": 2.3},
        "proxy_nca_pp": {"temperature": 1 / 9},
        "manifold": {"margin": 0.0005, "context": 1.0, "persistence": 0.8},
        "spectral_clustering": {},
        "facility_location": {"gamma": 1.0},
    }
    assert {name: entry.settings for name, entry in LOSSES.items()} == want
    assert len(want) == 63


@pytest.mark.parametrize(
    ("name", "key", "illegal", "legal"),
    [
        ("norm_softmax", "temperature", [0.0, 0, -0.05], [1e-3, 10.0]),
        ("snca", "sigma", [0.0], [5.0]),
        ("multi_similarity", "alpha", [0.0], [1000.0]),
        ("mpa", "centers", [0, -1], [1, 50]),
        ("mpa", "gamma", [0.0], [2.0]),
        ("pce", "lam", [0.0], [100.0]),
        ("softmax", "dropout", [1.5, 1.0, -0.1], [0.0, 0.9]),
        ("softmax", "smoothing", [1.1, -0.1], [0.0, 1]),
        ("center", "strength", [-0.1], [0.0, 2.0]),
        ("npair_mc", "l2", [-0.1], [0.0, 2.0]),
        ("triplet", "margin", [], [0.0, -0.2, 3.0]),
        ("contrastive", "margin", [], [-0.9, 1.0, np.float32(0.25), np.float64(0.25), torch.tensor(0.25)]),
        ("proxy_repulsion_batch", "average", [1], [np.True_, torch.tensor(True)]),
    ],
)
def test_illegal_values_are_rejected(name: str, key: str, illegal: list[float], legal: list[float]) -> None:
    """Rejected: divisions by zero, invalid probabilities, weights and counts. Margins may have any value."""
    for value in illegal:
        with pytest.raises(ConfigError, match=f"{name}: {key} must be .*, got {value}"):
            make(name, **{key: value})
    for value in legal:
        assert torch.isfinite(make(name, **{key: value})(*batch()))


@pytest.mark.parametrize("name", list(LOSSES))
def test_help_shows_the_public_signature(name: str) -> None:
    entry = LOSSES[name]
    shown = inspect.signature(public(name)).parameters
    positional = [n for n, p in shown.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[:2] == (["p"] if entry.inputs.pairs else ["emb", "labels"])
    assert all(param.name in positional for param in entry.inputs.params)
    assert {n: p.default for n, p in shown.items() if p.kind is p.KEYWORD_ONLY} == {
        **entry.loss_kwargs,
        **{buffer.name: None for buffer in entry.inputs.buffers},
        "reduction": "mean",
    }


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        (
            "proxy_anchor",
            lambda f, x, y, w: f(nk.pair_up(x, y)),
            r"'labels'. Call it as nk.losses.proxy_anchor\(emb, la",
        ),
        ("proxy_anchor", lambda f, x, y, w: f(x, y), "missing a required argument: 'proxies'. Call it as"),
        ("proxy_anchor", lambda f, x, y, w: f(x, y, w, w), "too many positional arguments. Call it as"),
        ("proxy_anchor", lambda f, x, y, w: f(x, y, w[:, None]), r"proxies must be a tensor \[C, D\], got \[6, 1, 8\]"),
        ("proxy_anchor", lambda f, x, y, w: f(x, y, w.tolist()), r"proxies must be a tensor \[C, D\], got list"),
        ("soft_triple", lambda f, x, y, w: f(x, y, w), r"proxies must be a tensor \[C, K, D\], got \[6, 8\]"),
        ("center", lambda f, x, y, w: f(x, y, w, w[:, 0], w[:4]), r"centers must be a tensor \[6, 8\], got \[4, 8\]"),
        ("softmax", lambda f, x, y, w: f(x, y, w, w[0]), r"bias must be a tensor \[6\], got \[8\]"),
        ("spce", lambda f, x, y, w: f(x, y, classes=6), "no setting 'classes'"),
        ("triplet", lambda f, x, y, w: f(x, y), r"triplet takes Pairs: nk.losses.triplet\(nk.pair_up\(emb, labels\)\)"),
        (
            "nca",
            lambda f, x, y, w: f(x, y),
            r'nca takes Pairs: nk.losses.nca\(nk.pair_up\(emb, labels, metric="dot"\)\)',
        ),
    ],
)
def test_a_wrong_call_is_explained(name: str, call: Callable[..., Tensor], message: str) -> None:
    emb, labels = batch()
    with pytest.raises(ConfigError, match=message):
        call(public(name), emb, labels, torch.eye(CLASSES, DIM, dtype=torch.float64))


def test_class_losses_take_parameters_by_name() -> None:
    (emb, labels), w = batch(), torch.eye(CLASSES, DIM, dtype=torch.float64)
    assert torch.equal(nk.losses.proxy_anchor(emb, labels, proxies=w), nk.losses.proxy_anchor(emb, labels, w))
    assert torch.equal(
        nk.losses.proxy_anchor(emb=emb, labels=labels, proxies=w), nk.losses.proxy_anchor(emb, labels, w)
    )
    assert torch.equal(nk.losses.spce(emb, labels, num_classes=9), nk.losses.spce(emb, labels, 9))
    centers = nk.losses.center(emb, labels, weight=w, bias=w[:, 7], centers=w, strength=0.5, reduction="sum")
    assert torch.equal(centers, nk.losses.center(emb, labels, w, w[:, 7], w, strength=0.5, reduction="sum"))


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"No loss named 'proxyanchor'. Did you mean 'proxy_anchor'?"):
        nk.Objective("proxyanchor")
    with pytest.raises(ConfigError, match=r"proxy_anchor: no setting 'alfa'. Did you mean 'alpha'?"):
        nk.Objective("proxy_anchor", num_classes=3, dim=4, alfa=3.0)
    with pytest.raises(ConfigError, match=r"No miner named 'semi_hard'. Did you mean 'semihard'?"):
        nk.Objective("triplet", miner="semi_hard")
