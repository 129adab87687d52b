"""Values and gradients against the golden file: to 1e-9 and 1e-6 in float64, to 1e-4 in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches import listed
from helpers.rows import ROWS, Row, golden
from torch import Tensor

import nearkin as nk
from nearkin.analysis import information
from nearkin.losses import LOSSES, miners, sparse_centers
from nearkin.report.losses import similarity_gradient

BATCHES = [
    "A_balanced",
    "B_unbalanced_singleton",
    "C_single_class",
    "D_batch_of_one",
    "E_zero_duplicate_antiparallel",
]
GOLDEN_ROWS = [row for row in ROWS if row.golden is not None]
PARAMS = {"proxies": "proxies", "weight": "W", "bias": "b", "centers": "centers"}


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return golden()


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def load(row: Row, batch: dict[str, Any], dtype: torch.dtype) -> tuple[nk.Objective, Tensor, Tensor, list[Tensor]]:
    """Return the objective with the parameters of the batch, the embeddings as a leaf, the labels and constants."""
    objective = nk.Objective(
        row.name,
        num_classes=batch["num_classes"],
        dim=5,
        miner=row.miner,
        miner_settings=row.miner_settings,
        reduction=row.reduction,
        **row.settings,
    ).to(dtype)
    for name, key in parameter_keys(objective).items():
        getattr(objective, name).data = tensor(batch[key], dtype)
    constants = [tensor(batch["p_for_pce"], dtype)] if row.name == "pce" else []
    return objective, tensor(batch["embeddings"], dtype).requires_grad_(), torch.tensor(batch["labels"]), constants


def parameter_keys(objective: nk.Objective) -> dict[str, str]:
    keys = {name: PARAMS[name] for name, _ in objective.named_parameters()}
    if "proxies" in keys and objective.proxies.dim() == 3:
        keys["proxies"] = "multi_proxies"
    return keys


def assert_close(got: Tensor, want: Tensor, rel: float, floor: float, what: str) -> None:
    error = float((got.double() - want).abs().max())
    allowed = max(rel * float(want.abs().max()), floor)
    assert error <= allowed, f"{what}: off by {error:.3g}, {allowed:.3g} allowed"


@pytest.mark.parametrize("batch_name", BATCHES)
@pytest.mark.parametrize("row", GOLDEN_ROWS, ids=lambda row: row.id)
def test_value_and_gradient(row: Row, batch_name: str, data: dict[str, Any]) -> None:
    want = data["losses"][row.golden]["results"][batch_name]
    objective, emb, labels, constants = load(row, data["batches"][batch_name], torch.float64)
    loss = objective(emb, labels, *constants)
    # The golden file computes spce as a difference of numbers of size 20, so it is exact to 1e-15 of that.
    assert_close(loss.detach(), tensor(want["value"]), 1e-9, 1e-14, "value")
    loss.backward()
    if "grad_embeddings" not in want or not row.gradient:
        assert torch.isfinite(emb.grad).all()
        return
    # The golden gradients are finite differences with step 3e-5: their resolution is the rounding error over the step.
    floor = 1e-10 * max(1.0, abs(want["value"]))
    assert_close(emb.grad, tensor(want["grad_embeddings"]), 1e-6, floor, "gradient on the embeddings")
    for name, key in parameter_keys(objective).items():
        assert_close(getattr(objective, name).grad, tensor(want[f"grad_{key}"]), 1e-6, floor, f"gradient on {name}")


@pytest.mark.parametrize("row", GOLDEN_ROWS, ids=lambda row: row.id)
def test_float32(row: Row, data: dict[str, Any]) -> None:
    for batch_name in BATCHES:
        want = data["losses"][row.golden]["results"][batch_name]
        objective, emb, labels, constants = load(row, data["batches"][batch_name], torch.float32)
        loss = objective(emb, labels, *constants)
        loss.backward()
        assert loss.dtype == torch.float32
        assert_close(loss.detach(), tensor(want["value"]), 1e-4, 1e-6, f"{batch_name} value")
        if "grad_embeddings" in want and row.gradient:
            assert_close(emb.grad, tensor(want["grad_embeddings"]), 1e-4, 1e-6, f"{batch_name} gradient")


@pytest.mark.parametrize("scale", [1, 16, 64])
@pytest.mark.parametrize("batch_name", BATCHES[:4])
def test_ice_gradient(scale: int, batch_name: str, data: dict[str, Any]) -> None:
    batch, want = data["batches"][batch_name], data["ice_reweighted"][batch_name][f"s={scale}"]
    labels, n = torch.tensor(batch["labels"]), len(batch["labels"])
    for anchor_grad, key in ((True, "both_ends_grad_raw"), (False, "eq15_literal_grad_raw")):
        emb = tensor(batch["embeddings"]).requires_grad_()
        nk.Objective("ice", scale=float(scale), anchor_grad=anchor_grad)(emb, labels).backward()
        assert_close(emb.grad, tensor(want[key]), 1e-9, 1e-14, key)
    pairs = LOSSES["ice"].inputs.build(tensor(batch["embeddings"]), labels)
    weights = similarity_gradient(LOSSES["ice"], pairs, scale=float(scale))
    assert_close(weights, tensor(want["signed_pair_weights_dL_dS"]), 1e-9, 1e-16, "weights")
    # For each anchor with positives and negatives, the weights of each sum to 1/(2N).
    pull, push = weights.clamp(max=0).sum(1), weights.clamp(min=0).sum(1)
    active = push > 0
    torch.testing.assert_close(-pull[active], torch.full_like(pull[active], 0.5 / n))
    torch.testing.assert_close(push[active], torch.full_like(push[active], 0.5 / n))


@pytest.mark.parametrize("batch_name", BATCHES)
def test_miners(batch_name: str, data: dict[str, Any]) -> None:
    batch, facts = data["batches"][batch_name], data["batch_facts"][batch_name]
    pairs = nk.pair_up(tensor(batch["embeddings"]), torch.tensor(batch["labels"]))
    torch.testing.assert_close(pairs.sim, tensor(facts["cosine_matrix"]), rtol=0, atol=1e-14)
    assert listed(miners.hard(pairs).triplets) == facts["hard_triplets"]
    assert listed(miners.semihard(pairs).triplets) == facts["semihard_triplets"]
    mined = miners.multi_similarity(pairs, epsilon=0.1)
    for entry in facts["ms_mined_sets_eps0.1"]:
        row = entry["anchor"]
        assert mined.pos[row].nonzero().flatten().tolist() == entry["pos"]
        assert mined.neg[row].nonzero().flatten().tolist() == entry["neg"]
    want = tensor(facts["distance_weighted_prob"])
    torch.testing.assert_close(miners.distance_weights(pairs), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_name", BATCHES)
def test_sparse_centers(batch_name: str, data: dict[str, Any]) -> None:
    value = sparse_centers(tensor(data["batches"][batch_name]["multi_proxies"]))
    assert float(value) == pytest.approx(data["batch_facts"][batch_name]["proxy_regulariser_eq3"], rel=1e-9)


@pytest.mark.parametrize("batch_name", BATCHES[:4])
def test_tightness_and_contrast(batch_name: str, data: dict[str, Any]) -> None:
    batch = data["batches"][batch_name]
    emb, labels = tensor(batch["embeddings"]), torch.tensor(batch["labels"])

    def want(key: str) -> dict[str, float]:
        parts = data["losses"][key]["results"][batch_name]["parts"]
        return parts if "C" in parts else {**parts, "C": parts["C_lse"] + parts["C_softmeans"]}

    def check(key: str, name: str, *constants: Tensor, **settings: Any) -> None:
        parts = information.decompose(name, emb, labels, *constants, **settings)
        assert float(parts.tightness) == pytest.approx(want(key)["T"], rel=1e-9, abs=1e-14)
        assert float(parts.contrastive) == pytest.approx(want(key)["C"], rel=1e-9, abs=1e-14)

    check("contrastive_euclid_sq_normalised", "contrastive_l2")
    check("contrastive_euclid_sq_raw", "contrastive_l2", margin=3.0, normalize=False)
    check("multi_similarity_all_pairs", "multi_similarity")
    check("snca", "snca", sigma=0.1)
    check("pce", "pce", tensor(batch["p_for_pce"]))
    pulled = information.decompose("center", emb, labels, tensor(batch["W"]), tensor(batch["b"]))
    losses = data["losses"]
    tightness = losses["center_tightness_sum_batchmeans"]["results"][batch_name]["value"]
    assert float(pulled.tightness) == pytest.approx(tightness, rel=1e-9, abs=1e-14)
    assert float(pulled.contrastive) == pytest.approx(losses["softmax_ce"]["results"][batch_name]["value"], rel=1e-9)


@pytest.mark.parametrize("batch_name", BATCHES[:3])
def test_entropies(batch_name: str, data: dict[str, Any]) -> None:
    batch, facts = data["batches"][batch_name], data["batch_facts"][batch_name]
    emb, labels = tensor(batch["embeddings"]), torch.tensor(batch["labels"])
    literal = facts["entropy_eq6_literal_logD2_self_excluded"]
    assert information.feature_entropy(emb) == pytest.approx(facts["entropy_scale_covariant_logD_self_excluded"])
    assert information.feature_entropy(emb, literal=True) == pytest.approx(literal)
    assert information.conditional_entropy(emb, labels) == pytest.approx(facts["cond_entropy_scale_covariant"])
    assert information.label_entropy(labels) == pytest.approx(facts["H_Y_nats"], abs=1e-12)
    cross_entropy = data["losses"]["softmax_ce"]["results"][batch_name]["value"]
    bound = information.mutual_information_bound(labels, cross_entropy)
    assert bound == pytest.approx(facts["MI_lower_bound_HY_minus_CE"])
