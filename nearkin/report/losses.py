"""Text and plots of `nearkin losses`: the list of losses, and the description of one with a plot of its gradient."""

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import docstring_parser
import torch
from torch import Tensor

from nearkin.bench.paper_studies import papers_of_losses
from nearkin.bench.papers import papers
from nearkin.losses.classes import ToClasses
from nearkin.losses.registry import LOSSES, ONE_PER_CLASS, Loss
from nearkin.losses.regularizers import REGULARIZERS
from nearkin.ops.pairs import Pairs
from nearkin.report.print_figures import plot_lines, save_figure

FAMILIES = {
    "pair": "pairs of the same class are pulled together, pairs of different classes are pushed apart",
    "tuple": "an anchor compared with all its positives and negatives together",
    "neighbour": "the probability that a neighbour drawn by similarity has the same class",
    "proxy": "the batch compared with learned proxies of the classes",
    "softmax": "classification: a softmax over classes",
    "margin_softmax": "a softmax over classes, with the own class made harder by a margin",
    "contrastive": "each positive identified among the other samples of the batch, or of a second tower",
    "ranking": "smooth or binned forms of average precision, recall and the order of positives and negatives",
    "clustering": "the clusters of the batch compared with its classes as wholes",
}


def list_losses() -> str:
    """List every registered loss by family: summary, paper, cost of a batch and the papers whose tables have it.

    Returns:
        The text.
    """
    width, tables = max(map(len, LOSSES)), papers_of_losses()
    lines = []
    for family in dict.fromkeys([*FAMILIES, *(entry.family for entry in LOSSES.values())]):
        entries = [entry for entry in LOSSES.values() if entry.family == family]
        lines += ["", f"{family}: {FAMILIES.get(family, '')}".rstrip(": ")] if entries else []
        for entry in entries:
            lines.append(f"  {entry.name:{width}}  {entry.summary}")
            used = f" In the tables of: {', '.join(tables[entry.name])}." if entry.name in tables else ""
            lines.append(f"  {'':{width}}  {entry.paper}. Cost {entry.cost}.{used}")
    lines += ["", "regularizers: added to a loss by name and weight (--loss.regularizers lp=0.01)"]
    lines += [f"  {name:{width}}  {entry.summary}" for name, entry in REGULARIZERS.items()]
    lines += [
        "",
        "N batch, M references, C classes (C' with two samples in the batch), K centres, P positives, D dimensions.",
        "Tables: " + "; ".join(f"{name} = {paper.title} ({paper.year})" for name, paper in papers().items()) + ".",
        "Run nearkin losses NAME for details.",
    ]
    return "\n".join(lines).lstrip()


def explain(name: str, plot: Path | None = None) -> str:
    """Describe one loss: summary, formula, settings with their ranges, and when to use it.

    Args:
        name: A registered loss.
        plot: Where to write a plot of its gradient, as PNG.

    Returns:
        The text.
    """
    entry = LOSSES[name]
    blocks = {
        "formula": entry.formula,
        "when": entry.use,
        "paper": entry.paper,
        "cost": f"{entry.cost} for a batch",
        "call": entry.call_example,
        "reduction": ", ".join(entry.reductions),
    }
    lines = [f"{name} ({entry.family})", "", entry.summary, ""]
    for title, text in blocks.items():
        lines.append(textwrap.fill(text, 100, initial_indent=f"{title:10}", subsequent_indent=" " * 10))
    if entry.settings:
        lines += ["", "settings"]
        width = max(map(len, entry.settings))
        for key, default, span, text in settings_table(entry):
            lines.append(f"  {key:{width}}  default {default}; {span or 'no search range'}")
            lines += [f"  {'':{width}}  {line}" for line in textwrap.wrap(text, 90)]
    if plot is not None:
        draw_gradient(name, plot)
        lines += ["", f"gradient plot saved to {plot}"]
    return "\n".join(lines)


def settings_table(entry: Loss) -> list[tuple[str, Any, str, str]]:
    """List the settings of a loss, explained by the docstring of the function and by `Inputs.builder_docs`."""
    return [
        (key, default, str(entry.space.get(key, "")), _explanation(entry, key))
        for key, default in entry.settings.items()
    ]


def _explanation(entry: Loss, setting: str) -> str:
    text = _documented_args(entry.function).get(setting) or entry.inputs.builder_docs.get(setting, "")
    # The text may refer to another loss.
    reference = re.fullmatch(r"[Aa]s in `(\w+)`\.?", text)
    return _explanation(LOSSES[reference[1]], setting) if reference else text


def _documented_args(function: Any) -> dict[str, str]:
    """Return the text on each argument in the `Args:` section of a Google-style docstring."""
    params = docstring_parser.google.parse(inspect.getdoc(function) or "").params
    return {param.arg_name.lstrip("*"): " ".join((param.description or "").split()) for param in params}


class Curve(NamedTuple):
    """The gradient on one similarity as it varies over [-1, 1] while the others are fixed."""

    label: str  # "positive" or "negative"
    sim: Tensor
    grad: Tensor  # the gradient of the loss on it [points]


def gradient_curves(name: str, points: int = 201) -> list[Curve]:
    """Compute d loss / d s of one positive and of one negative, with all other similarities fixed.

    For pair losses there is one anchor with positives at 0.7 and at s (or 0.6), and negatives at 0.3, 0 and s (or 0.1).
    For class losses there is one sample, its own class at s (or 0.6) and four others at 0.3, 0.1, 0, and s (or 0.2).

    Args:
        name: A registered loss.
        points: Number of values of s.

    Returns:
        The curves of the positive and of the negative.
    """
    entry = LOSSES[name]
    sweep = torch.linspace(-1, 1, points, dtype=torch.float64)
    build: Callable[[Loss, Tensor], Pairs | ToClasses] = _pair_inputs if entry.inputs.pairs else _class_inputs
    fixed, columns = (0.7, 0.6, 0.3, 0.0, 0.1), (1, 4)
    if not entry.inputs.pairs:
        fixed, columns = (0.6, 0.3, 0.1, 0.0, 0.2), (0, 4)
    curves = []
    for label, column in zip(("positive", "negative"), columns, strict=True):
        grads = []
        for s in sweep.tolist():
            sim = torch.tensor([fixed], dtype=sweep.dtype)
            sim[0, column] = s
            grads.append(similarity_gradient(entry, build(entry, sim))[0].flatten()[column - 5])
        curves.append(Curve(label, sweep, torch.stack(grads)))
    return curves


def similarity_gradient(entry: Loss, built: Any, **settings: Any) -> Tensor:
    """Compute the gradient of the mean of a loss on the similarities of its inputs; 0 where they are not used."""
    sim = built.sim.detach().requires_grad_()
    with torch.enable_grad():
        value = entry.reduce(entry.function(replace(built, sim=sim), **settings), "mean")
        (grad,) = torch.autograd.grad(value, sim, allow_unused=True)
    return torch.zeros_like(sim) if grad is None else grad


def _pair_inputs(entry: Loss, sim: Tensor) -> Pairs:
    pos = torch.tensor([[True, True, False, False, False]])
    if entry.inputs is ONE_PER_CLASS:
        return Pairs(sim[:, 1:], pos[:, 1:], ~pos[:, 1:])
    if entry.inputs.memory:
        return Pairs(sim, pos, ~pos)
    # A loss that compares a batch with itself only: the other four samples have no pairs.
    sim, pos, neg = (torch.nn.functional.pad(x, (0, 0, 0, 4)) for x in (sim, pos, ~pos))
    return Pairs(sim, pos, neg)


def _class_inputs(entry: Loss, sim: Tensor) -> ToClasses:
    proxies, share = torch.eye(5, dtype=sim.dtype), torch.full((1, 5), 0.2, dtype=sim.dtype)
    if entry.inputs.dims:  # several centres per class
        sim, proxies = sim[..., None], proxies[:, None]
    return ToClasses(sim, torch.tensor([0]), proxies=proxies, own=torch.ones(1, dtype=sim.dtype), probs=share)


def draw_gradient(name: str, path: Path, dpi: int = 120) -> None:
    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        curves = [(curve.label, curve.sim.tolist(), curve.grad.tolist()) for curve in gradient_curves(name)]
        plot_lines(axes, curves, "similarity of the pair (the others fixed)", "d loss / d similarity", marker="")
        axes.axhline(0.0, color="0.7", linewidth=0.8)
        axes.set_title(f"{name}: below 0 pulls together, above 0 pushes apart", fontsize=10)

    save_figure(draw, [path], size=(6, 3.5), dpi=dpi)
