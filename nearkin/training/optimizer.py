"""Parameter groups, the optimiser, and the learning-rate schedule as a pure function of the step."""

import math
from typing import Any

import torch

from nearkin.config.recipe import TrainConfig
from nearkin.losses.objective import Objective
from nearkin.models.embedder import Embedder


def make_optimizer(model: Embedder, objective: Objective, config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimiser; weight decay applies to matrices and kernels, and to class parameters if `class_decay`."""
    head = {id(p) for p in model.head.parameters()}
    learned = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for name, lr, part in (
        ("backbone", config.lr, [p for p in learned if id(p) not in head]),
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
