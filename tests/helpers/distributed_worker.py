"""What each of the processes of test_distributed.py does; started once per rank, never by pytest.

The functions up to the line are used by the test process too, alone: they are the one process to compare with.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.data import sources
from nearkin.data.samplers import make_sampler
from nearkin.data.splits import make_split
from nearkin.data.transforms import training_inputs
from nearkin.errors import DataError, ProcessLostError, UserError
from nearkin.training import distributed as nd
from nearkin.training.batch_norm import sync_batch_norm
from nearkin.training.factory import make_model, make_objective
from nearkin.training.step import backward

SHARES = ([1, 6], [4, 3], [0, 7])

# The loss with its options, the class parameters' learning rate, and how the ranks' gradients are joined.
TRAININGS: dict[str, tuple[dict[str, Any], float, str]] = {
    "proxy_anchor": ({"name": "proxy_anchor"}, 0.01, "reduce"),
    "multi_similarity mined": ({"name": "multi_similarity", "miner": "multi_similarity"}, 0.0, "ddp"),
    "margin sampled, with memory": (
        {"name": "margin", "miner": "distance_weighted", "memory": 30, "learn_beta": True},
        0.001,
        "ddp",
    ),
    "softmax with dropout": ({"name": "softmax"}, 0.5, "reduce"),
}


def glyph_like() -> tuple[torch.Tensor, np.ndarray]:
    """Ten kinds of strokes on 8 x 8 pixels, nine noisy images of each."""
    g = torch.Generator().manual_seed(5)
    strokes = (torch.rand(10, 1, 8, 8, generator=g) > 0.7).float()
    labels = torch.arange(10).repeat_interleave(9)
    return strokes[labels] + 0.3 * torch.randn(90, 1, 8, 8, generator=g), labels.numpy()


def train(name: str) -> dict[str, torch.Tensor]:
    """Two epochs with real samplers; batches of 21 cannot be shared equally by two ranks. No batch norm."""
    options, class_lr, joined = TRAININGS[name]
    images, labels = glyph_like()
    torch.manual_seed(nd.rank())  # ranks disagree until rank 0 tells them
    model: nn.Module = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 16)).to(
        memory_format=torch.channels_last
    )
    objective = nk.Objective(num_classes=10, dim=16, **options)
    nd.broadcast_state(model)
    nd.broadcast_state(objective)
    wrapped = DistributedDataParallel(model) if joined == "ddp" and nd.world_size() > 1 else model
    groups = [{"params": list(model.parameters()), "lr": 0.05}, *objective.param_groups(class_lr)]
    speed = {p: torch.zeros_like(p) for group in groups for p in group["params"]}
    sampler = make_sampler(
        labels, batch_size=21, samples_per_class=3, seed=1, rank=nd.rank(), world_size=nd.world_size()
    )
    losses = []
    for epoch in range(2):
        for step, rows in enumerate(sampler.epoch(epoch)):
            emb, whole_labels = nd.all_gather_with_grad(wrapped(images[rows]), torch.from_numpy(labels[rows]))
            with nd.fork_rng(1, epoch, step):
                value = objective(emb, whole_labels)
            value.backward()
            nd.all_reduce_gradients([*(model.parameters() if wrapped is model else []), *objective.parameters()])
            losses.append(value.detach())
            with torch.no_grad():  # torch.optim would import its compiler first, seconds in each process
                for group in groups:
                    for p in group["params"]:
                        speed[p].mul_(0.9).add_(p.grad)
                        p.sub_(group["lr"] * speed[p])
                        p.grad = None
    with torch.no_grad():
        table = nd.gather_rows(model(images[nd.rank_slice(len(images))]))
    state = {f"model.{k}": v for k, v in model.state_dict().items()}
    state |= {f"objective.{k}": v for k, v in objective.state_dict().items()}
    return {**state, "losses": torch.stack(losses), "table": table}


class NormThenRelu(nn.BatchNorm2d):
    """A subclass with its own forward, as timm's BatchNormAct2d."""

    def forward(self, x):
        self.num_batches_tracked.add_(1)
        settings = {"weight": self.weight, "bias": self.bias, "training": self.training, "momentum": 0.3}
        return F.relu(F.batch_norm(x, self.running_mean, self.running_var, **settings))


def normalized(shares: list[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs, gradients and running statistics of batch norms of all sorts; rank r has shares[r] of the 7 images."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), NormThenRelu(6), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, affine=False)),
        *(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5, momentum=None)),
    ).to(dtype, memory_format=torch.channels_last)
    weights = torch.randn(7, 5, dtype=torch.float64).to(dtype)
    x = torch.randn(7, 3, 8, 8, dtype=torch.float64).to(dtype)
    start = sum(shares[: nd.rank()])
    for _ in range(2):  # running statistics also depend on what they were
        with sync_batch_norm():
            own = model(x[start : start + shares[nd.rank()]])
        whole, _ = nd.all_gather_with_grad(own, torch.arange(len(own)))
        (whole * weights + whole**3).sum().backward()
    nd.all_reduce_gradients(model.parameters())
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    assert not model.eval().requires_grad_(False)(x).isnan().any()
    return {**dict(model.named_buffers()), **found, "outputs": whole.detach()}


def first_step() -> dict[str, torch.Tensor]:
    """The gradients and running statistics of the first step of glyphs_small.

    In float64: in float32 the last bits of a convolution, which depend on the size of its batch, decide ties in the
    maximum pooling of constant backgrounds.
    """
    recipe, quiet = nk.recipes.glyphs_small(), Reporter(quiet=True)
    table = sources.load(recipe.data, quiet)
    train = make_split(table, recipe.data)[0].train
    model = make_model(recipe, table, quiet).double().train()
    objective = make_objective(recipe, model.dim, train.num_classes).double()
    nd.broadcast_state(objective)
    sizes = {"batch_size": recipe.train.batch_size, "samples_per_class": recipe.train.samples_per_class}
    sampler = make_sampler(train.labels, **sizes, seed=0, rank=nd.rank(), world_size=nd.world_size())
    batches = sampler.epoch(0)[:1]
    [x] = training_inputs(train, batches, recipe, epoch=0, first=sampler.share.start)
    labels = torch.from_numpy(train.labels[batches[0]])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = backward(model, objective, x, labels, recipe.train, scaler, (0, 0, 0))
    parameters = dict([*model.named_parameters(), *objective.named_parameters()])
    nd.all_reduce_gradients(parameters.values())
    statistics = {name: value for name, value in model.named_buffers() if "running" in name}
    gradients = {f"gradient of {name}": p.grad for name, p in parameters.items() if p.grad is not None}
    return {**statistics, **gradients, "loss": torch.tensor(loss)}


# --- only here --------------------------------------------------------------------------------------------------------


def small_parts() -> dict[str, Any]:
    """Helpers, gathering and reducing: what this rank got, for the test to judge."""
    rank = nd.rank()
    found: dict[str, Any] = {"rank": rank, "world": nd.world_size(), "first": nd.is_main_process()}
    found["share"] = [nd.rank_slice(7).start, nd.rank_slice(7).stop]
    found["anywhere"] = [nd.any_rank(rank == 1), nd.any_rank(False)]
    found["broadcast_object"] = nd.broadcast_object({"score": rank + 0.5})
    kinds = (torch.bool, torch.int16, torch.uint8, torch.float16, torch.bfloat16, torch.complex64, torch.int64)
    found["kinds"] = [nd.gather_rows((torch.arange(6).view(3, 2) + rank).to(kind)) for kind in kinds]
    with torch.inference_mode():  # as evaluation makes them
        part = torch.full((rank * 3, 2, 2), rank)
    found["uneven"] = nd.gather_rows(part).tolist()
    found["nothing"] = list(nd.gather_rows(torch.zeros(0, 4)).shape)

    emb = torch.full((2 + rank, 3), float(rank), requires_grad=True)
    whole, labels = nd.all_gather_with_grad(emb, [10 * rank + i for i in range(2 + rank)])
    (whole * torch.arange(5.0)[:, None]).sum().backward()
    found["gathered"] = [whole.tolist(), labels.tolist(), emb.grad.tolist()]

    here, nowhere, both = (nn.Parameter(torch.zeros(2, 3, 4, 4)) for _ in range(3))
    both.grad = torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last) * (rank + 1)
    if rank == 0:
        here.grad = torch.ones(2, 3, 4, 4)
    nd._BUCKET = 100  # every tensor in a bucket of its own
    nd.all_reduce_gradients([here, nowhere, both, nn.Parameter(torch.zeros(3), requires_grad=False)])
    nd._BUCKET = 1 << 25
    found["reduced"] = [here.grad, nowhere.grad is None, both.grad]

    module = nn.BatchNorm1d(3)
    module.weight.data.fill_(rank + 2.0)
    module.num_batches_tracked.fill_(rank + 7)
    nd.broadcast_state(module)
    found["broadcast"] = [module.weight.tolist(), int(module.num_batches_tracked)]
    return found


GATHERING: dict[str, dict[str, Any]] = {
    "proxy_anchor": {"num_classes": 4, "dim": 5},
    "contrastive": {"dim": 5, "memory": 20},
    "supcon": {},
    "multi_similarity": {"reduction": "sum"},
}


def gathering(rows: slice, gather: bool | None) -> dict[str, Any]:
    """Losses and gradients of two steps on this rank's rows, with references, weights, or several labels each."""
    found: dict[str, Any] = {}
    for name, settings in GATHERING.items():
        torch.manual_seed(0)
        objective = nk.Objective(name, gather=gather, **settings)
        for step in range(2):
            emb, other = torch.randn(2, 10, 5, dtype=torch.float64).unbind()
            labels, tags = torch.arange(10) % 4, torch.rand(10, 3) > 0.5
            own = emb[rows].clone().requires_grad_()
            options: dict[str, Any] = {}
            if name == "supcon":
                options = {"refs": other[rows], "ref_labels": labels[rows]}
            elif name == "multi_similarity":
                options = {"weights": torch.arange(1.0, 11.0)[rows]}
            loss = objective.double()(
                own, tags[rows] if name == "multi_similarity" and step else labels[rows], **options
            )
            loss.backward()
            assert own.grad is not None
            parameters = list(objective.parameters())
            nd.all_reduce_gradients(parameters)
            grads = [p.grad.clone() for p in parameters if p.grad is not None]
            found[f"{name} {step}"] = [loss.detach(), nd.gather_rows(own.grad / nd.world_size()), *grads]
    return found


def warned() -> list[str]:
    """The warnings of an objective that sees only this rank's part of the batch: once, and none if it is gathered."""
    emb, labels = torch.randn(4, 3, requires_grad=True), [0, 0, 1, 1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        partial = nk.Objective("triplet")
        partial(emb, labels)
        partial(emb, labels)
        nk.Objective("triplet")(*nd.all_gather_with_grad(emb, labels))
        nk.Objective("triplet", gather=True)(emb, labels)
        nk.Objective("triplet", gather=False)(emb, labels)
    return [str(warning.message) for warning in caught]


def refused(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return "not refused"


def mistakes() -> list[str]:
    """Misfits that only one rank could see: all must be told, and the group must still work afterwards."""
    rank = nd.rank()
    found = [
        refused(lambda: nd.all_gather_with_grad(torch.zeros(2, 3 + rank), [0, 1])),
        refused(lambda: nd.all_gather_with_grad(torch.zeros(2, 3), [0, 1, 2][: 2 + rank])),
        refused(lambda: nd.gather_rows(torch.zeros(2, dtype=torch.float64 if rank else torch.float32))),
        refused(lambda: nd.broadcast_state(nk.Objective("proxy_anchor", num_classes=3 + rank, dim=4))),
        refused(
            lambda: nk.Objective("triplet")(
                *nd.all_gather_with_grad(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
            )
        ),
    ]
    assert nd.gather_rows(torch.ones(1)).tolist() == [1.0, 1.0]
    return found


def listening() -> list[str]:
    """The local addresses on which this process listens (Linux)."""
    names = os.listdir("/proc/self/fd")  # the one that reads this folder is closed by now
    links = [os.readlink(f"/proc/self/fd/{name}") for name in names if os.path.lexists(f"/proc/self/fd/{name}")]
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def lost(folder: Path, how: str) -> list[Any]:
    """What this rank is told when rank 1 sleeps through a collective, or dies without a word; and after how long."""
    began = time.monotonic()
    # The sleepers meet as under torchrun, by an address and a port.
    meeting = None if how == "sleeps" else folder / how
    try:
        with nd.process_group("cpu", timeout=3.0, meeting_file=meeting):
            nd.any_rank(False)
            if nd.rank() == 1:
                if how == "sleeps":
                    time.sleep(5)
                else:
                    os._exit(0)
            nd.all_gather_with_grad(torch.ones(1, 2), [0])
    except ProcessLostError as error:
        return [str(error), time.monotonic() - began, nd.world_size()]
    return ["not lost", 0.0, nd.world_size()]


def ends_early(rank: int, *_: Any) -> None:
    """Rank 1 ends at once, as the environment says; the other one must not be waited for."""
    if rank == 0:
        time.sleep(120)
    if os.environ["HOW"] == "raises":
        raise DataError("no disk")
    os.kill(os.getpid(), 9)


def main(rank: int, folder: Path, port: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found: dict[str, Any] = {}
    with nd.process_group("cpu", timeout=60.0, meeting_file=folder / "meeting") as place:
        found["place"] = str(place)
        found["small"] = small_parts()
        found["mistakes"] = mistakes()
        found["gathering"] = gathering(slice(0, 3) if rank == 0 else slice(3, 10), gather=True)
        found["warned"] = warned()
        found["listening"] = listening() if sys.platform == "linux" else []
        found["environment"] = "GLOO_SOCKET_IFNAME" in os.environ
        found["normalized"] = {f"{shares}": normalized(shares, torch.float64) for shares in SHARES}
        found["trained"] = {name: train(name) for name in TRAININGS}
    found["world after"] = nd.world_size()
    found["sleeps"] = lost(folder, "sleeps")
    target = folder / f"rank{rank}.pt"
    torch.save(found, target)
    found["dies"] = lost(folder, "dies")
    torch.save(found, target)


def first_steps(rank: int, folder: Path) -> None:
    """The first step of glyphs_small by three processes, and by the first two of them."""
    torch.set_num_threads(1)
    for ranks in (3, 2):
        if rank < ranks:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            with nd.process_group("cpu", timeout=60.0, meeting_file=folder / f"meeting{ranks}"):
                found = first_step()
            torch.save(found, folder / f"{ranks}-{rank}.pt")
