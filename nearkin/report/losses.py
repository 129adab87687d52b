"""What `nearkin losses` prints: the list of losses, and one of them explained, with a picture of its gradient."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.errors import import_extra
from nearkin.losses.classes import ToClasses
from nearkin.losses.registry import LOSSES, Loss
from nearkin.ops.pairs import Pairs

FAMILIES = {
    "pair": "each pair of one class is pulled, each pair of two classes is pushed",
    "tuple": "an anchor with its positives and negatives taken together",
    "neighbour": "whether a neighbour drawn by similarity is of the same class",
    "proxy": "the batch against learned proxies of the classes",
    "softmax": "classification: a softmax over classes",
}


def list_losses() -> str:
    """Every registered loss by family: what it does, the paper, what a batch costs."""
    width = max(map(len, LOSSES))
    lines = []
    for family in dict.fromkeys([*FAMILIES, *(entry.family for entry in LOSSES.values())]):
        entries = [entry for entry in LOSSES.values() if entry.family == family]
        lines += ["", f"{family}: {FAMILIES.get(family, '')}".rstrip(": ")] if entries else []
        for entry in entries:
            lines.append(f"  {entry.name:{width}}  {entry.summary}")
            lines.append(f"  {'':{width}}  {entry.paper}. Cost {entry.cost}.")
    lines += [
        "",
        "N batch, M references, C classes (C' with two samples in the batch), K centres, P positives, D dimensions.",
        "nearkin losses NAME explains one.",
    ]
    return "\n".join(lines).lstrip()


def explain(name: str, picture: Path | None = None) -> str:
    """One loss: what it does, its formula, its settings and ranges, when to use it; and a picture if asked."""
    entry = LOSSES[name]
    lines = [
        f"{name} ({entry.family})",
        "",
        entry.summary,
        "",
        _block("formula", entry.formula),
        _block("when", entry.use),
        _block("paper", entry.paper),
        _block("cost", f"{entry.cost} for a batch"),
        _block("takes", entry.takes),
        _block("reduction", ", ".join(entry.reductions)),
    ]
    if entry.settings:
        lines += ["", "settings"]
        width = max(map(len, entry.settings))
        for key, default, span, text in settings_table(entry):
            lines.append(f"  {key:{width}}  default {default}; {span or 'no search range'}")
            lines += [f"  {'':{width}}  {line}" for line in textwrap.wrap(text, 90)]
    if picture is not None:
        draw_gradient(name, picture)
        lines += ["", f"gradient picture written to {picture}"]
    return "\n".join(lines)


def _block(title: str, text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=f"{title:10}", subsequent_indent=" " * 10)


def settings_table(entry: Loss) -> list[tuple[str, Any, str, str]]:
    """(setting, default, range, explanation) for every setting, the explanation read from the docstring."""
    text = inspect.getdoc(entry.function) or ""
    elsewhere = re.search(r"settings as in `(\w+)`", text)
    if elsewhere:
        text += "\n" + (inspect.getdoc(LOSSES[elsewhere[1]].function) or "")
    rows = []
    for key, default in entry.settings.items():
        line = next((li for li in text.splitlines() if li.startswith(f"{key} ")), "")
        words = line[len(key) :].strip() or _BUILDER_SETTINGS.get(key, "")
        rows.append((key, default, str(entry.space.get(key, "")), words))
    return rows


# Settings of the objective rather than of a function: they have no line in a docstring.
_BUILDER_SETTINGS = {
    "normalize": "whether embeddings are scaled to length 1 first",
    "learn_beta": "make beta a parameter, with a learning rate of its own",
    "anchor_grad": "whether the anchor moves as well; False is the literal reading of the paper",
    "dropout": "on the embeddings before the head, in training only",
    "centers": "centres per class",
}

# --- the gradient picture ---------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """The pull on one similarity while it runs over [-1, 1] and the others stay where they are."""

    label: str
    sim: Tensor
    grad: Tensor


def gradient_curves(name: str, points: int = 201) -> list[Curve]:
    """d loss / d s of one positive and of one negative, in a small scene of fixed others.

    For pair losses the scene is one anchor with positives at 0.7 and at s (or 0.6), negatives at 0.3, 0 and s (or
    0.1). For class losses it is one sample, its own class at s (or 0.6) and four others at 0.3, 0.1, 0, and s (or 0.2).
    """
    entry = LOSSES[name]
    sweep = torch.linspace(-1, 1, points, dtype=torch.float64)
    build = _pair_scene if entry.inputs.pairs else _class_scene
    return [Curve(label, sweep, _pull(entry, *build(entry, sweep, label))) for label in ("positive", "negative")]


def _pull(entry: Loss, scenes: list[Any], at: tuple[int, ...]) -> Tensor:
    pulls = []
    for scene in scenes:
        sim = scene.sim.detach().requires_grad_()
        values = {k: v for k, v in vars(scene).items() if k in type(scene).__dataclass_fields__}
        value = entry.reduce(entry.function(type(scene)(**{**values, "sim": sim})), "mean")
        (grad,) = torch.autograd.grad(value, sim, allow_unused=True)
        pulls.append(torch.zeros((), dtype=sim.dtype) if grad is None else grad[at])
    return torch.stack(pulls)


def _pair_scene(entry: Loss, sweep: Tensor, label: str) -> tuple[list[Pairs], tuple[int, ...]]:
    pos = torch.tensor([[True, True, False, False, False]])
    scenes = []
    for s in sweep.tolist():
        row = [0.7, s, 0.3, 0.0, 0.1] if label == "positive" else [0.7, 0.6, 0.3, 0.0, s]
        if entry.name == "lifted_song":
            scenes.append(_square_scene(row))
        elif entry.name == "npair_mc":  # one positive per anchor
            scenes.append(Pairs(torch.tensor([row[1:]], dtype=sweep.dtype), pos[:, 1:], ~pos[:, 1:]))
        else:
            scenes.append(Pairs(torch.tensor([row], dtype=sweep.dtype), pos, ~pos))
    column = 1 if label == "positive" else 4
    return scenes, (0, column - 1 if entry.name == "npair_mc" else column)


def _square_scene(row: list[float]) -> Pairs:
    """The same for a loss that looks from both ends of a positive pair; the far end sees no negatives here."""
    sim = torch.zeros(5, 5, dtype=torch.float64)
    sim[0] = torch.tensor(row)
    pos, neg = torch.zeros(5, 5, dtype=torch.bool), torch.zeros(5, 5, dtype=torch.bool)
    pos[0, :2], neg[0, 2:] = True, True
    return Pairs(sim, pos, neg)


def _class_scene(entry: Loss, sweep: Tensor, label: str) -> tuple[list[ToClasses], tuple[int, ...]]:
    labels, dtype = torch.tensor([0]), sweep.dtype
    several = "centers" in entry.inputs.outer
    scenes = []
    for s in sweep.tolist():
        row = [s, 0.3, 0.1, 0.0, 0.2] if label == "positive" else [0.6, 0.3, 0.1, 0.0, s]
        sim = torch.tensor([row], dtype=dtype)
        scenes.append(
            ToClasses(
                sim[..., None] if several else sim,
                labels,
                proxies=torch.eye(5, dtype=dtype)[:, None] if several else torch.eye(5, dtype=dtype),
                own=torch.ones(1, dtype=dtype),
                probs=torch.full((1, 5), 0.2, dtype=dtype),
            )
        )
    at = (0, 0) if label == "positive" else (0, 4)
    return scenes, (*at, 0) if several else at


def draw_gradient(name: str, path: Path, dpi: int = 120) -> None:
    """The gradient picture of a loss, as PNG: how hard a pair is pulled or pushed, over its similarity."""
    import_extra("matplotlib", extra="report").use("Agg")
    pyplot = import_extra("matplotlib.pyplot", extra="report")
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for curve, colour in zip(gradient_curves(name), ("#1b7837", "#c51b7d"), strict=True):
        axes.plot(curve.sim.numpy(), curve.grad.numpy(), color=colour, label=curve.label)
    axes.axhline(0.0, color="0.7", linewidth=0.8)
    axes.set_xlabel("similarity of the pair (the others fixed)")
    axes.set_ylabel("d loss / d similarity")
    axes.set_title(f"{name}: below 0 pulls together, above 0 pushes apart", fontsize=10)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    pyplot.close(figure)
