"""One self-contained HTML page for a run, or for several runs judged on the same images: no network, all inline."""

from __future__ import annotations

import json
import math
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
from nearkin.report import gallery
from nearkin.report.compare import EACH, changed, check_same_images, difference, settings_that_differ, verdict
from nearkin.report.contents import Shown, findings, items, summary
from nearkin.report.gallery import Sheet, sheet
from nearkin.report.html import fill, write_html
from nearkin.report.lists import Lists, lists_of
from nearkin.report.plots import Series, histogram, line_chart
from nearkin.report.text import headline
from nearkin.report.view import NEIGHBOURS, View, load_view
from nearkin.training.run import Run


@dataclass(frozen=True)
class Report:
    """Everything a page tells, before it is HTML: what `--json` writes, the tables and the figures are made of.

    names     of the runs: A, B, ... with their losses; a single run has the name of its loss
    stories   what each run folder says: result, epochs, alarms, recipe, environment
    items     the images on the page, or None where there are none to look at; `why` then says the reason
    findings  what each run makes of the images
    against   for every run after the first, what it gains over the first
    differ    settings in which the runs are not alike
    """

    names: list[str]
    stories: list[dict[str, Any]]
    items: dict[str, Any] | None = None
    why: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)
    against: list[dict[str, Any]] = field(default_factory=list)
    differ: list[tuple[str, list[str]]] = field(default_factory=list)
    pictures: Sheet | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the pictures."""
        return {
            "nearkin": __version__,
            "names": self.names,
            "runs": nan_to_none(self.stories),
            "items": self.items,
            "why": self.why,
            "findings": self.findings,
            "against": self.against,
            "differ": [list(row) for row in self.differ],
        }


def write_page(run: Run, out: Path | None, *, reporter: Reporter) -> Path:
    """Write the page of one finished run and return where it is: report.html in the run folder, unless told."""
    return write_report(build_report([run], reporter=reporter), out or run.path / "report.html")


def build_report(runs: Sequence[Run], *, tsne: bool = False, reporter: Reporter) -> Report:
    """Look at the runs and all they were judged on. Runs that were judged on different images are refused."""
    if unfinished := [run for run in runs if run.result is None]:
        raise RunError(f"{unfinished[0].path}: this run is not finished. Run its training command again to go on.")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise RunError("report: the same run is given twice.")
    stories = [summary(run) for run in runs]
    names = [f"{letter}: {one['loss']}" for letter, one in zip(_letters(), stories, strict=False)]
    names = [stories[0]["loss"]] if len(runs) == 1 else names
    differ = settings_that_differ(runs)
    try:
        views = [load_view(run, reporter=reporter) for run in runs]
    except (DataError, RunError) as error:  # data or weights that are gone; the numbers are still there
        if len(runs) > 1:
            raise
        reporter.info(f"no images on the page: {error}")
        return Report(names, stories, why=_without_folders(str(error), runs[0]))
    check_same_images(runs, views)
    lists = [lists_of(view) for view in views]
    shown = _shown(views, lists)
    return Report(
        names,
        stories,
        items=items(views[0], shown),
        findings=[
            findings(view, one, shown, tsne=tsne, reporter=reporter) for view, one in zip(views, lists, strict=True)
        ],
        against=[difference(views[0], view, shown) for view in views[1:]],
        differ=differ,
        pictures=sheet(views[0].table.images, shown.rows, reporter=reporter) if views[0].has_images else None,
    )


def _without_folders(text: str, run: Run) -> str:
    """An error's text without the folders of this machine: a page is shared."""
    for path in filter(None, (run.recipe.data.root, run.path)):
        text = text.replace(f"{path.parent}/", "")
    return text


def _letters() -> Sequence[str]:
    return [*string.ascii_uppercase, *(a + b for a in string.ascii_uppercase for b in string.ascii_uppercase)]


def _shown(views: Sequence[View], lists: Sequence[Lists]) -> Shown:
    changes = [rows[:EACH] for view in views[1:] for rows in changed(views[0], view)]
    first = np.concatenate([*changes, *(one.rows for one in lists)])
    return Shown.of(gallery.choose([view.near for view in views], first, most=gallery.MOST), len(views[0]))


# --- HTML ------------------------------------------------------------------------------------------------------------


def write_report(report: Report, out: Path) -> Path:
    return write_html(render(report), out)


def render(report: Report) -> str:
    """The page as text."""
    verdicts = [
        verdict(one["metrics"], report.names[0], name)
        for one, name in zip(report.against, report.names[1:], strict=False)
    ]
    values = {
        "report": report,
        "several": len(report.stories) > 1,
        "headlines": [page_headline(one) for one in report.stories],
        "verdicts": verdicts,
        "charts": [charts(one) for one in report.stories],
        "pair_charts": [pair_charts(one) for one in report.findings],
        "together": learning_together(report),
        "environments": [json.dumps(one["environment"], indent=2) for one in report.stories],
        "neighbours": NEIGHBOURS,
        "data": safe_json(
            {
                "items": report.items,
                "names": report.names,
                "findings": [{k: v for k, v in one.items() if k not in STATIC} for one in report.findings],
                "against": report.against,
                "sheet": report.pictures and [report.pictures.columns, report.pictures.rows],
            }
        ),
    }
    return fill("page.html", "page.js", ["page.css"], values, percent=percent)


STATIC = ("similarity", "sizes", "hubness")  # drawn once, in the template


def safe_json(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element or be read as markup.

    >>> safe_json("</script>&")
    '"\\\\u003c/script\\\\u003e\\\\u0026"'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def percent(value: float | None, form: str = ".1f") -> str:
    """A share for people; a dash where there is none.

    >>> percent(0.1234), percent(None), percent(-0.02, "+.1f")
    ('12.3', '-', '-2.0')
    """
    return "-" if value is None or math.isnan(value) else f"{100 * value:{form}}"


def page_headline(told: dict[str, Any]) -> str:
    """The sentence a page opens with."""
    result = told["result"]
    if result["test"] is not None:
        return headline(result)
    epoch = result["protocol"]["epoch"]
    if result["val_R@1"] is None:
        return f"Trained to epoch {epoch}; nothing was judged: there are no validation classes, and the test is sealed."
    return (
        f"{100 * result['val_R@1']:.1f} % of the validation images have a neighbour of their own kind nearest "
        f"(epoch {epoch}, chosen by that number). The test classes are still sealed."
    )


# --- charts ----------------------------------------------------------------------------------------------------------

DIAGNOSTICS = (
    ("How tight classes are, and how far from others", (("tightness", "tightness"), ("contrastive", "contrastive"))),
    ("Information about the class, nats", (("I(Z;Y)", "information"), ("lower bound", "information_bound"))),
    ("Directions in use", (("effective rank", "effective_rank"),)),
    ("Alignment and uniformity, lower is better", (("alignment", "alignment"), ("uniformity", "uniformity"))),
)


def charts(told: dict[str, Any]) -> list[tuple[str, str]]:
    """Learning and diagnostic curves of a run, as titles and SVG; curves without values are left out."""
    epochs = told["epochs"]
    x = [event["epoch"] for event in epochs]
    kept = told["result"]["protocol"]["epoch"]

    def val(metric: str) -> list[float | None]:
        return [None if e["val"] is None else 100 * e["val"][metric] for e in epochs]

    found = [
        ("R@1 and MAP@R on validation classes, %", [Series(name, x, val(name)) for name in ("R@1", "MAP@R")]),
        ("Loss", [Series("loss", x, [event["loss"] for event in epochs])]),
    ]
    for title, lines in DIAGNOSTICS:
        found.append((title, [Series(name, x, [e["diagnosis"][key] for e in epochs]) for name, key in lines]))
    drawn = [(title, line_chart(lines, f"{title}, by epoch", mark=kept)) for title, lines in found]
    return [(title, svg) for title, svg in drawn if svg]


def pair_charts(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Similarities of pairs, and recall by embedding size."""
    pairs, sizes = found["similarity"], found["sizes"]
    groups = [("same class", pairs["positive"]), ("other class", pairs["negative"])]
    title = "Similarity of pairs, share of each kind"
    drawn = [(title, histogram(groups, f"{title}, by cosine", pairs["low"], pairs["high"]))]
    if len(sizes) > 1:
        line = Series("R@1", [row["size"] for row in sizes], [100 * row["R@1"] for row in sizes])
        title = "R@1 of the first numbers of each vector, %"
        drawn.append((title, line_chart([line], title, x_name="size", logarithmic=True)))
    return [(title, svg) for title, svg in drawn if svg]


def learning_together(report: Report) -> str:
    """Validation R@1 of all runs on one chart."""
    lines = []
    for name, told in zip(report.names, report.stories, strict=True):
        epochs = [event for event in told["epochs"] if event["val"] is not None]
        lines.append(Series(name, [e["epoch"] for e in epochs], [100 * e["val"]["R@1"] for e in epochs]))
    return line_chart(lines, "Validation R@1 of each run, by epoch") if len(lines) > 1 else ""
