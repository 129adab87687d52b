"""`download`: one file over HTTP, resumed where it was cut, from the first address that works, checked when whole."""

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

from nearkin._common.progress import ProgressBar, Reporter
from nearkin.errors import DataError

CHUNK = 2**18
TRIES = 5  # cuts in a row, without a byte gained, after which an address is given up
TIMEOUT = 30.0  # seconds without a byte
WAIT = 1.0  # seconds before the first new try, doubled for each further one


@dataclass(frozen=True)
class Checksums:
    """What a whole file must hash to; None where that is not known."""

    sha256: str | None = None
    md5: str | None = None


def download(
    urls: Sequence[str],
    target: Path,
    *,
    checksums: Checksums,
    reporter: Reporter,
    wait: float = WAIT,
) -> str:
    """Fetch `target` from the first of `urls` that works and return its SHA-256.

    The bytes go to TARGET.part, which a later call continues, and become `target` only when they are whole and their
    checksum is right.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    refused: list[str] = []
    for url in urls:
        try:
            _fetch(url, part, reporter, wait)
        except _Refused as error:
            reporter.info(f"{url}: {error}")
            refused.append(f"{url} ({error})")
            continue
        digest = verify(part, checksums)
        if isinstance(digest, _Wrong):
            # Nothing of it can be trusted, so the next try must not continue it.
            _forget(part)
            reporter.info(f"{url}: {digest.message}")
            refused.append(f"{url} ({digest.message})")
            continue
        part.replace(target)
        _forget(part)
        return digest
    raise DataError(
        f"{target.name}: could not be downloaded from {'; '.join(refused)}.\n"
        f"Fetch it by other means and pass it with --from FILE."
    )


class _Refused(Exception):
    """This address does not give the file."""


@dataclass(frozen=True)
class _Wrong:
    message: str


def verify(file: Path, checksums: Checksums) -> str | _Wrong:
    """The file's SHA-256, or in which checksum it is wrong."""
    hashes = {"sha256": hashlib.sha256(), "md5": hashlib.md5(usedforsecurity=False)}
    with open(file, "rb") as stream:
        while block := stream.read(2**20):
            for one in hashes.values():
                one.update(block)
    for name, wanted in (("sha256", checksums.sha256), ("md5", checksums.md5)):
        got = hashes[name].hexdigest()
        if wanted is not None and got != wanted.lower():
            return _Wrong(f"wrong {name}: expected {wanted.lower()}, got {got}")
    return hashes["sha256"].hexdigest()


def check_file(file: Path, checksums: Checksums) -> str:
    """The SHA-256 of a file that the user gave, refused where a checksum is wrong."""
    try:
        digest = verify(file, checksums)
    except OSError as error:
        raise DataError(f"{file}: cannot be opened ({error.strerror}).") from None
    if isinstance(digest, _Wrong):
        raise DataError(
            f"{file}: {digest.message}.\nIt is damaged or another file: remove it and fetch it again, or pass another "
            f"with --from FILE."
        )
    return digest


# --- one address -----------------------------------------------------------------------------------------------------


def _fetch(url: str, part: Path, reporter: Reporter, wait: float) -> None:
    """Bring `part` to its full length from one address, over as many connections as it takes."""
    in_vain = 0
    while True:
        before = _continued(url, part)
        try:
            if _transfer(url, part, before, reporter):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            if error.code not in (408, 425, 429, 500, 502, 503, 504):
                raise _Refused(f"{error.code} {error.reason}") from None
            reason = f"{error.code} {error.reason}"
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        except ValueError as error:
            raise _Refused(str(error)) from None
        have = part.stat().st_size if part.exists() else 0
        in_vain = 0 if have > before else in_vain + 1
        if in_vain >= TRIES:
            raise _Refused(reason)
        reporter.info(f"{url}: {reason} at {have / 1e6:,.1f} MB; trying again")
        time.sleep(min(60.0, wait * 2**in_vain))


def _transfer(url: str, part: Path, have: int, reporter: Reporter) -> bool:
    """One connection. True when the file is whole."""
    request = urllib.request.Request(url, headers={"User-Agent": "nearkin", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if validator := _note(part).get("validator"):
            request.add_header("If-Range", validator)  # another version of the file is then sent from its start
    try:
        reply = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is left to send, or the file has become shorter
            if _length_in(error.headers.get("Content-Range")) == have:
                return True
            _forget(part)
            return False
        raise
    with reply:
        headers: Any = reply.headers
        if "text/html" in (headers.get("Content-Type") or ""):
            raise _Refused("the server sent a web page instead of the file")
        resumed = reply.status == 206 if getattr(reply, "status", None) else False
        if resumed and not (headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            _forget(part)  # not the piece that was asked for
            return False
        have = have if resumed else 0
        length = headers.get("Content-Length")
        total = have + int(length) if length else None
        _write_note(part, url, headers.get("ETag") or headers.get("Last-Modified"))
        with (
            open(part, "ab" if resumed else "wb") as out,
            reporter.track(f"getting {part.stem}", max(1, total or 1), unit="B") as bar,
        ):
            bar.advance(have)
            copied, ended = _copy(reply, out, bar)
            have += copied
    return ended and (total is None or have >= total)


def _copy(reply: Any, out: Any, bar: ProgressBar) -> tuple[int, bool]:
    """How many bytes came, and whether the reply ended by itself (one cut short of its said length seems to)."""
    copied = 0
    while True:
        try:
            block = reply.read(CHUNK)
        except http.client.IncompleteRead as error:
            block = error.partial
            out.write(block)
            return copied + len(block), False
        except OSError:  # cut, silent for too long, or the net has gone
            return copied, False
        if not block:
            return copied, True
        out.write(block)
        copied += len(block)
        bar.advance(len(block))


def _length_in(content_range: str | None) -> int | None:
    """The whole length out of `bytes */1234`."""
    length = (content_range or "").rpartition("/")[2]
    return int(length) if length.isdigit() else None


def _continued(url: str, part: Path) -> int:
    """How many bytes of this very address are on the disk; what another address left is dropped."""
    if part.exists() and _note(part).get("url") != url:
        _forget(part)
    return part.stat().st_size if part.exists() else 0


def _note_file(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _note(part: Path) -> dict[str, str]:
    try:
        stored = json.loads(_note_file(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _write_note(part: Path, url: str, validator: str | None) -> None:
    note = {"url": url} | ({"validator": validator} if validator and not validator.startswith("W/") else {})
    _note_file(part).write_text(json.dumps(note), encoding="utf-8")


def _forget(part: Path) -> None:
    for file in (part, _note_file(part)):
        if os.path.lexists(file):
            file.unlink()
