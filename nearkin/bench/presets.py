"""Studies available by name: `nearkin bench run tiny`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin._common.registry import Registry
from nearkin.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from nearkin.bench.study import Study

PRESETS: Registry[Callable[[Path | None], Study]] = Registry("study")

# Losses whose published scale does not suit a small or whitened head; shared by every comparison of losses.
SCALES = {
    "norm_softmax": {"loss": {"temperature": 0.1}},
    "proxy_nca": {"loss": {"scale": 8.0}},
    "ice": {"loss": {"scale": 16.0}},
}


def _preset(build: Callable[[Path | None], Study]) -> Callable[[Path | None], Study]:
    return PRESETS.add(build.__name__, build)


@_preset
def tiny(data: Path | None) -> Study:
    """All losses on the built-in glyphs, 2 embedding sizes, 2 seeds; minutes on two cores."""
    if data is not None:
        fix = "Write a study file for your own data (see docs/bench.md)."
        raise ConfigError(f"--data: tiny uses the built-in glyphs. {fix}")
    from nearkin.bench.study import Study

    return Study(
        name="tiny",
        losses=("all",),
        sizes=(32, 128),
        seeds=(0, 1),
        keep_models=False,
        change={"model": {"width": 8}, "train": {"epochs": 3}},
        methods=SCALES,
    )


@_preset
def features(data: Path | None) -> Study:
    """All losses as heads on precomputed features (--data FILE.npz); half of the classes train; 4 sizes, 3 seeds."""
    if data is None:
        raise ConfigError("features: no data. Pass --data FOLDER with your images, or --data FILE.npz with features.")
    from nearkin.bench.study import Dataset, Study

    return Study(
        name="features",
        base="features_default",
        losses=("all",),
        datasets=(Dataset(data.stem, "features", data.resolve()),),
        sizes=(64, 128, 256, 512),
        seeds=(0, 1, 2),
        val_fractions=(0.2,),
        resplit=True,
        keep_models=False,
        change={"data": {"split": "half"}, "train": {"epochs": 6, "samples_per_class": 4, "lr_schedule": "constant"}},
        methods=SCALES,
    )


@_preset
def thesis(data: Path | None) -> Study:
    """The thesis's matrix: 3 datasets (folders in --data) x 3 backbones x 10 losses x 4 sizes. Needs a GPU."""
    from nearkin.bench.study import Dataset, Study
    from nearkin.training.recipes import THESIS

    return Study(
        name="thesis",
        base="thesis_{loss}:{dataset}:{backbone}:{size}",
        losses=tuple(THESIS),
        datasets=tuple(Dataset(name, name, data and data.resolve()) for name in ("cub", "cars", "sop")),
        backbones=("googlenet", "bn_inception", "resnet50"),
        sizes=(64, 128, 512, 1024),
    )


def check_study_name(name: str) -> None:
    """Refuse a name that is neither a preset, a table or figure of a paper, a .toml file nor a folder."""
    from nearkin.bench.papers import study_entries

    if name not in PRESETS and Path(name).suffix != ".toml" and not Path(name).is_dir():
        known = [*PRESETS, *study_entries()]
        if name not in known:
            hint = did_you_mean(name, known) or f" Available: {', '.join(PRESETS)}, and those of: nearkin papers."
            raise ConfigError(f"No study named '{name}'.{hint}")


def find_study(name: str, data: Path | None = None) -> Study:
    """Find a study.

    Args:
        name: The name of a preset, a TOML file, or the folder of a study.
        data: The data of a preset that needs some.

    Returns:
        The study.

    Raises:
        ConfigError: No such study, or `data` for a study that names its own data.
    """
    from nearkin.bench.paper_studies import paper_studies

    path = Path(name)
    if name in paper_studies():
        study = paper_studies()[name].build()
        if study is None:
            raise ConfigError(f"{name}: nothing to train. Compute it with: nearkin papers {name}")
        return study if data is None else with_data(study, data.resolve())
    if name not in PRESETS and path.is_dir():
        path = path / "study.toml"
    if name in PRESETS or path.suffix != ".toml":
        return PRESETS[name](data)
    from nearkin.bench.study import Study

    study = Study.from_toml(path)
    return study if data is None else with_data(study, data.resolve())


def with_data(study: Study, path: Path) -> Study:
    """Return a study with its datasets at a path: the folder of benchmarks, or a user's own images for a single one."""
    from nearkin.bench.study import Dataset
    from nearkin.data.benchmarks import BENCHMARKS
    from nearkin.data.sources import detect_source

    if not path.exists():
        raise DataError(f"--data {path}: no such file or folder.")
    here = {d.name: d.source in BENCHMARKS and BENCHMARKS[d.source].find(path) is not None for d in study.datasets}
    if all(here.values()) and here:
        return replace(study, datasets=tuple(replace(d, root=path) for d in study.datasets))
    source = detect_source(path)
    if not study.datasets:
        return replace(study, datasets=(Dataset(path.stem, source, path),))
    if source in BENCHMARKS or len(study.datasets) != 1:
        missing = [name for name, found in here.items() if not found]
        raise DataError(
            f"--data {path}: does not contain {', '.join(missing)}. Download them with `nearkin data get NAME --root "
            f"{path}`, or choose among the study's datasets with --datasets."
        )
    (dataset,) = study.datasets
    return replace(study, datasets=(Dataset(path.stem, source, path, dataset.recipe or dataset.source),))
