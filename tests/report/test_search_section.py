"""The section of a page about what `nearkin train --budget` tried."""

import json
import shutil
from dataclasses import replace

import pytest
from helpers.scored import QUIET, clouds

import nearkin as nk
from nearkin.report.page import describe_search, write_page
from nearkin.training.autopilot import RECORD, read_record
from nearkin.training.run import Run


def step(name, minutes, recall, map_at_r, milliseconds, kept=True):
    values = {"minutes": minutes, "val_R@1": recall, "val_MAP@R": map_at_r, "ms_per_image": milliseconds}
    return {"name": name, "kept": kept, **values}


STEPS = [
    step("whitened", 0.5, 0.80, 0.40, 4.0),
    step("a worse head", 1.0, 0.79, 0.39, 4.0, kept=False),
    step("tuned <b>stages</b>", 3.0, 0.85, 0.45, 4.0),
    step("slower and worse", 5.0, 0.82, 0.41, 9.0, kept=False),
    step("joined", 9.0, 0.88, 0.50, 12.0),
]
RECORDED = {"budget": 600.0, "chosen": "joined", "steps": STEPS, "not_tried": ["a third (about 5 min)"]}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    recipe = clouds(folder, classes=20, samples_per_class=6, dim=8, seed=0, duplicates={})
    recipe = replace(recipe, model=replace(recipe.model, dim=4), train=replace(recipe.train, epochs=1))
    run = nk.fit(recipe, folder / "runs", reporter=QUIET)
    (run.path / RECORD).write_text(json.dumps(RECORDED))
    return run


def test_the_front_of_speed_and_quality_and_the_curve_of_the_best():
    described = describe_search(RECORDED)
    assert [row["name"] for row in described["rows"] if row["front"]] == ["tuned <b>stages</b>", "joined"]
    assert "min 9: 88" in described["chart"]
    assert "min 5:" not in described["chart"]  # was not kept


def test_the_page_shows_what_was_tried_and_escapes_it(searched):
    page = write_page(searched).read_text()
    assert "What was tried" in page
    assert "joined <strong>(chosen)</strong>" in page
    assert "tuned &lt;b&gt;stages" in page
    assert "Not tried for lack of time: a third (about 5 min)" in page


@pytest.mark.parametrize(
    "content", ["", "[]", '{"budget": 1}', json.dumps({**RECORDED, "steps": [{"name": "x"}]}), "\x00"]
)
def test_a_damaged_record_is_left_out(searched, tmp_path, content):
    folder = shutil.copytree(searched.path, tmp_path / "run")
    (folder / RECORD).write_text(content)
    assert read_record(Run(folder)) is None
    assert "What was tried" not in write_page(Run(folder)).read_text()
