"""One training step: the gradient of the whole batch, the optimiser, and the learning rate of a step."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.config.recipe import TrainConfig
from nearkin.errors import ConfigError, import_extra
from nearkin.losses.weighted_sum import AnyObjective
from nearkin.models.backbones import TimmBackbone
from nearkin.models.embedder import Embedder
from nearkin.training.batch_norm import sync_batch_norm
from nearkin.training.distributed import all_gather_with_grad, all_reduce_gradients, fork_rng, rank, world_size

Forward = Callable[[Tensor], Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]
RngKey = tuple[int, int, int]
HALF = ("fp16", "bf16")  # precisions of which only the network makes use


class NonFiniteError(Exception):
    def __init__(self, tensor: str, rows: list[int] | None = None) -> None:
        super().__init__(tensor)
        self.tensor, self.rows = tensor, rows  # in words; rows of this process's batch that caused it, where known


def backward(
    forward: Forward,
    objective: LossFunction,
    batch: Tensor,
    labels: Tensor,
    config: TrainConfig,
    scaler: torch.amp.GradScaler,
    rng_key: RngKey,
) -> float:
    """Compute the loss and leave its gradients in the parameters; with micro-batches by `backward_in_parts`.

    Dropout and random miners draw from `rng_key` (seed, epoch, step), so a resumed run repeats them.
    """

    def embed(inputs: Tensor, index: int) -> Tensor:
        rng = fork_rng(*rng_key, 1 + rank(), index, device=batch.device)
        norms = sync_batch_norm() if config.sync_batchnorm else nullcontext()
        with rng, norms, autocast(batch.device, config.precision):
            return forward(inputs).float() if config.precision in HALF else forward(inputs)

    def loss_of(emb: Tensor) -> Tensor:
        return compute_loss(objective, emb, labels, rng_key)

    return float(backward_in_parts(embed, loss_of, batch, config.micro_batch_size, scaler))


def backward_in_parts(
    embed: Callable[[Tensor, int], Tensor],
    loss_of: Callable[[Tensor], Tensor],
    batch: Tensor,
    micro_batch_size: int,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Compute the gradient of the loss of a whole batch with the activations of one micro-batch in memory.

    The network runs twice: first without gradient, to get the embeddings on which the loss of the whole batch is
    computed; then one micro-batch at a time, each with the gradient of the loss by its embeddings. The sum is exactly
    the gradient of the whole batch, for any loss. Batch norms see micro-batches: freeze their statistics.

    Args:
        embed: The network: a micro-batch and its index to embeddings. It runs twice for every index and must draw the
            same random numbers both times: with dropout, inside `fork_rng(step, index)`.
        loss_of: The loss of the embeddings of the whole batch, such as `lambda emb: objective(emb, labels)`.
        batch: [N, ...] inputs of the network.
        micro_batch_size: Inputs per forward pass; 0 for all at once.
        scaler: Scales the gradient of the loss, for training in half precision.

    Returns:
        The loss, without gradient. The gradients are in the parameters.

    Example:
        >>> network, labels = nn.Linear(3, 2), torch.tensor([0, 0, 1, 1, 2, 2])
        >>> def loss_of(emb):
        ...     return (emb @ emb.t() - (labels[:, None] == labels).float()).square().mean()
        >>> loss = backward_in_parts(lambda x, index: network(x), loss_of, torch.randn(6, 3), micro_batch_size=2)
        >>> network.weight.grad.shape
        torch.Size([2, 3])
    """
    size = micro_batch_size or max(1, len(batch))
    micro_batches = [batch[start : start + size] for start in range(0, len(batch), size)] or [batch]
    if len(micro_batches) == 1:
        loss = loss_of(embed(batch, 0))
        (scaler.scale(loss) if scaler else loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()
    with torch.no_grad():
        emb = torch.cat([embed(inputs, index) for index, inputs in enumerate(micro_batches)])
    emb.requires_grad_()
    loss = loss_of(emb)
    (scaler.scale(loss) if scaler else loss).backward()  # type: ignore[no-untyped-call]
    assert emb.grad is not None
    for index, inputs in enumerate(micro_batches):
        embed(inputs, index).backward(emb.grad[index * size : (index + 1) * size])  # type: ignore[no-untyped-call]
    return loss.detach()


def compute_loss(objective: LossFunction, emb: Tensor, labels: Tensor, rng_key: RngKey) -> Tensor:
    """Return the loss of the embeddings of all processes; it is the same on each of them."""
    bad_rows = (~emb.detach().isfinite()).any(dim=1).nonzero().flatten().tolist()
    all_emb, all_labels = all_gather_with_grad(emb, labels)
    if bad_rows or (world_size() > 1 and not all_emb.detach().isfinite().all()):
        # Checked here because an objective would report such embeddings as bad input from the caller.
        raise NonFiniteError("the embeddings", bad_rows)
    with fork_rng(*rng_key, device=emb.device):
        loss: Tensor = objective(all_emb, all_labels)
    if not loss.isfinite():
        raise NonFiniteError("the loss")
    return loss


def optimizer_step(
    model: Embedder,
    objective: AnyObjective,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    scaler: torch.amp.GradScaler,
) -> None:
    all_reduce_gradients([*model.parameters(), *objective.parameters()])
    scaler.unscale_(optimizer)
    params = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    # In fp16 an occasional overflow is expected: the scaler skips that step and lowers its scale.
    if not scaler.is_enabled() and not norm.isfinite():
        raise NonFiniteError(f"the gradient of {_first_non_finite(model.named_parameters())}")
    if config.clip_norm:
        nn.utils.clip_grads_with_norm_(params, config.clip_norm, norm)
    if not scaler.is_enabled() and (name := _first_non_finite(objective.named_parameters())):
        raise NonFiniteError(f"the gradient of the objective's {name}")
    scaler.step(optimizer)
    scaler.update()


def _first_non_finite(named: Iterable[tuple[str, nn.Parameter]]) -> str:
    return next((name for name, p in named if p.grad is not None and not p.grad.isfinite().all()), "")


def autocast(device: torch.device, precision: str) -> torch.autocast | nullcontext[None]:
    """Return the mixed-precision context of the forward pass; losses never run in half precision."""
    if precision not in HALF:
        return nullcontext()
    return torch.autocast(device.type, torch.float16 if precision == "fp16" else torch.bfloat16)


def check_train_config(model: Embedder, config: TrainConfig, device: torch.device) -> None:
    """Refuse a precision that the device does not have, and micro-batches that would change batch-norm statistics."""
    if config.precision in HALF and device.type != "cuda":
        raise ConfigError(f"train.precision: {config.precision} needs a CUDA device, this is {device.type}. Use fp32.")
    if config.precision == "fp64" and device.type == "mps":
        raise ConfigError("train.precision: mps has no float64. Use fp32, or --device cpu.")
    batch_norms = [m for m in model.train().modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    if 0 < config.micro_batch_size < config.batch_size and batch_norms:
        raise ConfigError(
            "train.micro_batch_size: batch norms would see micro-batches instead of the batch. "
            "Freeze their statistics with --model.freeze-norm statistics, or use a backbone without batch norm."
        )


@torch.no_grad()
def update_ema(ema_model: Embedder, model: Embedder, decay: float, step: int) -> None:
    """Move the exponential moving average of the weights towards the model; faster in the first steps."""
    weight = 1 - min(decay, (1 + step) / (10 + step))
    ema_state, state = ema_model.state_dict(), model.state_dict()
    floats = [name for name, value in state.items() if value.is_floating_point()]
    torch._foreach_lerp_([ema_state[n] for n in floats], [state[n] for n in floats], weight)
    for name, value in state.items():
        if not value.is_floating_point():
            ema_state[name].copy_(value)


def make_optimizer(model: Embedder, objective: AnyObjective, config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimiser; weight decay applies to matrices and kernels, and to class parameters if `class_decay`."""
    head = {id(p) for p in model.head.parameters()}
    learned = [p for p in model.parameters() if p.requires_grad]
    groups = _layer_groups(model, config) if config.layer_decay < 1 else []
    grouped = {id(p) for group in groups for p in group["params"]}
    for name, lr, part in (
        ("backbone", config.lr, [p for p in learned if id(p) not in head | grouped]),
        ("head", config.head_lr or config.lr, [p for p in learned if id(p) in head]),
    ):
        matrices, vectors = [p for p in part if p.ndim > 1], [p for p in part if p.ndim <= 1]
        groups.append({"name": name, "params": matrices, "lr": lr})
        groups.append({"name": f"{name}, 1-D", "params": vectors, "lr": lr, "weight_decay": 0.0})
    for group in objective.param_groups(config.lr):
        if config.class_lr is not None:
            group["lr"] = config.class_lr
        groups.append(group if config.class_decay else {**group, "weight_decay": 0.0})
    # An optimizer needs a group even if nothing is trained (no head, no epochs).
    groups = [group for group in groups if group["params"]] or groups[:1]
    if config.optimizer == "sgd":
        nesterov = config.nesterov and config.momentum > 0  # torch refuses nesterov without momentum
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, weight_decay=config.weight_decay
        )
    else:
        optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay)
    for group in optimizer.param_groups:
        group["highest_lr"] = group["lr"]
    return optimizer


def _layer_groups(model: Embedder, config: TrainConfig) -> list[dict[str, Any]]:
    """Group the parameters of a timm network by depth, the first layers with the lowest learning rate."""
    if not isinstance(model.backbone, TimmBackbone):
        raise ConfigError("train.layer_decay: needs a timm backbone, whose layers are known. Use 1.")
    timm = import_extra("timm.optim", extra="images")
    by_depth = timm.param_groups_layer_decay(
        model.backbone.network, weight_decay=config.weight_decay, layer_decay=config.layer_decay
    )
    return [
        {"name": "backbone", "params": g["params"], "lr": config.lr * g["lr_scale"], "weight_decay": g["weight_decay"]}
        for g in by_depth
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int, steps_per_epoch: int) -> None:
    factor = learning_rate_factor(config, step, steps_per_epoch)
    for group in optimizer.param_groups:
        group["lr"] = group["highest_lr"] * factor


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    return config.steps or config.epochs * steps_per_epoch


def learning_rate_factor(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate at a step as a fraction of the highest; resuming needs no scheduler state."""
    progress = step / total_steps(config, steps_per_epoch)
    warmup = 0.2  # of one_cycle
    if config.lr_schedule == "constant":
        factor = 1.0
    elif config.lr_schedule == "cosine":
        factor = _cosine(1.0, 0.0, progress)
    elif config.lr_schedule == "step":
        factor = config.step_factor ** (step // steps_per_epoch // config.step_epochs)
    elif progress < warmup:
        factor = _cosine(0.04, 1.0, progress / warmup)
    else:
        factor = _cosine(1.0, 0.0, (progress - warmup) / (1 - warmup))
    return min(factor, (step + 1) / config.warmup_steps) if config.warmup_steps else factor


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
