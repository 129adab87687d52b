"""What moves the weights: parameter groups, optimiser, and the learning rate as a function of how far training is."""

from __future__ import annotations

import math
from typing import Any

import torch

from nearkin.config.recipe import TrainConfig
from nearkin.losses.objective import Objective
from nearkin.models.embedder import Embedder


def make_optimizer(model: Embedder, objective: Objective, hyper: TrainConfig) -> torch.optim.Optimizer:
    """Weight decay for matrices and kernels only; head and class parameters in groups of their own."""
    head = {id(p) for p in model.head.parameters()}
    learned = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for name, lr, part in (
        ("backbone", hyper.lr, [p for p in learned if id(p) not in head]),
        ("head", hyper.head_lr or hyper.lr, [p for p in learned if id(p) in head]),
    ):
        matrices, vectors = [p for p in part if p.ndim > 1], [p for p in part if p.ndim <= 1]
        groups.append({"name": name, "params": matrices, "lr": lr})
        groups.append({"name": f"{name}, 1-D", "params": vectors, "lr": lr, "weight_decay": 0.0})
    for group in objective.parameter_groups(hyper.lr):
        if hyper.class_lr is not None:
            group["lr"] = hyper.class_lr
        groups.append(group if hyper.class_decay else {**group, "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    if hyper.optimizer == "sgd":
        nesterov = hyper.nesterov and hyper.momentum > 0  # without momentum there is nothing to look ahead by
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=hyper.lr, momentum=hyper.momentum, nesterov=nesterov, weight_decay=hyper.weight_decay
        )
    else:
        optimizer = torch.optim.AdamW(groups, lr=hyper.lr, weight_decay=hyper.weight_decay)
    for group in optimizer.param_groups:
        group["highest_lr"] = group["lr"]
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, hyper: TrainConfig, step: int, steps_per_epoch: int) -> None:
    """Before step number `step`, counted from 0 over all epochs."""
    factor = learning_rate_factor(hyper, step, steps_per_epoch)
    for group in optimizer.param_groups:
        group["lr"] = group["highest_lr"] * factor


def learning_rate_factor(hyper: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The share of the highest learning rate at a step. A pure function, so that resuming needs no scheduler state."""
    done = step / (hyper.epochs * steps_per_epoch)
    rise = 0.2
    if hyper.lr_schedule == "constant":
        factor = 1.0
    elif hyper.lr_schedule == "cosine":
        factor = _cosine(1.0, 0.0, done)
    elif hyper.lr_schedule == "step":
        factor = hyper.step_factor ** (step // steps_per_epoch // hyper.step_epochs)
    elif done < rise:
        factor = _cosine(0.04, 1.0, done / rise)
    else:
        factor = _cosine(1.0, 0.0, (done - rise) / (1 - rise))
    return min(factor, (step + 1) / hyper.warmup_steps) if hyper.warmup_steps else factor


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2
