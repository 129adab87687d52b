"""`nearkin train`: a recipe by name, from a file, or chosen for the data, changed by flags."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nearkin.cli._arguments import parse, show
from nearkin.config.recipe import ComponentConfig, DataConfig, ModelConfig, Recipe, Scalar, TrainConfig
from nearkin.errors import ConfigError


@dataclass(frozen=True)
class TrainArgs:
    """Train a model, choose its epoch on validation classes and judge it once on sealed test classes.

    As in

    nearkin train glyphs_small --loss multi_similarity --loss.alpha 2 --train.epochs 12

    nearkin train --data photos/   (your images: photos/CLASS/IMAGE.jpg)

    nearkin train --data photos.csv   (columns path and label)

    nearkin train my_recipe.toml --seed 1

    nearkin train folder_finetune --data photos/   (the whole network, not only a head on its features)

    RECIPE comes first: a name, a .toml file or a run folder; flags change it. Names: glyphs_small, folder_default,
    folder_finetune, features_default, from_scratch, cub_lite; the papers' ice_cub, ice_cars, ice_sop, ce_cub, ce_cars,
    ce_sop, ce_inshop, mpa_cub, mpa_cars, mpa_sop, and thesis_LOSS, also thesis_LOSS:DATA:NETWORK:SIZE.

    --weights FILE and --freeze backbone are short for --model.weights and --model.freeze.

    A loss's own settings follow its name as --loss.SETTING VALUE (see: nearkin losses NAME), a miner's likewise.
    The same command again goes on where it was stopped, or says that it is done.
    """

    runs: Path = Path("runs")
    """Folder in which run folders are kept."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""
    quiet: bool = False
    """Print the final table only."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where the numbers of each epoch also go."""
    loss: str = "proxy_anchor"
    """Loss by name; `nearkin losses` lists them."""
    miner: str | None = None
    """Miner by name, for pair losses."""
    memory: int = 0
    """Embeddings of earlier batches kept as further references (pair losses only)."""
    seed: int = 0
    """Draws the first weights and the order of the images."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def run(argv: list[str]) -> None:
    recipe, args = parse_train(argv)
    from nearkin._common.progress import Reporter
    from nearkin.report.text import headline, result_table
    from nearkin.training.loop import fit

    run = fit(recipe, args.runs, device=args.device, trackers=args.log, reporter=Reporter(quiet=args.quiet))
    if not run.is_writer:  # of several processes one talks
        return
    assert run.result is not None
    notes = [f"Note: {note}" for note in run.result["notes"]]
    show(
        result_table(run),
        headline(run),
        *notes,
        f"\nrun:  {run.path}\npage: nearkin report {shlex.quote(str(run.path))}",
    )


SHORT = {"--weights": "--model.weights", "--freeze": "--model.freeze"}


def parse_train(argv: list[str]) -> tuple[Recipe, TrainArgs]:
    """The recipe that `nearkin train` is to run: a named or stored one, changed by flags."""
    from nearkin.training import recipes

    argv = list(argv)
    named = argv.pop(0) if argv and not argv[0].startswith("-") else None
    settings: dict[str, dict[str, Scalar]] = {"loss": {}, "miner": {}}
    flags: list[str] = []
    given: Path | None = None
    while argv:
        flag, equals, value = argv.pop(0).partition("=")
        flag = SHORT.get(flag, flag)
        owner, dot, setting = flag.removeprefix("--").partition(".")
        if flag == "--data" or (flag.startswith("--") and dot and owner in settings):
            if not equals:
                if not argv:
                    raise ConfigError(f"{flag}: a value is needed.")
                value = argv.pop(0)
            if flag == "--data":
                given = Path(value).resolve()  # the run folder must find its data from anywhere
            elif setting == "name":
                flags += [f"--{owner}", value]
            else:
                settings[owner][setting.replace("-", "_")] = _scalar(value)
        else:
            flags.append(f"{flag}{equals}{value}")

    if given is None:
        recipe = recipes.find(named or "glyphs_small")
    else:
        from nearkin.data.sources import detect_source

        source = detect_source(given)
        if named:
            recipe = recipes.find(named)
            recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, source=source, root=given))
        else:
            recipe, why = _recipe_for(source, given, flags)
            if "--quiet" not in flags and os.environ.get("RANK", "0") == "0":  # of several processes one talks
                print(f"recipe: {why}", file=sys.stderr)
    default = TrainArgs(
        loss=recipe.loss.name,
        miner=recipe.miner.name if recipe.miner else None,
        memory=recipe.memory,
        seed=recipe.seed,
        data=recipe.data,
        model=recipe.model,
        train=recipe.train,
    )
    args = parse(TrainArgs, flags, f"nearkin train {named or '[RECIPE]'}", default)
    miner = None if args.miner in (None, "none") else args.miner
    if recipe.miner and args.loss != recipe.loss.name and not _names("--miner", flags) and not _takes_miner(args.loss):
        miner = None  # it belonged to the recipe's own loss, as that one's settings did
    recipe = Recipe(
        data=args.data,
        model=args.model,
        loss=_choice(args.loss, recipe.loss, settings["loss"]),
        miner=_choice(miner, recipe.miner, settings["miner"]) if miner else None,
        train=args.train,
        memory=args.memory,
        seed=args.seed,
    )
    if settings["miner"] and recipe.miner is None:
        raise ConfigError(f"--miner.{next(iter(settings['miner']))}: no miner is chosen. Give one with --miner NAME.")
    return recipe, args


def _recipe_for(source: str, given: Path, flags: list[str]) -> tuple[Recipe, str]:
    """The recipe for data that came without one, for the device that will be used."""
    from nearkin.training.auto_recipe import choose_recipe
    from nearkin.training.factory import choose_device

    given_as = DataConfig(
        source=source,
        root=given,
        allow_missing=True,
        path_column=_value_of("--data.path-column", flags),
        label_column=_value_of("--data.label-column", flags),
    )
    return choose_recipe(given_as, gpu=choose_device(_value_of("--device", flags) or "auto").type == "cuda")


def _names(flag: str, flags: list[str]) -> bool:
    return any(word.partition("=")[0] == flag for word in flags)


def _takes_miner(loss: str) -> bool:
    from nearkin.losses import LOSSES

    return LOSSES[loss].inputs.pairs


def _value_of(flag: str, flags: list[str]) -> str | None:
    """The value of a flag that is needed before all are parsed, as `--flag value` or `--flag=value`."""
    for place, word in enumerate(flags):
        if word == flag:
            return flags[place + 1] if place + 1 < len(flags) else None
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _choice(name: str, before: ComponentConfig | None, changed: dict[str, Scalar]) -> ComponentConfig:
    """Another loss starts from its own defaults; the same one keeps the recipe's settings."""
    kept = before.settings if before is not None and before.name == name else {}
    return ComponentConfig(name, {**kept, **changed})


def _scalar(text: str) -> Scalar:
    """A setting's value as TOML would read it, a bare word as text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
