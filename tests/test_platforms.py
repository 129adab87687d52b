"""The package without what Windows lacks: no fcntl, no fork, no process groups, no POSIX signals."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from helpers.paths import ROOT
from helpers.public_api import public_names
from helpers.studies import small_study, write_features


@pytest.fixture
def run_without_posix(tmp_path):
    """Run code in a process in which, as in the processes it starts, POSIX modules and functions are missing."""
    (tmp_path / "site").mkdir()
    shutil.copy(ROOT / "tests" / "helpers" / "without_posix.py", tmp_path / "site" / "sitecustomize.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}

    def run(code: str) -> str:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_every_public_name_can_be_imported(run_without_posix):
    names = [(package, name) for package, name, _ in public_names()]
    output = run_without_posix(f"""
        import importlib, os, signal, sys
        assert sys.modules["fcntl"] is None and not hasattr(os, "fork") and not hasattr(signal, "SIGKILL")
        names = {names!r}
        print(sum(getattr(importlib.import_module(package), name) is not None for package, name in names))
    """)
    assert int(output) == len(names) > 100


@pytest.mark.slow
def test_training_and_search(run_without_posix, glyphs_table):
    """`glyphs_table` is drawn and cached before."""
    output = run_without_posix("""
        from dataclasses import replace
        import numpy as np
        import nearkin as nk

        rng = np.random.default_rng(0)
        labels = np.repeat(np.arange(8), 10)
        print("perfect", nk.score(np.eye(8, dtype=np.float32)[labels], labels)["R@1"])

        recipe = nk.recipes.glyphs_small()
        recipe = replace(
            recipe,
            model=replace(recipe.model, width=4, dim=8),
            train=replace(recipe.train, epochs=1, batch_size=32, samples_per_class=2),
        )
        run = nk.fit(recipe, "runs")
        print("result", 0 < run.result["test"]["trained"]["R@1"]["mean"] <= 1)

        vectors = rng.normal(size=(20, 6)).astype(np.float32)
        nk.Index(vectors, [f"item {n}" for n in range(20)]).save("saved.index")
        print("found", [nk.Index.load("saved.index").search(vector, k=1)[0].id for vector in vectors[:3]])
    """)
    assert output.splitlines() == ["perfect 1.0", "result True", "found ['item 0', 'item 1', 'item 2']"]


@pytest.mark.slow
def test_an_index_of_images(run_without_posix, photo_folder):
    output = run_without_posix(f"""
        from pathlib import Path
        import nearkin as nk
        from nearkin.config import ModelConfig

        paths = sorted(Path({str(photo_folder)!r}).rglob("*.png"))
        model = nk.Embedder(ModelConfig(backbone="small_conv", width=4, dim=8), (3, 24, 24)).eval()
        index = nk.Index.build(model, paths, [path.parent.name for path in paths])
        print(all(index.search(path, k=1)[0].similarity > 0.999 for path in paths[:5]), len(index))
    """)
    assert output.split() == ["True", "120"]


@pytest.mark.slow
def test_a_study_with_a_worker_process(run_without_posix, tmp_path):
    study = small_study(write_features(tmp_path / "clouds.npz"), losses=("norm_softmax",), sizes=(4,), seeds=(0,))
    (tmp_path / "study.toml").write_text(study.to_toml(), encoding="utf-8")
    output = run_without_posix("""
        from nearkin.bench.trials import StudyFolder
        from nearkin.cli import main

        main(["bench", "run", "study.toml", "--out", "study", "--workers", "1", "--device", "cpu"])
        folder = StudyFolder.open("study")
        print("outcomes", [outcome.status for outcome in folder.outcomes().values()], folder.running())
    """)
    assert output.splitlines()[-1] == "outcomes ['done'] set()"


@pytest.mark.slow
def test_a_hyperparameter_search_with_two_worker_processes(run_without_posix, tmp_path):
    pytest.importorskip("optuna", reason="needs nearkin[bench]")
    from helpers.searches import small_recipe, write_vectors

    (tmp_path / "recipe.toml").write_text(small_recipe(write_vectors(tmp_path / "v.npz")).to_toml(), encoding="utf-8")
    output = run_without_posix("""
        from nearkin.cli import main

        main("tune recipe.toml --losses triplet --trials 2 --workers 2 --out search --device cpu".split())
    """)
    assert (tmp_path / "search" / "triplet.toml").exists(), output
