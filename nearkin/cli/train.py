"""`nearkin train`: train with a recipe, given by name, by file or chosen for the data, and changed by flags."""

import dataclasses
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nearkin._common.progress import Reporter
from nearkin.cli._arguments import Device, Quiet, Runs, command_line, parse, require_names, require_path, show
from nearkin.config.recipe import ComponentConfig, DataConfig, EvalConfig, ModelConfig, Recipe, Scalar, TrainConfig
from nearkin.errors import ConfigError, require_extra
from nearkin.report.baselines import comparison_lines, headline
from nearkin.report.tables import result_table


@dataclass(frozen=True)
class TrainArgs:
    """Train a model, select its epoch on validation classes and evaluate it once on sealed test classes.

    For example:

    nearkin train glyphs_small --loss multi_similarity --loss.alpha 2 --train.epochs 12

    nearkin train --data photos/   (your images: photos/CLASS/IMAGE.jpg)

    nearkin train --data photos/ --budget 30m   (the best model that half an hour can find)

    nearkin train --data photos/ --freeze stages --distil runs/LARGE   (a small network taught by a large one)

    nearkin train --data photos.csv   (columns path and label)

    nearkin train my_recipe.toml --seed 1

    nearkin train --loss proxy_anchor+0.1*contrastive   (a weighted sum of losses)

    nearkin train --loss triplet --reduction nonzero --loss.regularizers lp=0.01,zero_mean=0.1

    nearkin train folder_finetune --data photos/   (fine-tune the whole network, not only a head on its features)

    RECIPE comes first: a name, a .toml file or a run folder. Flags override its settings. Names: glyphs_small,
    folder_default, folder_finetune, features_default, from_scratch, cub_lite; for a GPU: dinov2_small, dinov2_base,
    dinov3_small, dinov3_base, clip_base, siglip_base (low-rank: dinov2_small_lora, dinov2_base_lora, dinov3_small_lora,
    dinov3_base_lora, clip_base_lora, siglip_base_lora), convnext_tiny, convnext_base; from papers: ice_cub, ice_cars,
    ice_sop, ce_cub, ce_cars, ce_sop, ce_inshop, mpa_cub, mpa_cars, mpa_sop, thesis_LOSS or
    thesis_LOSS:DATA:NETWORK:SIZE, thesis_tuned_LOSS; and as BASELINE:DATA what they are compared with: cce,
    norm_softmax, triplet_semihard, lifted_struct, n_pair_mc, proxy_nca, margin, multi_similarity.

    --data PATH (a folder, .csv, .parquet or .npz) sets --data.source and --data.root. --weights FILE, --freeze backbone
    and --reduction sum are short for --model.weights FILE, --model.freeze backbone and --loss.reduction sum.

    Without RECIPE it is glyphs_small, whose defaults are shown below. With --data PATH it is features_default for
    features, from_scratch for 2,000 or more images smaller than 64 pixels, folder_finetune with a CUDA GPU, else
    folder_default. `nearkin train --data PATH --show` prints the settings that would be used.

    Set hyperparameters of the loss with --loss.SETTING VALUE (see: nearkin losses NAME), of the miner with
    --miner.SETTING VALUE. Settings of a sum of losses belong in a recipe file. Repeat the command to resume an
    interrupted run; a complete run is not trained again.
    """

    runs: Runs = Path("runs")
    device: Device = "auto"
    quiet: Quiet = False
    show: bool = False  # Print the recipe with all settings, as a .toml file, instead of training.
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()  # Experiment trackers that also log every epoch.
    loss: str = "proxy_anchor"
    """Name of the loss (`nearkin losses` lists them), or a sum such as proxy_anchor+0.1*contrastive."""
    miner: str | None = None
    """Miner, for pair losses: hard, semihard, multi_similarity, distance_weighted, random, all, or none."""
    memory: int = 0
    """Size of the cross-batch memory: embeddings of earlier batches used as extra references (pair losses only)."""
    budget: str | None = None
    """Find the best model in a given time, such as 5m, 30m or 2h, instead of training one recipe; with --data."""
    seed: int = 0  # Seed of the initial weights and of the order of the images.
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


def run(argv: list[str]) -> None:
    recipe, args = parse_train(argv)
    if args.show:
        print(recipe.to_toml(), end="")
        return
    if recipe.data.source != "features":
        require_extra("images", "PIL")
    from nearkin.training.run import refuse_if_busy

    if "RANK" not in os.environ:  # before torch is imported; the processes of torchrun start at different times
        refuse_if_busy(recipe, args.runs)
    from nearkin.training.autopilot import fit_within
    from nearkin.training.loop import fit

    reporter = Reporter(quiet=args.quiet)
    if args.budget is not None:
        run = fit_within(recipe, _seconds(args.budget), args.runs, device=args.device, reporter=reporter)
    else:
        run = fit(recipe, args.runs, device=args.device, trackers=args.log, reporter=reporter)
    if not run.is_writer:  # only the main process prints
        return
    assert run.result is not None
    notes = [f"Note: {note}" for note in run.result["notes"]]
    paths = f"\nrun:    {run.path}\nreport: {command_line('report', str(run.path))}"
    show(result_table(run), headline(run), *comparison_lines(run.result), *notes, paths)


ALIASES = {
    "--distil": "--train.teacher",
    "--weights": "--model.weights",
    "--freeze": "--model.freeze",
    "--reduction": "--loss.reduction",
}

# Flags that go with --budget, besides --data.*.
_WITH_BUDGET = ("--budget", "--runs", "--device", "--quiet", "--show", "--seed")

Settings = dict[str, Scalar]


@dataclass
class _Arguments:
    """The arguments of `nearkin train` before the flags are parsed."""

    recipe: str | None
    data: Path | None = None
    flags: list[str] = field(default_factory=list)
    settings: dict[str, Settings] = field(default_factory=lambda: {"loss": {}, "miner": {}})
    regularizers: dict[str, float] = field(default_factory=dict)


def parse_train(argv: list[str]) -> tuple[Recipe, TrainArgs]:
    """Build the recipe of `nearkin train`. Returns the recipe changed by the flags, and the flags."""
    arguments = _split_arguments(argv)
    _check_budget(arguments)
    losses, miner = (_flag_value(f"--{kind}", arguments.flags) for kind in ("loss", "miner"))
    if losses is not None:  # before the data are looked at
        require_names("loss", [loss.name for _, loss in ComponentConfig.parse_sum(losses).terms])
    if miner not in (None, "none"):
        require_names("miner", [str(miner)])
    require_names("regularizer", arguments.regularizers)
    base = _base_recipe(arguments)
    shared = {name: getattr(base, name) for name in ("memory", "seed", "data", "model", "train", "eval")}
    epochs, steps = (_flag_value(f"--train.{name}", arguments.flags) for name in ("epochs", "steps"))
    if epochs is not None and steps is not None:
        raise ConfigError("--train.epochs and --train.steps: both set the length of training. Give one.")
    if epochs is not None:  # replaces the recipe's number of steps
        shared["train"] = dataclasses.replace(base.train, steps=None)
    defaults = TrainArgs(loss=base.loss.name, miner=base.miner.name if base.miner else None, **shared)
    args = parse(TrainArgs, arguments.flags, f"nearkin train {arguments.recipe or '[RECIPE]'}", defaults)
    miner, settings = _miner_name(args, base, arguments.flags), arguments.settings
    if settings["miner"] and miner is None:
        raise ConfigError(
            f"--miner.{next(iter(settings['miner']))}: no miner is selected. Select one with --miner NAME."
        )
    recipe = Recipe(
        loss=_override_loss(args.loss, base.loss, settings["loss"], arguments.regularizers),
        miner=_override(miner, base.miner, settings["miner"]) if miner else None,
        **{name: getattr(args, name) for name in shared},
    )
    return recipe, args


def _split_arguments(argv: list[str]) -> _Arguments:
    """Separate the recipe, --data and the settings of loss and miner from the flags that tyro parses."""
    argv = list(argv)
    arguments = _Arguments(recipe=argv.pop(0) if argv and not argv[0].startswith("-") else None)
    while argv:
        flag, equals, value = argv.pop(0).partition("=")
        flag = ALIASES.get(flag, flag)
        component, dot, setting = flag.removeprefix("--").partition(".")
        is_setting = flag.startswith("--") and dot and component in arguments.settings
        if flag != "--data" and not is_setting:
            arguments.flags.append(f"{flag}{equals}{value}")
            continue
        if not equals:
            if not argv:
                raise ConfigError(f"{flag}: missing value.")
            value = argv.pop(0)
        if flag == "--data":
            require_path(value, "a folder of images, a .csv, .parquet or .npz file")
            arguments.data = Path(value).resolve()  # the run folder must find its data from any working directory
        elif setting == "name":
            arguments.flags += [f"--{component}", value]
        elif flag == "--loss.regularizers":
            terms = (term.partition("=") for term in value.split(","))
            try:
                arguments.regularizers = {name: float(weight) for name, _, weight in terms}
            except ValueError:
                raise ConfigError(f"{flag} {value}: expected weights such as lp=0.01,zero_mean=0.1.") from None
        else:
            arguments.settings[component][setting.replace("-", "_")] = _scalar(value)
    return arguments


def _base_recipe(arguments: _Arguments) -> Recipe:
    from nearkin.training import recipes

    root = arguments.data
    if root is None:
        return recipes.find(arguments.recipe or "glyphs_small")
    from nearkin.data.sources import detect_source

    source, flags = detect_source(root), arguments.flags
    if arguments.recipe:
        recipe = recipes.find(arguments.recipe)
        return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, source=source, root=root))
    from nearkin.training.auto_recipe import choose_recipe
    from nearkin.training.device import choose_device

    path, label = (_flag_value(f"--data.{name}-column", flags) for name in ("path", "label"))
    data = DataConfig(source=source, root=root, allow_missing=True, path_column=path, label_column=label)
    budget = _flag_value("--budget", flags)
    gpu = budget is None and choose_device(_flag_value("--device", flags) or "auto").type == "cuda"
    recipe, reason = choose_recipe(data, gpu=gpu)
    if budget is None and "--quiet" not in flags and os.environ.get("RANK", "0") == "0":  # only the main process prints
        print(f"recipe: {reason}", file=sys.stderr)
    return recipe


def _check_budget(arguments: _Arguments) -> None:
    """Refuse what --budget would ignore, before the data are looked at."""
    budget = _flag_value("--budget", arguments.flags)
    if budget is None:
        return
    _seconds(budget)
    if arguments.recipe or arguments.data is None:
        raise ConfigError("--budget: chooses the recipe for your images. Use: nearkin train --data FOLDER --budget 30m")
    others = [flag.partition("=")[0] for flag in arguments.flags if flag.startswith("--")]
    others += [f"--{name}.{key}" for name, settings in arguments.settings.items() for key in settings]
    taken = [f for f in others if not f.startswith("--data.") and f not in _WITH_BUDGET]
    if taken or arguments.regularizers:
        raise ConfigError(f"{[*taken, '--loss.regularizers'][0]}: --budget chooses it. Leave out one of the two.")


def _seconds(text: str) -> float:
    """Parse a time such as 90s, 30m or 1.5h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if found is None:
        raise ConfigError(f"--budget {text}: expected a time such as 90s, 30m or 1.5h.")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _flag_value(flag: str, flags: list[str]) -> str | None:
    """Return the value of a flag before all flags are parsed, given as `--flag value` or `--flag=value`."""
    for i, word in enumerate(flags):
        if word == flag:
            return flags[i + 1] if i + 1 < len(flags) else None
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _miner_name(args: TrainArgs, base: Recipe, flags: list[str]) -> str | None:
    """Return the miner to use. The recipe's miner is dropped if a new loss cannot use it."""
    if base.miner and args.loss != base.loss.name and _flag_value("--miner", flags) is None:
        from nearkin.losses import LOSSES

        losses = ComponentConfig.parse_sum(args.loss).terms
        return args.miner if any(LOSSES[loss.name].inputs.pairs for _, loss in losses) else None
    return None if args.miner == "none" else args.miner


def _override(name: str, base: ComponentConfig | None, settings: Settings) -> ComponentConfig:
    """Change the settings of a component. A component with a new name starts from its own defaults."""
    inherited = base.settings if base is not None and base.name == name else {}
    return ComponentConfig(name, {**inherited, **settings})


def _override_loss(
    name: str, base: ComponentConfig, settings: Settings, regularizers: dict[str, float]
) -> ComponentConfig:
    """Change the loss of a recipe. A new loss starts without the regularisers of the recipe's."""
    loss = base if name == base.name else ComponentConfig.parse_sum(name)
    if not loss.parts:
        kept = {**loss.regularizers, **regularizers}
        return dataclasses.replace(_override(name, base, settings), regularizers=kept)
    if settings or regularizers:
        setting = next(iter(settings), "regularizers")
        raise ConfigError(f"--loss.{setting}: {name} is a sum. Write the settings of its parts in a recipe: [[loss]].")
    return loss


def _scalar(text: str) -> Scalar:
    """Parse the value of a setting as TOML would; other words are strings."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text
