"""Change a study from the command line without editing its file, and find what it still needs before it can run."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nearkin.bench.protocols import Protocol
from nearkin.bench.study import Dataset, Study, Trial, check_known, merge
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.errors import ConfigError
from nearkin.losses.registry import LOSSES

_WORD = re.compile(r"[A-Za-z_][\w./:-]*")  # a value of --change that needs no quotes

PROTOCOLS = {
    **{name: Protocol(name) for name in ("last_epoch", "kfold", "fixed", "query_gallery")},
    "best_on_test": Protocol("last_epoch", select_on_test=True),
}


def narrow(
    study: Study,
    *,
    datasets: Sequence[str] = (),
    backbones: Sequence[str] = (),
    losses: Sequence[str] = (),
    sizes: Sequence[int] = (),
    seeds: Sequence[int] = (),
    protocol: str | None = None,
    weights: Sequence[str] = (),
    change: Sequence[str] = (),
    rehearse: bool = False,
) -> Study:
    """Return a study changed by flags of `nearkin bench`; what is not given stays."""
    if datasets:
        known = {dataset.name: dataset for dataset in study.datasets}
        for name in datasets:
            # A study whose recipes support it is transferred to another benchmark.
            if name not in known and not ("{dataset}" in study.base and name in BENCHMARKS):
                check_known("datasets", "dataset", name, known)
        root = next((dataset.root for dataset in study.datasets), None)
        study = replace(study, datasets=tuple(known.get(name, Dataset(name, name, root)) for name in datasets))
    files = dict(study.weights)
    for text in weights:
        backbone, equals, file = text.partition("=")
        if not equals or not file:
            example = "bn_inception=bn_inception-52deb4733.pth"
            raise ConfigError(f"--weights {text}: expected BACKBONE=FILE, such as {example}.")
        if not Path(file).is_file():
            raise ConfigError(f"--weights {text}: {file}: no such file. Expected a .pth or .safetensors file.")
        files[backbone] = str(Path(file).resolve())
    if losses:
        for name in losses:
            check_known("losses", "method", name, study.method_names)
        methods = {name: values for name, values in study.methods.items() if name in losses}
        study = replace(study, losses=tuple(n for n in losses if n not in methods or n in LOSSES), methods=methods)
    if protocol is not None:
        fractions = study.val_fractions if protocol in ("fixed", "query_gallery") else study.val_fractions[:1]
        study = replace(study, protocol=PROTOCOLS[protocol], val_fractions=fractions)
    return replace(
        study,
        backbones=tuple(backbones) or study.backbones,
        sizes=tuple(sizes) or study.sizes,
        seeds=tuple(seeds) or study.seeds,
        weights=files,
        change=_changed(study.change, change),
        rehearsal=study.rehearsal or rehearse,
    )


def _changed(settings: Any, changes: Sequence[str]) -> dict[str, Any]:
    for text in changes:
        key, equals, value = text.partition("=")
        if _WORD.fullmatch(value) and value not in ("true", "false"):
            value = f'"{value}"'
        try:
            settings = merge(settings, tomllib.loads(f"{key} = {value}" if equals else "="))
        except tomllib.TOMLDecodeError:
            raise ConfigError(
                f"--change {text}: expected KEY=VALUE as in a recipe file, such as train.epochs=5 or model.pool=gem."
            ) from None
    return dict(settings)


def requirements(study: Study, trials: Sequence[Trial]) -> list[str]:
    """List what a study still needs before it can run, each with the flag that provides it."""
    needed = []
    for dataset in study.datasets:
        if dataset.source not in BENCHMARKS or study.rehearsal:
            continue
        benchmark = BENCHMARKS[dataset.source]
        if dataset.root is None or benchmark.find(dataset.root) is None:
            where = "" if dataset.root is None else f" not found in {dataset.root};"
            get = f"download it with `nearkin data get {dataset.source}`"
            needed.append(f"{dataset.name}: {benchmark.title}{where} {get}, then pass its folder with --data FOLDER")
    for model in dict.fromkeys(trial.recipe.model for trial in trials):
        if model.backbone == "bn_inception" and model.weights == "default":
            file = "ImageNet weights come as a file, bn_inception-52deb4733.pth (docs/bn-inception.md)"
            needed.append(f"bn_inception: its {file}; pass it with --weights bn_inception=FILE")
        elif model.weights not in ("none", "default") and not Path(model.weights).is_file():
            needed.append(f"{model.backbone}: no weights at {model.weights}; pass --weights {model.backbone}=FILE")
    return list(dict.fromkeys(needed))
