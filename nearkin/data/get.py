"""`nearkin data get`: download a benchmark from its mirrors, with checksums, and unpack it safely."""

import hashlib
import http.client
import os
import shutil
import stat
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from nearkin._common.files import atomic_file, remove_leftovers, temporary_path
from nearkin._common.progress import Reporter
from nearkin.data.benchmarks import Benchmark
from nearkin.errors import DataError

CHUNK = 2**18
MAX_FAILURES = 5  # consecutive failures without a byte received before the next mirror is tried
TIMEOUT = 30.0  # seconds without a byte
RETRY_DELAY = 1.0  # seconds before the first retry, doubled for each further one
_RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)


Checksums = Mapping[str, str]  # name of the hash -> expected value in hexadecimal


def mismatch(file: Path, checksums: Checksums) -> str:
    """Describe the first checksum that a file does not have; empty if it has all."""
    for name, expected in checksums.items():
        if (actual := digest(file, name)) != expected.lower():
            return f"wrong {name}: expected {expected.lower()}, got {actual}"
    return ""


def digest(file: Path, name: str) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.new, name, usedforsecurity=False)).hexdigest()


def download(
    urls: Sequence[str], target: Path, *, checksums: Checksums, reporter: Reporter, retry_delay: float = RETRY_DELAY
) -> None:
    """Download a file from the first mirror that works, via TARGET.part, which a later call resumes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    if not checksums:  # nothing would tell that the rest belongs to another version of the file
        part.unlink(missing_ok=True)
    failures: list[str] = []
    pending = list(urls)
    while pending:
        resumed = part.exists()
        try:
            _fetch(pending[0], part, reporter, retry_delay)
            if not (reason := mismatch(part, checksums)):
                part.replace(target)
                return
            part.unlink()
            if resumed:  # its start may be that of another file: once more from the same mirror
                continue
        except _MirrorError as error:
            reason = str(error)
        failures.append(f"{pending[0]} ({reason})")
        reporter.info(f"{pending.pop(0)}: {reason}")
    raise DataError(
        f"{target.name}: could not be downloaded from {'; '.join(failures)}.\n"
        f"Download it by other means and pass it with --from FILE."
    )


class _MirrorError(Exception):
    """This mirror does not provide the file."""


def _fetch(url: str, part: Path, reporter: Reporter, retry_delay: float) -> None:
    """Complete `part` from one mirror, reconnecting as often as bytes keep coming."""
    headers: dict[str, str] = {}
    failures = 0
    while True:
        size_before = _size(part)
        try:
            if _transfer(url, part, headers, reporter):
                return
            reason = "the connection was interrupted"
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.reason}"
            if error.code not in _RETRY_STATUS:
                raise _MirrorError(reason) from None
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        except ValueError as error:  # not an address
            raise _MirrorError(str(error)) from None
        size = _size(part)
        failures = 0 if size > size_before else failures + 1
        if failures >= MAX_FAILURES:
            raise _MirrorError(reason)
        reporter.info(f"{url}: {reason} at {size / 1e6:,.1f} MB; retrying")
        time.sleep(min(60.0, retry_delay * 2**failures))


def _transfer(url: str, part: Path, headers: dict[str, str], reporter: Reporter) -> bool:
    """Append to `part` over one connection. True if it is complete. `headers` gets what the next connection sends."""
    size = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "nearkin", "Accept-Encoding": "identity"})
    if size:
        request.headers.update({"Range": f"bytes={size}-"} | headers)
    try:
        reply = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and size:  # nothing is left to send; the checksum tells whether the file is complete
            return True
        raise
    with reply:
        if "text/html" in (reply.headers.get("Content-Type") or ""):
            raise _MirrorError("the server sent a web page instead of the file")
        size = size if reply.status == 206 else 0
        total = size + int(reply.headers.get("Content-Length") or 0)
        version = reply.headers.get("ETag") or ""
        if version and not version.startswith("W/"):
            headers["If-Range"] = version  # a new version of the file is then sent from its start
        with (
            open(part, "ab" if size else "wb") as out,
            reporter.track(f"downloading {part.stem}", max(1, total), unit="B") as bar,
        ):
            bar.advance(size)
            while block := _read(reply):
                out.write(block)
                bar.advance(len(block))
            return out.tell() >= total


def _read(reply: http.client.HTTPResponse) -> bytes:
    try:
        return reply.read1(CHUNK)
    except OSError as error:  # unlike an error in writing, a reason to connect again
        raise ConnectionError(str(error)) from None


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


# Path in the archive, size, and a function that opens the file; None for a folder.
_Member = tuple[PurePosixPath, int, Callable[[], IO[bytes] | None] | None]


class _UnsafeError(Exception):
    """The archive contains what no genuine one does."""


def extract(archive: Path, target: Path, reporter: Reporter) -> list[Path]:
    """Unpack an archive: all members are checked before the first byte is written, and nothing is ever overwritten."""
    try:
        with zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive) as file:
            members = list(_zip_members(file) if isinstance(file, zipfile.ZipFile) else _tar_members(file))
            return _write(members, archive, target, reporter)
    except _UnsafeError as error:
        raise DataError(f"{archive}: contains {error}; nothing was unpacked. Do not trust this file.") from None
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise DataError(
            f"{archive}: not a complete tar or zip archive ({error}); nothing was unpacked. Download it again."
        ) from None


def _tar_members(tar: tarfile.TarFile) -> Iterator[_Member]:
    for info in tar.getmembers():
        path = _safe_path(info.name)
        if info.issym() or info.islnk():
            try:
                inside = tar.extractfile(info) is not None
            except (KeyError, RecursionError):
                inside = False
            if not inside:
                raise _UnsafeError(f"'{info.name}', a link to outside the target or not to a file")
        elif not info.isfile() and not info.isdir():
            raise _UnsafeError(f"'{info.name}', a device or pipe")
        yield path, info.size, None if info.isdir() else partial(tar.extractfile, info)


def _zip_members(file: zipfile.ZipFile) -> Iterator[_Member]:
    for info in file.infolist():
        path = _safe_path(info.filename)
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _UnsafeError(f"'{info.filename}', a link, device or pipe")
        yield path, info.file_size, None if info.is_dir() else partial(file.open, info)


def _safe_path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or name[1:2] == ":":  # C: is a drive
        raise _UnsafeError(f"'{name}', which is outside the target folder")
    return path


def _write(members: list[_Member], archive: Path, target: Path, reporter: Reporter) -> list[Path]:
    tops = sorted({path.parts[0] for path, _, _ in members if path.parts})
    if not tops:
        raise DataError(f"{archive}: the archive is empty.")
    target.mkdir(parents=True, exist_ok=True)
    for top in tops:
        if os.path.lexists(target / top):
            raise DataError(f"{target / top}: already exists. Move it away, then unpack {archive.name} again.")
    remove_leftovers(target)
    size, free = sum(size for _, size, _ in members), shutil.disk_usage(target).free
    if size > free:
        raise DataError(
            f"{archive}: needs {size / 1e9:.1f} GB, but {target} has {free / 1e9:.1f} GB free. "
            f"Free some space or choose another --root."
        )
    with (
        temporary_path(target / ".unpacking") as staging,
        reporter.track(f"unpacking {archive.name}", len(members), unit="file") as bar,
    ):
        for path, _, open_member in members:
            file = staging / path
            (file if open_member is None else file.parent).mkdir(parents=True, exist_ok=True)
            if open_member is not None:
                if file.exists():
                    raise tarfile.TarError(f"'{path}' occurs twice")
                source = open_member()
                assert source is not None
                with source, open(file, "xb") as out:
                    shutil.copyfileobj(source, out, 2**20)
            bar.advance()
        for top in tops:
            (staging / top).rename(target / top)
    return [target / top for top in tops]


def get_benchmark(
    benchmark: Benchmark, root: Path, *, files: Sequence[Path] = (), sha256: str | None = None, reporter: Reporter
) -> str:
    """Download and unpack a benchmark, and check its counts. Returns one line about the result."""
    reporter.info(f"{benchmark.title}: {benchmark.terms} ({benchmark.homepage})")
    names = [archive.name for archive in benchmark.archives]
    if sha256 and len(names) > 1:
        raise DataError(f"--sha256: {benchmark.name} consists of {len(names)} files; one checksum is not enough.")
    # The file of a benchmark with a single one may have any name.
    local_files = {names[0]: files[0]} if len(files) == len(names) == 1 else {file.name: file for file in files}
    if unknown := [file for name, file in local_files.items() if name not in names]:
        one_of = ", ".join(sorted(names))
        raise DataError(f"{unknown[0]}: not a file of {benchmark.name}. Rename it to the one it is: {one_of}.")
    try:
        for archive in benchmark.archives:
            if (root / archive.creates).exists():  # unpacking is all or nothing, so what exists is complete
                continue
            checksums = {"sha256": sha256} if sha256 else {}
            checksums |= {"md5": archive.md5} if archive.md5 else {}
            file = local_files.get(archive.name, root / archive.name)
            is_local = archive.name in local_files or file.is_file()
            if not is_local:
                if not archive.urls:
                    raise DataError(
                        f"{benchmark.name}: {archive.name} has no public download; request it at {benchmark.homepage}."
                        f"\nThen run: nearkin data get {benchmark.name} --root {root} --from {' '.join(names)}"
                    )
                download(archive.urls, file, checksums=checksums, reporter=reporter)
            _check_file(file, checksums, reporter)
            target = root / archive.extract_to
            if Path(archive.name).suffix in (".tgz", ".zip"):
                extract(file, target, reporter)
            else:
                target.mkdir(parents=True, exist_ok=True)
                with atomic_file(target / archive.name) as temporary:
                    shutil.copyfile(file, temporary)
            if not is_local:
                file.unlink()
    except OSError as error:
        raise DataError(
            f"{root}: cannot be written ({error.strerror or error}).\nFree some space, or choose another --root."
        ) from None
    listing = benchmark.list(root)
    return f"{benchmark.name}: {len(listing):,} images of {benchmark.total.classes:,} classes in {listing.root}"


def _check_file(file: Path, checksums: Checksums, reporter: Reporter) -> None:
    try:
        problem = mismatch(file, checksums)
        sha256 = digest(file, "sha256")
    except OSError as error:
        raise DataError(f"{file}: cannot be opened ({error.strerror}).") from None
    if problem:
        raise DataError(
            f"{file}: {problem}.\nIt is damaged or a different file: remove it and download it again, or pass another "
            f"with --from FILE."
        )
    if "sha256" not in checksums:
        status = "its MD5 matches, so it is undamaged" if "md5" in checksums else "no checksum is known for it"
        reporter.info(f"{file.name}: sha256 {sha256}; {status}. Pass --sha256 to require this one.")
