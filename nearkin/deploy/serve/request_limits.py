"""Limits of requests to `nearkin serve`: size and duration of uploads, formats and pixels of images.

Requests are rejected as early as possible, with a status code and one sentence without paths of this machine.
"""

from __future__ import annotations

import asyncio
import io
import re
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from nearkin.data.reading import MAX_PIXELS
from nearkin.errors import ConfigError, import_extra

# Accepted Content-Types, and Pillow's names of the accepted formats. The content decides, not the declared type.
TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp", "image/tiff", "application/octet-stream")
FORM_TYPE = "multipart/form-data"
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
MAX_JPEG_SCANS = 100  # a progressive JPEG has about 10; each scan goes through all pixels again


@dataclass(frozen=True)
class RequestLimits:
    """Limits per request, and on all concurrent requests together."""

    max_upload_bytes: int = 20_000_000  # largest upload
    max_pixels: int = 50_000_000  # largest JPEG, width times height; other formats half of it
    upload_timeout: float = 20.0  # for an upload to arrive
    timeout: float = 30.0  # for a response, once the upload has arrived
    max_requests: int = 64  # requests being processed or waiting for it; further ones get status 503
    buffered_uploads: int = 8  # full-size uploads in memory at once; proportionally more smaller ones
    neighbours: int = 200  # largest k

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')}: expected more than 0, got {value}.")
        if self.max_pixels > MAX_PIXELS:
            raise ConfigError(
                f"--max-pixels: expected at most {MAX_PIXELS:,}, the limit of the decoder; got {self.max_pixels:,}."
            )


def too_busy() -> HTTPException:
    """Return the rejection of a request that exceeds the limits on concurrent requests."""
    return HTTPException(503, "Too many concurrent requests. Try again later.", {"Retry-After": "1"})


class UploadReader:
    """Read uploads within the limits. Only bytes that have arrived count, so slow uploads do not block others."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits, self.buffered_bytes = limits, 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the image file in the body of a request, and count its memory while the block runs."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type not in (*TYPES, FORM_TYPE):
            got = f"'{content_type[:60]}'" if content_type else "none"
            raise HTTPException(
                415, f"Send the image file as a form or as the body, with Content-Type {', '.join(TYPES)}; got {got}."
            )
        length = request.headers.get("content-length", "0")  # absent if chunked: counted while it is read
        if not re.fullmatch(r"[0-9]+", length) or int(length) > self.limits.max_upload_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            await self._receive(request, body)
            data = await _file_in_form(request, bytes(body)) if content_type == FORM_TYPE else bytes(body)
            if not data:
                raise HTTPException(422, "The upload is empty.")
            yield data
        finally:
            self.buffered_bytes -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(self.limits.upload_timeout):
                async for chunk in request.stream():
                    body += chunk
                    self.buffered_bytes += len(chunk)
                    if len(body) > self.limits.max_upload_bytes:
                        raise self._too_large()
                    if self.buffered_bytes > self.limits.buffered_uploads * self.limits.max_upload_bytes:
                        raise too_busy()
        except TimeoutError:
            message = f"The upload did not arrive within {self.limits.upload_timeout:g} seconds."
            raise HTTPException(408, message) from None
        except ClientDisconnect:
            raise HTTPException(400, "The upload was interrupted.") from None

    def _too_large(self) -> HTTPException:
        megabytes = self.limits.max_upload_bytes / 1e6
        return HTTPException(413, f"The upload is larger than {megabytes:g} MB. Send a smaller image.")


async def _file_in_form(request: Request, body: bytes) -> bytes:
    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    try:
        async with Request(request.scope, receive).form(max_files=1, max_fields=10) as form:
            file = form.get("file")
            if isinstance(file, UploadFile):
                return await file.read()
    except HTTPException as error:
        raise HTTPException(422, f"The form cannot be read: {error.detail}") from None
    raise HTTPException(422, "The form has no file named 'file'. Send it as curl -F file=@image.jpg does.")


def check_image(data: bytes, limits: RequestLimits) -> None:
    """Check format and size of an image by its header, without decoding it, to bound the time that takes."""
    pil = import_extra("PIL.Image", extra="serve")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about large images, which are rejected below
            with pil.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
    except pil.DecompressionBombError:
        raise HTTPException(413, f"The image has more than {limits.max_pixels / 1e6:g} million pixels.") from None
    except Exception:  # decoders raise arbitrary exceptions on damaged files
        raise HTTPException(422, "The upload is not a valid JPEG, PNG, GIF, WebP, BMP or TIFF image.") from None
    # Only a JPEG can be decoded at reduced size: other formats take ten times as long per pixel.
    is_jpeg = data.startswith(b"\xff\xd8")
    max_pixels = limits.max_pixels if is_jpeg else limits.max_pixels // 2
    if width * height > max_pixels:
        message = f"The image has {width:,} x {height:,} pixels, more than {max_pixels / 1e6:g} million."
        raise HTTPException(413, f"{message} Send a smaller one{'' if is_jpeg else ', or a JPEG'}.")
    if is_jpeg and data.count(b"\xff\xda") > MAX_JPEG_SCANS:
        raise HTTPException(422, f"The JPEG has more than {MAX_JPEG_SCANS} scans. Save it again.")
