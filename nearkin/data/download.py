"""Resumable HTTP download of one file from a list of mirrors, with checksums."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearkin._common.files import atomic_write
from nearkin._common.progress import ProgressBar, Reporter
from nearkin.errors import DataError

CHUNK = 2**18
MAX_FAILURES = 5  # consecutive failures without a byte received before the next mirror is tried
TIMEOUT = 30.0  # seconds without a byte
RETRY_DELAY = 1.0  # seconds before the first retry, doubled for each further one
_RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Checksums:
    """Expected checksums of a file."""

    sha256: str | None = None  # hexadecimal SHA-256, or None if unknown
    md5: str | None = None  # hexadecimal MD5, or None if unknown


def download(
    urls: Sequence[str],
    target: Path,
    *,
    checksums: Checksums,
    reporter: Reporter,
    retry_delay: float = RETRY_DELAY,
) -> str:
    """Download a file from the first mirror that works.

    The bytes go to TARGET.part, which a later call resumes, and are renamed to `target` once they are complete and the
    checksums match.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    failures: list[str] = []
    for url in urls:
        try:
            _fetch(url, part, reporter, retry_delay)
        except _MirrorError as error:
            reporter.info(f"{url}: {error}")
            failures.append(f"{url} ({error})")
            continue
        digest = verify(part, checksums)
        if isinstance(digest, _ChecksumMismatch):
            _discard(part)  # not resumable: no byte of it can be trusted
            reporter.info(f"{url}: {digest.message}")
            failures.append(f"{url} ({digest.message})")
            continue
        part.replace(target)
        _discard(part)
        return digest
    raise DataError(
        f"{target.name}: could not be downloaded from {'; '.join(failures)}.\n"
        f"Download it by other means and pass it with --from FILE."
    )


class _MirrorError(Exception):
    """This mirror does not provide the file."""


@dataclass(frozen=True)
class _ChecksumMismatch:
    message: str


def verify(file: Path, checksums: Checksums) -> str | _ChecksumMismatch:
    """Compare a file with its expected checksums. Returns the SHA-256, or which checksum does not match."""
    hashes = {"sha256": hashlib.sha256(), "md5": hashlib.md5(usedforsecurity=False)}
    with open(file, "rb") as stream:
        while block := stream.read(2**20):
            for digest in hashes.values():
                digest.update(block)
    for name, expected in (("sha256", checksums.sha256), ("md5", checksums.md5)):
        actual = hashes[name].hexdigest()
        if expected is not None and actual != expected.lower():
            return _ChecksumMismatch(f"wrong {name}: expected {expected.lower()}, got {actual}")
    return hashes["sha256"].hexdigest()


def check_file(file: Path, checksums: Checksums) -> str:
    """Verify a file that the user provided. Returns the SHA-256."""
    try:
        digest = verify(file, checksums)
    except OSError as error:
        raise DataError(f"{file}: cannot be opened ({error.strerror}).") from None
    if isinstance(digest, _ChecksumMismatch):
        raise DataError(
            f"{file}: {digest.message}.\nIt is damaged or a different file: remove it and download it again, or pass "
            f"another with --from FILE."
        )
    return digest


# --- one mirror ------------------------------------------------------------------------------------------------------


def _fetch(url: str, part: Path, reporter: Reporter, retry_delay: float) -> None:
    """Complete `part` from one mirror, reconnecting as often as bytes keep coming."""
    failures = 0
    while True:
        size_before = _resumable_size(url, part)
        try:
            if _transfer(url, part, size_before, reporter):
                return
            reason = "the connection was interrupted"
        except urllib.error.HTTPError as error:
            if error.code not in _RETRY_STATUS:
                raise _MirrorError(f"{error.code} {error.reason}") from None
            reason = f"{error.code} {error.reason}"
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        except ValueError as error:
            raise _MirrorError(str(error)) from None
        size = part.stat().st_size if part.exists() else 0
        failures = 0 if size > size_before else failures + 1
        if failures >= MAX_FAILURES:
            raise _MirrorError(reason)
        reporter.info(f"{url}: {reason} at {size / 1e6:,.1f} MB; retrying")
        time.sleep(min(60.0, retry_delay * 2**failures))


def _transfer(url: str, part: Path, size: int, reporter: Reporter) -> bool:
    """Download over one connection, starting at byte `size`. True if the file is complete."""
    request = urllib.request.Request(url, headers={"User-Agent": "nearkin", "Accept-Encoding": "identity"})
    if size:
        request.add_header("Range", f"bytes={size}-")
        if validator := _read_state(part).get("validator"):
            request.add_header("If-Range", validator)  # a new version of the file is then sent from its start
    try:
        reply = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and size:  # complete already, or the file on the server has become shorter
            if _total_size(error.headers.get("Content-Range")) == size:
                return True
            _discard(part)
            return False
        raise
    with reply:
        headers: Any = reply.headers
        if "text/html" in (headers.get("Content-Type") or ""):
            raise _MirrorError("the server sent a web page instead of the file")
        resumed = reply.status == 206 if getattr(reply, "status", None) else False
        if resumed and not (headers.get("Content-Range") or "").startswith(f"bytes {size}-"):
            _discard(part)  # not the requested range
            return False
        size = size if resumed else 0
        length = headers.get("Content-Length")
        total = size + int(length) if length else None
        _write_state(part, url, headers.get("ETag") or headers.get("Last-Modified"))
        with (
            open(part, "ab" if resumed else "wb") as out,
            reporter.track(f"downloading {part.stem}", max(1, total or 1), unit="B") as bar,
        ):
            bar.advance(size)
            copied, ended = _copy(reply, out, bar)
            size += copied
    return ended and (total is None or size >= total)


def _copy(reply: Any, out: Any, bar: ProgressBar) -> tuple[int, bool]:
    """Copy a reply. Returns the number of bytes, and whether it ended normally (as one shorter than announced may)."""
    copied = 0
    while True:
        try:
            block = reply.read(CHUNK)
        except http.client.IncompleteRead as error:
            block = error.partial
            out.write(block)
            return copied + len(block), False
        except OSError:  # disconnected or timed out
            return copied, False
        if not block:
            return copied, True
        out.write(block)
        copied += len(block)
        bar.advance(len(block))


def _total_size(content_range: str | None) -> int | None:
    """The total size in `bytes */1234`."""
    size = (content_range or "").rpartition("/")[2]
    return int(size) if size.isdigit() else None


def _resumable_size(url: str, part: Path) -> int:
    """Bytes of this mirror's file on disk; a part from another mirror is discarded."""
    if part.exists() and _read_state(part).get("url") != url:
        _discard(part)
    return part.stat().st_size if part.exists() else 0


def _state_file(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_state(part: Path) -> dict[str, str]:
    try:
        state = json.loads(_state_file(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(part: Path, url: str, validator: str | None) -> None:
    state = {"url": url} | ({"validator": validator} if validator and not validator.startswith("W/") else {})
    atomic_write(_state_file(part), json.dumps(state))


def _discard(part: Path) -> None:
    for file in (part, _state_file(part)):
        if os.path.lexists(file):
            file.unlink()
