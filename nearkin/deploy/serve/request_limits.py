"""Validation of requests to `nearkin serve`: size, duration, parameters and image formats.

A request is rejected as early as possible: by its headers before the body is read, by the image header before the image
is decoded. Every rejection is a status code and one sentence, which never contains a path of this machine.
"""

from __future__ import annotations

import asyncio
import io
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from nearkin.data.reading import MAX_PIXELS
from nearkin.errors import ConfigError, did_you_mean, import_extra

# Accepted Content-Types, and Pillow's names of the accepted formats. The content decides, not the declared type.
TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp", "image/tiff", "application/octet-stream")
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
MAX_DRAIN_BYTES, MAX_DRAIN_SECONDS = 64_000_000, 2.0


class RequestRejected(Exception):
    """An error response.

    Args:
        status: HTTP status code.
        message: One sentence for the client.
        headers: Further response headers, with _ for -.
    """

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True)
class RequestLimits:
    """Limits per request, and on all concurrent requests together.

    Attributes:
        upload_bytes: Largest upload.
        pixels: Largest image, width times height.
        upload_seconds: Time limit for an upload to arrive.
        work_seconds: Time limit for a response.
        waiting: Concurrent requests; further ones get status 503.
        buffered_uploads: Full-size uploads in memory at once; proportionally more smaller ones.
        neighbours: Largest k.
    """

    upload_bytes: int = 20_000_000
    pixels: int = 50_000_000
    upload_seconds: float = 20.0
    work_seconds: float = 30.0
    waiting: int = 64
    buffered_uploads: int = 8
    neighbours: int = 200

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')}: expected more than 0, got {value}.")
        if self.pixels > MAX_PIXELS:
            raise ConfigError(
                f"--pixels: expected at most {MAX_PIXELS:,}, the largest image that can be read; got {self.pixels:,}."
            )


class ConcurrencyLimiter:
    """Count concurrent requests and the memory of their uploads.

    Args:
        limits: When to reject.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.active_requests = self.buffered_bytes = 0

    @contextmanager
    def acquire(self, upload_bytes: int = 0) -> Iterator[None]:
        """Count a request while the block runs.

        Args:
            upload_bytes: Memory reserved for its upload.

        Yields:
            Nothing.

        Raises:
            RequestRejected: With status 503 if a limit is exceeded.
        """
        max_bytes = self.limits.buffered_uploads * self.limits.upload_bytes
        if self.active_requests >= self.limits.waiting or self.buffered_bytes + upload_bytes > max_bytes:
            raise RequestRejected(503, "Too many concurrent requests. Try again later.", Retry_After="1")
        self.active_requests += 1
        self.buffered_bytes += upload_bytes
        try:
            yield
        finally:
            self.active_requests -= 1
            self.buffered_bytes -= upload_bytes


# --- requests --------------------------------------------------------------------------------------------------------


def upload_size(request: Request, limits: RequestLimits) -> int:
    """Check the headers of an upload.

    Args:
        request: The request.
        limits: Its limits.

    Returns:
        How many bytes the upload may have.

    Raises:
        RequestRejected: If it is too large or of an unsupported Content-Type.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in TYPES:
        got = f"'{content_type[:60]}'" if content_type else "none"
        raise RequestRejected(415, f"Send the image file as the body, with Content-Type {', '.join(TYPES)}; got {got}.")
    length = request.headers.get("content-length")
    if length is None:  # chunked: counted while it is read
        return limits.upload_bytes
    if not re.fullmatch(r"[0-9]+", length) or int(length) > limits.upload_bytes:
        raise _too_large(limits)
    return int(length)


async def read_upload(request: Request, limits: RequestLimits) -> bytes:
    """Read the body of a request.

    Args:
        request: The request.
        limits: Its limits.

    Returns:
        The body.

    Raises:
        RequestRejected: If it is empty, too large, too slow or incomplete.
    """
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.upload_bytes:
                    raise _too_large(limits)
                chunks.append(chunk)
    except TimeoutError:
        raise RequestRejected(408, f"The upload did not arrive within {limits.upload_seconds:g} seconds.") from None
    except ClientDisconnect:
        raise RequestRejected(400, "The upload was interrupted.") from None
    if not size:
        raise RequestRejected(422, "The upload is empty.")
    return b"".join(chunks)


def _too_large(limits: RequestLimits) -> RequestRejected:
    return RequestRejected(413, f"The upload is larger than {limits.upload_bytes / 1e6:g} MB. Send a smaller image.")


async def drain(receive: Receive) -> None:
    """Read and discard the rest of a rejected upload, within bounds.

    Closing a socket with unread data resets it, and some clients then never see the response.

    Args:
        receive: ASGI callable of the request.
    """
    left, deadline = MAX_DRAIN_BYTES, time.monotonic() + MAX_DRAIN_SECONDS
    while left > 0:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        left -= len(message.get("body", b""))


def parse_query(request: Request, parsers: Mapping[str, Callable[[str, str], Any]]) -> dict[str, Any]:
    """Parse the query parameters of a request.

    Args:
        request: The request.
        parsers: A function (name, value) -> parsed value for each allowed parameter.

    Returns:
        The parsed values.

    Raises:
        RequestRejected: If a parameter is unknown, repeated or invalid.
    """
    parsed: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name not in parsers:
            hint = did_you_mean(name, parsers) if parsers else ""
            raise RequestRejected(400, f"Unknown parameter '{shorten(name)}'.{hint}")
        if name in parsed:
            raise RequestRejected(400, f"{name}: given more than once.")
        parsed[name] = parsers[name](name, value)
    return parsed


def integer(low: int, high: int) -> Callable[[str, str], int]:
    """Return a parser of integers for `parse_query`.

    Args:
        low: Smallest allowed value.
        high: Largest allowed value.

    Returns:
        The parser.
    """

    def parse(name: str, value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", value) or not low <= int(value) <= high:
            raise RequestRejected(400, f"{name}: expected an integer from {low} to {high}, got '{shorten(value)}'.")
        return int(value)

    return parse


def shorten(text: str, max_length: int = 80) -> str:
    """Shorten client input for an error message, and replace surrogates that UTF-8 cannot encode.

    Args:
        text: What the client sent.
        max_length: Number of characters to keep.

    Returns:
        The text.
    """
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= max_length else f"{text[:max_length]}…"


# --- images ----------------------------------------------------------------------------------------------------------


def check_image(data: bytes, limits: RequestLimits) -> None:
    """Check format and size of an image by its header, without decoding it.

    Args:
        data: The uploaded file.
        limits: Of the request.

    Raises:
        RequestRejected: If it is not a supported image, or has too many pixels.
    """
    pil = import_extra("PIL.Image", extra="serve")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about large images, which are rejected below
            with pil.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
    except pil.DecompressionBombError:
        raise RequestRejected(413, f"The image has more than {limits.pixels / 1e6:g} million pixels.") from None
    except Exception:  # decoders raise arbitrary exceptions on damaged files
        raise RequestRejected(422, "The upload is not a valid JPEG, PNG, GIF, WebP, BMP or TIFF image.") from None
    if width * height > limits.pixels:
        raise RequestRejected(
            413, f"The image has {width:,} x {height:,} pixels, more than {limits.pixels / 1e6:g} million."
        )
