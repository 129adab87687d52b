"""`fit`: the training loop, top to bottom."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from nearkin.checkpoint import Interrupted, TrainingState, noting_ctrl_c
from nearkin.data import sources
from nearkin.data.batches import training_inputs
from nearkin.data.splits import split_for
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS
from nearkin.errors import ConfigError, TrainingFailed
from nearkin.evaluate import evaluate, evaluate_final
from nearkin.models.backbones import check_backbone
from nearkin.models.embedder import Embedder
from nearkin.models.frozen import FrozenFeatures
from nearkin.models.pooling import POOLINGS
from nearkin.models.weights import fingerprint, load_weights
from nearkin.objective import Objective
from nearkin.optim import make_optimizer, set_learning_rate
from nearkin.progress import Pace, Reporter
from nearkin.recipe import Recipe
from nearkin.runs import Run
from nearkin.samplers import make_sampler


def fit(
    recipe: Recipe,
    runs: str | Path = "runs",
    *,
    device: str = "auto",
    final: bool = True,
    reporter: Reporter | None = None,
) -> Run:
    """Train by this recipe, choose the epoch on validation classes, judge once on the sealed test classes.

    The run folder is `runs/<key>`. A run that is done is returned as it is; one that was stopped goes on from its
    checkpoint and ends with the same numbers as if it had not been.

    final   False leaves the test classes sealed, as a search over settings must; the same call with True opens them.
    """
    reporter = reporter or Reporter()
    check_names(recipe)
    place = choose_device(device)
    table = sources.load(recipe.data, reporter)
    split, holdout = split_for(table, recipe.data)
    model = make_model(recipe, table, reporter)
    run = Run.create(runs, recipe.key(f"{table.fingerprint}{model_fingerprint(recipe, model)}"), recipe)
    if run.result is not None and (run.result["test"] is not None or not final):
        reporter.say(f"done already: {run.path}")
        return run

    with run.writing(), noting_ctrl_c() as stop_asked:
        hyper = recipe.train
        model.calibrate(split.train.images)
        model.to(place)
        start = copy.deepcopy(model)
        # What the backbone makes of images before training: the yardstick, the head's start, the frozen lane's input.
        known = starting_features(recipe, start, table, reporter)
        if recipe.model.start == "whitened":
            seen = known.add_to(split.train) if known else split.train
            assert seen.features is not None
            features, kinds = torch.from_numpy(seen.features).to(place), torch.from_numpy(seen.labels).to(place)
            for network in (model, start):
                network.head.start_whitened(features, kinds, recipe.model.shrinkage)
        train, val = split.train, split.val
        if known is not None and recipe.model.freeze == "backbone":
            train, val = known.add_to(train), known.add_to(val) if val else None
        labels = torch.from_numpy(train.labels)
        objective = make_objective(recipe, model.dim, train.num_classes).to(place)
        if recipe.model.start == "whitened":
            objective.start_at(start.embed(features), kinds)
        optimizer = make_optimizer(model, objective, hyper)
        sampler = make_sampler(train.labels, batch_size=hyper.batch_size, per_class=hyper.per_class, seed=recipe.seed)
        steps_per_epoch = sampler.batches_per_epoch
        state = TrainingState(model, objective, optimizer)
        if state.restore(run):
            reporter.say(f"resuming {run.path} after epoch {state.epoch}, step {state.step}")
        else:
            reporter.say(
                f"train: {len(train):,} images of {train.num_classes} classes, {recipe.loss.name}, "
                f"{model.dim} dimensions, on {place}; "
                + (
                    f"epochs judged on {val.num_classes} other classes"
                    if val
                    else "no validation: the last epoch is kept"
                )
            )
            if recipe.model.start == "whitened":  # a good start competes with every epoch
                keep_if_best(run, state, model, val, epoch=0)
        pace = Pace(done=state.epoch * steps_per_epoch + state.step, total=hyper.epochs * steps_per_epoch)

        for epoch in range(state.epoch, hyper.epochs):
            model.train()
            model.hold_backbone(epoch < hyper.frozen_epochs)
            began = time.monotonic()
            with reporter.track(f"epoch {epoch + 1}/{hyper.epochs}", steps_per_epoch - state.step, unit="step") as bar:
                plan = sampler.epoch(epoch)
                batches = training_inputs(train, plan, recipe, epoch=epoch, start=state.step)
                for rows, batch in zip(plan[state.step :], batches, strict=True):
                    set_learning_rate(optimizer, hyper, epoch * steps_per_epoch + state.step, steps_per_epoch)
                    emb = model(batch.to(place))
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

            judged = keep_if_best(run, state, model, val, epoch=epoch + 1)
            pace.reach((epoch + 1) * steps_per_epoch)
            reporter.say(
                f"epoch {epoch + 1}/{hyper.epochs}  loss {state.mean_loss:.2f}  {judged}"
                f"{sampler.batch_size * pace.rate:,.0f} img/s  {pace.left} left"
            )
            state.seconds += time.monotonic() - began
            state.next_epoch()
            state.save(run)

        protocol = {
            **train.protocol(),
            "classes": {"train": train.num_classes, "val": val.num_classes if val else 0, "test": holdout.num_classes},
            "epoch_chosen_by": "R@1 on validation classes" if val else "nothing: the last one",
            "epoch": state.best_epoch,
        }
        result: dict[str, Any] = {"test": None}
        if final:
            result = evaluate_final(run, holdout, start=start, known=known, reporter=reporter)
        chosen = {"val_R@1": state.best if val else None, "seconds": round(state.seconds, 1)}
        run.finish({"protocol": protocol, **result, **chosen})
    return run


def keep_if_best(run: Run, state: TrainingState, model: Embedder, val: Table | None, *, epoch: int) -> str:
    """Judge an epoch on the validation classes, log it, and keep its weights if it is the best so far.

    Without validation classes the last epoch is kept. Returns what to say of it.
    """
    scores = evaluate(model, val) if val else None
    recall = scores["R@1"] if scores else state.best
    if scores is None or recall > state.best:  # the earlier epoch wins a tie
        state.best, state.best_epoch = recall, epoch
        run.save("best.pt", {"model": model.state_dict(), "image_shape": list(model.image_shape)})
    values = {name: scores[name] for name in ("R@1", "MAP@R")} if scores else None
    run.log(event="epoch", epoch=epoch, loss=state.mean_loss if epoch else None, val=values)
    return f"val R@1 {100 * recall:.1f} (best {100 * state.best:.1f} at {state.best_epoch})  " if scores else ""


# --- what a recipe names ---------------------------------------------------------------------------------------------


def check_names(recipe: Recipe) -> None:
    """Refuse a wrong name or setting before the time is spent to read the data."""
    make_objective(recipe, recipe.model.dim or 2, num_classes=2)
    _ = POOLINGS[recipe.model.pool], AUGMENTS[recipe.data.augment]
    check_backbone(recipe.model.backbone)
    whitened = recipe.model.start == "whitened"
    if whitened and recipe.model.head == "mlp":
        raise ConfigError("model.start: whitened needs a linear or residual head. Give --model.head linear.")


def make_model(recipe: Recipe, table: Table, reporter: Reporter) -> Embedder:
    """The network that a recipe names, for the images or features of a table, with the weights it starts from."""
    torch.manual_seed(recipe.seed)
    if table.features is not None:
        if recipe.model.backbone != "none":
            raise ConfigError(f"{table.source}: holds features, which need no backbone. Give --model.backbone none.")
        return Embedder(recipe.model, (table.features.shape[1], 1, 1))
    if recipe.model.backbone == "none":
        raise ConfigError(f"{table.source}: holds images, which need a backbone: --model.backbone NAME.")
    augment = AUGMENTS[recipe.data.augment]
    model = Embedder(recipe.model, augment.input_shape(table.images.shape), augment=recipe.data.augment)
    assert model.backbone is not None
    load_weights(model.backbone, recipe.model.backbone, recipe.model.weights, reporter)
    return model


def model_fingerprint(recipe: Recipe, model: Embedder) -> str:
    """What the weights that training starts from add to the run's key: nothing where they are drawn by the seed."""
    if recipe.model.weights == "none" or model.backbone is None:
        return ""
    return f"-{fingerprint(model.backbone)}"


def starting_features(recipe: Recipe, start: Embedder, table: Table, reporter: Reporter) -> FrozenFeatures | None:
    """The features of the starting backbone, where they say something: it is pretrained, frozen, or to be whitened."""
    used = recipe.model.weights != "none" or recipe.model.freeze == "backbone" or recipe.model.start == "whitened"
    if start.backbone is None or not used:
        return None
    return FrozenFeatures(start, table, on_disk=recipe.data.cache, reporter=reporter)


def make_objective(recipe: Recipe, dim: int, num_classes: int) -> Objective:
    """The loss that a recipe names, with its miner and memory."""
    return Objective(
        recipe.loss.name,
        num_classes=num_classes,
        dim=dim,
        miner=recipe.miner.name if recipe.miner else None,
        miner_settings=dict(recipe.miner.settings) if recipe.miner else None,
        memory=recipe.memory,
        **cast(dict[str, Any], recipe.loss.settings),
    )


def choose_device(name: str) -> torch.device:
    """ "auto" takes a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device '{name}' cannot be used here ({str(error).splitlines()[0]}). Try cpu.") from None
