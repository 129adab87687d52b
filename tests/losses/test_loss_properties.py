"""Properties that every loss has on random batches with any labels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers.batches import DOUBLE, batch, build, proxies
from helpers.rows import ROWS, Row
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nearkin as nk
from nearkin.losses import LOSSES, miners
from nearkin.ops.pairs import Pairs
from nearkin.report.losses import similarity_gradient

UNIT_ROWS = [row for row in ROWS if row.unit]
LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=12)
EXAMPLES = settings(max_examples=8, deadline=None, derandomize=True, database=None)


def random_batch(labels: list[int], seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(len(labels), 5, generator=g, dtype=DOUBLE), torch.tensor(labels)


def value_and_grad(objective: Callable[..., Tensor], emb: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = emb.detach().clone().requires_grad_()
    value = objective(leaf, labels)
    value.backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
@EXAMPLES
@given(labels=LABELS, seed=st.integers(0, 1000), data=st.data())
def test_any_batch(row: Row, labels: list[int], seed: int, data: st.DataObject) -> None:
    """Finite with a gradient, and invariant to the order of the batch and the numbering of the classes."""
    emb, y = random_batch(labels, seed)
    objective = build(row, 7, 5)
    value, grad = value_and_grad(objective, emb, y)
    assert torch.isfinite(value)
    assert torch.isfinite(grad).all()
    order = torch.tensor(data.draw(st.permutations(range(len(labels)))))
    if row.name == "npair_mc":  # it uses the first two samples of each class: keep the order within classes
        order = torch.argsort(torch.tensor([3, 0, 6, 1, 5, 2, 4])[y], stable=True)
    moved, moved_grad = value_and_grad(objective, emb[order], y[order])
    torch.testing.assert_close(moved, value, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(moved_grad, grad[order], rtol=1e-6, atol=1e-10)
    if not LOSSES[row.name].inputs.needs_classes:
        ids = torch.tensor([40, 7, 2**40, -3, 2**24 + 1, 2**24, 5])  # two of these are equal in float32
        renamed, _ = value_and_grad(_without_classes(row), emb, ids[y])
        torch.testing.assert_close(renamed, _without_classes(row)(emb, y), rtol=1e-9, atol=1e-11)


def _without_classes(row: Row) -> nk.Objective:
    return nk.Objective(row.name, miner=row.miner, reduction=row.reduction, **row.settings).eval()


@pytest.mark.parametrize("row", UNIT_ROWS, ids=lambda row: row.id)
@EXAMPLES
@given(labels=LABELS, seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
def test_the_length_of_embeddings_does_not_matter(row: Row, labels: list[int], seed: int, scale: float) -> None:
    """The loss of scaled embeddings is the same, and the gradient is orthogonal to each embedding."""
    emb, y = random_batch(labels, seed)
    objective = build(row, 7, 5)
    value, grad = value_and_grad(objective, emb, y)
    scaled, _ = value_and_grad(objective, emb * scale, y)
    torch.testing.assert_close(scaled, value, rtol=1e-7, atol=1e-9)
    radial = (grad * emb).sum(1).abs()
    assert float(radial.max()) <= 1e-9 * max(1.0, float(grad.abs().max() * emb.abs().max()))


@pytest.mark.parametrize("name", list(LOSSES))
@EXAMPLES
@given(labels=LABELS, seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_at_scale_64(name: str, labels: list[int], seed: int, dtype: torch.dtype) -> None:
    emb, y = random_batch(labels, seed)
    options = {"scale": 64.0} if "scale" in LOSSES[name].settings else {}
    objective = nk.Objective(name, num_classes=7, dim=5, **options)
    # The gradient of vicreg grows with the cube of the length, out of the range of float16 itself.
    value, grad = value_and_grad(objective, (emb * (8 if name == "vicreg" else 64)).to(dtype), y)
    assert torch.isfinite(value)
    assert torch.isfinite(grad).all()


@EXAMPLES
@given(labels=LABELS, seed=st.integers(0, 1000), epsilon=st.floats(0, 0.5))
def test_mined_sets_are_empty_together(labels: list[int], seed: int, epsilon: float) -> None:
    mined = miners.multi_similarity(nk.pair_up(*random_batch(labels, seed)), epsilon=epsilon)
    assert torch.equal(mined.pos.any(1), mined.neg.any(1))


def test_sums_over_180_samples_stay_finite() -> None:
    """exp(32 * 180) overflows float64; the logarithm of the sum does not."""
    emb = torch.ones(180, 8, requires_grad=True)
    loss = nk.Objective("proxy_repulsion_batch", num_classes=4, dim=8)
    loss.proxies.data = torch.ones(4, 8) + 0.01 * torch.eye(4, 8)
    value = loss(emb, torch.arange(180) % 4)
    value.backward()
    assert torch.isfinite(value)
    assert float(value.detach()) > 32 * 170
    assert torch.isfinite(emb.grad).all()


def test_documented_degenerate_values() -> None:
    emb, _ = batch(6, 2)
    alone, single = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    for name in ("triplet", "lifted_structure", "lifted_song", "npair", "snca", "nca", "ice"):
        assert float(nk.Objective(name)(emb, alone)) == 0.0, name
        assert float(nk.Objective(name)(emb, single)) == 0.0, name
    for name in ("contrastive", "contrastive_l2", "margin", "multi_similarity", "triplet", "npair_mc", "snca", "ice"):
        assert float(nk.Objective(name)(emb[:1], alone[:1])) == 0.0, name
    one_class = nk.losses.proxy_nca(emb, single, proxies(1))
    assert float(one_class) == 0.0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_similarity_gradient(row: Row) -> None:
    """d loss / d similarity, backpropagated through the similarities, is the gradient on the embeddings."""
    emb, labels = batch(12, 4, dim=5, seed=2)
    objective = build(row, 4, 5)
    entry = LOSSES[row.name]
    params = [getattr(objective, param.name).detach() for param in entry.inputs.params]
    miner = (lambda p: miners.MINERS[row.miner](p, **row.miner_settings)) if row.miner else (lambda p: p)
    used = entry.inputs.build_kwargs(entry.check(row.settings))
    mined = miner(entry.inputs.build(emb, labels, *params, **used))
    gradient = similarity_gradient(entry, mined, **{k: v for k, v in row.settings.items() if k in entry.loss_kwargs})
    assert gradient.shape == mined.sim.shape
    other_inputs = (
        row.name in ("center", "npair_mc", "nca", "pce", "spce", "proxy_repulsion") or "tau" in entry.settings
    )
    if other_inputs or row.settings.get("normalize") is False or not row.sim_only:
        return  # these also depend on the embeddings or proxies directly
    leaf = emb.clone().requires_grad_()
    objective(leaf, labels).backward()
    again = emb.clone().requires_grad_()
    built = entry.inputs.build(again, labels, *params, **entry.inputs.build_kwargs(row.settings))
    total = (built.sim * gradient).sum() * (len(emb) if row.reduction == "sum" else 1)
    total.backward()
    torch.testing.assert_close(again.grad, leaf.grad, rtol=1e-9, atol=1e-12)


def test_pairs_by_hand() -> None:
    """Users may pass their own similarities."""
    sim = torch.tensor([[0.9, 0.2], [0.1, 0.8]], requires_grad=True)
    eye = torch.eye(2, dtype=torch.bool)
    value = nk.losses.snca(Pairs(sim, eye, ~eye), sigma=1.0)
    want = (math.log1p(math.exp(0.2 - 0.9)) + math.log1p(math.exp(0.1 - 0.8))) / 2
    assert float(value.detach()) == pytest.approx(want, rel=1e-6)
    value.backward()


@pytest.mark.parametrize("m", [4, 16])
def test_lifted_song_rejects_references(m: int) -> None:
    (emb, labels), (refs, ref_labels) = batch(8, 3), batch(m, 3, seed=1)
    with pytest.raises(nk.UserError, match=rf"takes Pairs \[N, N\], a batch with itself, got \[8, {m}\]"):
        nk.losses.lifted_song(nk.pair_up(emb, labels, refs, ref_labels))


@pytest.mark.parametrize("margin", [0.5, -0.2], ids=["few active", "most active"])
def test_large_batches_against_plain_autograd(margin: float) -> None:
    """From 257 samples on gradients may be sparse, alone or added to dense ones; they agree with autograd."""
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 90, (300,), generator=g)
    emb = torch.randn(90, 24, generator=g, dtype=DOUBLE)[labels] + torch.randn(300, 24, generator=g, dtype=DOUBLE)
    same = labels[:, None] == labels
    eye = torch.eye(300, dtype=torch.bool)

    def plain(f: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.nn.functional.normalize(f) @ torch.nn.functional.normalize(f).t()
        contrastive = (torch.relu(s - margin)[~same].sum() - s[same & ~eye].sum()) / (300 * 299)
        far = s.masked_fill(~same | eye, math.inf).amin(1)
        near = s.masked_fill(same, -math.inf).amax(1)
        return contrastive, torch.relu(near - far + 0.3)[far < math.inf].mean()

    for index, objective in enumerate(
        (nk.Objective("contrastive", margin=margin), nk.Objective("triplet", miner="hard", margin=0.3))
    ):
        a, b = emb.clone().requires_grad_(), emb.clone().requires_grad_()
        value, want = objective(a, labels), plain(b)[index]
        value.backward()
        want.backward()
        assert float(value.detach()) == pytest.approx(float(want.detach()), rel=1e-9)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-12)
