"""The loop: learns, repeats itself exactly, resumes exactly, fails honestly, and keeps the test classes sealed."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.small_runs import make_result

import nearkin as nk
from nearkin._common.files import append_checksum
from nearkin._common.progress import Pace, Reporter
from nearkin.cli import main
from nearkin.config.recipe import ComponentConfig, DataConfig, TrainConfig
from nearkin.data.images import ArrayImages, NoImages
from nearkin.data.samplers import RandomSampler
from nearkin.data.splits import Holdout, make_split
from nearkin.data.table import Table
from nearkin.errors import ConfigError, RunBusyError, RunError, TrainingFailedError
from nearkin.models.weights import load_checkpoint
from nearkin.training import factory, loop
from nearkin.training.checkpoint import TrainingInterrupted, defer_sigint
from nearkin.training.factory import warn_about_few_classes
from nearkin.training.run import Run, refuse_if_busy


def numbers(run: Run) -> dict:
    """Everything in a run that must repeat: result, events, per-query values and weights."""
    result = {key: value for key, value in run.result.items() if key != "seconds"}
    weights = torch.load(run.path / "best.pt", weights_only=True)["model"]
    with np.load(run.path / "per_query.npz") as stored:
        per_query = {name: stored[name].tobytes() for name in stored.files}
    return {
        "result": result,
        "events": (run.path / "events.jsonl").read_text(),
        "weights": {name: value.numpy().tobytes() for name, value in weights.items()},
        "per query": per_query,
    }


@pytest.fixture
def finished(tiny_recipe, tmp_path, quiet) -> Run:
    return nk.fit(tiny_recipe, tmp_path / "first", reporter=quiet)


def test_a_run_ends_with_all_its_files_and_a_model_that_embeds(finished, photo_folder):
    names = {path.name for path in finished.path.iterdir()}
    assert {"recipe.toml", "env.json", "events.jsonl", "last.pt", "best.pt", "per_query.npz", "result.json"} <= names
    assert not any(name.endswith(".tmp") for name in names)
    assert finished.failed is None
    result = finished.result
    assert result["protocol"]["classes"] == {"train": 4, "val": 2, "test": 4}
    for model in ("raw pixels", "untrained", "trained"):
        for value in result["test"][model].values():
            low, high = value["interval"]
            assert 0 <= low <= value["mean"] <= high <= 1
    paths = sorted(photo_folder.rglob("*.png"))[:3]
    vectors = nk.load(finished.path).embed(paths)
    assert vectors.shape == (3, 8)
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3))
    opened = [event for event in finished.events() if event["event"] == "holdout_opened"]
    assert len(opened) == 1


def test_the_same_seed_gives_the_same_digits_and_another_seed_others(finished, tiny_recipe, tmp_path, quiet):
    again = nk.fit(tiny_recipe, tmp_path / "second", reporter=quiet)
    assert numbers(again) == numbers(finished)
    other = nk.fit(replace(tiny_recipe, seed=1), tmp_path / "second", reporter=quiet)
    assert other.path != again.path
    assert numbers(other)["weights"] != numbers(again)["weights"]


def test_a_finished_run_is_returned_as_it_is(finished, tiny_recipe, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.path.iterdir()}
    again = nk.fit(tiny_recipe, finished.path.parent)
    assert f"run already complete: {finished.path}" in capsys.readouterr().err
    assert again.path == finished.path
    assert {path: path.stat().st_mtime_ns for path in finished.path.iterdir()} == before


@pytest.mark.parametrize("stop_after", [1, 6, 7, 15])
def test_stopped_at_any_step_and_resumed_equals_never_stopped(
    finished, tiny_recipe, tmp_path, quiet, monkeypatch, stop_after
):
    steps = 0
    real = loop.set_learning_rate

    def counting(*args):
        nonlocal steps
        steps += 1
        if steps == stop_after:
            os.kill(os.getpid(), signal.SIGINT)
        real(*args)

    monkeypatch.setattr(loop, "set_learning_rate", counting)
    with pytest.raises(TrainingInterrupted, match="stopped at epoch"):
        nk.fit(tiny_recipe, tmp_path / "stopped", reporter=quiet)
    monkeypatch.undo()
    resumed = nk.fit(tiny_recipe, tmp_path / "stopped", reporter=quiet)
    assert numbers(resumed) == numbers(finished)


KILLED = """
import os, random, signal, sys
from nearkin.cli import main
from nearkin.training import loop

left = int(sys.argv.pop(1))  # steps until the process kills itself, outright
real = loop.set_learning_rate
def counting(*args):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args)
loop.set_learning_rate = counting
main()
"""


@pytest.mark.slow
def test_killed_outright_five_times_and_resumed_equals_never_stopped(finished, tiny_recipe, tmp_path, quiet):
    """kill -9 in the middle of a step, at steps drawn at random; the same command is given again each time."""
    recipe_file = tmp_path / "recipe.toml"
    recipe_file.write_text(tiny_recipe.to_toml())
    steps = random.Random(7).sample(range(1, 8), 5)  # an epoch has six: some die before a checkpoint, some after
    arguments = ["train", str(recipe_file), "--runs", str(tmp_path / "killed"), "--quiet"]
    for step in steps:
        done = subprocess.run([sys.executable, "-c", KILLED, str(step), *arguments], capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
    resumed = nk.fit(tiny_recipe, tmp_path / "killed", reporter=quiet)
    assert numbers(resumed) == numbers(finished)


def test_a_second_process_on_one_run_is_told(tiny_recipe, tmp_path, quiet):
    run = Run.create(tmp_path, "one", tiny_recipe)
    with run.lock(), pytest.raises(RunError, match="another process is training"), Run(run.path).lock():
        pass


def test_a_loss_that_is_not_finite_ends_as_failed_never_as_a_score(tiny_recipe, tmp_path, quiet):
    wild = replace(tiny_recipe, train=replace(tiny_recipe.train, lr=1e30, clip_norm=0.0, optimizer="sgd"))
    with pytest.raises(TrainingFailedError, match=r"became NaN or infinite at epoch \d, step \d"):
        nk.fit(wild, tmp_path, reporter=quiet)
    [path] = [p for p in tmp_path.iterdir() if (p / "recipe.toml").exists()]
    assert json.loads((path / "failed.json").read_text())["reason"]
    assert not (path / "result.json").exists()


def test_the_test_classes_stay_sealed_until_the_epoch_is_chosen(tiny_recipe, tmp_path, quiet, monkeypatch):
    opened_at = []
    real = Holdout.open

    def watched(self):
        [run] = list(tmp_path.iterdir())
        opened_at.append(len([e for e in Run(run).events() if e["event"] == "epoch"]))
        return real(self)

    monkeypatch.setattr(Holdout, "open", watched)
    nk.fit(tiny_recipe, tmp_path, reporter=quiet)
    assert opened_at == [4]  # the start, and three epochs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": ComponentConfig("proxyanchor")}, "Did you mean 'proxy_anchor'"),
        ({"loss": ComponentConfig("proxy_anchor", {"alfa": 1.0})}, "Did you mean 'alpha'"),
        ({"loss": ComponentConfig("norm_softmax", {"temperature": 0})}, r"temperature must be in \(0, inf\), got 0"),
        ({"loss": ComponentConfig("mpa", {"centers": -1})}, r"centers must be in \[1, inf\), got -1"),
        ({"miner": ComponentConfig("semihard")}, "takes no miner"),
        (
            {"loss": ComponentConfig("triplet"), "miner": ComponentConfig("hard", {"epsilon": 0.1})},
            "miner hard: no setting 'epsilon'",
        ),
        (
            {"loss": ComponentConfig("triplet"), "miner": ComponentConfig("multi_similarity", {"epsilon": "much"})},
            "miner multi_similarity: epsilon must be a finite number, got 'much'",
        ),
    ],
)
def test_a_wrong_name_is_refused_before_the_data_is_read(tiny_recipe, tmp_path, quiet, change, message):
    nowhere = replace(tiny_recipe, data=replace(tiny_recipe.data, root=tmp_path / "none"), **change)
    with pytest.raises(ConfigError, match=message):
        nk.fit(nowhere, tmp_path, reporter=quiet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["best.pt", "last.pt"])
def test_every_flipped_bit_of_a_checkpoint_is_detected(finished, name):
    """torch.load checks neither tensors nor padding: without our checksum most of these would load."""
    path = finished.path / name
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for position in [0, len(whole) - 1, len(whole) - 40, *random.integers(0, len(whole), 97)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << random.integers(0, 8)
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=f"{name}: not a readable checkpoint"):
            load_checkpoint(path, keys=("model",))
    path.write_bytes(whole)
    assert load_checkpoint(path, keys=("model",)).keys() == torch.load(path, weights_only=True).keys()


def test_a_flipped_bit_resumes_from_the_checkpoint_before(tiny_recipe, finished, capsys):
    before = numbers(finished)
    (finished.path / "result.json").unlink()
    damaged = bytearray((finished.path / "last.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (finished.path / "last.pt").write_bytes(damaged)
    again = nk.fit(tiny_recipe, finished.path.parent, reporter=Reporter())
    assert "does not match its checksum). Using the previous checkpoint." in capsys.readouterr().err
    assert numbers(again) == before


def test_a_checkpoint_without_its_entries_is_refused(finished):
    state = torch.load(finished.path / "best.pt", weights_only=True)
    del state["image_shape"]
    finished.save("best.pt", state)
    with pytest.raises(RunError, match=r"best\.pt: not a checkpoint of nearkin \(image_shape missing\)"):
        nk.load(finished.path)


@pytest.mark.parametrize("damaged", [("last.pt",), ("last.pt", "previous.pt")])
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_used(tiny_recipe, finished, capsys, damaged):
    before = numbers(finished)
    (finished.path / "result.json").unlink()
    for name in damaged:
        whole = (finished.path / name).read_bytes()
        (finished.path / name).write_bytes(whole[: len(whole) // 2])
    again = nk.fit(tiny_recipe, finished.path.parent, reporter=Reporter())
    said = capsys.readouterr().err
    assert all(f"{name}: not a readable checkpoint" in said for name in damaged)
    assert ("resuming" in said) == (len(damaged) == 1)
    assert said.count("Using the previous checkpoint") == 1
    assert said.count("Starting from the beginning") == len(damaged) - 1
    assert numbers(again) == before


def test_a_checkpoint_with_code_inside_is_refused(finished):
    class Evil:
        def __reduce__(self):
            return (os.system, ("touch pwned",))

    torch.save({"model": Evil()}, finished.path / "best.pt")
    append_checksum(finished.path / "best.pt")
    with pytest.raises(RunError, match=r"not a readable checkpoint \(it contains code"):
        nk.load(finished.path)


def test_a_full_disk_keeps_the_earlier_checkpoint(finished):
    before = (finished.path / "last.pt").read_bytes()
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
        "import torch; from nearkin.training.run import Run;"
        f"Run({str(finished.path)!r}).save('last.pt', {{'model': torch.zeros(10000)}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "last.pt: cannot write the checkpoint (File too large). The previous one is intact." in done.stderr
    assert (finished.path / "last.pt").read_bytes() == before
    assert not list(finished.path.glob("*.tmp"))


def test_ctrl_c_twice_stops_at_once():
    with defer_sigint() as pressed:
        assert not pressed()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("where", ["initial_features", "evaluate_epoch", "evaluate_final"])
def test_ctrl_c_outside_of_the_steps_is_heard_and_loses_nothing(
    finished, tiny_recipe, tmp_path, quiet, monkeypatch, where
):
    module = factory if where == "initial_features" else loop
    real, pressed = getattr(module, where), []

    def press_once(*args, **named):
        if not pressed and named.get("epoch") != 0:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return real(*args, **named)

    monkeypatch.setattr(module, where, press_once)
    with pytest.raises(KeyboardInterrupt) as stopped:
        nk.fit(tiny_recipe, tmp_path / "stopped", reporter=quiet)
    assert str(stopped.value) == ("stopped after epoch 1 of 3" if where == "evaluate_epoch" else "")
    resumed = nk.fit(tiny_recipe, tmp_path / "stopped", reporter=quiet)
    assert numbers(resumed) == numbers(finished)


def test_what_is_written_is_json_even_where_a_number_is_missing(tiny_recipe, tmp_path):
    """Bare NaN is refused by browsers and jq. Readers in Python get it back."""
    run = Run.create(tmp_path, "one", tiny_recipe)
    run.log(event="epoch", epoch=1, loss=float("nan"), val=None)
    recall = {"mean": 0.5, "interval": [float("nan")] * 2}
    metrics = {"R@1": recall, "MAP@R": recall}
    test = {"trained": metrics, "raw pixels": metrics}
    run.finish(make_result(test=test, differences={"raw pixels": metrics}) | {"val_R@1": None})
    for name in ("events.jsonl", "result.json"):
        json.loads((run.path / name).read_text(), parse_constant=pytest.fail)
    assert run.events()[0]["loss"] is None
    assert all(np.isnan(run.result["test"]["trained"]["R@1"]["interval"]))
    assert run.result["val_R@1"] is None


def test_a_run_folder_that_cannot_be_written_is_named(finished, tmp_path):
    """A full disk, as a limit on the size of files."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
        "from nearkin.errors import RunError; from nearkin.training.run import Run;"
        f"run = Run({str(finished.path)!r});"
        """
for write in (lambda: run.log(text="x" * 3000), lambda: run.finish({"x": "x" * 3000}), lambda: run.fail("x" * 3000)):
    try:
        write()
    except RunError as error:
        print(error)
"""
    )
    before = finished.result
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("events.jsonl", "result.json", "failed.json"):
        assert f"{name}: cannot be written (File too large)" in done.stdout
    assert finished.result == before
    lock = tmp_path / "taken" / "lock"
    run = Run.create(tmp_path, "taken", finished.recipe)
    lock.mkdir()
    with pytest.raises(RunError, match="lock: cannot be written"), run.lock():
        pass


TWO_AT_ONCE = """
import sys
from pathlib import Path
from nearkin.config import Recipe
from nearkin.training import Run

runs = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(60):
    Run.create(runs, f"run-{number}", Recipe())
"""


@pytest.mark.slow
def test_two_processes_may_make_the_same_runs_at_the_same_moment(tmp_path):
    command = [sys.executable, "-c", TWO_AT_ONCE, str(tmp_path / "runs")]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in both] == ["ready\n", "ready\n"]
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        said = process.communicate(timeout=100)[1]
        assert process.returncode == 0, said
    assert not list((tmp_path / "runs").rglob("*.tmp"))


def test_a_run_knows_where_its_data_lie_now(tiny_recipe, tmp_path, quiet, photo_folder, monkeypatch):
    (tmp_path / "photos").symlink_to(photo_folder)
    moved = tmp_path / "moved"
    shutil.copytree(photo_folder, moved)
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    here = replace(tiny_recipe.data, root=Path("photos"))
    first = nk.fit(replace(tiny_recipe, data=here), runs, reporter=quiet, final=False)
    assert first.recipe.data.root == photo_folder.resolve()
    again = nk.fit(replace(tiny_recipe, data=replace(here, root=Path("moved"))), runs, reporter=quiet, final=False)
    assert again.path == first.path
    assert Run(first.path).recipe.data.root == moved


def test_advice_where_a_pair_loss_would_find_few_pairs(tiny_recipe):
    """150 classes: of 24 images drawn at random few meet another of their class."""
    labels = np.repeat(np.arange(150), 5)
    images = ArrayImages(np.zeros((len(labels), 1, 1, 1), np.uint8))
    table = Table("made", labels, tuple(f"c{number}" for number in range(150)), images, "f")
    pairs = replace(tiny_recipe, loss=ComponentConfig("triplet"), train=TrainConfig(batch_size=24, samples_per_class=0))
    said = factory.warn_about_few_positives(pairs, table)
    drawn = RandomSampler(table.labels, batch_size=24, seed=0).epoch(0)[0]
    kinds = labels[drawn].tolist()
    share = sum(kinds.count(kind) > 1 for kind in kinds) / 24
    assert f"only {share:.0%} of the images" in said
    assert "--train.samples-per-class 4" in said
    for fine in (
        replace(pairs, loss=ComponentConfig("proxy_anchor")),
        replace(pairs, train=TrainConfig(batch_size=24, samples_per_class=4)),
        replace(pairs, train=TrainConfig(batch_size=600, samples_per_class=0)),
        replace(pairs, memory=100),
    ):
        assert factory.warn_about_few_positives(fine, table) == ""


def test_the_time_left_is_not_guessed_before_a_step_is_done():
    assert Pace(done=10, total=60).eta == "?"


def test_the_commit_is_that_of_nearkin_not_of_a_project_it_is_installed_in(tmp_path):
    def git(*args):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, check=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "mine")
    shutil.copytree(Path(nk.__file__).parent, tmp_path / "nearkin", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import nearkin.training.run; print(nearkin.training.run.__file__, nearkin.training.run._commit())"

    def said():
        return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True).stdout.split()

    assert said() == [str(tmp_path / "nearkin" / "training" / "run.py"), "None"]
    git("add", ".")
    git("commit", "-q", "-m", "a checkout")
    assert len(said()[1]) == 40


def test_a_run_folder_of_another_version_gets_one_clear_error(tmp_path, capsys):
    """Recipe keys were renamed in 0.2.0, so an older run cannot be read; the message names its version."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "recipe.toml").write_text("[train]\nper_class = 4\n")
    (folder / "env.json").write_text('{"packages": {"nearkin": "0.1.0"}}')
    with pytest.raises(RunError, match=r"written by nearkin 0\.1\.0, which .* cannot read\. Train it again"):
        Run(folder)
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(folder)])
    assert capsys.readouterr().err.count("\n") == 1
    (folder / "env.json").unlink()  # without a version, the setting itself is reported
    with pytest.raises(ConfigError, match=r"train\.per_class: no such setting"):
        Run(folder)


# --- few validation classes ------------------------------------------------------------------------------------------


def flowers(classes, **parts):
    labels = np.repeat(np.arange(classes), 2)
    part = np.concatenate([[name] * 2 * count for name, count in parts.items()]) if parts else None
    names = tuple(f"c{c}" for c in range(classes))
    return Table("flowers", labels, names, NoImages("flowers", len(labels)), "", part=part)


@pytest.mark.parametrize(
    ("table", "settings", "expected"),
    [
        (flowers(34), {}, "only 3 validation classes.*MAP@R selects.*8 would do: --data.val-fraction 0.24, .* 12 to"),
        (flowers(20), {}, "only 2 validation classes.*8 would do, but the data has too few classes"),
        (flowers(80), {}, ""),
        (flowers(60, train=40, test=20), {}, "only 4 .*8 would do: --data.val-fraction 0.2, which leaves 32 to train"),
        (flowers(60), {"folds": 6}, "only 6 .*8 would do: --data.folds 4"),
        (flowers(60, train=36, val=4, test=20), {}, "only 4 .*8 would do, but the data has too few classes"),
        (flowers(34), {"val_fraction": 0.24}, ""),
        (flowers(34), {"val_fraction": 0.0}, ""),
        (flowers(60), {"folds": 4}, ""),
    ],
)
def test_few_validation_classes_are_warned_about_with_the_number_that_would_do(table, settings, expected):
    data = DataConfig(source="features", **settings)
    warning = warn_about_few_classes(data, table, make_split(table, data)[0])
    assert re.search(expected, warning) if expected else warning == ""


@pytest.mark.parametrize(("num_classes", "metric"), [(2, "MAP@R"), (4, "MAP@R")])
def test_few_validation_classes_select_by_map(tiny_recipe, tmp_path, num_classes, metric):
    recipe = replace(tiny_recipe, data=replace(tiny_recipe.data, val_fraction=num_classes / 10))
    out = io.StringIO()
    run = nk.fit(recipe, tmp_path, reporter=Reporter(out=out), final=False)
    epochs = {event["epoch"]: event["val"] for event in run.events() if event["event"] == "epoch"}
    assert list(epochs) == [0, 1, 2, 3]
    best = run.result["protocol"]["epoch"]
    assert best == max(epochs, key=lambda epoch: (epochs[epoch][metric], epochs[epoch]["R@1"], -epoch))
    assert run.result["val_MAP@R"] == epochs[best]["MAP@R"]
    assert run.result["protocol"]["epoch_selected_by"] == "MAP@R (then R@1) on validation classes"
    assert f"warning: only {num_classes} validation classes" in out.getvalue()
    assert "val MAP@R" in out.getvalue()


def test_feature_augmentation_needs_frozen_features(tiny_recipe, tmp_path, quiet):
    with pytest.raises(ConfigError, match=r"train\.feature_noise: only with a frozen backbone"):
        nk.fit(replace(tiny_recipe, train=replace(tiny_recipe.train, feature_noise=0.1)), tmp_path, reporter=quiet)


def test_a_second_process_is_refused_before_it_reads_the_data(tiny_recipe, tmp_path, quiet, monkeypatch):
    run = Run.create(tmp_path, "key", tiny_recipe)
    monkeypatch.setattr(loop.sources, "load", pytest.fail)
    with run.lock(), pytest.raises(RunBusyError, match=r"key: another process is training this run"):
        nk.fit(tiny_recipe, tmp_path, reporter=quiet)
    other = replace(tiny_recipe, seed=7)
    with run.lock():
        refuse_if_busy(other, tmp_path)
    refuse_if_busy(tiny_recipe, tmp_path)  # not locked any more
    (run.path / "recipe.toml").write_text("written = 'by another version'", encoding="utf-8")
    with run.lock():
        refuse_if_busy(tiny_recipe, tmp_path)
    refuse_if_busy(tiny_recipe, tmp_path / "nowhere")
