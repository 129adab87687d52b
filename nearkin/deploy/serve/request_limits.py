"""Limits of requests to `nearkin serve`: size and duration of uploads, formats and pixels of images."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from nearkin.data.reading import MAX_PIXELS, ImageData, TooManyPixelsError, open_header, reason_of
from nearkin.errors import ConfigError

# Accepted Content-Types. The content decides, not the declared type.
TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp", "image/tiff", "application/octet-stream")
FORM_TYPE = "multipart/form-data"
# A progressive JPEG has about 10 scans, and each goes through all pixels again.
MAX_JPEG_SCANS, MAX_JPEG_SCANS_LARGEST = 100, 16  # of any image, of one with `max_pixels`


@dataclass(frozen=True)
class RequestLimits:
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
            raise ConfigError(f"--max-pixels: expected at most {MAX_PIXELS:,}, got {self.max_pixels:,}.")


def too_busy() -> HTTPException:
    return HTTPException(503, "Too many concurrent requests. Try again later.", {"Retry-After": "1"})


class UploadReader:
    """Read uploads within the limits; when all together exceed the memory, the one arriving for longest is rejected."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits, self.buffered_bytes = limits, 0
        self._arriving: dict[asyncio.Timeout, bytearray] = {}  # oldest first

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the image file in the body of a request, and count its memory while the block runs."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type not in (*TYPES, FORM_TYPE):
            got = f"'{content_type[:60]}'" if content_type else "none"
            message = "Send the image file as a form or as the body, with Content-Type"
            raise HTTPException(415, f"{message} {', '.join(TYPES)}; got {got}.")
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
            async with asyncio.timeout(self.limits.upload_timeout) as timeout:
                self._arriving[timeout] = body
                async for chunk in request.stream():
                    body += chunk
                    self.buffered_bytes += len(chunk)
                    if len(body) > self.limits.max_upload_bytes:
                        raise self._too_large()
                    self._free_memory()
                if timeout not in self._arriving:  # rejected with its last chunk
                    raise TimeoutError
        except TimeoutError:
            if timeout not in self._arriving:  # rejected by _free_memory
                raise too_busy() from None
            message = f"The upload did not arrive within {self.limits.upload_timeout:g} seconds."
            raise HTTPException(408, message) from None
        except ClientDisconnect:
            raise HTTPException(400, "The upload was interrupted.") from None
        finally:
            self._arriving.pop(timeout, None)

    def _free_memory(self) -> None:
        """Reject arriving uploads, oldest first, until the others fit into the limit."""
        while self.buffered_bytes > self.limits.buffered_uploads * self.limits.max_upload_bytes and self._arriving:
            timeout = next(iter(self._arriving))
            body = self._arriving.pop(timeout)
            self.buffered_bytes -= len(body)
            body.clear()
            timeout.reschedule(0.0)  # at once

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


def check_image(data: bytes, limits: RequestLimits) -> bool:
    """Check format and size of an image by its header, to bound the time of decoding; return whether that is long."""
    try:
        with open_header(ImageData(data)) as image:
            width, height = image.size
            has_scans = image.format in {"JPEG", "MPO"} or image.info.get("compression") == "jpeg"  # a TIFF
            is_jpeg = data.startswith(b"\xff\xd8")
    except TooManyPixelsError as error:
        raise HTTPException(413, f"The image has {error}.") from None
    except Exception as error:  # decoders raise arbitrary exceptions on damaged files
        message = "The upload is not a valid JPEG, PNG, GIF, WebP, BMP or TIFF image"
        raise HTTPException(422, f"{message} ({reason_of(error)}).") from None
    # Only a JPEG can be decoded at reduced size: other formats take ten times as long per pixel.
    max_pixels = limits.max_pixels if is_jpeg else limits.max_pixels // 2
    pixels, scans = width * height, data.count(b"\xff\xda") if has_scans else 1
    if pixels > max_pixels:
        message = f"The image has {width:,} x {height:,} pixels, more than {max_pixels / 1e6:g} million."
        raise HTTPException(413, f"{message} Send a smaller one{'' if is_jpeg else ', or a JPEG'}.")
    if scans > MAX_JPEG_SCANS or scans * pixels > MAX_JPEG_SCANS_LARGEST * limits.max_pixels:
        raise HTTPException(422, f"The JPEG has {scans} scans, too many for its size. Save it as a baseline JPEG.")
    return bool(scans * pixels > limits.max_pixels // (4 if is_jpeg else 10))
