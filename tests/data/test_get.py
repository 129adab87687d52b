"""Downloads from a local server, and complete benchmarks with `nearkin data get`."""

import hashlib
import io
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from helpers.archives import left_over, make_tar, make_zip
from helpers.limits import max_file_size
from PIL import Image

from nearkin import cli
from nearkin._common.progress import Reporter
from nearkin.data.benchmarks import BENCHMARKS, Archive, Counts
from nearkin.data.get import download, get_benchmark
from nearkin.errors import DataError

CONTENT = np.random.default_rng(0).integers(0, 256, 700_000, np.uint8).tobytes()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
KNOWN = {"sha256": SHA256}


class Server(ThreadingHTTPServer):
    """Serves `files`; the first folder of a path selects a fault: /cut/, /norange/, /page/, /busy/, /chunked/..."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"data.bin": CONTENT}
        self.requests: list[tuple[str, str | None]] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Server = self.server
        fault, _, name = self.path.lstrip("/").rpartition("/")
        wanted = self.headers.get("Range")
        before = sum(path == self.path for path, _ in server.requests)
        server.requests.append((self.path, wanted))
        if fault == "busy" and before < 2:
            self.send_error(503)
            return
        if name not in server.files:
            self.send_error(404)
            return
        content, etag = server.files[name], '"one"'
        if fault == "changed" and before:
            content, etag = content[::-1], '"two"'
        start = 0
        if wanted and fault != "norange" and self.headers.get("If-Range") in (None, etag):
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", etag)
        self.send_header("Content-Type", "text/html" if fault == "page" else "application/octet-stream")
        if fault == "chunked":  # no Content-Length; the first connection breaks before the last chunk
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            rest = content[start : start + 65_536] if before == 0 else content[start:]
            self.wfile.write(f"{len(rest):x}\r\n".encode() + rest + b"\r\n" + (b"0\r\n\r\n" if before else b""))
            self.close_connection = True
            return
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        # The first two connections of /cut/ and the first of the others break in the middle.
        broken = {"cut": 2, "norange": 1, "changed": 1, "always": 10**6}.get(fault, 0)
        if before < broken:
            self.wfile.write(content[start : start + (0 if fault == "always" else 200_000)])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(content[start:])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def fetch(server: Server, target: Path, *paths: str, checksums: dict[str, str] = KNOWN) -> None:
    download(
        [server.url(p) for p in paths], target, checksums=checksums, reporter=Reporter(quiet=True), retry_delay=0.0
    )


# --- downloading -----------------------------------------------------------------------------------------------------


def test_a_file_is_downloaded_verified_and_renamed(server, tmp_path):
    fetch(server, tmp_path / "deep" / "data.bin", "data.bin")
    assert (tmp_path / "deep" / "data.bin").read_bytes() == CONTENT
    assert left_over(tmp_path / "deep") == ["data.bin"]


def test_an_interrupted_connection_is_resumed(server, tmp_path):
    fetch(server, tmp_path / "data.bin", "cut/data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=200000-", "bytes=400000-"]


def test_an_interrupted_reply_of_unknown_length_is_not_mistaken_for_complete(server, tmp_path):
    fetch(server, tmp_path / "data.bin", "chunked/data.bin", checksums={})
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=65536-"]


def test_a_later_call_resumes_a_partial_file(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:300_000])
    fetch(server, tmp_path / "data.bin", "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.requests == [("/data.bin", "bytes=300000-")]
    assert left_over(tmp_path) == ["data.bin"]


def test_a_complete_partial_file_needs_no_more_bytes(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    fetch(server, tmp_path / "data.bin", "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_a_partial_file_that_is_too_long_or_of_another_file_is_discarded(server, tmp_path):
    for part in (CONTENT + b"more", CONTENT[::-1][:1000]):
        (tmp_path / "data.bin.part").write_bytes(part)
        fetch(server, tmp_path / "data.bin", "data.bin")
        assert (tmp_path / "data.bin").read_bytes() == CONTENT
        assert left_over(tmp_path) == ["data.bin"]
        assert server.requests.pop() == ("/data.bin", None)


def test_a_partial_file_is_not_resumed_if_no_checksum_would_tell_that_it_is_of_another_file(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(CONTENT[::-1][:1000])
    fetch(server, tmp_path / "data.bin", "data.bin", checksums={})
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_a_server_without_range_support_restarts(server, tmp_path):
    fetch(server, tmp_path / "data.bin", "norange/data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=200000-"]


def test_a_file_that_changed_in_between_is_restarted(server, tmp_path):
    fetch(server, tmp_path / "data.bin", "changed/data.bin", checksums={})
    assert (tmp_path / "data.bin").read_bytes() == CONTENT[::-1]


def test_a_wrong_checksum_is_an_error_and_leaves_nothing_behind(server, tmp_path):
    with pytest.raises(DataError, match="wrong sha256: expected 00, got") as error:
        fetch(server, tmp_path / "data.bin", "data.bin", checksums={"sha256": "00"})
    assert "--from FILE" in str(error.value)
    with pytest.raises(DataError, match="wrong md5"):
        fetch(server, tmp_path / "data.bin", "data.bin", checksums={"md5": "00"})
    assert left_over(tmp_path) == []


def test_mirrors_are_tried_in_order(server, tmp_path):
    server.files["other.bin"] = b"something else"
    fetch(server, tmp_path / "data.bin", "none.bin", "page/data.bin", "other.bin", "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/none.bin", "/page/data.bin", "/other.bin", "/data.bin"]


def test_a_busy_server_is_retried_and_a_dead_one_is_given_up(server, tmp_path):
    fetch(server, tmp_path / "data.bin", "busy/data.bin")
    assert len(server.requests) == 3
    with pytest.raises(DataError, match=r"none.bin \(404 Not Found\); .*page/data.bin \(the server sent a web page"):
        fetch(server, tmp_path / "new.bin", "none.bin", "page/data.bin")
    server.requests.clear()
    with pytest.raises(DataError, match="the connection was interrupted"):
        fetch(server, tmp_path / "new.bin", "always/data.bin")
    assert len(server.requests) == 5
    with pytest.raises(DataError, match="could not be downloaded from nonsense"):
        download(["nonsense"], tmp_path / "x", checksums=KNOWN, reporter=Reporter(quiet=True), retry_delay=0.0)


# --- complete benchmarks ----------------------------------------------------------------------------------------------


@pytest.fixture
def packed_cub(tmp_path) -> Path:
    """An archive in CUB's layout, of four classes of one image."""
    files = {"images.txt": "", "image_class_labels.txt": "", "classes.txt": ""}
    members: list[tuple[str, bytes, str]] = []
    for c in range(1, 5):
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4), (50 * c, 0, 0)).save(buffer, "JPEG")
        members.append((f"CUB_200_2011/images/{c}.B/{c}.jpg", buffer.getvalue(), "file"))
        files["images.txt"] += f"{c} {c}.B/{c}.jpg\n"
        files["image_class_labels.txt"] += f"{c} {c}\n"
        files["classes.txt"] += f"{c} {c}.B\n"
    members += [(f"CUB_200_2011/{name}", text.encode(), "file") for name, text in files.items()]
    return make_tar(tmp_path / "CUB_200_2011.tgz", *members)


def small_cub(*urls: str, **checksums: str):
    archive = Archive("CUB_200_2011.tgz", creates="CUB_200_2011", urls=urls, **checksums)
    parts = MappingProxyType({"train": Counts(2, 2), "test": Counts(2, 2)})
    return replace(BENCHMARKS["cub"], parts=parts, archives=(archive,))


def test_get_downloads_unpacks_and_counts(server, packed_cub, tmp_path, capsys):
    server.files["CUB_200_2011.tgz"] = packed_cub.read_bytes()
    source = small_cub(server.url("gone.tgz"), server.url("cut/CUB_200_2011.tgz"))
    root = tmp_path / "data"
    result = get_benchmark(source, root, reporter=Reporter())
    assert result == f"cub: 4 images of 4 classes in {root}/CUB_200_2011"
    assert left_over(root) == ["CUB_200_2011"]
    progress = capsys.readouterr().err
    assert f"sha256 {hashlib.sha256(packed_cub.read_bytes()).hexdigest()}; no checksum is known for it" in progress
    num_requests = len(server.requests)
    assert get_benchmark(source, root, reporter=Reporter(quiet=True)) == result
    assert len(server.requests) == num_requests  # existing files are not downloaded again


def test_get_from_a_file_verifies_and_keeps_it(packed_cub, tmp_path, quiet):
    renamed = packed_cub.rename(tmp_path / "my download.tgz")
    digest = hashlib.sha256(renamed.read_bytes()).hexdigest()
    root = tmp_path / "data"
    with pytest.raises(DataError, match=r"my download.tgz: wrong sha256: expected 00, got"):
        get_benchmark(small_cub(), root, files=[renamed], sha256="00", reporter=quiet)
    assert not root.exists()
    assert "4 images" in get_benchmark(small_cub(), root, files=[renamed], sha256=digest.upper(), reporter=quiet)
    assert renamed.exists()


def test_an_archive_in_the_root_is_used_and_kept(server, packed_cub, tmp_path, quiet):
    source = small_cub(server.url("CUB_200_2011.tgz"), md5=hashlib.md5(packed_cub.read_bytes()).hexdigest())
    server.files["CUB_200_2011.tgz"] = packed_cub.read_bytes()
    root = tmp_path / "data"
    root.mkdir()
    local = root / "CUB_200_2011.tgz"
    local.write_bytes(packed_cub.read_bytes()[:-9])
    with pytest.raises(
        DataError, match=r"wrong md5: (?s:.*)remove it and download it again, or pass another with --from"
    ):
        get_benchmark(source, root, reporter=quiet)
    local.write_bytes(packed_cub.read_bytes())
    assert "4 images" in get_benchmark(source, root, reporter=quiet)
    assert left_over(root) == ["CUB_200_2011", "CUB_200_2011.tgz"]
    assert server.requests == []
    assert local.read_bytes() == packed_cub.read_bytes()


def test_get_checks_the_counts(packed_cub, tmp_path, quiet):
    source = replace(small_cub(), parts=MappingProxyType({"train": Counts(3, 2), "test": Counts(2, 2)}))
    with pytest.raises(DataError, match="expected 3 train images of 2 classes"):
        get_benchmark(source, tmp_path / "data", files=[packed_cub], reporter=quiet)


def test_a_benchmark_of_several_files_is_assembled(tmp_path, quiet):
    inshop = replace(
        BENCHMARKS["inshop"],
        parts=MappingProxyType({"train": Counts(1, 1), "query": Counts(1, 1), "gallery": Counts(1, 1)}),
    )
    with pytest.raises(DataError, match=r"request it at https://mmlab(?s:.*)--from img.zip list_eval_partition.txt"):
        get_benchmark(inshop, tmp_path / "data", reporter=quiet)
    names = [f"img/WOMEN/Tees/id_{i}/1.jpg" for i in range(3)]
    archive = make_zip(tmp_path / "img.zip", *((name, b"x", 0) for name in names))
    rows = [
        f"{n} id_{min(i, 1)} {p}" for i, (n, p) in enumerate(zip(names, ["train", "query", "gallery"], strict=True))
    ]
    partition = tmp_path / "list_eval_partition.txt"
    partition.write_text("\n".join(["3", "image_name item_id evaluation_status", *rows]))
    with pytest.raises(DataError, match=r"other.zip: not a file of inshop. .* img.zip, list_eval_partition.txt"):
        get_benchmark(inshop, tmp_path / "data", files=[tmp_path / "other.zip"], reporter=quiet)
    with pytest.raises(DataError, match="one checksum is not enough"):
        get_benchmark(inshop, tmp_path / "data", files=[archive], sha256="0", reporter=quiet)
    result = get_benchmark(inshop, tmp_path / "data", files=[archive, partition], reporter=quiet)
    assert result == f"inshop: 3 images of 2 classes in {tmp_path}/data/inshop"


def test_a_root_that_cannot_be_written_is_an_error(server, packed_cub, tmp_path, quiet):
    server.files["CUB_200_2011.tgz"] = packed_cub.read_bytes()
    source = small_cub(server.url("CUB_200_2011.tgz"))
    (tmp_path / "file").touch()
    for files in ([packed_cub], []):
        with pytest.raises(DataError, match=r"file/data: cannot be written \(Not a directory\)\.\n.*another --root"):
            get_benchmark(source, tmp_path / "file" / "data", files=files, reporter=quiet)


def test_a_full_disk_during_a_download_is_an_error(server, tmp_path, quiet):
    archive = Archive("data.bin", creates="cub", urls=(server.url("data.bin"),))
    with max_file_size(300_000), pytest.raises(DataError, match=r"cannot be written \(File too large\)"):
        get_benchmark(replace(BENCHMARKS["cub"], archives=(archive,)), tmp_path, reporter=quiet)


def test_the_command(packed_cub, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "cub", small_cub())
    cli.main(["data", "get", "cub", "--root", str(tmp_path / "data"), "--from", str(packed_cub)])
    assert "cub: 4 images of 4 classes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["data", "get", "cub", "--root", str(tmp_path / "other"), "--from", str(tmp_path / "none.tgz")])
    assert "none.tgz: cannot be opened (No such file" in capsys.readouterr().err
