"""Objective: parameters, memory, matryoshka_dims, weighted sums, and losses that users declare."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import nearkin as nk
from nearkin.losses import LOSSES, Inputs, LearnedScalar, Param, WeightedSum, integer, linear, log, loss
from nearkin.losses.classes import ToClasses
from nearkin.report.losses import settings_table

STATUS = Path("/proc/self/status")


def batch(n: int = 8, dim: int = 6, seed: int = 0, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, dim, generator=g, dtype=torch.float64), torch.randint(0, classes, (n,), generator=g)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_adds_earlier_batches_as_references() -> None:
    objective = nk.Objective("contrastive", memory=20, dim=6)
    (a, la), (b, lb) = batch(seed=1), batch(seed=2)
    torch.testing.assert_close(objective(a, la), nk.losses.contrastive(nk.pair_up(a, la)))
    refs, labels = torch.cat([b, a]), torch.cat([lb, la])
    want = nk.losses.contrastive(nk.pair_up(b, lb, refs, labels, self_columns=torch.arange(8)))
    torch.testing.assert_close(objective(b, lb), want)


def test_an_earlier_copy_in_the_memory_counts_and_self_does_not() -> None:
    objective = nk.Objective("contrastive", memory=4, dim=2, reduction="sum")
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([7])
    assert float(objective(x, y)) == 0.0
    assert float(objective(x, y)) == -1.0  # its copy from the previous step, not itself
    assert float(objective(x, y)) == -2.0


def test_memory_is_a_ring_buffer() -> None:
    objective = nk.Objective("contrastive", memory=5, dim=1)
    for step in range(4):
        objective(torch.tensor([[3.0 * step + 1], [3.0 * step + 2], [3.0 * step + 3]]), torch.tensor([step] * 3))
    assert sorted(objective.memory_emb.flatten().tolist()) == [8, 9, 10, 11, 12]
    assert objective.memory_state.tolist() == [5, 2]
    objective(torch.arange(20.0)[:, None] + 100, torch.arange(20))
    assert sorted(objective.memory_emb.flatten().tolist()) == [115, 116, 117, 118, 119]


def test_memory_resumes_exactly() -> None:
    """Fill state, pointer and every digit, also when the new objective has another dtype."""
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


def test_memory_sends_no_gradient_to_earlier_batches() -> None:
    objective = nk.Objective("triplet", memory=20, dim=6, miner="semihard")
    first, labels = batch(seed=1)
    first.requires_grad_()
    objective(first, labels)
    second, labels = batch(seed=2)
    second.requires_grad_()
    objective(second, labels).backward()
    assert first.grad is None
    assert second.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["proxy_anchor", "npair_mc", "lifted_song"])
def test_memory_is_rejected_by_losses_that_cannot_use_it(name: str) -> None:
    with pytest.raises(nk.UserError, match="cannot use references from earlier batches"):
        nk.Objective(name, num_classes=3, dim=4, memory=10)


# --- matryoshka_dims and sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["contrastive", "proxy_anchor", "soft_triple", "softmax", "center"])
def test_prefixes_sum_the_loss_over_sizes(name: str) -> None:
    emb, labels = batch()
    whole = nk.Objective(name, num_classes=3, dim=6, matryoshka_dims=(2, 3, 6)).double().eval()
    for value in whole.parameters():
        torch.nn.init.normal_(value)
    want = torch.zeros((), dtype=torch.float64)
    for size in (2, 3, 6):
        part = nk.Objective(name, num_classes=3, dim=size).double().eval()
        for key, value in whole.named_parameters():
            getattr(part, key).data = value.data[..., :size] if value.shape[-1] == 6 else value.data
        want += part(emb[:, :size], labels).detach()
    torch.testing.assert_close(whole(emb, labels).detach(), want)
    with pytest.raises(nk.UserError, match="matryoshka_dims: expected sizes from 1 to 6, got 7"):
        nk.Objective(name, num_classes=3, dim=6, matryoshka_dims=(7,))


def test_weighted_sum() -> None:
    emb, labels = batch()
    one, two = nk.Objective("proxy_anchor", num_classes=3, dim=6).double(), nk.Objective("margin", learn_beta=True)
    both = WeightedSum((1.0, one), (0.25, two))
    torch.testing.assert_close(both(emb, labels), one(emb, labels) + 0.25 * two(emb, labels))
    assert [(g["name"], round(g["lr"], 6)) for g in both.param_groups(lr=1e-4)] == [
        ("0.proxies", 0.01),
        ("1.beta", 0.005),
    ]
    assert len(list(both.parameters())) == 2


def test_weighted_sum_takes_what_all_its_parts_take() -> None:
    emb, labels = batch()
    pairs = nk.Objective("contrastive"), nk.Objective("supcon")
    both, classes = (
        WeightedSum((1.0, pairs[0]), (0.5, pairs[1])),
        nk.Objective("cosface", num_classes=3, dim=6).double(),
    )
    masks = (labels[:, None] == labels) & ~torch.eye(8, dtype=torch.bool), labels[:, None] != labels
    for options in (
        {"labels": labels, "refs": emb.flip(0), "ref_labels": labels.flip(0)},
        {"pairs": masks},
        {"labels": labels, "weights": torch.arange(8.0, dtype=torch.float64)},
        {"labels": torch.stack([labels, labels // 2], 1)},
    ):
        torch.testing.assert_close(both(emb, **options), pairs[0](emb, **options) + 0.5 * pairs[1](emb, **options))
    mixed = WeightedSum((2.0, pairs[0]), (3.0, classes))
    with pytest.raises(nk.UserError, match="cosface compares samples with classes"):
        mixed(emb, pairs=masks)
    with pytest.raises(nk.UserError, match="cosface cannot use references"):
        mixed(emb, labels, refs=emb, ref_labels=labels)
    with pytest.raises(nk.UserError, match=r"expected objective\(emb, labels\), got 3"):
        both(emb, labels, emb)
    weights = torch.arange(8.0, dtype=torch.float64)
    want = 2 * pairs[0](emb, labels, weights=weights) + 3 * classes(emb, labels, weights=weights)
    torch.testing.assert_close(mixed(emb, labels, weights=weights), want)


def test_weighted_sum_has_the_logits_of_its_first_part_with_classes() -> None:
    emb, labels = batch()
    first, second = (nk.Objective(name, num_classes=3, dim=6).double() for name in ("cosface", "softmax"))
    both = WeightedSum((1.0, nk.Objective("contrastive")), (0.1, first), (1.0, second))
    assert torch.equal(both.logits(emb), first.logits(emb))
    assert torch.equal(both.predict(emb), first.predict(emb))
    torch.testing.assert_close(both.classifier()(emb), first.logits(emb))
    with pytest.raises(nk.UserError, match="no part learns anything about classes"):
        WeightedSum((1.0, nk.Objective("contrastive"))).logits(emb)
    none = WeightedSum(*[(1.0, nk.Objective(name, reduction="none")) for name in ("contrastive", "supcon")])
    assert none(emb, labels).shape == (8,)
    with pytest.raises(nk.UserError, match="use reduction='none' for all parts"):
        WeightedSum((1.0, nk.Objective("contrastive", reduction="none")), (1.0, first))


def test_weighted_sum_refreshes_its_parts() -> None:
    gaps = nk.Objective("hierarchical_triplet", num_classes=3, dim=6)
    counts = nk.Objective("dynamic_arcface", num_classes=3, dim=6)
    plain = nk.Objective("contrastive")
    sums = [WeightedSum((1.0, plain), (1.0, part)) for part in (plain, counts, gaps)]
    assert [one.refreshes_from for one in sums] == ["", "labels", "embeddings"]
    sums[1].refresh(torch.tensor([0, 0, 1, 2]))
    assert counts.class_counts.tolist() == [2, 1, 1]


def test_prefixes_longer_than_the_embeddings() -> None:
    """Without dim it is detected at the first batch."""
    emb, labels = batch()
    with pytest.raises(nk.UserError, match="matryoshka_dims: 100 exceeds the 6 dimensions of the embeddings"):
        nk.Objective("contrastive", matryoshka_dims=(2, 100))(emb, labels)


# --- learned state ----------------------------------------------------------------------------------------------------


def test_gradient_of_a_learned_beta() -> None:
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


def test_init_proxies_sets_class_means() -> None:
    emb = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [1.0, 2.0, 0.0], [-1.0, -2.0, 0.0]])
    labels = torch.tensor([0, 0, 1, 3, 3])  # class 2 is absent, and the samples of class 3 cancel
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


def test_dropout_is_for_training_only() -> None:
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
    optimizer = torch.optim.AdamW(objective.param_groups(lr=1e-3))
    first = float(objective(emb, labels).detach())
    for _ in range(30):
        optimizer.zero_grad()
        objective(emb, labels).backward()
        optimizer.step()
    assert float(objective(emb, labels).detach()) < 0.8 * first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0, "dim": 4}, "num_classes: expected an integer above 0, got 0"),
        ({"num_classes": 3, "dim": 2.5}, "dim: expected an integer above 0, got 2.5"),
        ({"memory": -1}, "memory: expected a number of embeddings"),
    ],
)
def test_invalid_sizes_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(nk.UserError, match=message):
        nk.Objective("contrastive", **options)


def test_sizes_may_be_numpy_scalars() -> None:
    sizes = {"num_classes": np.int64(3), "dim": np.int32(6), "memory": np.int64(5), "matryoshka_dims": np.array([2, 6])}
    objective = nk.Objective("contrastive", **sizes, margin=np.float32(0.25))
    assert (objective.num_classes, objective.dim, objective.memory_size, objective.matryoshka_dims) == (3, 6, 5, (2, 6))
    assert torch.isfinite(objective(*batch()))
    for wrong in (np.float64(3), True, np.True_, "3", -1, torch.tensor([3, 4])):
        with pytest.raises(nk.UserError, match="dim: expected an integer above 0"):
            nk.Objective("contrastive", dim=wrong)


def test_memory_needs_the_dimension() -> None:
    with pytest.raises(nk.UserError, match="memory: pass dim="):
        nk.Objective("contrastive", memory=10)


def test_repr() -> None:
    text = repr(nk.Objective("triplet", miner="semihard", margin=0.2))
    assert text == "Objective('triplet', margin=0.2, miner='semihard')"


# --- references and logits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["contrastive", "supcon", "info_nce", "siglip", "nca"])
def test_references_of_a_second_tower(name: str) -> None:
    (emb, labels), (refs, ref_labels) = batch(), batch(seed=1)
    metric = "dot" if name == "nca" else "cosine"
    want = getattr(nk.losses, name)(nk.pair_up(emb, labels, refs, ref_labels, metric=metric))
    assert torch.equal(nk.Objective(name)(emb, labels, refs=refs, ref_labels=ref_labels), want)


def test_references_with_a_miner_and_matryoshka_sizes() -> None:
    (emb, labels), (refs, ref_labels) = batch(), batch(seed=1)
    objective = nk.Objective("contrastive", miner="multi_similarity", matryoshka_dims=(2, 6))
    parts = [
        nk.losses.contrastive(nk.miners.multi_similarity(nk.pair_up(emb[:, :d], labels, refs[:, :d], ref_labels)))
        for d in (2, 6)
    ]
    torch.testing.assert_close(objective(emb, labels, refs=refs, ref_labels=ref_labels), sum(parts))


@pytest.mark.parametrize("name", [name for name in LOSSES if not LOSSES[name].inputs.memory])
def test_references_that_cannot_be_used_are_rejected(name: str) -> None:
    emb, labels = batch()
    with pytest.raises(nk.errors.ConfigError, match=f"{name} cannot use references"):
        nk.Objective(name, num_classes=3, dim=6)(emb, labels, refs=emb, ref_labels=labels)


def test_references_without_labels_with_a_memory_or_of_another_size_are_rejected() -> None:
    emb, labels = batch()
    with pytest.raises(nk.errors.ConfigError, match="pass refs and ref_labels together"):
        nk.Objective("contrastive")(emb, labels, refs=emb)
    with pytest.raises(nk.errors.ConfigError, match="cannot be combined with a memory"):
        nk.Objective("contrastive", memory=9, dim=6)(emb, labels, refs=emb, ref_labels=labels)
    with pytest.raises(nk.errors.DataError, match="refs: expected 6 dimensions"):
        nk.Objective("contrastive")(emb, labels, refs=torch.randn(8, 9), ref_labels=labels)


@pytest.mark.parametrize("name", [n for n in LOSSES if any("C" in p.shape for p in LOSSES[n].inputs.params)])
def test_logits_of_every_loss_with_class_parameters(name: str) -> None:
    emb, labels = batch()
    objective = nk.Objective(name, num_classes=3, dim=6).double().eval()
    for parameter in objective.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
    logits = objective.logits(emb)
    assert logits.shape == (len(emb), 3)
    assert torch.equal(objective.predict(emb), logits.argmax(1))
    kwargs = objective.loss_kwargs
    if name == "manifold":  # its similarities are those along the manifold of the batch
        with pytest.raises(nk.UserError, match="manifold has no classifier"):
            objective.classifier()
        return
    classifier = objective.classifier()
    assert isinstance(classifier.linear, torch.nn.Linear)
    torch.testing.assert_close(classifier(emb), logits)
    assert not set(map(id, classifier.parameters())) & set(map(id, objective.parameters()))
    if name in ("sphereface", "large_margin_softmax"):  # the lengths of the embeddings count
        want = torch.nn.functional.cross_entropy(logits, labels)
        torch.testing.assert_close(getattr(nk.losses, name)(emb, labels, objective.proxies, margin=1), want)
    elif "proxies" in dict(objective.named_parameters()) and objective.proxies.dim() == 2:
        cosine = torch.nn.functional.normalize(emb) @ torch.nn.functional.normalize(objective.proxies).t()
        scale = kwargs.get("scale") or kwargs.get("alpha") or 1 / kwargs.get("temperature", 1.0)
        torch.testing.assert_close(logits, cosine * scale)
    if name == "softmax":
        torch.testing.assert_close(logits, emb @ objective.weight.t() + objective.bias)
        want = torch.nn.functional.cross_entropy(logits, labels)
        torch.testing.assert_close(
            nk.losses.softmax(emb, labels, objective.weight, objective.bias, smoothing=0.0), want
        )


@pytest.mark.parametrize("name", ["contrastive", "spce", "hierarchical_triplet"])
def test_losses_without_class_parameters_have_no_logits(name: str) -> None:
    with pytest.raises(nk.errors.ConfigError, match=f"{name} learns nothing about classes"):
        nk.Objective(name, num_classes=3, dim=6).logits(batch()[0])
    with pytest.raises(nk.errors.ConfigError, match=f"{name} has no classifier"):
        nk.Objective(name, num_classes=3, dim=6).classifier()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soft_triple", "softmax"])
def test_a_classifier_can_be_exported(name: str, tmp_path: Path) -> None:
    emb = batch()[0].float()
    classifier = nk.Objective(name, num_classes=3, dim=6).classifier().eval()
    size = {"emb": {0: torch.export.Dim("n")}}
    torch.export.save(torch.export.export(classifier, (emb,), dynamic_shapes=size), tmp_path / "c.pt2")
    loaded = torch.export.load(tmp_path / "c.pt2").module()
    torch.testing.assert_close(loaded(emb[:5]), classifier(emb[:5]))
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.onnx.export(classifier, (emb,), tmp_path / "c.onnx", dynamo=True, dynamic_shapes=size, verbose=False)
    session = runtime.InferenceSession(tmp_path / "c.onnx")
    [logits] = session.run(None, {session.get_inputs()[0].name: emb[:5].numpy()})
    np.testing.assert_allclose(logits, classifier(emb[:5]).detach().numpy(), rtol=1e-4, atol=1e-5)


# --- constants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, 3, (1, 2), torch.ones(8, 3)], ids=["None", "int", "tuple", "tensor"])
@pytest.mark.parametrize("name", ["triplet", "proxy_anchor", "spce"])
def test_an_argument_that_the_loss_cannot_use_is_rejected(name: str, extra: object) -> None:
    objective = nk.Objective(name, num_classes=3, dim=6)
    with pytest.raises(nk.errors.ConfigError, match=rf"{name}: expected objective\(emb, labels\), got 3 arguments"):
        objective(*batch(), extra)


def test_a_pair_loss_points_to_its_miner() -> None:
    with pytest.raises(nk.errors.ConfigError, match=r"To mine pairs, pass miner=\.\.\. to nk\.Objective"):
        nk.Objective("triplet")(*batch(), torch.zeros(2, 3))


def test_pce_takes_probabilities() -> None:
    emb, labels = batch()
    probabilities = torch.softmax(emb[:, :3], 1)
    objective = nk.Objective("pce", num_classes=3)
    assert torch.equal(objective(emb, labels, probabilities), nk.losses.pce(emb, labels, probabilities))
    assert not torch.equal(objective(emb, labels, probabilities), objective(emb, labels))
    call = r"objective\(emb, labels, probabilities\)"
    with pytest.raises(nk.errors.ConfigError, match=f"pce: expected {call}, got 4 arguments"):
        objective(emb, labels, probabilities, probabilities)
    with pytest.raises(nk.errors.ConfigError, match=f"pce: probabilities must be a tensor, got list. Call {call}"):
        objective(emb, labels, probabilities.tolist())
    for wrong in (probabilities[:5], probabilities[:, 0]):
        with pytest.raises(nk.errors.DataError, match=r"probabilities: expected \[N, C\] for 8 embeddings, got \["):
            objective(emb, labels, wrong)


# --- losses of a user -------------------------------------------------------------------------------------------------


@pytest.fixture
def registered() -> Iterator[None]:
    """Remove the losses that a test registers."""
    known = set(LOSSES)
    yield
    for name in set(LOSSES) - known:
        del LOSSES[name]


@pytest.mark.usefixtures("registered")
def test_a_user_loss_with_a_learned_temperature() -> None:
    """A contrastive loss with a learned temperature and bias, like the sigmoid loss of SigLIP."""

    @loss(
        family="pair",
        paper="Zhai et al. 2023",
        formula="mean_i of sum_j softplus(-z_ij (scale s_ij + bias)), z = 1 (same class), -1 (other class)",
        use="As an example of a loss with learned scalars.",
        space={"scale": log(1, 100), "bias": linear(-20, 0)},
        inputs=Inputs(
            nk.pair_up,
            pairs=True,
            builder_kwargs={"learn_bias": False},
            builder_docs={"learn_bias": "Learn the bias as well."},
            learned_scalars=(LearnedScalar("scale", lr=10.0), LearnedScalar("bias", switch="learn_bias")),
        ),
    )
    def sigmoid_pairs(p: nk.Pairs, *, scale: float | torch.Tensor = 10.0, bias: float | torch.Tensor = -10.0):
        """Sigmoid loss on pairs.

        Args:
            p: Cosines [N, M] with masks.
            scale: Inverse temperature.
            bias: Logit at cosine 0.

        Returns:
            One value per anchor [N].
        """
        logits = scale * p.sim + bias
        terms = torch.nn.functional.softplus(torch.where(p.pos, -logits, logits))
        return (terms * (p.pos | p.neg)).sum(1)

    emb, labels = batch(16)
    objective = nk.Objective("sigmoid_pairs", scale=5.0).double()
    assert {name: value.item() for name, value in objective.named_parameters()} == {"scale": 5.0}
    objective(emb, labels).backward()
    assert float(objective.scale.grad) != 0
    groups = nk.Objective("sigmoid_pairs", learn_bias=True).param_groups(lr=0.1)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [("scale", 1.0, 0.0), ("bias", 0.1, 0.0)]
    value = sigmoid_pairs(nk.pair_up(emb, labels), scale=5.0)
    torch.testing.assert_close(objective(emb, labels).detach(), value)
    explained = {key: text for key, _, _, text in settings_table(LOSSES["sigmoid_pairs"])}
    assert explained == {
        "scale": "Inverse temperature.",
        "bias": "Logit at cosine 0.",
        "learn_bias": "Learn the bias as well.",
    }
    optimizer = torch.optim.SGD(objective.param_groups(lr=1e-3))
    optimizer.step()
    restored = nk.Objective("sigmoid_pairs").double()
    restored.load_state_dict(objective.state_dict())
    assert torch.equal(restored(emb, labels), objective(emb, labels))


@pytest.mark.usefixtures("registered")
def test_a_user_loss_declares_dimensions_dropout_and_constants() -> None:
    def subspace_distances(emb, labels, bases, weights=None, *, power=2.0):
        sim = torch.einsum("nd,crd->ncr", emb, bases.to(emb.dtype)).abs().pow(power).sum(2)
        return ToClasses(sim if weights is None else sim * weights, torch.as_tensor(labels))

    @loss(
        family="softmax",
        paper="none",
        formula="cross entropy of the projections on one subspace per class",
        use="As an example.",
        space={"rank": integer(1, 4)},
        inputs=Inputs(
            subspace_distances,
            params=(Param("bases", "CRD", lr=3.0, decay=False),),
            builder_kwargs={"rank": 2, "drop": 0.0, "power": 2.0},
            dims={"R": "rank"},
            dropout="drop",
            constants=("weights",),
        ),
    )
    def subspaces(c: ToClasses) -> torch.Tensor:
        """Cross entropy over subspaces."""
        return torch.nn.functional.cross_entropy(c.sim, c.labels, reduction="none")

    emb, labels = batch()
    objective = nk.Objective("subspaces", num_classes=3, dim=6, rank=4, power=1.0).double()
    assert objective.bases.shape == (3, 4, 6)
    groups = objective.param_groups(lr=0.1)
    assert [(g["name"], round(g["lr"], 6), g["weight_decay"]) for g in groups] == [("bases", 0.3, 0.0)]
    want = torch.nn.functional.cross_entropy((emb @ objective.bases.flatten(0, 1).T).abs().view(8, 3, 4).sum(2), labels)
    torch.testing.assert_close(objective(emb, labels), want)
    assert not torch.equal(objective(emb, labels, torch.rand(8, 3)), objective(emb, labels))
    dropped = nk.Objective("subspaces", num_classes=3, dim=6, drop=0.5).double()
    assert not torch.equal(dropped(emb, labels), dropped(emb, labels))
    assert torch.equal(dropped.eval()(emb, labels), dropped(emb, labels))
    assert LOSSES["subspaces"].call_example == "nk.losses.subspaces(emb, labels, bases, weights)"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"params": (Param("w", "CZ"),)}, "shape refers to Z, which is not declared"),
        ({"dims": {"K": "centers"}}, "dims, dropout or switch refers to centers, which is not declared"),
        ({"dropout": "dropout"}, "dims, dropout or switch refers to dropout, which is not declared"),
        ({"builder_docs": {"rank": "Rank."}}, "builder_docs refers to rank, which is not declared"),
        ({"learned_scalars": (LearnedScalar("slope"),)}, "learned_scalars refers to slope, which is not annotated"),
        ({"learned_scalars": (LearnedScalar("offset"),)}, "learned_scalars refers to offset, which is not annotated"),
        ({}, "space refers to slope, which is not declared"),
    ],
)
def test_inconsistent_declarations_are_rejected(inputs: dict[str, object], message: str) -> None:
    register = loss(
        family="pair",
        paper="none",
        formula="none",
        use="Never.",
        space={} if inputs else {"slope": linear(0, 1)},
        inputs=Inputs(nk.pair_up, pairs=True, **inputs),
    )

    def inconsistent(p: nk.Pairs, *, offset: float = 0.0) -> torch.Tensor:
        return p.sim.sum(1) + offset

    with pytest.raises(nk.errors.ConfigError, match=f"inconsistent: {message}"):
        register(inconsistent)
    assert "inconsistent" not in LOSSES


# --- very many classes ------------------------------------------------------------------------------------------------


def _memory(key: str) -> float:
    return next(float(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(key))


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc to measure the peak memory")
@pytest.mark.parametrize("name", ["norm_softmax", "arcface", "proxy_nca", "proxy_anchor", "softmax", "center"])
def test_100_000_classes_cost_only_their_similarities(name: str) -> None:
    n, classes, dim = 48, 100_000, 8
    objective = nk.Objective(name, num_classes=classes, dim=dim)
    emb, labels = torch.randn(n, dim, requires_grad=True), torch.randint(0, classes, (n,))
    objective(emb, labels).backward()  # once, so that the gradients exist
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    except OSError:
        pytest.skip("the peak memory cannot be reset here")
    before = _memory("VmRSS")
    objective(emb, labels).backward()
    peak = _memory("VmHWM") - before
    params = 3 * classes * dim * 4  # the unit vectors of the classes and two gradients of them
    assert peak <= 3 * n * classes * 4 + params, f"{peak / (n * classes * 4):.2f} times the similarity block"
