"""Resumable download of one file from a list of mirrors, with checksums."""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nearkin._common.progress import Reporter
from nearkin.errors import DataError

CHUNK = 2**18
MAX_FAILURES = 5  # consecutive failures without a byte received before the next mirror is tried
TIMEOUT = 30.0  # seconds without a byte
RETRY_DELAY = 1.0  # seconds before the first retry, doubled for each further one
_RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Checksums:
    """Expected checksums of a file, in hexadecimal; None if unknown."""

    sha256: str | None = None
    md5: str | None = None

    def mismatch(self, file: Path) -> str:
        """Describe the first checksum that a file does not have; empty if it has all."""
        for name, expected in (("sha256", self.sha256), ("md5", self.md5)):
            if expected is not None and (actual := digest(file, name)) != expected.lower():
                return f"wrong {name}: expected {expected.lower()}, got {actual}"
        return ""


def digest(file: Path, name: str) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.new, name, usedforsecurity=False)).hexdigest()


def download(
    urls: Sequence[str],
    target: Path,
    *,
    checksums: Checksums,
    reporter: Reporter,
    retry_delay: float = RETRY_DELAY,
) -> None:
    """Download a file from the first mirror that works, via TARGET.part, which a later call resumes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    if checksums == Checksums():  # nothing would tell that the rest belongs to another version of the file
        part.unlink(missing_ok=True)
    failures: list[str] = []
    pending = list(urls)
    while pending:
        resumed = part.exists()
        try:
            _fetch(pending[0], part, reporter, retry_delay)
            if not (reason := checksums.mismatch(part)):
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
