"""/openapi.json is true: schemathesis sends what it allows and what it does not, and looks at every answer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers.serving import ROOT, TOKEN

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
# No schema can say what a picture is, so schemathesis is told: these are the bodies that must be taken.
HOOKS = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import schemathesis
from hypothesis import strategies as st
from nearkin.deploy.limits import FORMATS, TYPES
from helpers.serving import picture
pictures = [picture(kind, size) for kind in FORMATS for size in ((1, 1), (40, 30), (3, 700))]
for kind in TYPES:
    schemathesis.openapi.media_type(kind, st.sampled_from(pictures))
"""


def test_every_route_is_described_and_every_description_has_a_route(served):
    import nearkin as nk
    from nearkin.deploy.serve.app import Service, make_app

    service = Service(nk.Index.load(served.folder))
    try:
        app = make_app(service).app
        routes = {route.path: route.methods - {"HEAD"} for route in app.routes}
        with_document = {path: {method.upper() for method in operations} for path, operations in document(app).items()}
        assert with_document == routes
    finally:
        service.close()


def document(app):
    from starlette.testclient import TestClient

    return TestClient(app).get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("asks_for_token", [False, True])
def test_schemathesis_finds_nothing(server, locked, asks_for_token, tmp_path):
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed (pip install schemathesis)")
    running = locked if asks_for_token else server
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{running.url}openapi.json"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--seed", "0", "--no-color"]
    command += ["--generation-database", "none", "--workers", "1"]
    if asks_for_token:
        command += ["--header", f"Authorization: Bearer {TOKEN}"]
    (tmp_path / "hooks.py").write_text(HOOKS)
    told = {**os.environ, "SCHEMATHESIS_HOOKS": str(tmp_path / "hooks.py"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=told)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert running.alive()
