"""`fit`: the training loop, top to bottom."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearkin._common.progress import Pace, Reporter
from nearkin.analysis.diagnostics import Diagnosis, alarms, diagnose
from nearkin.config.recipe import Recipe
from nearkin.data import sources
from nearkin.data.batches import training_inputs
from nearkin.data.samplers import make_sampler
from nearkin.data.splits import make_split
from nearkin.data.table import Table
from nearkin.errors import TrainingFailedError, TrainingStoppedError
from nearkin.losses.registry import LOSSES
from nearkin.models.embedder import Embedder
from nearkin.training.checkpoint import TrainingInterrupted, TrainingState, defer_sigint
from nearkin.training.distributed import (
    any_rank,
    broadcast_object,
    broadcast_state,
    gather_rows,
    is_main_process,
    process_group,
    rank,
    world_size,
)
from nearkin.training.evaluation import embed_table, evaluate_final, score_embeddings
from nearkin.training.factory import (
    choose_device,
    initial_features,
    make_model,
    make_objective,
    model_fingerprint,
    validate_recipe,
)
from nearkin.training.optimizer import make_optimizer, set_learning_rate
from nearkin.training.run import Run
from nearkin.training.run_key import run_key
from nearkin.training.step import NonFiniteError, backward, check_train_config, optimizer_step, update_ema
from nearkin.training.trackers import Tracker, open_trackers

TEST_CHOSEN = "THE TEST CLASSES: too high, and not comparable with the other protocols"


def fit(
    recipe: Recipe,
    runs: str | Path = "runs",
    *,
    device: str = "auto",
    final: bool = True,
    trackers: tuple[str, ...] = (),
    reporter: Reporter | None = None,
    watch: Callable[[int, float], bool] | None = None,
) -> Run:
    """Train by this recipe, choose the epoch on validation classes, judge once on the sealed test classes.

    The run folder is `runs/<key>`. A run that is done is returned as it is; one that was stopped goes on from its
    checkpoint and ends with the same numbers as if it had not been. Under torchrun several processes share every batch.

    final     False leaves the test classes sealed, as a search over settings must; the same call with True opens them.
    trackers  "tensorboard", "wandb": where the numbers of each epoch also go
    watch     is told each epoch and the best validation R@1 so far; True raises `TrainingStoppedError`
    """
    with process_group(choose_device(device)) as place:
        said_by = (reporter or Reporter()) if is_main_process() else Reporter(quiet=True)
        return _fit(recipe, Path(runs), place, final, trackers, said_by, watch)


def _fit(
    recipe: Recipe,
    runs: Path,
    place: torch.device,
    final: bool,
    trackers: tuple[str, ...],
    reporter: Reporter,
    watch: Callable[[int, float], bool] | None,
) -> Run:
    validate_recipe(recipe)
    table = sources.load(recipe.data, reporter)
    split, holdout = make_split(table, recipe.data)
    model = make_model(recipe, table, reporter)
    key = run_key(recipe, f"{table.fingerprint}{model_fingerprint(recipe, model)}")
    run = Run(broadcast_object(Run.create(runs, key, recipe).path if is_main_process() else None) or runs / key)
    run.is_writer = is_main_process()
    if broadcast_object(is_finished(run, final)):
        reporter.info(f"done already: {run.path}")
        return run

    with run.writing(), open_trackers(trackers, run) as tracker:
        if broadcast_object(is_finished(run, final)):  # by another process, between the look above and the lock
            return run
        hyper = recipe.train
        check_train_config(model, hyper, place)
        model.fit_pixel_norm(split.train.images)
        model.to(place)
        start = copy.deepcopy(model)
        # What the backbone makes of images before training: the yardstick, the head's start, the frozen lane's input.
        known = initial_features(recipe, start, table, reporter)
        if recipe.model.head_init == "whitened":
            seen = known.add_to(split.train) if known else split.train
            assert seen.features is not None
            features, kinds = torch.from_numpy(seen.features).to(place), torch.from_numpy(seen.labels).to(place)
            model.head.init_whitened(features, kinds, recipe.model.shrinkage)
            start.head.load_state_dict(model.head.state_dict())
        train, val = split.train, split.val
        if known is not None and recipe.model.freeze == "backbone":
            train, val = known.add_to(train), known.add_to(val) if val else None
        labels = torch.from_numpy(train.labels)
        objective = make_objective(recipe, model.dim, train.num_classes).to(place)
        if recipe.model.head_init == "whitened":
            objective.init_proxies(start.embed(features), kinds)
        broadcast_state(model)
        broadcast_state(objective)
        average = copy.deepcopy(model) if hyper.ema else None
        judged = average or model
        optimizer = make_optimizer(model, objective, hyper)
        scaler = torch.amp.GradScaler(place.type, enabled=hyper.precision == "fp16")
        forward = torch.compile(model) if hyper.compile else model
        shared = {"rank": rank(), "world": world_size()}
        sampler = make_sampler(
            train.labels,
            batch_size=hyper.batch_size,
            samples_per_class=hyper.samples_per_class,
            seed=recipe.seed,
            **shared,
        )
        steps_per_epoch = sampler.batches_per_epoch
        state = TrainingState(model, objective, optimizer, scaler, average)
        if state.restore(run, reporter):
            reporter.info(f"resuming {run.path} after epoch {state.epoch}, step {state.step}")
        else:
            reporter.info(describe(recipe, train, val, model, place))
            if advice := few_pairs(recipe, train):
                reporter.info(advice)
            if recipe.model.head_init == "whitened":  # a good start competes with every epoch
                said = judge_epoch(run, state, judged, train, val, tracker, reporter, epoch=0)
                reporter.info(f"start  {said}".rstrip())
        pace = Pace(done=state.epoch * steps_per_epoch + state.step, total=hyper.epochs * steps_per_epoch)

        with defer_sigint() as stop_asked:  # a plain Ctrl-C is safe elsewhere: what is on the disk is whole
            for epoch in range(state.epoch, hyper.epochs):
                if hyper.patience and val and epoch - state.best_epoch >= hyper.patience:
                    reporter.info(
                        f"stopping: {hyper.patience} epochs have brought nothing better than epoch {state.best_epoch}"
                    )
                    break
                model.train()
                model.freeze_backbone(epoch < hyper.frozen_epochs)
                began = saved = time.monotonic()
                with reporter.track(
                    f"epoch {epoch + 1}/{hyper.epochs}", steps_per_epoch - state.step, unit="step"
                ) as bar:
                    plan = sampler.epoch(epoch)
                    batches = training_inputs(
                        train, plan, recipe, epoch=epoch, start=state.step, first=sampler.share.start
                    )
                    for rows, batch in zip(plan[state.step :], batches, strict=True):
                        done = epoch * steps_per_epoch + state.step
                        set_learning_rate(optimizer, hyper, done, steps_per_epoch)
                        optimizer.zero_grad(set_to_none=True)
                        chance = (recipe.seed, epoch, state.step)
                        try:
                            loss = backward(
                                forward, objective, batch.to(place), labels[rows].to(place), hyper, scaler, chance
                            )
                            optimizer_step(model, objective, optimizer, hyper, scaler)
                        except NonFiniteError as trouble:
                            raise failure(run, train, rows, trouble, epoch=epoch + 1, step=state.step + 1) from None
                        if average is not None:
                            update_ema(average, model, hyper.ema, done)
                        state.stepped(loss)
                        bar.advance(note=f"loss {state.mean_loss:.3f}")
                        stopping = any_rank(stop_asked())
                        if stopping or time.monotonic() - saved > 60 * hyper.checkpoint_minutes:
                            saved = time.monotonic()
                            state.seconds, began = state.seconds + saved - began, saved
                            state.save(run)
                        if stopping:
                            raise TrainingInterrupted(
                                f"stopped at epoch {epoch + 1}, step {state.step} of {steps_per_epoch}"
                            )

                broadcast_state(model)  # batch-norm statistics are of each process's own images
                if average is not None:
                    broadcast_state(average)
                said = judge_epoch(run, state, judged, train, val, tracker, reporter, epoch=epoch + 1)
                pace.update((epoch + 1) * steps_per_epoch)
                reporter.info(
                    f"epoch {epoch + 1}/{hyper.epochs}  loss {state.mean_loss:.2f}  {said}"
                    f"{sampler.batch_size * pace.rate:,.0f} img/s  {pace.eta} left"
                )
                if watch is not None and val and any_rank(is_main_process() and watch(epoch + 1, state.best)):
                    run.log(event="stopped", epoch=epoch + 1)
                    raise TrainingStoppedError(
                        run.path, f"stopped after epoch {epoch + 1} of {hyper.epochs}, as was asked."
                    )
                state.seconds += time.monotonic() - began
                state.next_epoch()
                state.save(run)
                if any_rank(stop_asked()):
                    raise TrainingInterrupted(f"stopped after epoch {epoch + 1} of {hyper.epochs}")

        protocol = {
            **train.protocol(),
            "classes": {"train": train.num_classes, "val": val.num_classes if val else 0, "test": holdout.num_classes},
            "epoch_chosen_by": _chooser(recipe, val),
            "epoch": state.best_epoch,
        }
        result: dict[str, Any] = {"test": None}
        if final:
            broadcast_object(None)  # best.pt, which every process reads, is written
            result = evaluate_final(run, holdout, start=start, known=known, reporter=reporter)
        chosen = {"val_R@1": state.best if val else None, "seconds": round(state.seconds, 1)}
        run.finish({"protocol": protocol, **result, **chosen})
        broadcast_object(None)  # no process goes on before the result is written
    return run


def is_finished(run: Run, final: bool) -> bool:
    """Whether nothing is left to do: trained and, if asked for, judged on the test classes."""
    return run.result is not None and (run.result["test"] is not None or not final)


def _chooser(recipe: Recipe, val: Table | None) -> str:
    if val is None:
        return "nothing: the last one"
    return "R@1 (then MAP@R) on " + ("validation classes" if recipe.data.select_on == "validation" else TEST_CHOSEN)


def judge_epoch(
    run: Run,
    state: TrainingState,
    model: Embedder,
    train: Table,
    val: Table | None,
    tracker: Tracker,
    reporter: Reporter,
    *,
    epoch: int,
) -> str:
    """Judge an epoch on the validation classes, look at its embeddings, log both, and keep its weights if it is best.

    Without validation classes the last epoch is kept, and a sample of the training images is looked at. Returns what
    to say of it.
    """
    looked_at = val or train.sample(1000)
    emb = embed_table(model, looked_at, raw=True)
    if not bool(torch.isfinite(emb).all()):  # the last step went too far; each step's loss was still finite
        reason = f"the embeddings stopped being finite by the end of epoch {epoch}"
        run.fail(reason, tensor="embeddings", epoch=epoch, step=None, files=[])
        raise TrainingFailedError(f"{run.path}: {reason}.\nTry a lower --train.lr, or --train.clip-norm 1.")
    scores = score_embeddings(val, emb) if val else None
    recall, precision = (scores["R@1"], scores["MAP@R"]) if scores else (state.best, state.best_map)
    # With few validation classes R@1 is often the same; MAP@R decides then, and if that ties the earlier epoch wins.
    if scores is None or (recall, precision) > (state.best, state.best_map):
        state.best, state.best_map, state.best_epoch = recall, precision, epoch
        run.save("best.pt", {"model": model.state_dict(), "image_shape": list(model.image_shape)})
    diagnosis = diagnose(emb, torch.from_numpy(looked_at.labels))
    event = {
        "epoch": epoch,
        "loss": state.mean_loss if epoch else None,
        "val": {name: scores[name] for name in ("R@1", "MAP@R")} if scores else None,
        "val_interval": list(scores.interval("R@1")) if scores else None,
        "diagnosis": diagnosis.to_dict(),
    }
    run.log(event="epoch", **event)
    tracker.log(event)
    for alarm in new_alarms(run):
        run.log(event="alarm", epoch=epoch, kind=alarm.name, text=str(alarm))
        reporter.info(f"ALARM at epoch {epoch}: {alarm}")
    return f"val R@1 {100 * recall:.1f} (best {100 * state.best:.1f} at {state.best_epoch})  " if scores else ""


def new_alarms(run: Run) -> list[Any]:
    """Alarms of the last epoch of a kind that has not been raised before in this run."""
    events = run.events()
    history = [Diagnosis.from_dict(event["diagnosis"]) for event in events if event["event"] == "epoch"]
    raised = {event["kind"] for event in events if event["event"] == "alarm"}
    return [alarm for alarm in alarms(history) if alarm.name not in raised]


def failure(
    run: Run, train: Table, rows: Any, trouble: NonFiniteError, *, epoch: int, step: int
) -> TrainingFailedError:
    """Write failed.json with all that helps to find the cause, and say it in two lines."""
    blamed = gather_rows(torch.from_numpy(rows if trouble.rows is None else rows[trouble.rows])).tolist()
    files = [str(train.paths[r]) if train.paths else f"row {train.row_numbers[r]}" for r in blamed]
    reason = f"{trouble.tensor} stopped being finite at epoch {epoch}, step {step}"
    run.fail(reason, tensor=trouble.tensor, epoch=epoch, step=step, files=files)
    named = f" First of its images: {files[0]}." if files else ""
    return TrainingFailedError(
        f"{run.path}: {reason}.{named}\n"
        "If it is always the same image, look at that (failed.json has the list); else try a lower --train.lr."
    )


def describe(recipe: Recipe, train: Table, val: Table | None, model: Embedder, place: torch.device) -> str:
    processes = f" in {world_size()} processes" if world_size() > 1 else ""
    judging = f"epochs judged on {val.num_classes} other classes" if val else "no validation: the last epoch is kept"
    return (
        f"train: {len(train):,} images of {train.num_classes} classes, {recipe.loss.name}, {model.dim} dimensions, "
        f"on {place}{processes}; {judging}"
    )


def few_pairs(recipe: Recipe, train: Table) -> str:
    """Advice where a loss that compares images within a batch would seldom find two of a class there."""
    hyper = recipe.train
    if hyper.samples_per_class or recipe.memory or not LOSSES[recipe.loss.name].inputs.pairs:
        return ""
    batch = make_sampler(train.labels, batch_size=hyper.batch_size, samples_per_class=0, seed=recipe.seed).epoch(0)[0]
    met = np.bincount(train.labels[batch])
    share = met[met > 1].sum() / len(batch)
    if share >= 0.5:
        return ""
    some = next(count for count in (4, 3, 2, hyper.batch_size) if hyper.batch_size % count == 0)
    return (
        f"advice: {recipe.loss.name} compares images of a class, and in a batch only {share:.0%} of them meet another "
        f"of theirs; --train.samples-per-class {some} brings {some} of each"
    )
