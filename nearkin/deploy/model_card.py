"""Model cards: how a model was trained and evaluated, in the form that the Hugging Face Hub shows."""

from typing import Any

from nearkin._common.version import __version__
from nearkin.errors import RunError
from nearkin.training.run import Run

_HEADER = """---
library_name: nearkin
tags:
- metric-learning
- image-retrieval
- embeddings
---
"""


def model_card(run: Run, repo: str) -> str:
    """Describe a finished run in Markdown: use, protocol, and metrics on unseen classes beside every baseline.

    Args:
        run: A finished run.
        repo: The name of the model on the Hub, for the example.

    Returns:
        The text of README.md.

    Raises:
        RunError: The run is not finished.
    """
    result = run.result
    if result is None:
        raise RunError(f"{run.path}: has no result yet. Finish it first: nearkin train {run.path / 'recipe.toml'}.")
    recipe, protocol = run.recipe, result["protocol"]
    classes = protocol["classes"]
    lines = [
        _HEADER,
        f"# {repo.partition('/')[2]}",
        "",
        f"Maps images to vectors of {run.embedder().dim} dimensions such that images of the same class are near each "
        f"other, also for classes that were not in the training data. Trained with nearkin {__version__}: "
        f"{recipe.model.backbone}, loss {recipe.loss.name}.",
        "",
        "```python",
        "import nearkin as nk",
        "",
        f'model = nk.load("hf:{repo}")',
        'vectors = model.embed(["a.jpg", "b.jpg"])  # unit vectors; similarity is their dot product',
        "```",
        "",
        "## Evaluation",
        "",
        *_metrics_table(result["test"]),
        "",
        f"- Data: {protocol['source']}, split {protocol['split']}: {classes['train']} classes for training, "
        f"{classes['val']} for validation, {classes['test']} for the test.",
        f"- Epoch {protocol['epoch']} of {protocol['epochs']}, selected by {protocol['epoch_selected_by']}.",
        "- Intervals: 95 %, over classes. Test classes were opened once, after training.",
        "",
        "## Intended use",
        "",
        "Search and grouping of images like those of the training data. The metrics hold for classes drawn like the "
        "test classes; on other images measure again: `nearkin evaluate`. Not meant for identifying people.",
        "",
    ]
    return "\n".join(lines)


def _metrics_table(test: dict[str, Any] | None) -> list[str]:
    if test is None:
        return ["Not evaluated on test classes."]
    names = list(test["trained"])
    rows = [f"| on unseen classes, percent | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for name in ("trained", *(other for other in test if other != "trained")):
        cells = []
        for metric in names:
            low, high = (100 * bound for bound in test[name][metric]["interval"])
            cells.append(f"{100 * test[name][metric]['mean']:.1f} ({low:.1f} to {high:.1f})")
        rows.append(f"| {'**this model**' if name == 'trained' else name} | {' | '.join(cells)} |")
    return rows
