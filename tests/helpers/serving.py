"""A real `nearkin serve` in a process of its own, an index for it, and odd files to send to it."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
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
# A server that waits shorter for a request's head than the real one, so that a test need not.
LAUNCH = """
import sys
from nearkin import cli
from nearkin.deploy import listening
listening.HEAD_SECONDS = 1.5
cli.main(["serve", *sys.argv[1:]])
"""


@dataclass(frozen=True)
class Made:
    """An index on the disk. outside: an indexed file that lies in another folder."""

    folder: Path
    run: Path
    photos: Path
    outside: Path


def make_index(place: Path, photo_folder: Path) -> Made:
    """Four classes of six images, one class with a name like a tag, and one image from elsewhere without a label."""
    import nearkin as nk
    from nearkin.deploy.index.provenance import model_info

    photos, outside = place / "secret place" / "photos", place / "other" / "portrait.png"
    names = ["class 0", "class 1", "class 2", "<b>bold</b> & é"]
    for c, name in enumerate(names):
        (photos / name).mkdir(parents=True)
        for i in range(6):
            (photos / name / f"{i}.png").write_bytes((photo_folder / f"class {c}" / f"{i:02d}.png").read_bytes())
    outside.parent.mkdir()
    outside.write_bytes((photo_folder / "class 4" / "00.png").read_bytes())
    ids = [f"{name}/{i}.png" for name in names for i in range(6)] + [str(outside)]
    labels = [name for name in names for _ in range(6)] + [None]
    run = make_run(place / "runs", photos).path
    model = nk.load(run)
    vectors = model.embed([photos / id for id in ids])
    index = nk.Index(vectors, ids, labels, mark=model_info(model, run), root=photos)
    index.save(place / "photos.index")
    return Made(place / "photos.index", run, photos, outside)


class Server:
    """One running server."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """(status, headers, body): JSON is read, anything else is bytes."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            data = answer.read()
            kind = answer.headers.get("content-type", "")
            return answer.status, answer.headers, json.loads(data) if kind == "application/json" else data
        finally:
            connection.close()

    def forget_memory(self) -> None:
        """Count the most memory from here on."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def memory(self) -> int:
        """The most memory it has had, in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]

    def alive(self) -> bool:
        return self.process.poll() is None and self.ask("GET", "/health")[2] == {"status": "ok"}


def launch(*flags: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@contextmanager
def serving(folder: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """A server on a free port, stopped at the end."""
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


# --- files to send ---------------------------------------------------------------------------------------------------


def picture(kind: str = "JPEG", size: tuple[int, int] = (40, 30), seed: int = 0, **how: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    return encoded(Image.fromarray(pixels), kind, **how)


def encoded(image: Image.Image, kind: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def png(width: int, height: int, *, colour: int = 2, rows: int | None = None) -> bytes:
    """A PNG of zeros, made row by row; with fewer rows than it says where `rows` is given."""
    depth = {0: 1, 2: 3, 6: 4}[colour]
    packer = zlib.compressobj(9)
    line = bytes(1 + width * depth)
    packed = b"".join(packer.compress(line) for _ in range(height if rows is None else rows)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
