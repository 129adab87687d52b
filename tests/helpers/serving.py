"""Start `nearkin serve` in a child process, with an index, and make files to send to it."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from helpers.paths import ROOT
from helpers.small_runs import make_run

JPEG = {"Content-Type": "image/jpeg"}
TOKEN = "correct-horse-battery-staple"


@dataclass(frozen=True)
class ServedIndex:
    """An index on disk. outside: an indexed file in another folder."""

    folder: Path
    run: Path
    photos: Path
    outside: Path


def make_index(root: Path, photo_folder: Path) -> ServedIndex:
    """Four classes of six images, one of them named like an HTML tag, and one unlabelled image in another folder."""
    import nearkin as nk
    from nearkin.deploy.index.items import get_model_info

    photos, outside = root / "secret place" / "photos", root / "other" / "portrait.png"
    names = ["class 0", "class 1", "class 2", "<b>bold</b> & é"]
    for c, name in enumerate(names):
        (photos / name).mkdir(parents=True)
        for i in range(6):
            (photos / name / f"{i}.png").write_bytes((photo_folder / f"class {c}" / f"{i:02d}.png").read_bytes())
    outside.parent.mkdir()
    outside.write_bytes((photo_folder / "class 4" / "00.png").read_bytes())
    ids = [f"{name}/{i}.png" for name in names for i in range(6)] + [str(outside)]
    labels = [name for name in names for _ in range(6)] + [None]
    run = make_run(root / "runs", photos).path
    model = nk.load(run)
    vectors = model.embed([photos / id for id in ids])
    index = nk.Index(vectors, ids, labels, model_info=get_model_info(model, run), root=photos)
    index.save(root / "photos.index")
    return ServedIndex(root / "photos.index", run, photos, outside)


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """Return status, headers and body (parsed JSON, or bytes)."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            data = response.read()
            is_json = response.headers.get("content-type", "") == "application/json"
            return response.status, response.headers, json.loads(data) if is_json and data else data
        finally:
            connection.close()

    def reset_peak_memory(self) -> None:
        """Reset the peak that `peak_memory` returns."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_memory(self) -> int:
        """Return the peak resident memory in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]

    def alive(self) -> bool:
        return self.process.poll() is None and self.request("GET", "/health")[2] == {"status": "ok"}


def launch(*flags: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "nearkin", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@contextmanager
def serving(folder: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """Run a server on a free port while the block runs."""
    process = launch(str(folder), "--port", "0", "--device", "cpu", *flags, **environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+/", line)
        assert found, (line, process.stderr.read() if process.stderr else "")
        yield Server(process, found[0])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


# --- raw requests ----------------------------------------------------------------------------------------------------

HEADERS = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"


def send_raw(server: Server, *parts: bytes, wait: float = 0.0) -> tuple[int, Any, float]:
    """Send raw bytes with pauses; returns status, body (parsed if it is JSON) and elapsed seconds."""
    began = time.monotonic()
    with socket.create_connection((server.host, server.port), timeout=30) as line:
        for part in parts:
            try:
                line.sendall(part)
            except OSError:
                break
            time.sleep(wait)
        data = b""
        while b"\r\n\r\n" not in data or not data.endswith((b"}", b"received.")):
            more = line.recv(65536)
            if not more:
                break
            data += more
        took = time.monotonic() - began
    head, _, body = data.partition(b"\r\n\r\n")
    is_json = b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body) if is_json else body, took


# --- files to send ---------------------------------------------------------------------------------------------------


def random_image(image_format: str = "JPEG", size: tuple[int, int] = (40, 30), seed: int = 0, **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    return encode(Image.fromarray(pixels), image_format, **options)


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def png(width: int, height: int, *, colour: int = 2, rows: int | None = None) -> bytes:
    """Return a PNG of zeros; `rows` writes fewer rows than its header declares."""
    depth = {0: 1, 2: 3, 6: 4}[colour]
    packer = zlib.compressobj(9)
    line = bytes(1 + width * depth)
    packed = b"".join(packer.compress(line) for _ in range(height if rows is None else rows)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
