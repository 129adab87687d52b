"""/openapi.json is true: schemathesis sends what it allows and what it does not, and looks at every answer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from serving import Made, make_index, serving

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
TOKEN = "correct horse battery"


@pytest.fixture(scope="module")
def made(tmp_path_factory, photo_folder) -> Made:
    return make_index(tmp_path_factory.mktemp("api"), photo_folder)


def test_every_route_is_described_and_every_description_has_a_route(made):
    import nearkin as nk
    from nearkin.deploy.serve import Service, make_app

    service = Service(nk.Index.load(made.folder))
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


@pytest.mark.slow
@pytest.mark.parametrize("locked", [False, True])
def test_schemathesis_finds_nothing(made, locked, tmp_path):
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed (pip install schemathesis)")
    environment = {"NEARKIN_TOKEN": TOKEN} if locked else {}
    with serving(made.folder, **environment) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}openapi.json"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--seed", "0", "--no-color"]
        command += ["--generation-database", "none", "--workers", "1"]
        if locked:
            command += ["--header", f"Authorization: Bearer {TOKEN}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert server.alive()
