"""Pages with more images than they can hold: listed images are there, others are given by their class."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.scored import QUIET, clouds, cosines

import nearkin as nk
from nearkin.report import gallery
from nearkin.report.page import build_report, render


@pytest.fixture(scope="module")
def wide_runs(tmp_path_factory):
    """Two runs evaluated on 600 rows, of classes that are hard to separate."""
    folder = tmp_path_factory.mktemp("wide")
    recipe = clouds(
        folder, classes=120, samples_per_class=10, dim=12, seed=2, duplicates={1191: 1100, 645: 630}, val_fraction=0.1
    )
    recipe = replace(recipe, train=replace(recipe.train, epochs=1))
    models = (replace(recipe.model, dim=8), replace(recipe.model, dim=6))
    return [nk.fit(replace(recipe, model=model), folder / "runs", reporter=QUIET) for model in models]


def row_names(report, items):
    """Row names instead of items, which differ from page to page."""
    return [report.items["names"][item] for item in items]


@pytest.mark.slow
def test_listed_images_are_on_the_page(wide_runs, monkeypatch):
    monkeypatch.setattr(gallery, "MAX_QUERIES", 20)
    whole = build_report(wide_runs, reporter=QUIET)
    monkeypatch.setattr(gallery, "MAX_IMAGES", 560)
    part = build_report(wide_runs, reporter=QUIET)
    assert (len(whole.items["names"]), len(part.items["names"])) == (600, 560)
    for was, now in zip(whole.analyses, part.analyses, strict=True):
        for name in ("confident_errors", "hardest", "random"):
            assert row_names(part, now["example_queries"][name]) == row_names(whole, was["example_queries"][name])
        for old, new in (
            (was["hubs"], now["hubs"]),
            (was["label_errors"]["suspects"], now["label_errors"]["suspects"]),
        ):
            assert row_names(part, [row["item"] for row in new]) == row_names(whole, [row["item"] for row in old])
        for old, new in (
            (was["confused_pairs"], now["confused_pairs"]),
            (was["near_duplicates"]["pairs"], now["near_duplicates"]["pairs"]),
        ):
            assert [row_names(part, row["items"]) for row in new] == [row_names(whole, row["items"]) for row in old]
    for change in ("fixed", "broken"):
        old, new = whole.comparisons[0][change]["items"], part.comparisons[0][change]["items"]
        assert len(old) > 20
        assert row_names(part, new) == row_names(whole, old)


def test_neighbours_that_are_not_on_the_page_are_given_by_their_class(wide_runs, monkeypatch):
    monkeypatch.setattr(gallery, "MAX_QUERIES", 20)
    monkeypatch.setattr(gallery, "MAX_IMAGES", 400)
    report = build_report(wide_runs[:1], reporter=QUIET)
    sim, labels = cosines(wide_runs[0], first=60)
    order = np.argsort(-np.round(sim, 9), axis=1, kind="stable")[:, :8]
    analysis, rows = report.analyses[0], [int(name.removeprefix("row ")) - 600 for name in report.items["names"]]
    absent = 0
    for item, row in enumerate(rows):
        for near, other in zip(analysis["neighbours"][item], order[row], strict=True):
            absent += near < 0
            if near < 0:
                assert int(report.items["class_names"][-1 - near]) == labels[other]
                assert other not in rows
            else:
                assert rows[near] == other
        first = analysis["neighbours"][item][0]
        label = report.items["labels"][first] if first >= 0 else -1 - first
        assert (
            (label == report.items["labels"][item]) == analysis["R@1"][item] == (labels[order[row, 0]] == labels[row])
        )
    assert absent > 100
    assert all(
        near >= 0
        for queries in analysis["example_queries"].values()
        for item in queries
        for near in analysis["neighbours"][item]
    )
    assert report.items["class_sizes"] == [10] * 60
    assert "This page holds 400 of the images" in render(report)
