"""`nearkin serve`: answers that are true, and nothing about the machine in any of them."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from urllib.parse import quote

import numpy as np
import pytest
from helpers.serving import JPEG, ROOT, TOKEN, Made, Server, encoded, launch, picture, serving
from PIL import Image

import nearkin as nk
from nearkin.cli._arguments import parse
from nearkin.cli.serve import ServeArgs
from nearkin.deploy.serve.app import public_names
from nearkin.errors import ConfigError

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")


def by_hand(served: Made, vector: np.ndarray, skip: int | None = None) -> list[tuple[str, float]]:
    """Every item by its cosine to a vector, in float64."""
    index = nk.Index.load(served.folder)
    vectors = np.asarray(index.vectors, np.float64)
    cosines = vectors @ vector / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vector)
    rows = [row for row in np.argsort(-cosines, kind="stable") if row != skip]
    return [(index.ids[row], cosines[row]) for row in rows]


# --- answers ---------------------------------------------------------------------------------------------------------


def test_an_uploaded_picture_finds_what_brute_force_finds(server, served):
    file = served.photos / "class 2" / "3.png"
    status, headers, answer = server.ask("POST", "/search?k=8", file.read_bytes(), {"Content-Type": "image/png"})
    assert status == 200
    assert headers["cache-control"] == "no-store"
    vector = nk.load(served.run).embed([file])[0].double().numpy()
    expected = by_hand(served, vector)[:8]
    shown = [(hit["id"], hit["similarity"]) for hit in answer["hits"]]
    assert [id.rpartition("/")[2] for id, _ in shown] == [id.rpartition("/")[2] for id, _ in expected]
    np.testing.assert_allclose([cosine for _, cosine in shown], [cosine for _, cosine in expected], atol=1e-6)
    assert shown[0] == ("class 2/3.png", pytest.approx(1, abs=1e-6))
    assert answer["hits"][0]["label"] == "class 2"
    assert answer["known"] is None
    assert answer["nearest"] == pytest.approx(1, abs=1e-6)


def test_the_same_pixels_in_any_form_give_the_same_answer(server, served):
    image = Image.open(served.photos / "class 1" / "0.png")
    animated = encoded(image, "GIF", save_all=True, append_images=[Image.new("RGB", image.size, "red")])
    first = Image.open(io.BytesIO(animated)).convert("RGB")  # an animation is its first picture
    expected = by_hand(served, nk.load(served.run).embed([first])[0].double().numpy())[0]
    status, _, answer = server.ask("POST", "/search?k=1", animated, {"Content-Type": "image/gif"})
    assert status == 200
    assert answer["hits"][0]["similarity"] == pytest.approx(expected[1], abs=1e-6)
    for kind in ("PNG", "BMP", "TIFF"):
        status, _, answer = server.ask("POST", "/search?k=1", encoded(image, kind), JPEG)  # what is inside decides
        assert status == 200
        assert answer["hits"][0]["id"] == "class 1/0.png"


def test_an_item_finds_the_others(server, served):
    id = "<b>bold</b> & é/2.png"
    index = nk.Index.load(served.folder)
    row = index.row_of(id)
    status, _, answer = server.ask("GET", f"/items/neighbours?k=200&id={quote(id)}")
    assert status == 200
    assert (answer["id"], answer["label"]) == (id, "<b>bold</b> & é")
    expected = by_hand(served, np.asarray(index.vectors[row], np.float64), skip=row)
    assert [hit["id"] for hit in answer["hits"]][:24] == [
        id if not id.startswith("/") else public_names([id])[0] for id, _ in expected
    ]
    np.testing.assert_allclose([hit["similarity"] for hit in answer["hits"]], [c for _, c in expected], atol=1e-6)


def test_items_are_listed_in_pages_and_in_steps(server):
    status, _, answer = server.ask("GET", "/items")
    assert status == 200
    assert answer["total"] == len(answer["items"]) == 25
    assert answer["items"][0] == {"id": "class 0/0.png", "label": "class 0"}
    ids = [item["id"] for item in answer["items"]]
    assert [i["id"] for i in server.ask("GET", "/items?offset=3&limit=4&step=2")[2]["items"]] == ids[3:11:2]
    assert server.ask("GET", "/items?offset=25")[2]["items"] == []


def test_a_thumbnail_is_the_middle_of_the_picture(server, served):
    status, headers, data = server.ask("GET", f"/items/thumbnail?id={quote('class 0/1.png')}")
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    shown = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), float)
    assert shown.shape == (192, 192, 3)
    stored = Image.open(served.photos / "class 0" / "1.png").resize((192, 192), Image.Resampling.BILINEAR)
    assert np.abs(shown - np.asarray(stored, float)).mean() < 6  # JPEG's own loss


def test_info_and_health(server):
    status, _, answer = server.ask("GET", "/info")
    assert status == 200
    assert {name: answer[name] for name in ("items", "classes", "dim", "known_above")} == {
        "items": 25,
        "classes": 4,
        "dim": 16,
        "known_above": None,
    }
    assert answer["limits"]["upload_bytes"] == 4_000_000
    assert server.ask("GET", "/health")[2] == {"status": "ok"}


def test_a_calibrated_index_says_what_it_does_not_know(served, tmp_path):
    from starlette.testclient import TestClient

    from nearkin.deploy.serve.app import Service, make_app

    index = nk.Index.load(served.folder)
    index.calibrate(0.05)
    service = Service(index)
    try:
        client = TestClient(make_app(service), base_url="http://127.0.0.1")
        assert client.get("/info").json()["known_above"] == index.threshold.value
        answer = client.post("/search", content=picture("PNG"), headers=JPEG).json()
        assert answer["known"] is (answer["nearest"] > index.threshold.value)
    finally:
        service.close()


# --- what no answer may hold -----------------------------------------------------------------------------------------


def everything(server: Server) -> list[tuple[str, object, object]]:
    """Many questions, good and bad, and their whole answers."""
    questions: list[tuple[str, str, bytes | None]] = [
        ("GET", path, None)
        for path in (
            *("/", "/health", "/openapi.json", "/info", "/items", "/items?limit=0", "/nothing"),
            *("/items/neighbours?id=class%200/0.png", "/items/neighbours?id=none", "/items/thumbnail?id=none"),
            *("/items/thumbnail", "/search", "/items/..%2f..%2f", "/info?x=1"),
        )
    ]
    questions += [("POST", "/search", body) for body in (picture(), picture()[:100], b"text", b"")]
    for method, path, body in questions:
        yield f"{method} {path}", *server.ask(method, path, body, JPEG if body is not None else {})


def test_no_answer_names_a_place_on_this_machine(server, served):
    words = [str(path) for path in (served.folder, served.run, served.photos, served.outside)]
    words += ["secret place", "Traceback", "/tmp"]
    words += [str(part) for part in served.folder.parents if len(part.parts) > 2]
    for question, headers, answer in ((q, h, a) for q, s, h, a in everything(server)):
        whole = f"{headers.items()} {answer!r}"
        assert not [word for word in words if word in whole], question
        assert "set-cookie" not in headers


def test_a_file_from_elsewhere_is_shown_without_its_place(server, served):
    [name] = [item["id"] for item in server.ask("GET", "/items")[2]["items"] if item["label"] is None]
    assert name.startswith("elsewhere/")
    assert name.endswith("/portrait.png")
    assert server.ask("GET", f"/items/thumbnail?id={quote(name)}")[0] == 200
    assert server.ask("GET", f"/items/neighbours?id={quote(name)}")[2]["id"] == name
    for path in ("neighbours", "thumbnail"):  # its true name does not work, so nobody can try out paths
        assert server.ask("GET", f"/items/{path}?id={quote(str(served.outside))}")[0] == 404


def test_names_that_utf8_cannot_hold_are_spelled_out():
    assert public_names(["a\udcff.jpg", "a\\udcff.jpg"]) == ["a\\udcff.jpg", "a\\udcff.jpg~"]
    assert public_names(["../up.jpg"])[0].startswith("elsewhere/")


def test_browsers_are_told_what_the_page_may_do(server):
    _, headers, page = server.ask("GET", "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    text = page.decode()
    assert "://" not in text  # nothing is loaded from anywhere
    for _, _, headers, _ in everything(server):
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


def test_a_kept_thumbnail_is_asked_for_again(asking, served):
    """Another index under the same address has other pictures under the same names."""
    client, name = asking(), {"id": "class 0/1.png"}
    first = client.get("/items/thumbnail", params=name)
    assert first.headers["cache-control"] == "private, no-cache"
    again = client.get("/items/thumbnail", params=name, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get(
        "/items/thumbnail", params={"id": "class 0/2.png"}, headers={"If-None-Match": first.headers["etag"]}
    )
    assert other.status_code == 200
    assert other.headers["etag"] != first.headers["etag"]


# --- who may ask -----------------------------------------------------------------------------------------------------


def test_without_the_token_there_is_no_data(locked):
    for path in ("/info", "/items", "/items/neighbours?id=class%200/0.png", "/items/thumbnail?id=x", "/nothing"):
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}, {"Cookie": TOKEN}):
            status, headers, answer = locked.ask("GET", path, headers=given)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert "token" in answer["error"]
    assert locked.ask("POST", "/search", picture(), JPEG)[0] == 401
    for path in ("/", "/health", "/openapi.json"):
        assert locked.ask("GET", path)[0] == 200
    for scheme in ("Bearer", "bearer"):
        right = {"Authorization": f"{scheme} {TOKEN}"}
        assert locked.ask("GET", "/info", headers=right)[0] == 200
        assert locked.ask("POST", "/search", picture(), JPEG | right)[0] == 200
    assert locked.ask("GET", "/info", headers={"Authorization": "Bearer \xe9\xff"})[0] == 401


@pytest.fixture
def asking(served):
    """A client of an application made with these settings, in this process."""
    from starlette.testclient import TestClient

    from nearkin.deploy.serve.app import Service, make_app

    opened = []

    def make(url: str = "http://testserver", **settings):
        index = nk.Index.load(served.folder, nk.load(served.run))
        opened.append(Service(index, **settings))
        return TestClient(make_app(opened[-1]), base_url=url)

    yield make
    for service in opened:
        service.close()


def test_an_allowed_host_may_be_given_with_its_port(asking):
    client = asking("http://photos.example:8443", hosts=["Photos.example:8443", "::1"])
    assert client.get("/info").status_code == 200
    assert client.get("/info", headers={"Host": "[::1]:9"}).status_code == 200
    assert client.get("/info", headers={"Host": ""}).status_code == 421
    with pytest.raises(ConfigError, match="--allow-host: expected the name of a host"):
        asking(hosts=["https://photos.example"])


def test_a_token_that_nobody_could_send_is_refused(asking, monkeypatch):
    from nearkin.cli.serve import _token

    for token in ("clé secrète de la maison", "correct horse battery staple", "long enough to be one "):
        with pytest.raises(ConfigError, match="token: expected ASCII characters without blanks"):
            asking(token=token)
    monkeypatch.setenv("NEARKIN_TOKEN", f" {TOKEN}\r\n")
    assert _token(None) == TOKEN
    monkeypatch.setenv("NEARKIN_TOKEN", " ")
    with pytest.raises(ConfigError, match="NEARKIN_TOKEN: is blank"):
        _token(None)


def test_a_foreign_name_is_refused_on_a_loopback_address(server):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1", "localhost@evil.example:1"):
        status, _, answer = server.ask("GET", "/info", headers={"Host": host})
        assert status == 421, host
        assert "--allow-host" in answer["error"]
    for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:80", "LOCALHOST:1"):
        assert server.ask("GET", "/info", headers={"Host": host})[0] == 200


# --- starting and stopping -------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named(served):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = launch(str(served.folder), "--port", str(port))
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.strip() == (
        f"nearkin: --port {port}: is in use on 127.0.0.1. Choose another, or 0 for any that is free."
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port: expected 0 to 65535, got 70000"),
        (["--host", "256.0.0.1"], "--host 256.0.0.1"),
        (["--workers", "0"], "--workers: expected at least 1"),
        (["--pixels", "0"], "--pixels: expected more than 0"),
        (["--pixels", "400000000"], "--pixels: expected at most 178,956,970"),
        (["--token-file", "/none"], "--token-file /none: cannot be read"),
        (["--run", "/none"], "/none"),
    ],
)
def test_mistakes_get_the_cure(served, flags, message, monkeypatch):
    from nearkin.cli import serve
    from nearkin.errors import UserError

    with pytest.raises(UserError) as caught:
        serve.run([str(served.folder), "--port", "0", *flags])
    assert message in str(caught.value)


def test_a_short_token_is_refused(served, monkeypatch, tmp_path):
    from nearkin.cli import serve
    from nearkin.errors import UserError

    (tmp_path / "token").write_text("short\n")
    with pytest.raises(UserError, match="5 characters are soon guessed"):
        serve.run([str(served.folder), "--port", "0", "--token-file", str(tmp_path / "token")])


def test_ctrl_c_finishes_what_is_under_way_and_stops(served):
    body = picture("PNG", (300, 200))
    with serving(served.folder) as running, socket.create_connection((running.host, running.port), timeout=20) as line:
        head = f"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(body)}"
        line.sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 100")  # it waits for the body now
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        line.sendall(body)
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
        out, said = running.process.communicate(timeout=20)
    assert running.process.returncode == 0
    assert (out.strip(), said.strip()) == ("stopped", "")


# --- the page in docs/ -----------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_do_what_it_says(locked, tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    page = (ROOT / "docs" / "serve.md").read_text()
    commands = [line for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()]
    [secret] = [line for line in commands if line.startswith("python3 -c")]
    assert subprocess.run(secret, shell=True, cwd=tmp_path).returncode == 0
    assert len((tmp_path / "token.txt").read_text().strip()) > 30
    for line in commands:  # its flags exist
        if line.startswith("nearkin serve"):
            parse(ServeArgs, line.partition("#")[0].split()[3:], "nearkin serve")
    (tmp_path / "new.jpg").write_bytes(picture())
    (tmp_path / "token.txt").write_text(TOKEN)
    asking = [line for line in commands if line.startswith("curl")]
    assert len(asking) == 5
    for line in asking:
        # As written, but for the address, the item's name, and the token that this server wants.
        line = line.replace("http://127.0.0.1:8000/", locked.url).replace("robin/00.jpg", "class 0/0.png")
        if "Authorization" not in line:
            line = line.replace("curl -s", 'curl -s -H "Authorization: Bearer $(cat token.txt)"')
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, line
        if "thumbnail" in line:
            assert Image.open(tmp_path / "robin.jpg").size == (192, 192)
        else:
            answer = json.loads(done.stdout)
            assert "error" not in answer, line
            assert len(answer.get("hits", range(5))) == 5
