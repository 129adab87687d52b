"""Overhead of `fit` over a plain PyTorch loop with the same model, data and loader, and cost of its diagnostics.

    python benchmarks/training.py                      # the built-in glyphs, small_conv
    python benchmarks/training.py --data CUB_200_2011  # photos, EfficientNet-Lite0 at 128 pixels, part of an epoch

The plain loop is what one would write by hand: a batch from our loader, forward, loss, backward, step, and reading the
loss for the log. `fit` adds the learning-rate schedule, checks for NaN and infinity, clipping, progress and
reproducible random numbers. Both alternate in one process; the result is the median ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from nearkin._common.progress import Reporter
from nearkin.analysis.diagnostics import diagnose
from nearkin.config import Recipe
from nearkin.data import sources
from nearkin.data.samplers import make_sampler
from nearkin.data.splits import make_split
from nearkin.data.transforms import training_inputs
from nearkin.training import loop, recipes
from nearkin.training.evaluation import embed_table
from nearkin.training.factory import make_model, make_objective

QUIET = Reporter(quiet=True)


def time_plain_loop(recipe: Recipe, steps: int | None) -> float:
    """Return the seconds of one epoch of the plain loop, without set-up; `steps` limits the epoch."""
    table = sources.load(recipe.data, QUIET)
    split, _ = make_split(table, recipe.data)
    model = make_model(recipe, table, QUIET)
    model.fit_pixel_norm(split.train.images)
    model.train()
    objective = make_objective(recipe, model.dim, split.train.num_classes)
    optimizer = torch.optim.AdamW([*model.parameters(), *objective.parameters()], lr=1e-4)
    labels = torch.from_numpy(split.train.labels)
    config = recipe.train
    sampler = make_sampler(
        split.train.labels, batch_size=config.batch_size, samples_per_class=config.samples_per_class, seed=0
    )
    plan = sampler.epoch(0)[:steps]
    start = 0.0
    for rows, batch in zip(plan, training_inputs(split.train, plan, recipe, epoch=0), strict=True):
        start = start or time.perf_counter()  # neither loop counts the wait for the first batch
        loss = objective(model(batch), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
    return time.perf_counter() - start


def time_fit(recipe: Recipe, steps: int | None) -> float:
    """Return the seconds of one epoch inside `fit`: from the first learning rate set to the end of the last step."""
    times: list[float] = []
    set_learning_rate, evaluate_epoch = loop.set_learning_rate, loop.evaluate_epoch

    def timed_set_learning_rate(*args: object) -> None:
        times.append(time.perf_counter())
        set_learning_rate(*args)  # type: ignore[arg-type]

    def timed_evaluate_epoch(*args: object, epoch: int) -> str:
        if epoch:
            times.append(time.perf_counter())
        return evaluate_epoch(*args, epoch=epoch)  # type: ignore[arg-type]

    class ShortSampler:
        def __init__(self, sampler: object) -> None:
            self.__dict__.update(sampler.__dict__)
            self.batches_per_epoch, self.epoch = steps, lambda epoch: sampler.epoch(epoch)[:steps]

    def make_short_sampler(*args: object, **kwargs: object) -> object:
        sampler = make_sampler(*args, **kwargs)  # type: ignore[arg-type]
        return ShortSampler(sampler) if steps else sampler

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(loop, "set_learning_rate", timed_set_learning_rate),
        mock.patch.object(loop, "evaluate_epoch", timed_evaluate_epoch),
        mock.patch.object(loop, "make_sampler", make_short_sampler),
    ):
        loop.fit(recipe, folder, final=False, device="cpu", reporter=QUIET)
    return times[-1] - times[0]


def time_diagnostics(recipe: Recipe) -> float:
    """Return the seconds of the diagnostics on the validation embeddings, without scoring them."""
    table = sources.load(recipe.data, QUIET)
    split, _ = make_split(table, recipe.data)
    assert split.val is not None
    emb = embed_table(make_model(recipe, table, QUIET), split.val, raw=True)
    labels = torch.from_numpy(split.val.labels)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        diagnose(emb, labels)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a CUB_200_2011 folder; by default the built-in glyphs")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--part", type=int, help="number of steps to time; by default 12 with photos, else the whole epoch"
    )
    args = parser.parse_args()
    recipe, steps = recipes.glyphs_small(), args.part
    if args.data:
        recipe = recipes.cub_lite()
        recipe = replace(recipe, data=replace(recipe.data, root=args.data))
        steps = steps or 12
    recipe = replace(recipe, train=replace(recipe.train, epochs=1))
    time_plain_loop(recipe, 2)  # warm-up
    plain, fit = [], []
    for repeat in range(args.repeat):
        for times in (plain, fit) if repeat % 2 else (fit, plain):
            times.append(time_plain_loop(recipe, steps) if times is plain else time_fit(recipe, steps))
        print(f"repeat {repeat + 1}: plain loop {plain[-1]:.2f} s, fit {fit[-1]:.2f} s", flush=True)
    ratio = statistics.median(np.array(fit) / np.array(plain))
    print(f"fit / plain loop, median of {args.repeat}: {ratio:.3f}")
    seconds, epoch = time_diagnostics(recipe), statistics.median(plain)
    print(f"diagnostics: {1000 * seconds:.0f} ms per epoch, {seconds / epoch:.1%} of the timed steps")


if __name__ == "__main__":
    main()
