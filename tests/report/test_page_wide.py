"""Pages of more images than they can hold: what is listed is there, and what is not is known by its class."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.scored import QUIET, clouds, cosines

import nearkin as nk
from nearkin.report import gallery
from nearkin.report.page import build_report, render


@pytest.fixture(scope="module")
def wide_runs(tmp_path_factory):
    """Two runs that judge 600 rows, of classes that are hard to tell apart."""
    folder = tmp_path_factory.mktemp("wide")
    recipe = clouds(folder, classes=120, each=10, dim=12, seed=2, copies={1191: 1100, 645: 630}, val_fraction=0.1)
    recipe = replace(recipe, train=replace(recipe.train, epochs=1))
    models = (replace(recipe.model, dim=8), replace(recipe.model, dim=6))
    return [nk.fit(replace(recipe, model=model), folder / "runs", reporter=QUIET) for model in models]


def named(report, things):
    """The same with the names of the rows instead of items, which differ from page to page."""
    return [report.items["name"][item] for item in things]


def test_what_a_page_lists_is_on_it(wide_runs, monkeypatch):
    monkeypatch.setattr(gallery, "EACH", 20)
    whole = build_report(wide_runs, reporter=QUIET)
    monkeypatch.setattr(gallery, "MOST", 560)
    part = build_report(wide_runs, reporter=QUIET)
    assert (len(whole.items["name"]), len(part.items["name"])) == (600, 560)
    for was, now in zip(whole.findings, part.findings, strict=True):
        for name in ("sure", "hardest", "random"):
            assert named(part, now["views"][name]) == named(whole, was["views"][name])
        for listed in (lambda found: found["hubs"], lambda found: found["suspects"]["rows"]):
            assert named(part, [o["item"] for o in listed(now)]) == named(whole, [o["item"] for o in listed(was)])
        for listed in (lambda found: found["pairs"], lambda found: found["copies"]["rows"]):
            assert [named(part, o["items"]) for o in listed(now)] == [named(whole, o["items"]) for o in listed(was)]
    for kind in ("mended", "broken"):
        assert len(whole.against[0][kind]["items"]) > 20
        assert named(part, part.against[0][kind]["items"]) == named(whole, whole.against[0][kind]["items"])


def test_neighbours_that_are_not_on_the_page_are_known_by_their_class(wide_runs, monkeypatch):
    monkeypatch.setattr(gallery, "EACH", 20)
    monkeypatch.setattr(gallery, "MOST", 400)
    report = build_report(wide_runs[:1], reporter=QUIET)
    sim, labels = cosines(wide_runs[0], first=60)
    order = np.argsort(-np.round(sim, 9), axis=1, kind="stable")[:, :8]
    found, rows = report.findings[0], [int(name.removeprefix("row ")) - 600 for name in report.items["name"]]
    away = 0
    for item, row in enumerate(rows):
        for near, other in zip(found["near"][item], order[row], strict=True):
            away += near < 0
            if near < 0:
                assert int(report.items["classes"][-1 - near]) == labels[other]
                assert other not in rows
            else:
                assert rows[near] == other
        first = found["near"][item][0]
        label = report.items["label"][first] if first >= 0 else -1 - first
        assert (label == report.items["label"][item]) == found["recall"][item] == (labels[order[row, 0]] == labels[row])
    assert away > 100
    assert all(near >= 0 for view in found["views"].values() for item in view for near in found["near"][item])
    assert report.items["sizes"] == [10] * 60
    assert "This page holds 400 of the images" in render(report)
