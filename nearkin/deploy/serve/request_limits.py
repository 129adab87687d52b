"""What `nearkin serve` takes from strangers: how much, how long, and of which kinds.

A request is refused as early as it can be: by its head before its body is read, by the head of the picture before it is
unpacked. Each refusal is a status and one sentence; none of them names a file of this machine.
"""

from __future__ import annotations

import asyncio
import io
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from nearkin.data.reading import MAX_PIXELS
from nearkin.errors import ConfigError, did_you_mean, import_extra

# Content types that an upload may name, and how Pillow calls what may be inside. What is inside decides.
TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp", "image/tiff", "application/octet-stream")
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
DRAINED_BYTES, DRAINED_SECONDS = 64_000_000, 2.0  # of an upload that was refused unread, so that the answer arrives


class RequestRejected(Exception):
    """An answer other than success: a status and one sentence for the one who asked."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True)
class RequestLimits:
    """What one request, and all of them together, may take."""

    upload_bytes: int = 20_000_000
    pixels: int = 50_000_000
    upload_seconds: float = 20.0
    work_seconds: float = 30.0
    waiting: int = 64  # requests for work under way at once; more are told to come back
    held_uploads: int = 8  # uploads of the full size that may be held at once; of smaller ones accordingly more
    neighbours: int = 200

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')}: expected more than 0, got {value}.")
        if self.pixels > MAX_PIXELS:
            raise ConfigError(
                f"--pixels: expected at most {MAX_PIXELS:,}, as no larger picture is read; got {self.pixels:,}."
            )


class Admission:
    """Counts what is under way, and refuses what would be too much."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.under_way = self.held = 0

    @contextmanager
    def one(self, upload: int = 0) -> Iterator[None]:
        """Hold a place, and the bytes of an upload, while the block runs."""
        most = self.limits.held_uploads * self.limits.upload_bytes
        if self.under_way >= self.limits.waiting or self.held + upload > most:
            raise RequestRejected(503, "Too many requests at once. Try again in a moment.", Retry_After="1")
        self.under_way += 1
        self.held += upload
        try:
            yield
        finally:
            self.under_way -= 1
            self.held -= upload


# --- the request -----------------------------------------------------------------------------------------------------


def upload_size(request: Request, limits: RequestLimits) -> int:
    """How many bytes the upload may come to, from its head alone; refused if they are too many or of a wrong kind."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in TYPES:
        got = f"'{kind[:60]}'" if kind else "none"
        raise RequestRejected(
            415, f"Send the file itself as the body, with a Content-Type of {', '.join(TYPES)}; got {got}."
        )
    length = request.headers.get("content-length")
    if length is None:  # it comes in pieces, and is counted as it comes
        return limits.upload_bytes
    if not re.fullmatch(r"[0-9]+", length) or int(length) > limits.upload_bytes:
        raise too_large(limits)
    return int(length)


async def read_upload(request: Request, limits: RequestLimits) -> bytes:
    """The body, given up on when it grows too large or does not arrive in time."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.upload_bytes:
                    raise too_large(limits)
                parts.append(part)
    except TimeoutError:
        raise RequestRejected(408, f"The upload did not arrive within {limits.upload_seconds:g} seconds.") from None
    except ClientDisconnect:
        raise RequestRejected(400, "The upload broke off.") from None
    if not size:
        raise RequestRejected(422, "The upload is empty.")
    return b"".join(parts)


def too_large(limits: RequestLimits) -> RequestRejected:
    return RequestRejected(413, f"The upload is larger than {limits.upload_bytes / 1e6:g} MB. Send a smaller picture.")


async def drain(receive: Receive) -> None:
    """Read and forget the rest of a refused upload, within bounds.

    A socket that is closed on unread data is reset, and some clients then never see the answer that was sent before.
    """
    left, until = DRAINED_BYTES, time.monotonic() + DRAINED_SECONDS
    while left > 0:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            return
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        left -= len(message.get("body", b""))


def parameters(request: Request, known: Mapping[str, Any]) -> dict[str, Any]:
    """The query's parameters, each read by its reader in `known`; what is unknown or given twice is refused."""
    found: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            hint = did_you_mean(name, known) if known else ""
            raise RequestRejected(400, f"No parameter is named '{shortened(name)}' here.{hint}")
        if name in found:
            raise RequestRejected(400, f"{name}: given twice.")
        found[name] = known[name](name, value)
    return found


def whole_number(low: int, high: int) -> Any:
    """A reader for `parameters`."""

    def read(name: str, value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", value) or not low <= int(value) <= high:
            raise RequestRejected(
                400, f"{name}: expected a whole number from {low} to {high}, got '{shortened(value)}'."
            )
        return int(value)

    return read


def shortened(text: str, most: int = 80) -> str:
    """What a stranger sent, in a length fit for an answer; a lone surrogate would not fit into UTF-8."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= most else f"{text[:most]}…"


# --- the picture -----------------------------------------------------------------------------------------------------


def check_image(data: bytes, limits: RequestLimits) -> None:
    """Refuse what is no picture, or unpacks to too many pixels, by its first bytes; nothing is unpacked for it."""
    image = import_extra("PIL.Image", extra="vision")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large pictures; we refuse them
            with image.open(io.BytesIO(data), formats=FORMATS) as opened:
                width, height = opened.size
    except image.DecompressionBombError:
        raise RequestRejected(413, f"The picture has more than {limits.pixels / 1e6:g} million pixels.") from None
    except Exception:  # decoders raise anything at all on a damaged file
        raise RequestRejected(
            422, "The upload is not a JPEG, PNG, GIF, WebP, BMP or TIFF picture, or is damaged."
        ) from None
    if width * height > limits.pixels:
        raise RequestRejected(
            413, f"The picture has {width:,} x {height:,} pixels, more than {limits.pixels / 1e6:g} million."
        )
