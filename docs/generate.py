"""Write the pages under docs/losses from the registry: one page per family, one plot per loss.

    python docs/generate.py             write pages and plots
    python docs/generate.py --pages     write the pages only

The pages contain only what the source says: edit the docstring or the decorator of a loss, then run this.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from nearkin.losses import LOSSES, REGULARIZERS, Loss
from nearkin.report.losses import FAMILIES, draw_gradient, settings_table

HERE = Path(__file__).parent / "losses"
TITLES = {
    "pair": "Pair losses",
    "tuple": "Tuple losses",
    "neighbour": "Neighbour losses",
    "proxy": "Proxy losses",
    "softmax": "Softmax losses",
    "margin_softmax": "Margin softmax losses",
    "contrastive": "Contrastive losses",
    "ranking": "Ranking losses",
    "clustering": "Clustering losses",
}


REGULARIZER_TEXT = """
## Regularisers

`nk.Objective("proxy_anchor", num_classes=100, dim=512, regularizers={"lp": 0.01, "regular_face": 1.0})` adds them to a
loss by name and weight; in a recipe `[loss.regularizers]`, on the command line `--loss.regularizers lp=0.01`. Those of
`proxies` need a loss with vectors of classes, those of `centers` one with several per class. The decorator
`nearkin.losses.regularizer` registers your own. All are equal to those of pytorch-metric-learning
(`tests/losses/test_regularizers.py`).

| regulariser | of | what it does |
|---|---|---|
""".strip()

COMPARISON = """
## Compared with pytorch-metric-learning

Losses that pytorch-metric-learning 2.9 (PML) has too are equal to it in value and gradient on 50 random batches each,
with unbalanced classes, singletons and duplicates (`tests/losses/test_pml.py`). It differs in these; a loop over the
definition (`tests/losses/test_loss_definitions.py`) agrees with ours, except for the last two and `manifold`, for which
there is none:

| loss | PML |
|---|---|
| `smooth_ap` | takes the wrong positives unless there are as many classes as samples of each; rejects unequal classes |
| `instance` | takes the sample whose index is the number of the class as the class, so the loss depends on the order |
| `angular` | does not normalise the negatives: equal for embeddings of length 1 |
| `tuplet_margin` | the gradient of duplicates is NaN |
| `histogram` | fails on duplicates, and leaves out pairs of two singletons |
| `ranked_list` | adds 1e-5 to every weight, and skips negatives at distance 0 |
| `manifold` | inverts in float32: equal to four digits |
| `dynamic_soft_margin` | its momentum depends on the batch size, and its second backward pass fails |
| `p2sgrad` | the gradient on a proxy is not that of its direction |
| `circle`, `supcon` | leave terms that are 0 out of the mean, also where they are 0 by underflow |
""".strip()


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    families = {family: [entry for entry in LOSSES.values() if entry.family == family] for family in TITLES}
    index = ["# Losses", "", "| loss | family | what it does | cost |", "|---|---|---|---|"]
    for family, entries in families.items():
        index += [f"| [`{e.name}`]({family}.md#{e.name}) | {family} | {e.summary} | {e.cost} |" for e in entries]
    legend = "N batch, C classes (C' with two samples in the batch), K centres, P positives, D dimensions"
    index += ["", f"{legend}; the cost of one batch.", "", *REGULARIZER_TEXT.splitlines()]
    index += [f"| `{name}` | {', '.join(entry.inputs)} | {entry.summary} |" for name, entry in REGULARIZERS.items()]
    index += ["", *COMPARISON.splitlines(), ""]
    out = {"index.md": "\n".join(index)}
    for family, entries in families.items():
        head = [f"# {TITLES[family]}", "", f"{FAMILIES[family][0].upper()}{FAMILIES[family][1:]}.", ""]
        out[f"{family}.md"] = "\n".join([*head, *(section(entry) for entry in entries)])
    return out


def section(entry: Loss) -> str:
    """Return the section of one loss."""
    lines = [f"## {entry.name}", "", entry.summary, "", "```text", *textwrap.wrap(entry.formula, 110), "```", ""]
    lines += [f"**When.** {entry.use}", "", f"**Paper.** {entry.paper}. **Cost.** {entry.cost}."]
    lines += [f"**Reduction.** {', '.join(entry.reductions)}.", ""]
    if entry.settings:
        lines += ["| setting | default | search range | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{key}` | {default} | {span or '-'} | {text} |" for key, default, span, text in settings_table(entry)
        ]
        lines.append("")
    lines += ["```python", example(entry), "```", "", f"![gradient of {entry.name}]({entry.name}.png)", ""]
    return "\n".join(lines)


def example(entry: Loss) -> str:
    """Return how to call a loss, as an objective and as a function."""
    needs = ", num_classes=100, dim=512" if entry.inputs.needs_classes else ""
    return "\n".join(
        [
            f'objective = nk.Objective("{entry.name}"{needs})',
            "loss = objective(emb, labels)",
            f"# or as a function: {entry.call_example}",
        ]
    )


def main() -> None:
    HERE.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (HERE / name).write_text(text)
    if "--pages" not in sys.argv[1:]:
        for name in LOSSES:
            draw_gradient(name, HERE / f"{name}.png", dpi=72)


if __name__ == "__main__":
    main()
