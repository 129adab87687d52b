"""Tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from nearkin.training.run import Run


def result_table(run: Run) -> RichTable:
    """The final numbers of a run in percent, each with its 95 % interval over classes below it."""
    result = run.result
    assert result is not None, "only a finished run has a table"
    classes = result["protocol"]["classes"]
    table = RichTable(
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        title=f"On {classes['test']} classes never seen in training, percent",
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
        strong = "bold green" if model == "trained" else ""
        cells = []
        for value in metrics.values():
            low, high = value["interval"]
            cells.append(
                Text(f"{100 * value['mean']:.1f}\n", strong) + Text(f"{100 * low:.1f}-{100 * high:.1f}", "dim")
            )
        table.add_row(Text(model, strong), *cells)
    return table


def headline(run: Run | dict[str, Any]) -> str:
    """One sentence that says what training did, as far as the paired interval allows it to be said.

    run   or its result, of a run that opened its test classes
    """
    result = run if isinstance(run, dict) else run.result
    assert result is not None
    gain = result["gain"]
    over = gain["over"]
    trained, raw = (100 * result["test"][name]["R@1"]["mean"] for name in ("trained", over))
    low, high = (100 * bound for bound in gain["interval"])
    compared = {"raw pixels": "by raw pixels", "raw backbone": "by the backbone as it came"}[over]
    kept = "" if result["protocol"]["epoch"] else " No epoch beat the start on the validation classes: that is kept."
    share = f"{trained:.1f} % of the images have a neighbour of their own kind nearest, {raw:.1f} % {compared}"
    if low > 0:
        return f"{share}: {low:.1f} to {high:.1f} points gained.{kept}"
    if high < 0:
        return f"{share}: {-high:.1f} to {-low:.1f} points lost. Training made it worse: do not use this model.{kept}"
    return (
        f"{share}: training does not beat it for certain; the difference ({low:.1f} to {high:.1f} points) is not "
        f"settled by this many classes.{kept}"
    )
