"""One training step: gradients of the whole batch, whatever its precision, pieces and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from nearkin.config.recipe import TrainConfig
from nearkin.errors import ConfigError
from nearkin.losses.objective import Objective
from nearkin.models.embedder import Embedder
from nearkin.training.distributed import all_gather_with_grad, all_reduce_gradients, fork_rng, rank, world_size

Forward = Callable[[Tensor], Tensor]


class NonFiniteError(Exception):
    """A tensor went NaN or infinite. rows: places in this process's batch that are to blame, where that is known."""

    def __init__(self, tensor: str, rows: list[int] | None = None) -> None:
        super().__init__(tensor)
        self.tensor, self.rows = tensor, rows


def backward(
    forward: Forward,
    objective: Objective,
    batch: Tensor,
    labels: Tensor,
    hyper: TrainConfig,
    scaler: torch.amp.GradScaler,
    chance: tuple[int, int, int],
) -> float:
    """Leave the gradients of one step in the parameters; returns the loss of the whole batch.

    batch, labels   this process's share; embeddings of all processes are gathered before the loss sees them
    chance          (seed, epoch, step): dropout and random miners draw from these, so that a resumed run repeats them

    With micro-batches the network runs twice: first without gradient, for the embeddings on which the loss of the whole
    batch is taken; then piece by piece, each with the gradient that the loss gave its embeddings. The sum over pieces
    is the gradient of the whole batch, exactly, for any loss; only activations of one piece are ever held.
    """
    size = hyper.micro_batch_size or max(1, len(batch))
    pieces = [batch[at : at + size] for at in range(0, len(batch), size)] or [batch]

    def embed(piece: Tensor, number: int) -> Tensor:
        with fork_rng(*chance, 1 + rank(), number), autocast(batch.device, hyper.precision):
            return forward(piece).float() if hyper.precision != "fp32" else forward(piece)

    if len(pieces) == 1:
        emb = embed(batch, 0)
        loss = compute_loss(objective, emb, labels, chance)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())
    with torch.no_grad():
        emb = torch.cat([embed(piece, number) for number, piece in enumerate(pieces)])
    emb.requires_grad_()
    loss = compute_loss(objective, emb, labels, chance)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    assert emb.grad is not None
    for number, piece in enumerate(pieces):
        embed(piece, number).backward(emb.grad[number * size : (number + 1) * size])  # type: ignore[no-untyped-call]
    return float(loss.detach())


def compute_loss(objective: Objective, emb: Tensor, labels: Tensor, chance: tuple[int, int, int]) -> Tensor:
    """The loss of all processes' embeddings, the same on each of them."""
    bad = (~emb.detach().isfinite()).any(dim=1).nonzero().flatten().tolist()
    everywhere, all_labels = all_gather_with_grad(emb, labels)
    if bad or (world_size() > 1 and not everywhere.detach().isfinite().all()):
        # An objective would refuse such embeddings as a mistake of the caller.
        raise NonFiniteError("the embeddings", bad)
    with fork_rng(*chance):
        loss: Tensor = objective(everywhere, all_labels)
    if not loss.isfinite():
        raise NonFiniteError("the loss")
    return loss


def optimizer_step(
    model: Embedder,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    hyper: TrainConfig,
    scaler: torch.amp.GradScaler,
) -> None:
    """Put the gradients of all processes together, clip them, move the weights."""
    all_reduce_gradients([*model.parameters(), *objective.parameters()])
    scaler.unscale_(optimizer)
    learned = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in learned if p.grad is not None])
    # With fp16 a gradient beyond its range is expected now and then: the scaler skips that step and lowers its scale.
    if not scaler.is_enabled() and not norm.isfinite():
        raise NonFiniteError(f"the gradient of {_first_bad(model.named_parameters())}")
    if hyper.clip_norm:
        nn.utils.clip_grads_with_norm_(learned, hyper.clip_norm, norm)
    if not scaler.is_enabled() and (bad := _first_bad(objective.named_parameters())):
        raise NonFiniteError(f"the gradient of the objective's {bad}")
    scaler.step(optimizer)
    scaler.update()


def _first_bad(named: Iterable[tuple[str, nn.Parameter]]) -> str:
    return next((name for name, p in named if p.grad is not None and not p.grad.isfinite().all()), "")


def autocast(device: torch.device, precision: str) -> torch.autocast | nullcontext[None]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.float16 if precision == "fp16" else torch.bfloat16)


def check_train_config(model: Embedder, hyper: TrainConfig, device: torch.device) -> None:
    """Refuse what cannot be had: half precision without a GPU, micro-batches that batch norms would see."""
    if hyper.precision != "fp32" and device.type != "cuda":
        raise ConfigError(f"train.precision: {hyper.precision} needs a CUDA device, this is {device.type}. Use fp32.")
    counting = [m for m in model.train().modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    if 0 < hyper.micro_batch_size < hyper.batch_size and counting:
        raise ConfigError(
            "train.micro_batch_size: batch norms would see pieces instead of the batch. "
            "Freeze their statistics: --model.freeze-norm statistics (or use another backbone or norm)."
        )


@torch.no_grad()
def update_ema(average: Embedder, model: Embedder, decay: float, steps: int) -> None:
    """Move the running mean of the weights towards the model, quickly at first, so that early weights are forgotten."""
    weight = 1 - min(decay, (1 + steps) / (10 + steps))
    ours, theirs = average.state_dict(), model.state_dict()
    floats = [name for name, value in theirs.items() if value.is_floating_point()]
    torch._foreach_lerp_([ours[n] for n in floats], [theirs[n] for n in floats], weight)
    for name, value in theirs.items():
        if not value.is_floating_point():
            ours[name].copy_(value)
