"""Studies by name: `nearkin bench run tiny`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin._common.registry import Registry
from nearkin.errors import ConfigError
from nearkin.training.recipes import THESIS

if TYPE_CHECKING:
    from nearkin.bench.study import Study

PRESETS: Registry[Callable[[Path | None], Study]] = Registry("study")

# Losses whose published scale means something else on a small or whitened head; the same wherever losses are compared.
SCALES = {
    "norm_softmax": {"loss": {"temperature": 0.1}},
    "proxy_nca": {"loss": {"scale": 8.0}},
    "ice": {"loss": {"scale": 16.0}},
}


def _preset(make: Callable[[Path | None], Study]) -> Callable[[Path | None], Study]:
    return PRESETS.add(make.__name__, make)


@_preset
def tiny(data: Path | None) -> Study:
    """Every loss on the built-in glyphs, two sizes, two seeds: the whole machinery in minutes on two cores."""
    if data is not None:
        raise ConfigError("--data: tiny has its own data. Write a study file for yours (see docs/bench.md).")
    from nearkin.bench.protocols import Protocol
    from nearkin.bench.study import Study

    return Study(
        name="tiny",
        base="glyphs_small",
        losses=("all",),
        sizes=(32, 128),
        seeds=(0, 1),
        protocol=Protocol("fixed"),
        keep_models=False,
        change={"model": {"width": 8}, "train": {"epochs": 3}},
        methods=SCALES,
    )


@_preset
def features(data: Path | None) -> Study:
    """Every loss as a head on ready features (--data FILE.npz, first half of the classes trains), 4 sizes, 3 seeds."""
    if data is None:
        raise ConfigError("features: an .npz file with `features` [N, F] and `labels` [N] is needed: --data FILE.npz.")
    from nearkin.bench.protocols import Protocol
    from nearkin.bench.study import Dataset, Study

    return Study(
        name="features",
        base="features_default",
        losses=("all",),
        datasets=(Dataset(data.stem, "features", data.resolve()),),
        sizes=(64, 128, 256, 512),
        seeds=(0, 1, 2),
        protocol=Protocol("fixed"),
        val_fractions=(0.2,),
        resplit=True,
        keep_models=False,
        change={
            "data": {"split": "half"},
            "train": {"epochs": 6, "samples_per_class": 4, "lr_schedule": "constant"},
        },
        methods=SCALES,
    )


@_preset
def thesis(data: Path | None) -> Study:
    """The thesis's matrix: 3 data sets (below --data) x 3 networks x 10 losses x 4 sizes. Made for GPUs."""
    from nearkin.bench.protocols import Protocol
    from nearkin.bench.study import Dataset, Study

    root = Path("data") if data is None else data
    return Study(
        name="thesis",
        base="thesis_{loss}:{dataset}:{backbone}:{size}",
        losses=tuple(THESIS),
        datasets=tuple(Dataset(name, name, root.resolve()) for name in ("cub", "cars", "sop")),
        backbones=("googlenet", "bn_inception", "resnet50"),
        sizes=(64, 128, 512, 1024),
        protocol=Protocol("fixed"),
    )


def find_study(name: str, data: Path | None = None) -> Study:
    """A study by its name here, or from a TOML file or the folder of a study that was begun."""
    path = Path(name)
    if name in PRESETS:
        return PRESETS[name](data)
    if path.is_dir():
        path = path / "study.toml"
    if path.suffix == ".toml":
        if data is not None:
            raise ConfigError("--data: only with a study by name; a study file names its data itself.")
        from nearkin.bench.study import Study

        return Study.from_toml(path)
    _ = PRESETS[name]
    raise AssertionError
