# ruff: noqa: F811  (fixtures by their names)
"""What `nearkin index` works out once the items are there: a threshold, a re-ranking, a graph; and by which classes."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers.indexing import index, photos, run  # noqa: F401  (fixtures)
from helpers.small_runs import make_run

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.cli import index as index_command
from nearkin.deploy.index.trained import training_classes
from nearkin.errors import ConfigError, DataError, UserError

QUIET = Reporter(quiet=True)


def test_calibration_leaves_out_trained_classes(index, photo_folder, run):
    made, said = index(photo_folder, "--calibrate", "--false-accept", "0.1")
    trained = training_classes(nk.Run(run), QUIET).labels_in(made)
    assert len(trained) == 4  # of ten: four are sealed, two validate
    assert "4 indexed classes were trained on" in said
    assert "the chance that an image of a class that is\nmissing here passes as known" in said
    asking = [row for row, label in enumerate(made.labels) if label not in trained]
    assert made.threshold.unknown == len(asking) == 72
    # By hand: the nearest item of another class, for each that asks.
    units = made.vectors.astype(np.float64)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    cosines, labels = units @ units.T, np.array(made.labels)
    foreign = np.array([cosines[row][labels != labels[row]].max() for row in asking])
    assert made.threshold.value == pytest.approx(np.sort(foreign)[::-1][7])
    again, _ = index(photo_folder)
    assert again.threshold == made.threshold


def test_calibration_says_what_becomes_of_unlabelled_items(index, photos):
    shutil.copy(photos / "class 0" / "00.png", photos / "loose.png")
    made, said = index(photos, "--calibrate", "--assume-unseen")
    assert "1 items without a label are searched and count as of other classes" in said
    assert made.threshold.value == pytest.approx(1, abs=1e-6)  # that of the copy, which is no class of its own


def test_changed_items_keep_their_threshold_and_say_so(index, photos):
    made, _ = index(photos, "--calibrate", "--assume-unseen")
    (photos / "class 0" / "00.png").unlink()
    again, said = index(photos, "--prune")
    assert again.threshold == made.threshold
    assert "is kept, and made anew by: --calibrate" in said


def test_trained_images_are_known_by_their_content(run, photo_folder, tmp_path):
    """Under other class names, in another folder."""
    for c in range(10):
        shutil.copytree(photo_folder / f"class {c}", tmp_path / "renamed" / f"sort {c}")
    index_command.run([str(run), str(tmp_path / "renamed"), "-o", str(tmp_path / "index"), "--quiet"])
    made = nk.Index.load(tmp_path / "index")
    plain = {f"class {str(label)[-1]}" for label in training_classes(nk.Run(run), QUIET).labels_in(made)}
    index_command.run([str(run), str(photo_folder), "-o", str(tmp_path / "second"), "--quiet"])
    assert plain == training_classes(nk.Run(run), QUIET).labels_in(nk.Index.load(tmp_path / "second"))


def test_changed_training_data_is_noticed(photo_folder, tmp_path):
    """One class more, and the same seed deals the classes otherwise."""
    shutil.copytree(photo_folder, tmp_path / "data")
    trained = make_run(tmp_path, tmp_path / "data", name="changed")
    from nearkin.data.sources import load

    now = load(replace(trained.recipe.data, cache=False), QUIET).fingerprint
    trained.finish({"protocol": {"fingerprint": now}})
    everything = nk.Index(np.eye(10), [str(c) for c in range(10)], [f"class {c}" for c in range(10)])
    assert len(training_classes(trained, QUIET).labels_in(everything)) == 4
    shutil.copytree(photo_folder / "class 0", tmp_path / "data" / "class new")
    with pytest.raises(ConfigError, match="is not what it was when the run was trained"):
        training_classes(trained, QUIET)


def test_images_that_training_left_out_do_not_count_as_a_change(photo_folder, tmp_path):
    from nearkin.data.sources import load

    shutil.copytree(photo_folder, tmp_path / "data")
    (tmp_path / "data" / "class 3" / "99.png").write_bytes(b"broken")
    (tmp_path / "data" / "only broken").mkdir()
    (tmp_path / "data" / "only broken" / "0.png").write_bytes(b"broken")
    trained = make_run(tmp_path, tmp_path / "data", name="skipped")
    data = replace(trained.recipe.data, skip_broken=True, cache=False)
    (trained.path / "recipe.toml").write_text(replace(trained.recipe, data=data).to_toml())
    trained.finish({"protocol": {"fingerprint": load(data, QUIET).fingerprint}})
    found = training_classes(nk.Run(trained.path), QUIET)
    assert len(found.names) == 4
    assert len(found.digests) == 48


def test_without_the_training_data_nothing_is_calibrated(photo_folder, photos, tmp_path, capsys):
    shutil.copytree(photo_folder, tmp_path / "trained on")
    lost = make_run(tmp_path, tmp_path / "trained on", name="lost")
    shutil.rmtree(tmp_path / "trained on")
    flags = [str(lost.path), str(photos), "-o", str(tmp_path / "index"), "--quiet", "--calibrate"]
    with pytest.raises(ConfigError, match="cannot tell which classes"):
        index_command.run(flags)
    assert not (tmp_path / "index").exists()  # told before anything is embedded
    index_command.run([*flags, "--assume-unseen"])
    assert "20 unknown queries are too few for that rate" in capsys.readouterr().out


def test_what_was_worked_out_survives_a_later_failure(index, photo_folder, tmp_path, capsys):
    """Classes of four, one and one image: enough to calibrate, not enough to choose a re-ranking."""
    for c, count in enumerate((4, 1, 1)):
        (tmp_path / "few" / f"class {c}").mkdir(parents=True)
        for i in range(count):
            shutil.copy(photo_folder / f"class {c}" / f"{i:02d}.png", tmp_path / "few" / f"class {c}")
    with pytest.raises(DataError, match="re-ranking: needs items"):
        index(tmp_path / "few", "--calibrate", "--false-accept", "0.5", "--choose-rerank", "--assume-unseen")
    assert nk.Index.load(tmp_path / "index").threshold is not None
    assert "known above" in capsys.readouterr().out


def test_what_cannot_be_worked_out_is_said_before_the_work(index, photos, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="false-accept: expected a share"):
        index(photos, "--calibrate", "--false-accept", "5")
    with pytest.raises(ConfigError, match="--false-accept: is for --calibrate"):
        index(photos, "--false-accept", "0.05")
    with pytest.raises(ConfigError, match=r"--data\.label-column: is for tables"):
        index(photos, "--data.label-column", "kind")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"pip install 'nearkin\[graph\]'"):
        index(photos, "--hnsw", "--hnsw-from", "2")
    assert not (tmp_path / "index").exists()


def test_the_graph_and_rerank_flags(index, photos):
    pytest.importorskip("faiss", reason="faiss is not installed (nearkin[graph])")
    _, said = index(photos, "--hnsw")
    assert "graph: none; 20 items are fewer than 200,000 and searched exactly" in said
    made, said = index(photos, "--hnsw", "--hnsw-from", "10", "--choose-rerank", "--assume-unseen")
    assert "graph: recall@10" in said
    assert made.graph is not None
    assert "re-ranking: " in said
    assert "graph: kept, recall@10" in index(photos, "--hnsw", "--hnsw-from", "10")[1]
    (photos / "class 0" / "00.png").unlink()
    made, said = index(photos, "--prune")
    assert made.graph is None
    assert "the graph is dropped, and made anew by: --hnsw" in said
