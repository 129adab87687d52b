"""A name or path that does not exist is refused before torch is imported, which takes seconds."""

import os
import subprocess
import sys

import pytest

from nearkin._common.plugins import HINT
from nearkin.cli import COMMANDS
from nearkin.cli._arguments import require_names
from nearkin.errors import UnknownNameError

COMMANDS_AND_ERRORS = {
    "train nosuch": "No recipe or recipe file named 'nosuch'",
    "train nosuch.toml": "nosuch.toml: no such recipe file",
    "train --data nosuch": "nosuch: no such file or folder",
    "train --data photos --loss proxyanchor": "Did you mean 'proxy_anchor'?",
    "train --loss proxyanchor": "Did you mean 'proxy_anchor'?",
    "train --loss triplet --miner semi_hard": "Did you mean 'semihard'?",
    "tune nosuch": "No recipe or recipe file named 'nosuch'",
    "tune --losses tripplet": "Did you mean 'triplet'?",
    "tune --data nosuch": "nosuch: no such file or folder",
    "evaluate nosuch": "nosuch: no such file or folder. Expected a run folder or a features.npz",
    "report nosuch": "nosuch: no such folder",
    "report .": ".: not a run folder",
    "report --study nosuch": "nosuch: no such file or folder. Expected the folder of a study",
    "index nosuch . -o x": "nosuch: no such file or folder. Expected a run folder",
    "index . nosuch -o x": "nosuch: no such file or folder. Expected a folder of images",
    "index . . -o x": ".: not a run folder",
    "search nosuch x.jpg": "nosuch: no such file or folder. Expected an index folder",
    "search . nosuch.jpg": "nosuch.jpg: no such file or folder. Expected an image",
    "search . photos": "photos: is a folder. Give image files, for example photos/*.jpg",
    "serve nosuch": "nosuch: no such file or folder. Expected an index folder",
    "export nosuch --to onnx -o x.onnx": "nosuch: no such file or folder. Expected a run folder",
    "export photos --to onnx": "missing -o PATH. See: nearkin export",
    "index . . -o x --gpu": "--gpu: no such setting. Did you mean '--device'?",
    "features nosuch -o x.npz": "nosuch: no such file or folder. Expected a folder of images",
    "features . -o x.npy": "expected a file that ends in .npz",
    "features . -o nowhere/x.npz": "expected a file in an existing folder",
    "data check nosuch": "nosuch: no such benchmark or path",
    "data get nosuch": "No benchmark named 'nosuch'",
    "losses tripplet": "Did you mean 'triplet'?",
    "bench run nosuch": "No study named 'nosuch'",
    "bench plan tiny --losses tripplet": "Did you mean 'triplet'?",
    "bench run features --data nosuch": "nosuch: no such file or folder",
    "bench status nosuch": "nosuch: no such file or folder. Expected the folder of a study",
    "bench work nosuch": "nosuch: no such file or folder. Expected the folder of a study",
    "papers mpa-table77": "Did you mean 'mpa-table7'?",
    "tournament nosuch": "nosuch: no such file or folder",
    "cache prune": "what to delete?",
    "cache prune --max-gb -1": "--max-gb: expected 0 or above",
}

SCRIPT = """
import sys
from nearkin import cli
for line in sys.stdin.read().splitlines():
    try:
        cli.main(line.split())
    except SystemExit as stop:
        print(stop.code, "torch" in sys.modules, file=sys.stderr)
"""


def test_wrong_names_and_paths_are_refused_without_torch(tmp_path):
    (tmp_path / "photos").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(COMMANDS_AND_ERRORS),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    remaining = done.stderr
    for command, message in COMMANDS_AND_ERRORS.items():
        error, _, remaining = remaining.partition("2 False\n")  # the exit code, and that torch is not imported
        assert message in error, f"nearkin {command}: {error}"
        assert len(error.splitlines()) <= 2
    assert remaining == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]


def test_all_commands_that_take_a_name_or_path_are_tried():
    assert {command.split()[0] for command in COMMANDS_AND_ERRORS} == set(COMMANDS) - {"demo", "doctor"}


def test_names_in_the_sources_are_those_of_the_registries(monkeypatch):
    from nearkin.losses import LOSSES, MINERS, REGULARIZERS

    monkeypatch.delitem(sys.modules, "nearkin.losses")
    for kind, registry in (("loss", LOSSES), ("miner", MINERS), ("regularizer", REGULARIZERS)):
        require_names(kind, registry)
        with pytest.raises(UnknownNameError) as unknown:
            require_names(kind, ["-"])
        assert str(unknown.value) == f"No {kind} named '-'. Available: {', '.join(sorted(registry))}. {HINT}"
