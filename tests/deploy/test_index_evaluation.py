# ruff: noqa: F811  (fixtures)
"""`nearkin index`: threshold, re-ranking and graph, and the classes they are evaluated on."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers.indexing import index, photos, run  # noqa: F401  (fixtures)
from helpers.small_runs import make_result, make_run

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.cli import index as index_command
from nearkin.deploy.index.sources import training_classes
from nearkin.errors import ConfigError, DataError, UserError

QUIET = Reporter(quiet=True)


def test_calibration_leaves_out_trained_classes(index, photo_folder, run):
    built, output = index(photo_folder, "--calibrate", "--false-accept-rate", "0.1")
    trained = training_classes(nk.Run(run), QUIET).labels_in(built)
    assert len(trained) == 4  # of ten: four are in the holdout, two in validation
    assert "4 indexed classes were trained on" in output
    assert "how often an image of a class missing from the index is\ncalled known" in output
    queries = [row for row, label in enumerate(built.labels) if label not in trained]
    assert built.threshold.unknown_queries == len(queries) == 72
    # Independently: the nearest item of another class, for each query.
    units = built.vectors.astype(np.float64)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    cosines, labels = units @ units.T, np.array(built.labels)
    other_class = np.array([cosines[row][labels != labels[row]].max() for row in queries])
    assert built.threshold.value == pytest.approx(np.sort(other_class)[::-1][7])
    again, _ = index(photo_folder)
    assert again.threshold == built.threshold


def test_calibration_reports_unlabelled_items(index, photos):
    shutil.copy(photos / "class 0" / "00.png", photos / "loose.png")
    built, output = index(photos, "--calibrate", "--false-accept-rate", "0.01", "--assume-unseen")
    assert "1 item without a label: searched, and counted as other classes" in output
    assert built.threshold.value == pytest.approx(1, abs=1e-6)  # similarity of the unlabelled copy


def test_changed_items_keep_the_threshold_with_a_note(index, photos):
    built, _ = index(photos, "--calibrate", "--false-accept-rate", "0.01", "--assume-unseen")
    (photos / "class 0" / "00.png").unlink()
    again, output = index(photos, "--prune")
    assert again.threshold == built.threshold
    assert "previous settings were kept, update them with: --calibrate" in output


def test_training_images_are_recognised_by_content(run, photo_folder, tmp_path):
    """With other class names, in another folder."""
    for c in range(10):
        shutil.copytree(photo_folder / f"class {c}", tmp_path / "renamed" / f"renamed {c}")
    index_command.run([str(run), str(tmp_path / "renamed"), "-o", str(tmp_path / "index"), "--quiet"])
    built = nk.Index.load(tmp_path / "index")
    plain = {f"class {str(label)[-1]}" for label in training_classes(nk.Run(run), QUIET).labels_in(built)}
    index_command.run([str(run), str(photo_folder), "-o", str(tmp_path / "second"), "--quiet"])
    assert plain == training_classes(nk.Run(run), QUIET).labels_in(nk.Index.load(tmp_path / "second"))


def test_changed_training_data_is_detected(photo_folder, tmp_path):
    """With one more class, the same seed gives a different split."""
    shutil.copytree(photo_folder, tmp_path / "data")
    trained = make_run(tmp_path, tmp_path / "data", name="changed")
    from nearkin.data.sources import load

    now = load(replace(trained.recipe.data, cache=False), QUIET).fingerprint
    trained.finish(make_result(now))
    everything = nk.Index(np.eye(10), [str(c) for c in range(10)], [f"class {c}" for c in range(10)])
    assert len(training_classes(trained, QUIET).labels_in(everything)) == 4
    shutil.copytree(photo_folder / "class 0", tmp_path / "data" / "class new")
    with pytest.raises(ConfigError, match="has changed since the run was trained"):
        training_classes(trained, QUIET)


def test_images_skipped_in_training_are_not_a_change(photo_folder, tmp_path):
    from nearkin.data.sources import load

    shutil.copytree(photo_folder, tmp_path / "data")
    (tmp_path / "data" / "class 3" / "99.png").write_bytes(b"broken")
    (tmp_path / "data" / "only broken").mkdir()
    (tmp_path / "data" / "only broken" / "0.png").write_bytes(b"broken")
    trained = make_run(tmp_path, tmp_path / "data", name="skipped")
    data = replace(trained.recipe.data, skip_broken=True, cache=False)
    (trained.path / "recipe.toml").write_text(replace(trained.recipe, data=data).to_toml())
    trained.finish(make_result(load(data, QUIET).fingerprint))
    found = training_classes(nk.Run(trained.path), QUIET)
    assert len(found.names) == 4
    assert len(found.digests) == 48


def test_calibration_needs_the_training_data(photo_folder, photos, tmp_path, capsys):
    shutil.copytree(photo_folder, tmp_path / "trained on")
    lost = make_run(tmp_path, tmp_path / "trained on", name="lost")
    shutil.rmtree(tmp_path / "trained on")
    flags = [str(lost.path), str(photos), "-o", str(tmp_path / "index"), "--quiet", "--calibrate"]
    with pytest.raises(ConfigError, match="cannot determine its training classes"):
        index_command.run(flags)
    assert not (tmp_path / "index").exists()  # fails before anything is embedded
    index_command.run([*flags, "--assume-unseen"])
    assert "20 unknown queries are too few for this rate" in capsys.readouterr().out


def test_the_threshold_is_saved_if_re_ranking_fails(index, photo_folder, tmp_path, capsys):
    """Classes of four, one and one image: enough to calibrate, not to select a re-ranking."""
    for c, count in enumerate((4, 1, 1)):
        (tmp_path / "few" / f"class {c}").mkdir(parents=True)
        for i in range(count):
            shutil.copy(photo_folder / f"class {c}" / f"{i:02d}.png", tmp_path / "few" / f"class {c}")
    with pytest.raises(DataError, match="re-ranking: needs at least two classes"):
        index(tmp_path / "few", "--calibrate", "--false-accept-rate", "0.5", "--choose-rerank", "--assume-unseen")
    assert nk.Index.load(tmp_path / "index").threshold is not None
    assert "an image is known if its highest similarity is above" in capsys.readouterr().out


def test_invalid_settings_fail_before_the_work(index, photos, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="false-accept-rate: expected a fraction"):
        index(photos, "--calibrate", "--false-accept-rate", "5")
    with pytest.raises(ConfigError, match="--false-accept-rate: only applies with --calibrate"):
        index(photos, "--false-accept-rate", "0.05")
    with pytest.raises(ConfigError, match=r"--data\.label-column: only applies to tables"):
        index(photos, "--data.label-column", "species")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"pip install 'nearkin\[stores\]'"):
        index(photos, "--hnsw", "--hnsw-min-items", "2")
    assert not (tmp_path / "index").exists()


def test_the_graph_and_rerank_flags(index, photos):
    pytest.importorskip("faiss", reason="faiss is not installed (nearkin[stores])")
    _, output = index(photos, "--hnsw")
    assert "graph: not built; 20 items are fewer than 200,000 and searched exactly" in output
    built, output = index(photos, "--hnsw", "--hnsw-min-items", "10", "--choose-rerank", "--assume-unseen")
    assert "graph: recall@10" in output
    assert built.graph is not None
    assert "re-ranking: " in output
    assert "graph: up to date, recall@10" in index(photos, "--hnsw", "--hnsw-min-items", "10")[1]
    (photos / "class 0" / "00.png").unlink()
    built, output = index(photos, "--prune")
    assert built.graph is None
    assert "the graph was dropped, rebuild it with: --hnsw" in output
