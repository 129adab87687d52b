"""A stand-in for the Hugging Face Hub: the parts of its HTTP API that the client uses, on the loopback interface."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

COMMIT = "1" * 40


class Hub(BaseHTTPRequestHandler):
    """Keeps repositories in memory: create, commit, list files, download."""

    repos: ClassVar[dict[str, dict[str, bytes]]] = {}
    protocol_version = "HTTP/1.1"

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_POST(self) -> None:
        sent = self.body()
        if self.path == "/api/repos/create":
            words = json.loads(sent)
            name = f"{words.get('organization') or 'me'}/{words['name']}"
            self.repos.setdefault(name, {})
            return self.answer({"url": f"http://{self.headers['Host']}/{name}", "id": name, "name": name})
        if self.path == "/api/validate-yaml":  # the header of a model card
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = json.loads(sent)["files"]
            keys = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return self.answer({"files": [{"path": file["path"], **keys} for file in files]})
        if "/commit/" in self.path:
            repo = "/".join(self.path.split("/")[3:5])
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "file":
                    self.repos[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/{repo}/commit/{COMMIT}"
            return self.answer({"commitUrl": url, "commitOid": COMMIT, "success": True})
        return self.answer({"error": "not here"}, 404)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"] and "/".join(path[2:4]) in self.repos:
            name = "/".join(path[2:4])
            siblings = [{"rfilename": file} for file in self.repos[name]]
            if "tree" in path:
                rows = [{"type": "file", "path": f, "size": len(d), "oid": COMMIT} for f, d in self.repos[name].items()]
                return self.answer(rows)
            return self.answer({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False})
        if len(path) > 4 and path[2] == "resolve":
            data = self.repos.get("/".join(path[:2]), {}).get("/".join(path[4:]))
            if data is not None:
                return self.answer(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"')
        return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running stand-in, to which the client is connected."""
    Hub.repos.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    connect(monkeypatch, tmp_path, f"http://127.0.0.1:{server.server_port}")
    yield Hub.repos
    server.shutdown()
    server.server_close()
    thread.join()


def connect(monkeypatch, tmp_path, address: str) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
