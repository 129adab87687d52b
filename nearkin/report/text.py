"""Tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from nearkin.runs import Run


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


def headline(run: Run) -> str:
    """One sentence that says what training did, as far as the intervals allow it to be said."""
    assert run.result is not None
    trained, raw = (run.result["test"][name]["R@1"] for name in ("trained", "raw pixels"))
    share = f"{100 * trained['mean']:.1f} % of unseen-class images have a neighbour of their own kind nearest"
    by_pixels = f"raw pixels ({100 * raw['mean']:.1f} %)"
    if trained["interval"][0] > raw["interval"][1]:
        return f"{share}, clearly more than by {by_pixels}."
    if trained["interval"][1] < raw["interval"][0]:
        return f"{share}, fewer than by {by_pixels}: this model should not be used."
    return f"{share}; on this evidence not clearly more than by {by_pixels}."
