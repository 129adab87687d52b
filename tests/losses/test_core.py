"""What a GPU needs: no operator that waits, one compiled graph, static shapes, second derivatives, bounded memory.

The tests run on every registered loss and miner, so a new one is covered without a change here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.batches import batch, build
from helpers.rows import ROWS, Row
from torch import Tensor

import nearkin as nk
from nearkin.cli.doctor import report_core
from nearkin.losses import LOSSES, MINERS, REGULARIZERS, loss
from nearkin.losses.readiness import check_row, peak_blocks, rows, waiting_operators
from nearkin.ops import plain
from nearkin.ops.checks import on_host

CLASSES, DIM = 6, 8
PAIR_LOSSES = [name for name in LOSSES if LOSSES[name].inputs.pairs]
CASES = [(name, None, 0) for name in LOSSES] + [("triplet", miner, 0) for miner in MINERS]
CASES += [("contrastive", None, 15), ("nca", "hard", 15)]


def make(name: str, miner: str | None = None, memory: int = 0, **options: object) -> nk.Objective:
    """Return an objective with random class parameters, without dropout."""
    objective = nk.Objective(name, num_classes=CLASSES, dim=DIM, miner=miner, memory=memory, **options)
    g = torch.Generator().manual_seed(1)
    for value in objective.parameters():
        if value.dim():
            value.data = torch.randn(value.shape, generator=g)
    if LOSSES[name].inputs.dropout:
        objective.builder_kwargs[LOSSES[name].inputs.dropout] = 0.0
    return objective.double()


def value_and_grads(step: Callable[..., Tensor], emb: Tensor, labels: Tensor, params: list[Tensor]) -> list[Tensor]:
    leaf = emb.detach().clone().requires_grad_()
    value = step(leaf, labels)
    return [value.detach(), *torch.autograd.grad(value, [leaf, *params], allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize(("name", "miner", "memory"), CASES)
def test_no_operator_waits_for_the_device(name: str, miner: str | None, memory: int) -> None:
    objective = make(name, miner, memory)
    for seed in range(1 + 2 * (memory > 0)):  # a memory that is empty, filled and overwritten
        assert waiting_operators(objective, *batch(20, CLASSES, DIM, seed=seed)) == []


@pytest.mark.parametrize("name", list(REGULARIZERS))
def test_no_regularizer_waits_for_the_device(name: str) -> None:
    assert waiting_operators(make("soft_triple", regularizers={name: 0.1}), *batch(20, CLASSES, DIM)) == []


@pytest.mark.slow
def test_waiting_operators_and_graph_breaks_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """In the forward and in the backward pass."""

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            return g * float(g.sum())

    @loss(family="toy", paper="none", formula="none", use="Never.")
    def waits(p: nk.Pairs) -> Tensor:
        """Wait."""
        return Waits.apply(p.sim)[p.pos.any(1)].sum(1) + p.sim.sum(1).max().item()

    try:
        found = waiting_operators(make("waits"), *batch(20, CLASSES, DIM))
        assert found == ["index", "_local_scalar_dense", "index_put", "_local_scalar_dense"]
        row = check_row("waits", n=24)
        assert row.graph_breaks > 0
        assert not row.ok
        assert report_core(["contrastive", "waits"], n=24) is False
        assert "FAILED: 1 of 2 losses" in capsys.readouterr().out
        assert report_core(["contrastive"], n=24) is True
        assert "passed: 1 losses without synchronisations or graph breaks on cpu" in capsys.readouterr().out
    finally:
        del LOSSES["waits"]


def check_one_graph(objective: nk.Objective, other: nk.Objective, batches: int) -> None:
    """Traced as a whole, without generating code, it has the value and the gradients of the plain path."""
    torch._dynamo.reset()
    compiled = torch.compile(objective, fullgraph=True, backend="eager")
    for seed in range(batches):
        emb, labels = batch(20, CLASSES, DIM, seed=seed)
        torch.manual_seed(0)
        got = value_and_grads(compiled, emb, labels, list(objective.parameters()))
        torch.manual_seed(0)
        with plain():
            want = value_and_grads(other, emb, labels, list(other.parameters()))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "miner", "memory"), CASES)
def test_one_graph(name: str, miner: str | None, memory: int) -> None:
    check_one_graph(make(name, miner, memory), make(name, miner, memory), batches=1 + (memory > 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REGULARIZERS))
def test_one_graph_with_a_regularizer(name: str) -> None:
    objective, other = (make("soft_triple", regularizers={name: 0.1}) for _ in range(2))
    check_one_graph(objective, other, batches=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "miner"), [("contrastive", None), ("triplet", "semihard"), ("npair_mc", None)])
def test_batches_of_many_sizes_compile_twice(name: str, miner: str | None) -> None:
    """Once for the first size, and once for all others."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(make(name, miner), fullgraph=True, backend=counter)
    for size in (20, 24, 31, 18, 40):
        compiled(*batch(size, CLASSES, DIM))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_plain_path_agrees_with_the_cpu_path(row: Row) -> None:
    """Values and gradients at a size where CPU kernels are used; also with classes of very different sizes."""
    if row.miner == "random":
        return
    objective = build(row, 40, 6)
    n = 80 if LOSSES[row.name].family == "ranking" else 300  # the plain path of these takes N^3
    for emb, labels in (batch(n, 40, 6), (batch(n, 1, 6)[0], torch.arange(n).clamp(max=39))):
        want = value_and_grads(objective, emb, labels, list(objective.parameters()))
        with plain():
            got = value_and_grads(objective, emb, labels, list(objective.parameters()))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# Their gradient is not that of their value: their weights are constants by definition.
OWN_GRADIENT = {"ice", "circle", "dynamic_soft_margin"}


@pytest.mark.parametrize("host", [True, False], ids=["CPU kernels", "plain"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in OWN_GRADIENT], ids=lambda row: row.id)
def test_second_derivatives(row: Row, host: bool) -> None:
    emb, labels = batch(12, 4, dim=3, seed=4)
    objective = build(row, 4, 3)
    probabilities = [torch.softmax(emb, 1).repeat(1, 2)[:, :4]] if row.name == "pce" else []
    inputs = (emb.requires_grad_(), *objective.parameters())

    def step(x: Tensor, *_: Tensor) -> Tensor:
        return objective(x, labels, *probabilities)

    if host:
        assert torch.autograd.gradgradcheck(step, inputs, fast_mode=True)
    else:
        with plain():
            assert torch.autograd.gradgradcheck(step, inputs, fast_mode=True)


# facility_location searches its medoids with NumPy, which cannot read the tensors of torch.func.
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "facility_location"])
def test_torch_func(name: str) -> None:
    objective = make(name)
    if LOSSES[name].inputs.update is not None:  # as batch norm, in training it writes its state
        objective.eval()
    emb, labels = batch(20, CLASSES, DIM)
    params = dict(objective.named_parameters())

    def step(x: Tensor) -> Tensor:
        return torch.func.functional_call(objective, params, (x, labels))

    want = value_and_grads(objective, emb, labels, [])
    torch.testing.assert_close(torch.func.grad(step)(emb), want[1], rtol=1e-9, atol=1e-12)


def test_vmap_over_a_setting() -> None:
    emb, labels = batch(20, CLASSES, DIM)
    margins = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    pairs = nk.pair_up(emb, labels)
    for name in ("contrastive", "margin_similarity", "lifted_structure"):
        function = getattr(nk.losses, name)
        got = torch.vmap(lambda margin, f=function: f(pairs, margin=margin))(margins)
        assert got.tolist() == pytest.approx([float(function(pairs, margin=m)) for m in margins.tolist()])
        slopes = torch.func.grad(lambda margin, f=function: f(pairs, margin=margin))(margins[1])
        assert torch.isfinite(slopes)


@pytest.mark.slow
def test_labels_out_of_range_fail_off_the_host() -> None:
    """Asynchronously on a GPU; where that does not exist, and inside torch.func, the loss is NaN."""
    objective, (emb, labels) = make("proxy_anchor"), batch(20, CLASSES, DIM)
    labels[3] = CLASSES
    with plain(), pytest.raises(RuntimeError, match="labels: expected 0 to 5 for 6 classes"):
        objective(emb, labels)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="labels: expected 0 to 5 for 6 classes"):
        torch.compile(objective, fullgraph=True, backend="aot_eager")(emb, labels)
    assert on_host(emb)


@pytest.mark.parametrize("name", list(LOSSES))
def test_nan_off_the_host_reaches_the_loss(name: str) -> None:
    emb, _ = batch(20, CLASSES, DIM)
    emb[0, 2] = float("nan")
    with plain():
        assert torch.isnan(make(name)(emb, torch.arange(20) // 4))


@pytest.mark.parametrize("name", ["nca", "center", "softmax", "pce", "spce", "npair_mc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_overflow_are_refused(name: str, dtype: torch.dtype) -> None:
    emb, _ = batch(20, CLASSES, DIM)
    with pytest.raises(nk.UserError, match=r"squared length of .*, too large for products in torch\.float32"):
        make(name).float()((emb * 1e30).to(dtype), torch.arange(20) // 4)
    assert torch.isfinite(make(name)(emb * 1e30, torch.arange(20) // 4))  # float64 can represent it


@pytest.mark.parametrize("name", list(LOSSES))
def test_large_inputs_give_finite_gradients_or_an_error(name: str) -> None:
    """In half precision and at any scale: never NaN or infinity without a word."""
    emb, labels = batch(20, CLASSES, DIM)[0].float(), torch.arange(20) // 4
    inputs = [emb.half(), emb.bfloat16(), (emb * 30).half()]  # float16 must be able to represent the gradient
    inputs += [emb * scale for scale in (1e-30, 1e6, 1e12, 1e18, 1e30)] + [(emb * 1e30).bfloat16()]
    accepted = 0
    for x in inputs:
        leaf = x.requires_grad_()
        try:
            value = make(name).float()(leaf, labels)
        except nk.errors.DataError:
            continue
        value.backward()
        accepted += 1
        assert torch.isfinite(value), (x.dtype, float(x.detach().abs().max()))
        assert torch.isfinite(leaf.grad).all(), (x.dtype, float(x.detach().abs().max()))
    assert accepted >= 4  # those of ordinary size


@pytest.mark.parametrize(
    "name", [name for name, entry in LOSSES.items() if entry.inputs.memory and entry.inputs.by_anchor]
)
@pytest.mark.parametrize("miner", [None, "hard", "multi_similarity"])
def test_chunks_of_anchors(name: str, miner: str | None) -> None:
    """The value and the gradients of the whole batch."""
    emb, labels = batch(20, CLASSES, DIM)
    want = value_and_grads(make(name, miner), emb, labels, [])
    got = value_and_grads(make(name, miner, chunk_size=7), emb, labels, [])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["lifted_song", "npair_mc", "ice", "proxy_anchor"])
def test_chunks_are_refused_where_anchors_depend_on_each_other(name: str) -> None:
    with pytest.raises(nk.UserError, match="cannot be computed by chunks of anchors"):
        make(name, chunk_size=8)
    with pytest.raises(nk.UserError, match="cannot be combined with a memory"):
        make("contrastive", memory=9, chunk_size=8)


# Those that need more than three blocks of similarities beyond the similarities and the masks, as measured.
BLOCKS = {
    # The sparse gradient of its product [N, N] x [N, N], whose output torch allocates twice.
    "angular": 4,
    # The similarities are themselves a function of the dot products, which its gradient needs.
    "hyperbolic": 4,
    # Its search in NumPy takes the distances in float64, which are two blocks.
    "facility_location": 4,
    # Ten matrices over samples and classes [N + C, N + C], each of which is 6 blocks [N, C]: a matrix inverse.
    "manifold": 64,
    # The rank among all pairs of the batch, by a sort with indices in int64: two blocks for each of them.
    "triplet + hard_aware": 7,
    "triplet + uniform_histogram": 12,
}


@pytest.mark.parametrize("row", rows())
def test_peak_memory(row: str) -> None:
    assert peak_blocks(row, "cpu", 512) <= BLOCKS.get(row, 3) + 0.2
