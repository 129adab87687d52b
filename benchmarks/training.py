"""What `fit` costs beyond a bare PyTorch loop on the same model, data and loader, and what its diagnostics cost.

    python benchmarks/training.py                      # the built-in glyphs, small_conv
    python benchmarks/training.py --data CUB_200_2011  # photos, EfficientNet-Lite0 at 128 pixels, a part of an epoch

The bare loop is what one would write by hand: batches from our loader, forward, loss, backward, a step, the loss read
for the log. `fit` does all it does: learning-rate schedule, checks for numbers that are not finite, clipping, progress,
random draws that can be repeated. Both take turns, in one process, and medians are compared.
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
from nearkin.config.recipe import Recipe
from nearkin.data import sources
from nearkin.data.batches import training_inputs
from nearkin.data.samplers import make_sampler
from nearkin.data.splits import make_split
from nearkin.training import loop, recipes
from nearkin.training.evaluation import embed_table
from nearkin.training.factory import make_model, make_objective

QUIET = Reporter(quiet=True)


def bare_epoch(recipe: Recipe, part: int | None) -> float:
    """Seconds of one epoch by hand, without set-up."""
    table = sources.load(recipe.data, QUIET)
    split, _ = make_split(table, recipe.data)
    model = make_model(recipe, table, QUIET)
    model.fit_pixel_norm(split.train.images)
    model.train()
    objective = make_objective(recipe, model.dim, split.train.num_classes)
    optimizer = torch.optim.AdamW([*model.parameters(), *objective.parameters()], lr=1e-4)
    labels = torch.from_numpy(split.train.labels)
    hyper = recipe.train
    sampler = make_sampler(
        split.train.labels, batch_size=hyper.batch_size, samples_per_class=hyper.samples_per_class, seed=0
    )
    plan = sampler.epoch(0)[:part]
    began = 0.0
    for rows, batch in zip(plan, training_inputs(split.train, plan, recipe, epoch=0), strict=True):
        began = began or time.perf_counter()  # the wait for the first batch is left out on both sides
        loss = objective(model(batch), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
    return time.perf_counter() - began


def fit_epoch(recipe: Recipe, part: int | None) -> float:
    """Seconds of the steps inside `fit`: from the first learning rate that is set to the end of the last step."""
    seen: list[float] = []
    real_rate, real_judge = loop.set_learning_rate, loop.judge_epoch

    def rate(*given: object) -> None:
        seen.append(time.perf_counter())
        real_rate(*given)  # type: ignore[arg-type]

    def judged(*given: object, **named: object) -> str:
        if named["epoch"]:
            seen.append(time.perf_counter())
        return real_judge(*given, **named)  # type: ignore[arg-type]

    class Shortened:
        def __init__(self, sampler: object) -> None:
            self.__dict__.update(sampler.__dict__)
            self.batches_per_epoch, self.epoch = part, lambda number: sampler.epoch(number)[:part]

    def make(*given: object, **named: object) -> object:
        sampler = make_sampler(*given, **named)  # type: ignore[arg-type]
        return Shortened(sampler) if part else sampler

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(loop, "set_learning_rate", rate),
        mock.patch.object(loop, "judge_epoch", judged),
        mock.patch.object(loop, "make_sampler", make),
    ):
        loop.fit(recipe, folder, final=False, device="cpu", reporter=QUIET)
    return seen[-1] - seen[0]


def diagnostics_cost(recipe: Recipe) -> float:
    """Seconds that the panel takes on the validation embeddings, beside scoring them."""
    table = sources.load(recipe.data, QUIET)
    split, _ = make_split(table, recipe.data)
    assert split.val is not None
    emb = embed_table(make_model(recipe, table, QUIET), split.val, raw=True)
    labels = torch.from_numpy(split.val.labels)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        diagnose(emb, labels)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a CUB_200_2011 folder; by default the built-in glyphs")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--part", type=int, help="steps of the epoch to time; by default 12 with photos, else all")
    args = parser.parse_args()
    recipe, part = recipes.glyphs_small(), args.part
    if args.data:
        recipe = recipes.cub_lite()
        recipe = replace(recipe, data=replace(recipe.data, root=args.data))
        part = part or 12
    recipe = replace(recipe, train=replace(recipe.train, epochs=1))
    bare_epoch(recipe, 2)
    bare, ours = [], []
    for turn in range(args.repeat):
        for which in (bare, ours) if turn % 2 else (ours, bare):
            which.append(bare_epoch(recipe, part) if which is bare else fit_epoch(recipe, part))
        print(f"turn {turn + 1}: bare {bare[-1]:.2f} s, fit {ours[-1]:.2f} s", flush=True)
    ratio = statistics.median(np.array(ours) / np.array(bare))
    print(f"fit / bare loop, median of {args.repeat}: {ratio:.3f}")
    seconds, epoch = diagnostics_cost(recipe), statistics.median(bare)
    print(f"diagnostics: {1000 * seconds:.0f} ms per epoch, {seconds / epoch:.1%} of what was timed")


if __name__ == "__main__":
    main()
