"""Result table and headline of a run for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from nearkin.training.run import Run


def result_table(run: Run) -> RichTable:
    """Return the test metrics of a run in percent, each with its 95 % interval over classes.

    Args:
        run: A finished run that was evaluated on its test classes.

    Returns:
        A table of the baselines and the trained model.
    """
    result = run.result
    assert result is not None, "only a finished run has a table"
    table = RichTable(
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        title=f"Results on {result['protocol']['classes']['test']} classes never seen in training, percent",
        title_style="bold",
        title_justify="left",
        caption="small: 95 % interval over classes",
        caption_justify="left",
    )
    models = result["test"]
    table.add_column("", no_wrap=True)
    for metric in next(iter(models.values())):
        table.add_column(metric, justify="right", min_width=9, no_wrap=True)
    for model, metrics in models.items():
        style = "bold green" if model == "trained" else ""
        cells = []
        for value in metrics.values():
            low, high = value["interval"]
            cells.append(Text(f"{100 * value['mean']:.1f}\n", style) + Text(f"{100 * low:.1f}-{100 * high:.1f}", "dim"))
        table.add_row(Text(model, style), *cells)
    return table


def headline(run: Run | dict[str, Any]) -> str:
    """Summarize in one sentence what training gained, and claim no more than the paired interval supports.

    Args:
        run: A finished run, or its result.

    Returns:
        The sentence.
    """
    result = run if isinstance(run, dict) else run.result
    assert result is not None
    epoch, recall = result["protocol"]["epoch"], result["val_R@1"]
    if result["test"] is None and recall is None:
        reason = "there are no validation classes, and the test classes are sealed"
        return f"Trained to epoch {epoch}, not evaluated: {reason}."
    if result["test"] is None:
        share = f"{100 * recall:.1f}"
        return (
            f"Validation R@1 {share}: the nearest neighbour of {share} % of the validation images has the same class "
            f"(epoch {epoch}, selected by this metric). The test classes are still sealed."
        )
    gain = result["gain"]
    baseline = gain["over"]
    trained, start = (100 * result["test"][name]["R@1"]["mean"] for name in ("trained", baseline))
    low, high = (100 * bound for bound in gain["interval"])
    advice = ""
    if low > 0:
        change = f"gain {low:.1f} to {high:.1f} points"
    elif high < 0:
        change = f"loss {-high:.1f} to {-low:.1f} points"
        advice = " Training made it worse: do not use this model."
    else:
        change = f"difference {low:+.1f} to {high:+.1f} points, not significant"
    if not epoch:
        advice += " No epoch improved on the initial weights on the validation classes, so these are used."
    return (
        f"R@1 {trained:.1f}: the nearest neighbour of {trained:.1f} % of the test images has the same class "
        f"({baseline}: {start:.1f}; {change}).{advice}"
    )
