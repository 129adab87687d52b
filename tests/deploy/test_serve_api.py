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
from nearkin.deploy.serve.request_limits import FORMATS, TYPES
from helpers.serving import random_image
images = [random_image(name, size) for name in FORMATS for size in ((1, 1), (40, 30), (3, 700))]
for content_type in TYPES:
    schemathesis.openapi.media_type(content_type, st.sampled_from(images))
"""


def test_routes_and_document_agree(served):
    import nearkin as nk
    from nearkin.deploy.serve.app import Service, make_app

    service = Service(nk.Index.load(served.folder))
    try:
        app = make_app(service).app
        routes = {route.path: route.methods - {"HEAD"} for route in app.routes}
        documented = {path: {method.upper() for method in operations} for path, operations in document(app).items()}
        assert documented == routes
    finally:
        service.close()


def document(app):
    from starlette.testclient import TestClient

    return TestClient(app).get("/openapi.json").json()["paths"]


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
