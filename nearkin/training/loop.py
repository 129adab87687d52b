"""The training loop: `fit` calls `prepare`, then `train_epoch` and `evaluate_epoch` in turn, then `finish`."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearkin._common.processes import keep_freed_memory, return_freed_memory
from nearkin._common.progress import Pace, Reporter, format_rate
from nearkin._common.words import counted
from nearkin.analysis.diagnostics import Diagnosis, alarms, diagnose
from nearkin.config.recipe import Recipe
from nearkin.data import sources
from nearkin.data.own import as_table
from nearkin.data.samplers import Sampler, make_sampler
from nearkin.data.splits import Holdout, Split, make_split
from nearkin.data.table import Table
from nearkin.data.transforms import training_inputs
from nearkin.errors import TrainingFailedError, TrainingStoppedError
from nearkin.models.embedder import Embedder
from nearkin.models.frozen import FrozenFeatures, StemMaps
from nearkin.models.weights import check_available
from nearkin.training import distributed as dist
from nearkin.training import factory
from nearkin.training._run_key import run_key
from nearkin.training.checkpoint import TrainingInterrupted, TrainingState, defer_sigint
from nearkin.training.device import choose_device, end_step
from nearkin.training.distillation import distil, load_teacher, teacher_vectors
from nearkin.training.evaluation import (
    COMPARED_METRICS,
    describe_protocol,
    embed_table,
    evaluate_final,
    score_embeddings,
    selection_metrics,
)
from nearkin.training.run import Run, refuse_if_busy
from nearkin.training.step import (
    NonFiniteError,
    backward,
    check_train_config,
    make_optimizer,
    optimizer_step,
    set_learning_rate,
    total_steps,
    update_ema,
)
from nearkin.training.trackers import Log, open_trackers

EpochCallback = Callable[[int, float], bool]


@dataclass
class Session:
    """Everything that one training run works with, on this process."""

    recipe: Recipe
    run: Run
    device: torch.device
    train: Table
    val: Table | None
    initial_model: Embedder  # before the first step: a baseline of the final evaluation
    frozen_features: FrozenFeatures | None  # of the initial backbone, where it is pretrained or frozen
    forward: Callable[[Tensor], Tensor]  # the model, compiled if the recipe says so
    sampler: Sampler
    state: TrainingState  # the model, the objective, the optimizer and the progress
    log: Log  # to the experiment trackers
    reporter: Reporter
    teacher: Tensor | None = None  # [N, T] vectors of the training images by the model to distil

    @property
    def selected_by(self) -> tuple[str, str]:
        """The metric that selects the epoch, and the one that breaks its ties."""
        return selection_metrics(self.val.num_classes if self.val else 0, self.recipe.eval.select_by)


def fit(
    recipe: Recipe,
    runs: str | Path = "runs",
    *,
    data: Any = None,
    model: Embedder | None = None,
    device: str = "auto",
    final: bool = True,
    trackers: tuple[str, ...] = (),
    reporter: Reporter | None = None,
    on_epoch_end: EpochCallback | None = None,
) -> Run:
    """Train a recipe, choose the epoch on validation classes, and evaluate it once on the sealed test classes.

    The run folder is `runs/<key>`. A complete run is returned as it is; an interrupted one resumes from its checkpoint
    and ends with the same numbers, bit for bit. Under torchrun, several processes share every batch.

    Args:
        recipe: Data, model, loss and training settings.
        runs: Folder that holds the run folders.
        data: Data of your own, as `nearkin.data.as_table` takes them, instead of those that the recipe names.
        model: Your own network, made by `Embedder.wrap`, instead of the one that the recipe names. It is copied, so
            that its weights stay as they are.
        device: "cpu", "cuda", "cuda:1", "mps", another device of torch, or "auto" for a GPU if there is one.
        final: False leaves the test classes sealed, as a hyper-parameter search must. Calling again with True
            evaluates them.
        trackers: "tensorboard" and "wandb": where the metrics of each epoch are logged as well.
        reporter: Where progress is printed; by default standard error.
        on_epoch_end: Called with the epoch and its validation R@1 (MAP@R with fewer than 8 validation
            classes). Returning True stops the run.

    Returns:
        The finished run.

    Raises:
        TrainingStoppedError: `on_epoch_end` stopped the run.
        TrainingFailedError: The loss, the embeddings or a gradient became NaN or infinite.
    """
    keep_freed_memory()
    timeout = 60 * recipe.train.rank_timeout_minutes
    with dist.process_group(choose_device(device), timeout=timeout) as torch_device:
        reporter = (reporter or Reporter()) if dist.is_main_process() else Reporter(quiet=True)
        recipe = factory.with_own(recipe, data, model)
        # The processes of one training start at different times. Of data or a model of the user the recipe says little.
        if dist.world_size() == 1 and data is None and model is None:
            refuse_if_busy(recipe, runs)
        factory.validate_recipe(recipe, model)
        if model is None and recipe.model.weights == "default":
            check_available(recipe.model.backbone)
        if data is None:
            table = sources.load(recipe.data, reporter)
        else:
            table = as_table(data, recipe.data, channels=model.channels if model else 3, reporter=reporter)
        if model is not None:
            torch.manual_seed(recipe.seed)  # of the objective's initial parameters, as in `make_model`
            model = copy.deepcopy(model)
            model.augment = recipe.data.augment
            model.freeze_backbone(False)  # except what the settings and the user freeze
            table = factory.match_table(table, model)
        split, holdout = make_split(table, recipe.data)
        if warning := factory.warn_about_few_classes(recipe.data, table, split):
            reporter.info(warning)
        teacher = load_teacher(recipe, own_data=data is not None)
        model = model or factory.make_model(recipe, table, reporter)
        run = open_run(recipe, table, model, Path(runs), teacher)
        if dist.broadcast_object(is_complete(run, final)):
            reporter.info(f"run already complete: {run.path}")
            return run
        with run.lock(), open_trackers(trackers, run) as log:
            if dist.broadcast_object(is_complete(run, final)):  # another process finished it before we got the lock
                return run
            session = prepare(recipe, run, table, split, model, torch_device, log, reporter)
            if teacher is not None:
                session.teacher = teacher_vectors(teacher, recipe, split.train, torch_device, reporter).to(torch_device)
            train(session, on_epoch_end)
            finish(session, holdout, final)
    return_freed_memory()
    return run


def open_run(recipe: Recipe, table: Table, model: Embedder, runs: Path, teacher: Embedder | None = None) -> Run:
    """Open or create the run folder of a recipe; only the main process writes to it."""
    fingerprint = f"{table.fingerprint}{factory.model_fingerprint(recipe, model)}"
    if dist.world_size() > 1 and not recipe.train.sync_batchnorm:
        fingerprint += f"-{dist.world_size()}-processes"  # their number changes the batch-norm statistics
    if teacher is not None:
        fingerprint += f"-taught-by-{teacher.fingerprint()}"
    key = run_key(recipe, fingerprint)
    path = dist.broadcast_object(Run.create(runs, key, recipe).path if dist.is_main_process() else None)
    run = Run(path or runs / key)
    run.is_writer = dist.is_main_process()
    return run


def is_complete(run: Run, final: bool) -> bool:
    """Whether nothing is left to do: trained and, if `final`, evaluated on the test classes."""
    return run.result is not None and (run.result["test"] is not None or not final)


def prepare(
    recipe: Recipe,
    run: Run,
    table: Table,
    split: Split,
    model: Embedder,
    device: torch.device,
    log: Log,
    reporter: Reporter,
) -> Session:
    """Build everything training needs, and resume from the run's checkpoint if it has one."""
    config = recipe.train
    check_train_config(model, config, device)
    model.fit_pixel_norm(split.train.images)
    model.to(device)
    initial_model = copy.deepcopy(model)
    # Features of the initial backbone: a baseline, the input of a whitened head, and of training with it frozen.
    frozen_features = factory.initial_features(recipe, initial_model, table, reporter)
    train, val = split.train, split.val
    if frozen_features is not None and recipe.model.freeze == "backbone":
        train, val = frozen_features.add_to(train), frozen_features.add_to(val) if val else None
    if recipe.model.freeze == "stages":
        maps = StemMaps(initial_model, table, on_disk=recipe.data.cache, reporter=reporter)
        train, val = maps.add_to(train), maps.add_to(val) if val else None
    objective = factory.make_objective(recipe, model.dim, train.num_classes).to(device)
    if recipe.model.head_init == "whitened":
        features = (frozen_features.add_to(split.train) if frozen_features else split.train).features
        assert features is not None
        x, labels = torch.from_numpy(features).to(device), torch.from_numpy(split.train.labels).to(device)
        model.head.init_whitened(x, labels, recipe.model.shrinkage)
        initial_model.head.load_state_dict(model.head.state_dict())
        objective.init_proxies(initial_model.embed(x), labels)  # at the class means
    if config.precision == "fp64":
        model.double()
        objective.double()
    dist.broadcast_state(model)
    dist.broadcast_state(objective)
    if config.compile:
        objective.compile()

    optimizer = make_optimizer(model, objective, config)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    sampler = make_sampler(
        train.labels,
        batch_size=config.batch_size,
        samples_per_class=config.samples_per_class,
        seed=recipe.seed,
        rank=dist.rank(),
        world_size=dist.world_size(),
    )
    forward = torch.compile(model) if config.compile else model
    state = TrainingState(model, objective, optimizer, scaler, copy.deepcopy(model) if config.ema else None)
    session = Session(
        recipe, run, device, train, val, initial_model, frozen_features, forward, sampler, state, log, reporter
    )
    resume_or_start(session)
    return session


def resume_or_start(s: Session) -> None:
    """Load the run's last checkpoint, or say what is about to be trained."""
    s.run.require_space(s.state.num_bytes)
    if s.state.restore(s.run, s.reporter):
        s.reporter.info(f"resuming {s.run.path} after epoch {s.state.epoch}, step {s.state.step}")
        before, now = s.state.processes[-1], dist.world_size()
        if before != now:
            s.state.processes.append(now)
            s.reporter.info(
                f"number of processes: {before} before, {now} now; this changes the result by rounding only "
                "(and dropout inside the network, which each process draws itself)"
            )
        return
    processes = f" in {dist.world_size()} processes" if dist.world_size() > 1 else ""
    validation = f"validation on {s.val.num_classes} other classes" if s.val else "no validation, last epoch is used"
    s.reporter.info(
        f"train: {counted(len(s.train), 'image')} of {counted(s.train.num_classes, 'class')}, {s.recipe.loss.name}, "
        f"{s.state.model.dim} dimensions, on {s.device}{processes}; {validation}"
    )
    if warning := factory.warn_about_few_positives(s.recipe, s.train):
        s.reporter.info(warning)
    metrics = evaluate_epoch(s, epoch=0)  # the start may be better than every trained epoch
    if metrics:
        s.reporter.info(f"start  {metrics}".rstrip())


def train(s: Session, on_epoch_end: EpochCallback | None = None) -> None:
    """Train the remaining epochs, with early stopping; a checkpoint is written after each."""
    config, state, steps = s.recipe.train, s.state, s.sampler.batches_per_epoch
    total = total_steps(config, steps)
    epochs = math.ceil(total / steps)
    pace = Pace(done=state.epoch * steps + state.step, total=total)
    with defer_sigint() as sigint_received:  # elsewhere a plain Ctrl-C is safe: files are replaced atomically
        for epoch in range(state.epoch, epochs):
            if config.patience and s.val and epoch - state.best_epoch >= config.patience:
                best = f"(best: epoch {state.best_epoch})"
                s.reporter.info(f"early stopping: no improvement for {counted(config.patience, 'epoch')} {best}")
                break
            train_epoch(s, epoch, sigint_received)
            metrics = evaluate_epoch(s, epoch=epoch + 1)
            pace.done = min((epoch + 1) * steps, total)
            s.reporter.info(
                f"epoch {epoch + 1}/{epochs}  loss {state.mean_loss:.2f}  {metrics}"
                f"{format_rate(s.sampler.batch_size * pace.rate, 'img')}  {pace.eta} left"
            )
            latest = state.latest.get(s.selected_by[0], math.nan)
            if on_epoch_end and s.val and dist.any_rank(dist.is_main_process() and on_epoch_end(epoch + 1, latest)):
                s.run.log(event="stopped", epoch=epoch + 1)
                raise TrainingStoppedError(s.run.path, f"stopped after epoch {epoch + 1} of {epochs} by on_epoch_end.")
            state.epoch, state.step, state.loss_sum = epoch + 1, 0, 0.0
            state.save(s.run)
            if dist.any_rank(sigint_received()):
                raise TrainingInterrupted(f"stopped after epoch {epoch + 1} of {epochs}")


def train_epoch(s: Session, epoch: int, sigint_received: Callable[[], bool]) -> None:
    """Train one epoch, or what is left of it after a checkpoint within it."""
    config, state, steps = s.recipe.train, s.state, s.sampler.batches_per_epoch
    model, objective, optimizer, scaler = state.model, state.objective, state.optimizer, state.scaler
    if objective.refreshes_from and state.step == 0:  # recompute what the loss stores about the training set
        needs_emb = objective.refreshes_from == "embeddings"
        emb = embed_table(model, s.train, raw=True).to(s.device) if needs_emb else None
        objective.refresh(torch.from_numpy(s.train.labels).to(s.device), emb)
    model.train()
    model.freeze_backbone(epoch < config.frozen_epochs)
    state.start_timer()
    saved_at = time.monotonic()
    all_labels = torch.from_numpy(s.train.labels)
    total = total_steps(config, steps)
    batches = s.sampler.epoch(epoch)[: total - epoch * steps]
    place = {"first": s.sampler.share.start, "batch_size": s.sampler.batch_size}
    stream = training_inputs(s.train, batches, s.recipe, epoch=epoch, start=state.step, **place)
    title = f"epoch {epoch + 1}/{math.ceil(total / steps)}"
    with s.reporter.track(title, len(batches) - state.step, unit="step") as bar:
        for rows, batch in zip(batches[state.step :], stream, strict=True):
            step = epoch * steps + state.step
            set_learning_rate(optimizer, config, step, steps)
            optimizer.zero_grad(set_to_none=True)
            x, labels = batch.to(s.device), all_labels[rows].to(s.device)
            try:
                rng_key = (s.recipe.seed, epoch, state.step)
                loss_function: Callable[[Tensor, Tensor], Tensor] = objective
                if s.teacher is not None:
                    taught = dist.gather_rows(s.teacher[torch.from_numpy(rows)])
                    loss_function = partial(distil, objective, taught, config.teacher_weight)
                loss = backward(s.forward, loss_function, x, labels, config, scaler, rng_key)
                optimizer_step(model, objective, optimizer, config, scaler)
            except NonFiniteError as error:
                raise failed_step(s, rows, error, epoch=epoch + 1) from None
            if state.ema_model is not None:
                update_ema(state.ema_model, model, config.ema, step)
            end_step(s.device)
            state.step, state.loss_sum = state.step + 1, state.loss_sum + loss
            bar.advance(note=f"loss {state.mean_loss:.3f}")

            interrupted = dist.any_rank(sigint_received())
            if interrupted or time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
                state.save(s.run)
                saved_at = time.monotonic()
            if interrupted:
                raise TrainingInterrupted(f"stopped at epoch {epoch + 1}, step {state.step} of {steps}")
    dist.broadcast_state(model)  # without sync_batchnorm, each process has the statistics of its own images
    if state.ema_model is not None:
        dist.broadcast_state(state.ema_model)


def evaluate_epoch(s: Session, *, epoch: int) -> str:
    """Score the validation classes (or diagnose training images), save the weights if they are the best, and log."""
    state, model = s.state, s.state.ema_model or s.state.model
    table = s.val or s.train.sample(1000)
    emb = embed_table(model, table, raw=True, reporter=s.reporter)
    if not bool(torch.isfinite(emb).all()):  # the last step went too far, though its loss was still finite
        if not epoch and s.recipe.train.epochs:
            return ""  # because of an input, which the first step will name
        reason = f"the embeddings became NaN or infinite by the end of epoch {epoch}"
        s.run.fail(reason, tensor="embeddings", epoch=epoch, step=None, files=[])
        raise TrainingFailedError(f"{s.run.path}: {reason}.\nTry a lower --train.lr, or --train.clip-norm 1.")
    scores = score_embeddings(s.val, emb, similarity=s.recipe.eval.similarity) if s.val else None
    metrics = {name: scores[name] for name in COMPARED_METRICS} if scores else {}
    state.latest = metrics
    # Of equal epochs the earlier one wins.
    if not state.best or [metrics[name] for name in s.selected_by] > [state.best[name] for name in s.selected_by]:
        state.best, state.best_epoch = metrics, epoch
        s.run.save("best.pt", {"model": model.state_dict(), "image_shape": list(model.image_shape), **model.own_dict()})
    event = {
        "epoch": epoch,
        "loss": state.mean_loss if epoch else None,
        "val": metrics or None,
        "val_interval": list(scores.interval(s.selected_by[0])) if scores else None,
        "diagnosis": diagnose(emb, torch.from_numpy(table.labels)).to_dict(),
    }
    s.run.log(event="epoch", **event)
    s.log(event)
    events = s.run.events()
    raised = {event["kind"] for event in events if event["event"] == "alarm"}
    for alarm in alarms([Diagnosis.from_dict(event["diagnosis"]) for event in events if event["event"] == "epoch"]):
        if alarm.name not in raised:
            s.run.log(event="alarm", epoch=epoch, kind=alarm.name, text=str(alarm))
            s.reporter.info(f"ALARM at epoch {epoch}: {alarm}")
    if not metrics:
        return ""
    name = s.selected_by[0]
    return f"val {name} {100 * metrics[name]:.1f} (best {100 * state.best[name]:.1f} at {state.best_epoch})  "


def failed_step(s: Session, rows: Any, error: NonFiniteError, *, epoch: int) -> TrainingFailedError:
    """Write failed.json with the batch's files, and return the error to raise."""
    suspects = dist.gather_rows(torch.from_numpy(rows if error.rows is None else rows[error.rows])).tolist()
    files = [str(s.train.paths[r]) if s.train.paths else f"row {s.train.row_numbers[r]}" for r in suspects]
    step = s.state.step + 1
    reason = f"{error.tensor} became NaN or infinite at epoch {epoch}, step {step}"
    s.run.fail(reason, tensor=error.tensor, epoch=epoch, step=step, files=files)
    first = f" First image of the batch: {files[0]}." if files else ""
    return TrainingFailedError(
        f"{s.run.path}: {reason}.{first}\n"
        "If it is always the same image, check that file (failed.json lists them); otherwise try a lower --train.lr."
    )


def finish(s: Session, holdout: Holdout, final: bool) -> None:
    """Evaluate the best epoch on the test classes if `final`, and write the result: the last write of a run."""
    result: dict[str, Any] = {"test": None}
    if final:
        dist.broadcast_object(None)  # wait until rank 0 has written best.pt, which every rank reads
        result = evaluate_final(
            s.run, holdout, initial_model=s.initial_model, frozen_features=s.frozen_features, reporter=s.reporter
        )
    s.run.finish(
        {
            "protocol": describe_protocol(s.recipe, s.train, s.val, holdout, epoch=s.state.best_epoch),
            **result,
            **{f"val_{name}": s.state.best.get(name) for name in COMPARED_METRICS},
            "processes": s.state.processes,
            "seconds": round(s.state.seconds, 1),
        }
    )
    dist.broadcast_object(None)  # no rank returns before the result is on disk
