"""Model cards: how a model was trained and evaluated, in the form that the Hugging Face Hub shows."""

from pathlib import Path
from typing import Any

from nearkin._common.version import __version__
from nearkin.errors import RunError
from nearkin.training.run import Run


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
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return template.format(
        name=repo.partition("/")[2],
        repo=repo,
        dim=run.embedder().dim,
        version=__version__,
        backbone=run.recipe.model.backbone,
        loss=run.recipe.loss.name,
        metrics=_metrics_table(result["test"]),
        protocol=result["protocol"],
    )


def _metrics_table(test: dict[str, Any] | None) -> str:
    if test is None:
        return "Not evaluated on test classes."
    names = list(test["trained"])
    rows = [f"| on unseen classes, percent | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for name in ("trained", *(other for other in test if other != "trained")):
        cells = []
        for metric in names:
            low, high = (100 * bound for bound in test[name][metric]["interval"])
            cells.append(f"{100 * test[name][metric]['mean']:.1f} ({low:.1f} to {high:.1f})")
        rows.append(f"| {'**this model**' if name == 'trained' else name} | {' | '.join(cells)} |")
    return "\n".join(rows)
