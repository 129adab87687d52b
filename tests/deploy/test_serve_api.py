"""/openapi.json against the server: schemathesis sends valid and invalid requests and checks every response."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers.serving import ROOT, TOKEN

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
# A schema cannot describe image files, so schemathesis gets a list of valid bodies.
HOOKS = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import schemathesis
from hypothesis import strategies as st
from nearkin.data.reading import FORMATS
from nearkin.deploy.serve.request_limits import TYPES
from helpers.serving import random_image
images = [random_image(name, size) for name in FORMATS for size in ((1, 1), (40, 30), (3, 700))]
for content_type in TYPES:
    schemathesis.openapi.media_type(content_type, st.sampled_from(images))
schemathesis.openapi.format("binary", st.sampled_from(images))  # the file of a form
"""


def test_the_document_describes_all_addresses(server, locked):
    parameters = {"/items": ["offset", "limit", "step"], "/items/neighbours": ["id", "k"], "/search": ["k"]}
    parameters |= {"/items/thumbnail": ["id"], "/": [], "/health": [], "/info": []}
    for running in (server, locked):
        paths = running.request("GET", "/openapi.json")[2]["paths"]
        given = {
            path: [p["name"] for p in op.get("parameters", [])] for path, ops in paths.items() for op in ops.values()
        }
        assert given == parameters
        protected = {path for path, operations in paths.items() for op in operations.values() if "security" in op}
        assert protected == ({*parameters} - {"/", "/health"} if running is locked else set())
    assert "multipart/form-data" in paths["/search"]["post"]["requestBody"]["content"]


@pytest.mark.parametrize("needs_token", [False, True])
def test_schemathesis_finds_no_error(server, locked, needs_token, tmp_path):
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed (pip install schemathesis)")
    running = locked if needs_token else server
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{running.url}openapi.json"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--seed", "0", "--no-color"]
    command += ["--generation-database", "none", "--workers", "1"]
    if needs_token:
        command += ["--header", f"Authorization: Bearer {TOKEN}"]
    (tmp_path / "hooks.py").write_text(HOOKS)
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(tmp_path / "hooks.py"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert running.alive()
