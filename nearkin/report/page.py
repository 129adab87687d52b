"""The HTML page of a run, or of several runs that were evaluated on the same images: one self-contained file."""

import itertools
import json
import os
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nearkin._common.files import nan_to_none
from nearkin._common.progress import Reporter
from nearkin._common.version import __version__
from nearkin.errors import DataError, RunError
from nearkin.report import contents, gallery
from nearkin.report.baselines import comparison_lines, headline, no_run_helped
from nearkin.report.contents import PageItems, analyze, describe_items, find_highlights, summarize_run
from nearkin.report.gallery import NEIGHBOURS, SpriteSheet, load_eval_data, make_sprite_sheet
from nearkin.report.html import render_template, write_html, writing
from nearkin.report.svg_charts import Series, histogram, line_chart
from nearkin.report.tables import Grid, latex, markdown, metric_rows, percent, write_texts
from nearkin.training.run import Run


@dataclass(frozen=True)
class Report:
    """The contents of a page before rendering. `--json`, tables and figures use them too."""

    names: list[str]  # name of each run: its loss, with A, B, ... in front if there are several runs
    summaries: list[dict[str, Any]]  # result, epochs, alarms, recipe and environment of each run
    items: dict[str, Any] | None = None  # the images on the page, or None if they are unavailable
    no_images_reason: str = ""
    analyses: list[dict[str, Any]] = field(default_factory=list)  # what each run makes of the images
    comparisons: list[dict[str, Any]] = field(default_factory=list)  # each run after the first compared with the first
    # settings in which the runs differ, with their values
    differing_settings: list[tuple[str, list[str]]] = field(default_factory=list)
    # thumbnails of the items, or None for a run on features
    sprite_sheet: SpriteSheet | None = field(default=None, repr=False)

    @property
    def learning_curves(self) -> list[Series]:
        """The validation R@1 of every run in percent, by epoch."""
        curves = []
        for name, summary in zip(self.names, self.summaries, strict=True):
            epochs = [event for event in summary["epochs"] if event["val"] is not None]
            curves.append(Series(name, [e["epoch"] for e in epochs], [100 * e["val"]["R@1"] for e in epochs]))
        return curves

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the thumbnails."""
        shown = ("items", "no_images_reason", "analyses", "comparisons", "differing_settings")
        values = {name: getattr(self, name) for name in shown}
        return {"nearkin": __version__, "names": self.names, "runs": nan_to_none(self.summaries), **values}


def write_page(run: Run, out: Path | None = None, *, data: Any = None, reporter: Reporter | None = None) -> Path:
    """Write the page of one finished run.

    Args:
        run: A finished run.
        out: File to write; None for `report.html` in the run folder.
        data: The data that were passed to `fit`, if they were.
        reporter: Receives progress; by default nothing does.

    Returns:
        The path of the page.
    """
    report = build_report([run], data=data, reporter=reporter or Reporter(quiet=True))
    return write_report(report, out or run.path / "report.html")


def build_report(runs: Sequence[Run], *, data: Any = None, tsne: bool = False, reporter: Reporter) -> Report:
    """Collect the contents of a page.

    Args:
        runs: Finished runs, evaluated on the same images.
        data: The data that were passed to `fit`, if they were.
        tsne: Add a t-SNE map.
        reporter: Receives progress.

    Returns:
        The contents. If the data of a single run are missing or have changed, they are contents without images.

    Raises:
        RunError: A run is not finished or is given twice, or runs were evaluated on different images.
    """
    if unfinished := [run for run in runs if run.result is None]:
        raise RunError(f"{unfinished[0].path}: this run is not finished. Repeat its training command to resume it.")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise RunError("report: the same run is given twice. Name different runs.")
    summaries = [summarize_run(run) for run in runs]
    letters = [*string.ascii_uppercase, *map("".join, itertools.product(string.ascii_uppercase, repeat=2))]
    names = [summary["loss"] for summary in summaries]
    if len(runs) > 1:
        names = [f"{letter}: {name}" for letter, name in zip(letters, names, strict=False)]
    try:
        datasets = [load_eval_data(run, data, reporter=reporter) for run in runs]
    except (DataError, RunError) as error:  # missing data or weights; the metrics are still known
        if len(runs) > 1:
            raise
        reporter.info(f"no images on the page: {error}")
        reason = str(error)
        for path in filter(None, (runs[0].recipe.data.root, runs[0].path)):  # pages are shared
            reason = reason.replace(f"{path.parent}{os.sep}", "")
        return Report(names, summaries, no_images_reason=reason)
    contents.check_same_images(runs, datasets)
    highlights = [find_highlights(data) for data in datasets]
    first, *others = datasets
    changed = [rows[: contents.MAX_CHANGED] for data in others for rows in contents.changed_queries(first, data)]
    listed = np.concatenate([*changed, *map(contents.listed_rows, highlights)])
    rows = gallery.choose_rows([data.neighbours for data in datasets], listed, max_rows=gallery.MAX_IMAGES)
    page_items = PageItems.from_rows(rows, len(first))
    images = first.table.images  # without channels for a run on features
    return Report(
        names,
        summaries,
        items=describe_items(first, page_items),
        analyses=[
            analyze(data, found, page_items, tsne=tsne, reporter=reporter)
            for data, found in zip(datasets, highlights, strict=True)
        ],
        comparisons=[contents.compare_runs(first, data, page_items) for data in others],
        differing_settings=contents.differing_settings(runs),
        sprite_sheet=make_sprite_sheet(images, page_items.rows, reporter=reporter) if images.is_pixels else None,
    )


# Parts of an analysis that the template draws; the script does not need them.
STATIC_KEYS = ("similarity_histogram", "recall_by_size", "hubness")


def write_report(report: Report, out: Path) -> Path:
    """Render the contents of a page and write it.

    Args:
        report: The contents.
        out: File to write.

    Returns:
        `out`.
    """
    return write_html(render(report), out)


def render(report: Report) -> str:
    comparison_headlines = [
        contents.comparison_headline(comparison["metrics"], report.names[0], name)
        for comparison, name in zip(report.comparisons, report.names[1:], strict=False)
    ]
    if line := no_run_helped([summary["result"] for summary in report.summaries]):
        comparison_headlines.append(line)
    script_data = {
        "items": report.items,
        "names": report.names,
        "analyses": [{k: v for k, v in one.items() if k not in STATIC_KEYS} for one in report.analyses],
        "comparisons": report.comparisons,
        "sheet": report.sprite_sheet and [report.sprite_sheet.columns, report.sprite_sheet.rows],
    }
    values = {
        "report": report,
        "several": len(report.summaries) > 1,
        "headlines": [headline(summary["result"]) for summary in report.summaries],
        "baseline_lines": [comparison_lines(summary["result"]) for summary in report.summaries],
        "comparison_headlines": comparison_headlines,
        "training_charts": [training_charts(summary) for summary in report.summaries],
        "similarity_charts": [similarity_charts(analysis) for analysis in report.analyses],
        "shared_chart": shared_chart(report),
        "searches": [summary["search"] and describe_search(summary["search"]) for summary in report.summaries],
        "environments": [json.dumps(summary["environment"], indent=2) for summary in report.summaries],
        "num_neighbours": NEIGHBOURS,
        "data": safe_json(script_data),
    }
    return render_template("page.html", "page.js", ["page.css"], values)


def result_grid(report: Report) -> Grid:
    """Tabulate the baselines of the first run and the trained model of every run."""
    results = dict(zip(report.names, (summary["result"] for summary in report.summaries), strict=True))
    first = results[report.names[0]]
    if first["test"] is None:
        val_rows = [(name, percent(result["val_R@1"])) for name, result in results.items()]
        return Grid("Validation classes, percent; the test classes are sealed", ("run", "R@1"), val_rows)
    models = first["test"] | {name: result["test"]["trained"] for name, result in results.items()}
    rows = metric_rows({name: metrics for name, metrics in models.items() if name != "trained"}, "{} ({} to {})")
    classes = first["protocol"]["classes"]["test"]
    title = f"{classes} classes never seen in training, percent, with the 95 percent interval over classes"
    return Grid(title, ("model", *first["test"]["trained"]), rows)


def write_tables(report: Report, folder: Path) -> list[Path]:
    """Write the results as numbers.md and numbers.tex.

    Args:
        report: The contents of a page.
        folder: Where to write; created if missing.

    Returns:
        The written files.

    Raises:
        RunError: The folder cannot be written.
    """
    grid = result_grid(report)
    texts = {"numbers.md": f"{grid.title}\n\n{markdown(grid)}", "numbers.tex": latex(grid)}
    with writing("tables", folder, " Choose another folder with --tables."):
        return write_texts(texts, folder)


def safe_json(value: Any) -> str:
    """Encode JSON for a script element: nothing in it can end the element or be read as markup."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


# Title, and (series name, key of the diagnosis)
DIAGNOSTIC_CHARTS = (
    ("Tightness: falls as each class contracts", (("tightness", "tightness"),)),
    ("Contrast: falls as embeddings spread", (("contrastive", "contrastive"),)),
    ("Entropy terms, relative", (("H(Z)", "feature_entropy"), ("H(Z|Y)", "conditional_entropy"))),
    (
        "Mutual information with the class, nats",
        (("I(Z;Y)", "information"), ("lower bound", "information_bound"), ("H(Y), the maximum", "label_entropy")),
    ),
    ("Effective rank", (("effective rank", "effective_rank"),)),
    ("Alignment and uniformity, lower is better", (("alignment", "alignment"), ("uniformity", "uniformity"))),
)


def training_charts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    epochs = summary["epochs"]
    x = [event["epoch"] for event in epochs]
    selected = summary["result"]["protocol"]["epoch"]

    def val(metric: str) -> list[float | None]:
        return [None if e["val"] is None else 100 * e["val"][metric] for e in epochs]

    charts = [
        ("Validation R@1 and MAP@R, %", [Series(name, x, val(name)) for name in ("R@1", "MAP@R")]),
        ("Loss", [Series("loss", x, [event["loss"] for event in epochs])]),
    ]
    for title, series in DIAGNOSTIC_CHARTS:
        charts.append((title, [Series(name, x, [e["diagnosis"][key] for e in epochs]) for name, key in series]))
    return [(title, line_chart(series, f"{title}, by epoch", mark=selected)) for title, series in charts]


def similarity_charts(analysis: dict[str, Any]) -> list[tuple[str, str]]:
    pairs, sizes = analysis["similarity_histogram"], analysis["recall_by_size"]
    groups = [("same class", pairs["positive"]), ("other class", pairs["negative"])]
    title = "Cosine similarity of pairs, share of pairs"
    drawn = [(title, histogram(groups, title, pairs["low"], pairs["high"]))]
    if len(sizes) > 1:
        series = Series("R@1", [row["size"] for row in sizes], [100 * row["R@1"] for row in sizes])
        title = "R@1 of the first dimensions, %"
        drawn.append((title, line_chart([series], title, x_name="size", logarithmic=True)))
    return drawn


def describe_search(search: dict[str, Any]) -> dict[str, Any]:
    """What `nearkin train --budget` tried: rows of a table, and the metrics of the best so far over time."""
    steps = search["steps"]

    def value(step: dict[str, Any]) -> float:
        return float(step["val_R@1"] + step["val_MAP@R"])

    rows = []
    for step in steps:
        faster = [other for other in steps if other["ms_per_image"] <= step["ms_per_image"] and other is not step]
        # On the front of speed and quality: nothing as fast is as good.
        rows.append(step | {"front": all(value(other) < value(step) for other in faster)})
    kept = [step for step in steps if step["kept"]]
    minutes = [round(step["minutes"], 1) for step in kept]
    lines = [Series(name, minutes, [100 * step[f"val_{name}"] for step in kept]) for name in ("R@1", "MAP@R")]
    chart = line_chart(lines, "Validation metrics of the best model so far", x_name="min")
    return {"rows": rows, "chart": chart, "chosen": search["chosen"], "not_tried": search["not_tried"]}


def shared_chart(report: Report) -> str:
    several = len(report.summaries) > 1
    return line_chart(report.learning_curves, "Validation R@1 of each run, by epoch") if several else ""
