"""The work behind `nearkin serve`: search and thumbnails in a thread pool.

No response contains a path of this machine, and no file is sent as it is on disk.
"""

import asyncio
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from torch import Tensor

from nearkin._common.words import printable
from nearkin.data.loading import available_cores
from nearkin.data.reading import name_of, read_image, square
from nearkin.deploy.images import model_input
from nearkin.deploy.index.index import Index
from nearkin.deploy.index.search import SearchResult
from nearkin.deploy.serve.middleware import host_name
from nearkin.deploy.serve.request_limits import RequestLimits, UploadReader, check_image, too_busy
from nearkin.errors import ConfigError, DataError, import_extra
from nearkin.models.embedder import Embedder

Id = Annotated[str, Field(description="Name of the item: its path below the indexed folder.")]
Label = Annotated[str | int | None, Field(description="Class of the item, if known.")]


class Response(BaseModel, extra="forbid"):
    """Base of all responses: no further fields."""


class Error(Response):
    error: str = Field(description="The problem, in one sentence.")


class Health(Response):
    status: Literal["ok"] = "ok"


class Item(Response):
    id: Id
    label: Label


class Hit(Item):
    similarity: float = Field(description="Cosine similarity, from -1 to 1.")


class Items(Response):
    total: int
    items: list[Item]


class SearchResponse(Response):
    hits: list[Hit] = Field(description="The nearest items, nearest first.")
    nearest: float = Field(description="Highest cosine similarity of any item, before re-ranking; -1 if there is none.")
    known: bool | None = Field(description="Whether `nearest` exceeds the threshold; null without calibration.")


class ItemSearchResponse(Item, SearchResponse):
    pass


class Limits(Response):
    max_upload_bytes: int
    max_pixels: int
    neighbours: int


class Info(Response):
    version: str
    items: int
    classes: int
    dim: int = Field(description="Dimensions per vector.")
    threshold: float | None = Field(description="Similarity above which a query is known; null without calibration.")
    limits: Limits


T = TypeVar("T")
THUMBNAIL_SIZE = 192  # pixels
MAX_THUMBNAILS = 2000  # cached, about 10 kB each
MIN_TOKEN_LENGTH = 16


class Lane:
    """Threads with a queue of limited length."""

    def __init__(self, threads: int, max_requests: int, torch_threads: int) -> None:
        self.max_requests, self.active = max_requests, 0
        self.pool = ThreadPoolExecutor(threads, "nearkin-serve", lambda: torch.set_num_threads(torch_threads))

    async def run(self, timeout: float, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread; rejected if too many are waiting, or after `timeout`."""
        if self.active >= self.max_requests:
            raise too_busy()
        self.active += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(self.pool, function, *args)
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            message = f"Timed out after {timeout:g} seconds. Try again later."
            raise HTTPException(503, message, {"Retry-After": "5"}) from None
        finally:
            self.active -= 1


class Service:
    """An index ready to be served.

    Args:
        index: Its model must be a `nearkin.Embedder`.
        limits: Limits of requests.
        workers: Number of threads that read and embed images. One more decodes large images, one at a time.
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
        if token is not None and len(token) < MIN_TOKEN_LENGTH:
            raise ConfigError(f"token: expected at least {MIN_TOKEN_LENGTH} characters, got {len(token)}.")
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise ConfigError("token: expected ASCII characters without spaces, since it is sent in an HTTP header.")
        if urls := [host for host in hosts or () if "/" in host]:
            raise ConfigError(f"--allow-host: expected a host name, got {urls[0]!r}.")
        model = index.model()
        if not isinstance(model, Embedder):  # which also defines the preprocessing
            raise ConfigError(f"serve: expected the model to be a nearkin.Embedder, got {type(model).__name__}.")
        if not model.takes_pixels and model.preprocess is None:
            raise ConfigError("serve: the model takes tensors, not images. Search by vectors in Python instead.")
        self.index, self.model, self.token = index, model.eval(), token
        self.limits = limits or RequestLimits()
        # Both as given, which may be a bare IPv6 address, and without a port, as they are compared.
        self.hosts = None if hosts is None else {n for host in hosts for n in (host.lower(), host_name(host)) if n}
        self.uploads = UploadReader(self.limits)
        self.names = public_names(index.ids)
        self.rows = {name: row for row, name in enumerate(self.names)}
        self.labels = [printable(label) if isinstance(label, str) else label for label in index.labels]
        threads = max(1, available_cores() // workers)
        self.lane = Lane(workers, self.limits.max_requests, threads)
        # Images that take long to decode wait only for each other.
        self.large_lane = Lane(1, max(1, self.limits.max_requests // 4), threads)
        self.thumbnail = lru_cache(MAX_THUMBNAILS)(self._render_thumbnail)  # of a row, as a JPEG
        self.page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        # Warm up, so that the first request is not slower than the others.
        index.search_many(torch.zeros(1, index.dim))
        model.embed(model_input(model, _to_jpeg(torch.zeros(3, 32, 32, dtype=torch.uint8)))[None])

    def close(self) -> None:
        """Stop the worker threads."""
        for lane in (self.lane, self.large_lane):
            lane.pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a worker thread; rejected if too many are waiting, or after `timeout`."""
        return await self.lane.run(self.limits.timeout, function, *args)

    async def search(self, data: bytes, k: int) -> SearchResponse:
        """Find the nearest items of an uploaded image file, in a thread of the lane for its size."""
        response = await self.run(self.search_image, data, k)
        if response is None:
            response = await self.large_lane.run(self.limits.timeout, self.search_image, data, k, False)
        assert response is not None
        return response

    def search_image(self, data: bytes, k: int, check: bool = True) -> SearchResponse | None:
        """Find the nearest items of an image file; with `check`, None if it takes long to decode."""
        if check and check_image(data, self.limits):
            return None
        try:
            pixels = model_input(self.model, data)
        except DataError as error:
            reason = str(error).removeprefix(f"{name_of(data)}: ")
            raise HTTPException(422, f"The upload: {reason}") from None
        vector = self.model.embed(pixels[None])[0]
        if not vector.isfinite().all():
            raise HTTPException(422, "The model returns NaN or infinity for this image.")
        return SearchResponse(**self._result(self.index.answer(vector, k)))

    def search_item(self, row: int, k: int) -> ItemSearchResponse:
        """Find the nearest other items of an item."""
        result = self.index.answer(self.index.vectors[row], k, exclude=row)
        return ItemSearchResponse(**vars(self.item(row)), **self._result(result))

    def _render_thumbnail(self, row: int) -> bytes:
        try:
            pixels = square(read_image(self.index.path_of(self.index.ids[row]), THUMBNAIL_SIZE), THUMBNAIL_SIZE)
        except (DataError, ValueError):  # ValueError: an id that is not a valid path
            raise HTTPException(404, "The image file of this item is missing or cannot be read.") from None
        return _to_jpeg(pixels)

    def _result(self, result: SearchResult) -> dict[str, Any]:
        hits = [Hit(**vars(self.item(hit.row)), similarity=hit.similarity) for hit in result.hits]
        return {"hits": hits, "nearest": result.nearest, "known": result.known}

    def row_of(self, name: str) -> int:
        """Return the row of an item by its public name, or raise `HTTPException` with status 404."""
        if name not in self.rows:
            raise HTTPException(404, f"No item named '{shorten(name)}'.")
        return self.rows[name]

    def item(self, row: int) -> Item:
        """Describe an item."""
        return Item(id=self.names[row], label=self.labels[row])


def _to_jpeg(pixels: Tensor) -> bytes:
    buffer = io.BytesIO()
    image = import_extra("PIL.Image", extra="serve").fromarray(pixels.permute(1, 2, 0).numpy())
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def public_names(ids: Sequence[str]) -> list[str]:
    """Return distinct names of items for responses: their ids, unless those reveal paths of this machine."""
    names: dict[str, None] = {}
    for id in ids:
        path = PurePath(id)
        name = printable(id)
        if path.is_absolute() or ".." in path.parts:
            digest = hashlib.sha256(id.encode("utf-8", "surrogateescape")).hexdigest()[:8]
            name = f"elsewhere/{digest}/{printable(path.name)}"
        while name in names:  # two names may become equal by escaping
            name += "~"
        names[name] = None
    return list(names)


def shorten(text: str, max_length: int = 80) -> str:
    text = printable(text)
    return text if len(text) <= max_length else f"{text[:max_length]}…"
