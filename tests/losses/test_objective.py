"""Objective: class parameters, memory, prefixes, weighted sums."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

import nearkin as nk
from nearkin.losses.objective import WeightedSum

STATUS = Path("/proc/self/status")


def batch(n: int = 8, dim: int = 6, seed: int = 0, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, dim, generator=g, dtype=torch.float64), torch.randint(0, classes, (n,), generator=g)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_adds_earlier_batches_as_references() -> None:
    objective = nk.Objective("contrastive", memory=20, dim=6)
    (a, la), (b, lb) = batch(seed=1), batch(seed=2)
    assert torch.equal(objective(a, la), nk.losses.contrastive(nk.pair_up(a, la)))
    refs, labels = torch.cat([b, a]), torch.cat([lb, la])
    want = nk.losses.contrastive(nk.pair_up(b, lb, refs, labels, self_columns=torch.arange(8)))
    torch.testing.assert_close(objective(b, lb), want)


def test_an_item_met_again_in_the_memory_counts_and_self_does_not() -> None:
    objective = nk.Objective("contrastive", memory=4, dim=2, reduction="sum")
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([7])
    assert float(objective(x, y)) == 0.0
    assert float(objective(x, y)) == -1.0  # its copy of the step before, not itself
    assert float(objective(x, y)) == -2.0


def test_memory_is_a_ring() -> None:
    objective = nk.Objective("contrastive", memory=5, dim=1)
    for step in range(4):
        objective(torch.tensor([[3.0 * step + 1], [3.0 * step + 2], [3.0 * step + 3]]), torch.tensor([step] * 3))
    assert sorted(objective.memory_emb.flatten().tolist()) == [8, 9, 10, 11, 12]
    assert objective.memory_state.tolist() == [5, 2]
    objective(torch.arange(20.0)[:, None] + 100, torch.arange(20))
    assert sorted(objective.memory_emb.flatten().tolist()) == [115, 116, 117, 118, 119]


def test_memory_resumes_exactly() -> None:
    """Fill state, pointer and every digit, also for a memory of another dtype than the fresh objective's."""
    batches = [batch(seed=s) for s in range(6)]
    first = nk.Objective("multi_similarity", memory=20, dim=6)
    for emb, labels in batches[:2]:
        first(emb, labels)
    assert first.memory_emb.dtype == torch.float64
    second = nk.Objective("multi_similarity", memory=20, dim=6)
    second.load_state_dict(first.state_dict())
    for emb, labels in batches[2:]:
        assert torch.equal(first(emb, labels), second(emb, labels))
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])


def test_memory_is_not_written_in_eval() -> None:
    objective = nk.Objective("contrastive", memory=20, dim=6).eval()
    objective(*batch())
    assert objective.memory_state.tolist() == [0, 0]


def test_memory_sends_no_gradient_to_the_past() -> None:
    objective = nk.Objective("triplet", memory=20, dim=6, miner="semihard")
    past, labels = batch(seed=1)
    past.requires_grad_()
    objective(past, labels)
    now, labels = batch(seed=2)
    now.requires_grad_()
    objective(now, labels).backward()
    assert past.grad is None
    assert now.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["proxy_anchor", "npair_mc", "lifted_song"])
def test_memory_is_refused_where_it_makes_no_sense(name: str) -> None:
    with pytest.raises(nk.UserError, match="has no use for references from earlier batches"):
        nk.Objective(name, num_classes=3, dim=4, memory=10)


# --- prefixes and sums ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["contrastive", "proxy_anchor", "soft_triple", "softmax", "center"])
def test_prefixes_sum_the_loss_over_sizes(name: str) -> None:
    emb, labels = batch()
    whole = nk.Objective(name, num_classes=3, dim=6, prefixes=(2, 3, 6)).double().eval()
    for value in whole.parameters():
        torch.nn.init.normal_(value)
    want = torch.zeros((), dtype=torch.float64)
    for size in (2, 3, 6):
        part = nk.Objective(name, num_classes=3, dim=size).double().eval()
        for key, value in whole.named_parameters():
            getattr(part, key).data = value.data[..., :size] if value.shape[-1] == 6 else value.data
        want += part(emb[:, :size], labels).detach()
    torch.testing.assert_close(whole(emb, labels).detach(), want)
    with pytest.raises(nk.UserError, match="prefixes: expected sizes from 1 to 6, got 7"):
        nk.Objective(name, num_classes=3, dim=6, prefixes=(7,))


def test_weighted_sum() -> None:
    emb, labels = batch()
    one, two = nk.Objective("proxy_anchor", num_classes=3, dim=6).double(), nk.Objective("margin", learn_beta=True)
    both = WeightedSum((1.0, one), (0.25, two))
    torch.testing.assert_close(both(emb, labels), one(emb, labels) + 0.25 * two(emb, labels))
    assert [(g["name"], round(g["lr"], 6)) for g in both.parameter_groups(lr=1e-4)] == [
        ("0.proxies", 0.01),
        ("1.beta", 0.005),
    ]
    assert len(list(both.parameters())) == 2


def test_prefixes_longer_than_the_embeddings() -> None:
    """Without dim it shows only when a batch comes."""
    emb, labels = batch()
    with pytest.raises(nk.UserError, match="prefixes: 100 is more than the 6 dimensions given"):
        nk.Objective("contrastive", prefixes=(2, 100))(emb, labels)


# --- learned state ----------------------------------------------------------------------------------------------------


def test_learned_beta_moves() -> None:
    emb, labels = batch(16)
    objective = nk.Objective("margin", learn_beta=True).double()
    value = objective(emb, labels)
    value.backward()
    fixed = nk.Objective("margin")(emb, labels)
    assert float(value.detach()) == pytest.approx(float(fixed), rel=1e-6)
    # (active negatives - active positives) / active terms
    distance, pairs = nk.pair_up(emb, labels).distance(), nk.pair_up(emb, labels)
    near = int(((distance - 1.0 > 0) & pairs.pos).sum())
    far = int(((1.4 - distance > 0) & pairs.neg).sum())
    assert float(objective.beta.grad) == pytest.approx((far - near) / (far + near), rel=1e-6)
    assert not list(nk.Objective("margin").parameters())


def test_proxies_start_at_the_means_of_their_classes() -> None:
    emb = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [1.0, 2.0, 0.0], [-1.0, -2.0, 0.0]])
    labels = torch.tensor([0, 0, 1, 3, 3])  # none of class 2, and those of class 3 cancel
    objective = nk.Objective("proxy_anchor", num_classes=4, dim=3)
    several = nk.Objective("mpa", num_classes=4, dim=3, centers=2)
    both = WeightedSum((1.0, objective), (1.0, several), (1.0, nk.Objective("contrastive")))
    before = objective.proxies.detach().clone()
    both.init_proxies(emb, labels)
    want = torch.tensor([[0.5**0.5, 0.5**0.5, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(objective.proxies.detach()[:2], want)
    assert torch.equal(objective.proxies.detach()[2:], before[2:])
    near = torch.einsum("ckd,cd->ck", several.proxies.detach()[:2], want)
    assert near.min() > 0.99
    both(emb, torch.tensor([2, 2, 1, 3, 3])).backward()
    for part in (objective, several):
        assert part.proxies.grad.flatten(1).norm(dim=1).min() > 0, "a proxy that can never move"


def test_shapes_of_class_parameters() -> None:
    def shapes(name: str, **settings: object) -> dict[str, tuple[int, ...]]:
        objective = nk.Objective(name, num_classes=5, dim=7, **settings)
        return {key: tuple(value.shape) for key, value in objective.named_parameters()}

    assert shapes("proxy_anchor") == {"proxies": (5, 7)}
    assert shapes("mpa", centers=3) == {"proxies": (5, 3, 7)}
    assert shapes("softmax") == {"weight": (5, 7), "bias": (5,)}
    assert shapes("center") == {"weight": (5, 7), "bias": (5,), "centers": (5, 7)}
    assert shapes("triplet") == {}


def test_dropout_is_for_training() -> None:
    emb, labels = batch()
    objective = nk.Objective("softmax", num_classes=3, dim=6).double()
    torch.nn.init.normal_(objective.weight)
    torch.manual_seed(0)
    assert not torch.equal(objective(emb, labels), objective(emb, labels))
    objective.eval()
    assert torch.equal(objective(emb, labels), objective(emb, labels))


def test_a_miner_may_be_any_function() -> None:
    emb, labels = batch()
    named = nk.Objective("multi_similarity", miner="multi_similarity", miner_settings={"epsilon": 0.3})
    own = nk.Objective("multi_similarity", miner=lambda p: nk.miners.multi_similarity(p, epsilon=0.3))
    assert torch.equal(named(emb, labels), own(emb, labels))
    with pytest.raises(nk.UserError, match="takes no miner"):
        nk.Objective("proxy_anchor", num_classes=3, dim=6, miner="hard")


def test_proxies_learn() -> None:
    torch.manual_seed(0)
    emb, labels = batch(30)
    objective = nk.Objective("proxy_anchor", num_classes=3, dim=6).double()
    optimizer = torch.optim.AdamW(objective.parameter_groups(lr=1e-3))
    first = float(objective(emb, labels).detach())
    for _ in range(30):
        optimizer.zero_grad()
        objective(emb, labels).backward()
        optimizer.step()
    assert float(objective(emb, labels).detach()) < 0.8 * first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0, "dim": 4}, "num_classes: expected a whole number above 0, got 0"),
        ({"num_classes": 3, "dim": 2.5}, "dim: expected a whole number above 0, got 2.5"),
        ({"memory": -1}, "memory: expected a number of embeddings"),
    ],
)
def test_sizes_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(nk.UserError, match=message):
        nk.Objective("contrastive", **options)


def test_sizes_may_be_numbers_of_numpy() -> None:
    sizes = {"num_classes": np.int64(3), "dim": np.int32(6), "memory": np.int64(5), "prefixes": np.array([2, 6])}
    objective = nk.Objective("contrastive", **sizes, margin=np.float32(0.25))
    assert (objective.num_classes, objective.dim, objective.memory_size, objective.prefixes) == (3, 6, 5, (2, 6))
    assert torch.isfinite(objective(*batch()))
    for wrong in (np.float64(3), True, np.True_, "3", -1, torch.tensor([3, 4])):
        with pytest.raises(nk.UserError, match="dim: expected a whole number above 0"):
            nk.Objective("contrastive", dim=wrong)


def test_memory_needs_the_dimension() -> None:
    with pytest.raises(nk.UserError, match="memory: pass dim="):
        nk.Objective("contrastive", memory=10)


def test_it_says_what_it_is() -> None:
    text = repr(nk.Objective("triplet", miner="semihard", margin=0.2))
    assert text == "Objective('triplet', margin=0.2, miner='semihard')"


# --- very many classes ------------------------------------------------------------------------------------------------


def _memory(key: str) -> float:
    return next(float(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(key))


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc to see the peak memory")
@pytest.mark.parametrize("name", ["norm_softmax", "arcface", "proxy_nca", "proxy_anchor", "softmax", "center"])
def test_100_000_classes_cost_their_similarities(name: str) -> None:
    n, classes, dim = 128, 100_000, 8
    objective = nk.Objective(name, num_classes=classes, dim=dim)
    emb, labels = torch.randn(n, dim, requires_grad=True), torch.randint(0, classes, (n,))
    objective(emb, labels).backward()  # once, so that the gradients exist
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        pytest.skip("the peak memory cannot be reset here")
    before = _memory("VmRSS")
    objective(emb, labels).backward()
    peak = _memory("VmHWM") - before
    assert peak <= 3 * n * classes * 4, f"{peak / (n * classes * 4):.2f} times the similarity block"
