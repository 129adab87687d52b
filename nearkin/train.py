"""`fit`: the training loop, top to bottom."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from nearkin.checkpoint import Interrupted, TrainingState, noting_ctrl_c
from nearkin.data import sources
from nearkin.data.splits import split_for
from nearkin.data.transforms import AUGMENTS, training_batches
from nearkin.errors import ConfigError, TrainingFailed
from nearkin.evaluate import evaluate, evaluate_final
from nearkin.models.backbones import BACKBONES
from nearkin.models.embedder import Embedder
from nearkin.models.pooling import POOLINGS
from nearkin.objective import Objective
from nearkin.progress import Pace, Reporter
from nearkin.recipe import Recipe, Train
from nearkin.runs import Run
from nearkin.samplers import make_sampler


def fit(recipe: Recipe, runs: str | Path = "runs", *, device: str = "auto", reporter: Reporter | None = None) -> Run:
    """Train by this recipe, choose the epoch on validation classes, judge once on the sealed test classes.

    The run folder is `runs/<key>`. A run that is done is returned as it is; one that was stopped goes on from its
    checkpoint and ends with the same numbers as if it had not been.
    """
    reporter = reporter or Reporter()
    check_names(recipe)
    place = choose_device(device)
    table = sources.load(recipe.data, reporter)
    split, holdout = split_for(table, recipe.data)
    run = Run.create(runs, recipe.key(table.fingerprint), recipe)
    if run.result is not None:
        reporter.say(f"done already: {run.path}")
        return run

    with run.writing(), noting_ctrl_c() as stop_asked:
        hyper = recipe.train
        images, labels = split.train.images, torch.from_numpy(split.train.labels)
        torch.manual_seed(recipe.seed)
        augment = AUGMENTS[recipe.data.augment]
        model = Embedder(recipe.model, augment.input_shape(images.shape), augment=augment)
        model.calibrate(images)
        untrained = copy.deepcopy(model).to(place)
        model.to(place)
        objective = make_objective(recipe, split.train.num_classes).to(place)
        optimizer = make_optimizer(model, objective, hyper)
        sampler = make_sampler(
            split.train.labels, batch_size=hyper.batch_size, per_class=hyper.per_class, seed=recipe.seed
        )
        steps_per_epoch = sampler.batches_per_epoch
        state = TrainingState(model, objective, optimizer)
        if state.restore(run):
            reporter.say(f"resuming {run.path} after epoch {state.epoch}, step {state.step}")
        else:
            reporter.say(
                f"train: {len(split.train):,} images of {split.train.num_classes} classes, {recipe.loss.name}, "
                f"{recipe.model.dim} dimensions, on {place}; epochs judged on {split.val.num_classes} other classes"
            )
        pace = Pace(done=state.epoch * steps_per_epoch + state.step, total=hyper.epochs * steps_per_epoch)

        for epoch in range(state.epoch, hyper.epochs):
            model.train()
            began = time.monotonic()
            with reporter.track(f"epoch {epoch + 1}/{hyper.epochs}", steps_per_epoch - state.step, unit="step") as bar:
                plan = sampler.epoch(epoch)
                # Drawn from (seed, epoch, step): what an image looks like does not depend on when it was read.
                drawn = {"seed": recipe.seed, "epoch": epoch, "start": state.step, "workers": recipe.data.workers}
                batches = training_batches(images, plan, augment, **drawn)
                for rows, pixels in zip(plan[state.step :], batches, strict=True):
                    set_learning_rate(optimizer, hyper.schedule, epoch + state.step / steps_per_epoch, hyper.epochs)
                    emb = model(pixels.to(place))
                    loss = objective(emb, labels[rows].to(place)) if emb.isfinite().all() else emb.sum()
                    if not loss.isfinite():  # an objective would refuse such embeddings as a mistake of the caller
                        reason = f"the loss stopped being finite at epoch {epoch + 1}, step {state.step + 1}"
                        run.fail(reason)
                        raise TrainingFailed(f"{run.path}: {reason}. Try a lower learning rate: --train.lr.")
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    if hyper.clip_norm:
                        nn.utils.clip_grad_norm_(model.parameters(), hyper.clip_norm)
                    optimizer.step()
                    state.stepped(loss.item())
                    bar.advance(note=f"loss {state.mean_loss:.3f}")
                    if stop_asked():
                        state.seconds += time.monotonic() - began
                        state.save(run)
                        raise Interrupted(f"stopped at epoch {epoch + 1}, step {state.step} of {steps_per_epoch}")

            scores = evaluate(model, split.val)
            recall = scores["R@1"]
            if recall > state.best:  # the earlier epoch wins a tie
                state.best, state.best_epoch = recall, epoch + 1
                run.save("best.pt", {"model": model.state_dict(), "image_shape": list(model.image_shape)})
            values = {name: scores[name] for name in ("R@1", "MAP@R")}
            run.log(event="epoch", epoch=epoch + 1, loss=state.mean_loss, val=values, seen=len(split.val))
            pace.reach((epoch + 1) * steps_per_epoch)
            reporter.say(
                f"epoch {epoch + 1}/{hyper.epochs}  loss {state.mean_loss:.2f}  val R@1 {100 * recall:.1f} "
                f"(best {100 * state.best:.1f} at {state.best_epoch})  "
                f"{sampler.batch_size * pace.rate:,.0f} img/s  {pace.left} left"
            )
            state.seconds += time.monotonic() - began
            state.next_epoch()
            state.save(run)

        result = evaluate_final(run, holdout, untrained=untrained, reporter=reporter)
        protocol = {
            **split.train.protocol(),
            "classes": {"train": split.train.num_classes, "val": split.val.num_classes, "test": holdout.num_classes},
            "epoch_chosen_by": "R@1 on validation classes",
            "epoch": state.best_epoch,
        }
        run.finish({"protocol": protocol, **result, "val_R@1": state.best, "seconds": round(state.seconds, 1)})
    return run


def check_names(recipe: Recipe) -> None:
    """Refuse a wrong name or setting before the time is spent to read the data."""
    make_objective(recipe, num_classes=2)
    _ = BACKBONES[recipe.model.backbone], POOLINGS[recipe.model.pool], AUGMENTS[recipe.data.augment]


def make_objective(recipe: Recipe, num_classes: int) -> Objective:
    """The loss that a recipe names, with its miner and memory."""
    return Objective(
        recipe.loss.name,
        num_classes=num_classes,
        dim=recipe.model.dim,
        miner=recipe.miner.name if recipe.miner else None,
        miner_settings=dict(recipe.miner.settings) if recipe.miner else None,
        memory=recipe.memory,
        **cast(dict[str, Any], recipe.loss.settings),
    )


def make_optimizer(model: nn.Module, objective: Objective, hyper: Train) -> torch.optim.Optimizer:
    """Weight decay for matrices and kernels only; class parameters in groups of their own."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    for group in objective.parameter_groups(hyper.lr):
        if hyper.class_lr is not None:
            group["lr"] = hyper.class_lr
        groups.append({**group, "weight_decay": 0.0})
    if hyper.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=hyper.lr, momentum=0.9, nesterov=True, weight_decay=hyper.weight_decay
        )
    else:
        optimizer = torch.optim.AdamW(groups, lr=hyper.lr, weight_decay=hyper.weight_decay)
    for group in optimizer.param_groups:
        group["highest_lr"] = group["lr"]
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, schedule: str, epoch: float, epochs: int) -> None:
    """A pure function of how far training is, so that resuming needs no scheduler state."""
    done = epoch / epochs
    warm_up = 0.2
    if schedule == "constant":
        factor = 1.0
    elif schedule == "cosine":
        factor = _cosine(1.0, 0.0, done)
    elif done < warm_up:
        factor = _cosine(0.04, 1.0, done / warm_up)
    else:
        factor = _cosine(1.0, 0.0, (done - warm_up) / (1 - warm_up))
    for group in optimizer.param_groups:
        group["lr"] = group["highest_lr"] * factor


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def choose_device(name: str) -> torch.device:
    """ "auto" takes a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device '{name}' cannot be used here ({str(error).splitlines()[0]}). Try cpu.") from None
