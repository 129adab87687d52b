"""The work behind `nearkin serve`: search and thumbnails in a thread pool.

Items are identified by their path below the indexed folder. No response contains a path of this machine, and no file is
sent as it is on disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch

from nearkin._common.version import __version__
from nearkin.data.loading import available_cores
from nearkin.data.reading import name_of, read_image, square
from nearkin.deploy.images import model_input
from nearkin.deploy.index.index import Index, SearchResult
from nearkin.deploy.serve.middleware import content_security_policy, host_name
from nearkin.deploy.serve.request_limits import (
    ConcurrencyLimiter,
    RequestLimits,
    RequestRejected,
    check_image,
    shorten,
)
from nearkin.errors import ConfigError, DataError, import_extra
from nearkin.models.embedder import Embedder

T = TypeVar("T")
THUMBNAIL_SIZE = 192  # pixels
MAX_THUMBNAILS = 2000  # cached, about 10 kB each
MIN_TOKEN_LENGTH = 16


class Service:
    """An index ready to be served.

    Args:
        index: Its model must be a `nearkin.Embedder`.
        limits: Limits of requests.
        workers: Number of threads that read and embed images.
        token: Bearer token required for data; None requires none.
        hosts: Accepted host names; None accepts any. Restrict them on a loopback address: another web page could point
            its own name here and read the responses (DNS rebinding).
    """

    def __init__(
        self,
        index: Index,
        *,
        limits: RequestLimits | None = None,
        workers: int = 2,
        token: str | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"--workers: expected at least 1, got {workers}.")
        _check_token(token)
        invalid = next((host for host in hosts or () if "/" in host), None)
        if invalid is not None:
            raise ConfigError(f"--allow-host: expected a host name, got {invalid!r}.")
        model = index.model()
        if not isinstance(model, Embedder):  # which also defines the preprocessing
            raise ConfigError(f"serve: expected the model to be a nearkin.Embedder, got {type(model).__name__}.")
        self.index, self.model, self.token = index, model.eval(), token
        self.limits = limits or RequestLimits()
        # Both as given, which may be a bare IPv6 address, and without a port, as they are compared.
        self.hosts = None if hosts is None else {n for host in hosts for n in (host.lower(), host_name(host)) if n}
        self.limiter = ConcurrencyLimiter(self.limits)
        self.names = public_names(index.ids)
        self.rows = {name: row for row, name in enumerate(self.names)}
        self.labels = [utf8_safe(label) if isinstance(label, str) else label for label in index.labels]
        threads = max(1, available_cores() // workers)
        self.pool = ThreadPoolExecutor(workers, "nearkin-serve", lambda: torch.set_num_threads(threads))
        self._thumbnails: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        self.page_policy = content_security_policy(self.page)
        # Warm up, so that the first request is not slower than the others.
        index.search_many(torch.zeros(1, index.dim))
        model.embed(torch.zeros((1, *model.image_shape), dtype=torch.uint8))

    def close(self) -> None:
        """Stop the worker threads."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a worker thread.

        Args:
            function: The function.
            args: Its arguments.

        Returns:
            Its result.

        Raises:
            RequestRejected: With status 503 after `work_seconds`.
        """
        future = asyncio.get_running_loop().run_in_executor(self.pool, function, *args)
        try:
            return await asyncio.wait_for(future, self.limits.work_seconds)
        except TimeoutError:
            raise RequestRejected(
                503, f"Timed out after {self.limits.work_seconds:g} seconds. Try again later.", Retry_After="5"
            ) from None

    # --- in worker threads -------------------------------------------------------------------------------------------

    def search_image(self, data: bytes, k: int) -> dict[str, Any]:
        """Find the nearest items of an uploaded image.

        Args:
            data: The image file.
            k: Number of neighbours.

        Returns:
            The body of the response.
        """
        check_image(data, self.limits)
        try:
            pixels = model_input(self.model, data)
        except DataError as error:
            reason = str(error).removeprefix(f"{name_of(data)}: ")
            raise RequestRejected(422, f"The upload: {reason}") from None
        except MemoryError:
            raise RequestRejected(413, "The image does not fit into memory.") from None
        vector = self.model.embed(pixels[None])[0]
        if not vector.isfinite().all():
            raise RequestRejected(422, "The model returns NaN or infinity for this image.")
        return self._result_json(self.index.answer(vector, k))

    def search_item(self, row: int, k: int) -> dict[str, Any]:
        """Find the nearest other items of an item.

        Args:
            row: Its row in the index.
            k: Number of neighbours.

        Returns:
            The body of the response.
        """
        result = self.index.answer(self.index.vectors[row], k, exclude=row)
        return self._item_json(row) | self._result_json(result)

    def thumbnail(self, row: int) -> bytes | None:
        """Render the thumbnail of an item.

        Args:
            row: Its row in the index.

        Returns:
            A JPEG file, or None if the item's file cannot be read.
        """
        with self._lock:
            if row in self._thumbnails:
                self._thumbnails.move_to_end(row)
                return self._thumbnails[row]
        try:
            pixels = square(read_image(self.index.path_of(self.index.ids[row]), THUMBNAIL_SIZE), THUMBNAIL_SIZE)
        except (DataError, MemoryError, ValueError):  # ValueError: an id that is not a valid path
            return None
        buffer = io.BytesIO()
        image = import_extra("PIL.Image", extra="serve").fromarray(pixels.permute(1, 2, 0).numpy())
        image.save(buffer, "JPEG", quality=85)
        with self._lock:
            self._thumbnails[row] = buffer.getvalue()
            while len(self._thumbnails) > MAX_THUMBNAILS:
                self._thumbnails.popitem(last=False)
        return buffer.getvalue()

    # --- responses ---------------------------------------------------------------------------------------------------

    def _item_json(self, row: int) -> dict[str, Any]:
        return {"id": self.names[row], "label": self.labels[row]}

    def _result_json(self, result: SearchResult) -> dict[str, Any]:
        hits = [self._item_json(hit.row) | {"similarity": hit.similarity} for hit in result.hits]
        return {"hits": hits, "nearest": result.nearest, "known": result.known}

    def row_of(self, name: str) -> int:
        """Return the row of an item by its public name, or raise `RequestRejected` with status 404."""
        if name not in self.rows:
            raise RequestRejected(404, f"No item named '{shorten(name)}'.")
        return self.rows[name]

    def list_items(self, offset: int, limit: int, step: int) -> dict[str, Any]:
        """List items.

        Args:
            offset: Items to skip.
            limit: Largest number of items.
            step: Take every step-th item.

        Returns:
            The body of the response.
        """
        rows = range(offset, len(self.names), step)[:limit]
        return {"total": len(self.names), "items": [self._item_json(row) for row in rows]}

    def info(self) -> dict[str, Any]:
        """Return size, threshold and limits as the body of a response."""
        index = self.index
        return {
            "version": __version__,
            "items": len(index),
            "classes": len({label for label in index.labels if label is not None}),
            "dim": index.dim,
            "threshold": None if index.threshold is None else index.threshold.value,
            "limits": {
                "upload_bytes": self.limits.upload_bytes,
                "pixels": self.limits.pixels,
                "neighbours": self.limits.neighbours,
            },
        }


def _check_token(token: str | None) -> None:
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(f"token: expected at least {MIN_TOKEN_LENGTH} characters, got {len(token)}.")
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ConfigError("token: expected ASCII characters without spaces, since it is sent in an HTTP header.")


def public_names(ids: Sequence[str]) -> list[str]:
    """Return the names of items in responses: their ids, unless those reveal paths of this machine.

    Args:
        ids: Item ids.

    Returns:
        Distinct names.

    Example:
        >>> public_names(["robin/1.jpg", "/home/ann/2.jpg"])
        ['robin/1.jpg', 'elsewhere/.../2.jpg']
    """
    names: dict[str, None] = {}
    for id in ids:
        path = PurePath(id)
        name = utf8_safe(id)
        if path.is_absolute() or ".." in path.parts:
            digest = hashlib.sha256(id.encode("utf-8", "surrogateescape")).hexdigest()[:8]
            name = f"elsewhere/{digest}/{utf8_safe(path.name)}"
        while name in names:  # two names may become equal by escaping
            name += "~"
        names[name] = None
    return list(names)


def utf8_safe(text: str) -> str:
    """Escape characters of a file name that UTF-8 cannot encode.

    Args:
        text: May contain surrogates.

    Returns:
        Text that can be encoded.
    """
    return text.encode("utf-8", "backslashreplace").decode()
