"""Run folders with damaged files: an error that names the file, never a traceback."""

import json

import pytest
from helpers.small_runs import make_result, make_run

from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, RunError
from nearkin.models.saved import load
from nearkin.training.run import Run

RECALL = {"mean": 0.5, "interval": [0.4, 0.6]}
TESTED = {
    "test": {"trained": {"R@1": RECALL}, "raw pixels": {"R@1": RECALL}},
    "differences": {"raw pixels": {"R@1": RECALL, "MAP@R": RECALL}},
    "notes": ["a note"],
}
NESTED = "[" * 100_000


@pytest.fixture
def run(photo_folder, tmp_path):
    return make_run(tmp_path, photo_folder)


def test_results_are_read(run):
    for result in (make_result(), make_result(**TESTED)):
        run.finish(result)
        assert run.result == result


@pytest.mark.parametrize(
    "changed",
    [
        {"protocol": None},
        {"protocol": {"epoch": "one", "classes": {"test": 5}}},
        {"val_R@1": "high"},
        {"test": [1.0]},
        {"test": {"raw pixels": {"R@1": RECALL}}},  # without the trained model
        {"test": {"trained": {"R@1": {"mean": 0.5}}, "raw pixels": {"R@1": RECALL}}},
        {"test": {"trained": {"R@1": RECALL | {"interval": [0.4]}}, "raw pixels": {"R@1": RECALL}}},
        {"test": {"trained": {"R@1": RECALL | {"mean": "0.5"}}, "raw pixels": {"R@1": RECALL}}},
        {"differences": None},
        {"differences": {"raw pixels": {"R@1": 0.5}}},
        {"differences": {"raw pixels": {"R@1": RECALL}}},  # without MAP@R
        {"differences": {"another": {"R@1": RECALL, "MAP@R": RECALL}}},
        {"test": {"trained": {"R@1": RECALL}, "raw pixels": {"MAP@R": RECALL}}},
        {"notes": [1]},
    ],
)
def test_a_damaged_result_is_rejected(run, changed):
    run.finish(make_result(**TESTED) | changed)
    with pytest.raises(RunError, match=r"result.json: damaged \("):
        _ = run.result


@pytest.mark.parametrize("text", [NESTED, "9" * 5000, "[]", "{", '"text"', "\udcff"])
@pytest.mark.parametrize("name", ["result.json", "failed.json", "env.json"])
def test_json_that_cannot_be_read_is_rejected(run, name, text):
    (run.path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RunError, match=f"{name}: cannot be read"):
        _ = run.result, run.failed, run.stored_environment


@pytest.mark.parametrize("line", [NESTED, "[]", "7", '{"event": 1}}', '{"epoch": 1}', '{"event": "epoch", "epoch": 1}'])
def test_a_damaged_event_is_rejected_with_its_line(run, line):
    run.log(event="alarm", epoch=1, kind="dead", text="x")
    with open(run.path / "events.jsonl", "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(RunError, match=r"events.jsonl: line 2 is damaged"):
        run.events()
    with open(run.path / "events.jsonl", "ab") as file:
        file.write(b"\xff\n")
    with pytest.raises(RunError, match=r"events.jsonl: damaged"):
        run.events()


@pytest.mark.parametrize("value", [NESTED, "9" * 5000])
def test_a_recipe_nested_or_long_without_end_is_rejected(tmp_path, value):
    (tmp_path / "r.toml").write_text(f"seed = {value}\n")
    with pytest.raises(ConfigError, match="cannot be read as a recipe"):
        Recipe.from_toml(tmp_path / "r.toml")


def test_a_model_nested_without_end_is_rejected(run, tmp_path):
    load(run.path).save(tmp_path / "saved")
    (tmp_path / "saved" / "model.json").write_text(NESTED)
    with pytest.raises(RunError, match=r"not a readable model .*nested too deeply"):
        load(tmp_path / "saved")


def test_an_environment_without_a_file_is_empty(run):
    (run.path / "env.json").unlink()
    assert Run(run.path).stored_environment == {}
    (run.path / "env.json").write_text(json.dumps({"packages": {}}))
    assert Run(run.path).stored_environment == {"packages": {}}
