"""`nearkin serve`: an index as a web page and a JSON API.

    GET  /                 the page: drop, paste or choose a picture, see its neighbours, go on from one of them
    POST /search?k=10      the neighbours of the picture in the body
    GET  /items/neighbours?id=ID&k=10    those of an indexed item
    GET  /items/thumbnail?id=ID          a small JPEG of it
    GET  /items?offset=0&limit=50&step=1 what is indexed
    GET  /info  /health  /openapi.json

Pictures are read and embedded in a few threads, so that the server answers meanwhile. Items are known outside by their
names below the indexed folder; no answer holds a path of this machine, and no file is ever sent as it is.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearkin._common.version import __version__
from nearkin.data.loading import available_cores
from nearkin.data.reading import read_image, square
from nearkin.deploy.images import model_input
from nearkin.deploy.index.index import Index, SearchResult
from nearkin.deploy.serve.openapi import document
from nearkin.deploy.serve.request_limits import (
    Admission,
    RequestLimits,
    RequestRejected,
    check_image,
    drain,
    parameters,
    read_upload,
    shortened,
    upload_size,
    whole_number,
)
from nearkin.errors import ConfigError, DataError, import_extra
from nearkin.models.embedder import Embedder

T = TypeVar("T")
K, LISTED, MOST_LISTED = 10, 50, 500  # neighbours and items in an answer unless asked for otherwise
THUMBNAIL, THUMBNAILS = 192, 2000  # their side in pixels, and how many are kept (about 10 kB each)
OPEN_PATHS = {"/", "/health", "/openapi.json"}  # those that hold nothing of the index need no token
SHORTEST_TOKEN = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Service:
    """An index ready to answer: its public names, the threads that work, and what they may take."""

    def __init__(
        self,
        index: Index,
        *,
        limits: RequestLimits | None = None,
        workers: int = 2,
        token: str | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        """token: what every request for data must bear. hosts: names this server may be called by; None for any.

        The names matter on a loopback address: a foreign page can point its own name here, and read what we answer.
        """
        if workers < 1:
            raise ConfigError(f"--workers: expected at least 1, got {workers}.")
        if token is not None and len(token) < SHORTEST_TOKEN:
            raise ConfigError(f"token: {len(token)} characters are soon guessed; give at least {SHORTEST_TOKEN}.")
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise ConfigError("token: expected ASCII characters without blanks; others do not pass through a header.")
        wrong = next((host for host in hosts or () if "/" in host), None)
        if wrong is not None:
            raise ConfigError(f"--allow-host: expected the name of a host, got {wrong!r}.")
        model = index.model()
        if not isinstance(model, Embedder):  # which also says how a picture is cut
            raise ConfigError(f"serve: needs a nearkin.Embedder to read pictures with, got {type(model).__name__}.")
        self.index, self.model, self.token = index, model.eval(), token
        self.limits = limits or RequestLimits()
        # As given, which may be a bare IPv6 address, and without a port, as they are asked for.
        self.hosts = None if hosts is None else {n for host in hosts for n in (host.lower(), host_name(host)) if n}
        self.admission = Admission(self.limits)
        self.names = public_names(index.ids)
        self.rows = {name: row for row, name in enumerate(self.names)}
        self.labels = [writable(label) if isinstance(label, str) else label for label in index.labels]
        threads = max(1, available_cores() // workers)
        self.pool = ThreadPoolExecutor(workers, "nearkin-serve", lambda: torch.set_num_threads(threads))
        self._thumbnails: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        self.policy = content_policy(self.page)
        index.search_many(torch.zeros(1, index.dim))  # lengths are computed now, not by the first who asks
        model.embed(torch.zeros((1, *model.image_shape), dtype=torch.uint8))

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def work(self, function: Callable[..., T], *args: Any) -> T:
        """function(*args) in one of the threads; whoever waits too long is sent away."""
        future = asyncio.get_running_loop().run_in_executor(self.pool, function, *args)
        try:
            return await asyncio.wait_for(future, self.limits.work_seconds)
        except TimeoutError:
            raise RequestRejected(
                503, f"No answer within {self.limits.work_seconds:g} seconds. Try again.", Retry_After="5"
            ) from None

    # --- what the threads do ------------------------------------------------------------------------------------------

    def search_image(self, data: bytes, k: int) -> dict[str, Any]:
        check_image(data, self.limits)
        try:
            pixels = model_input(self.model, data)
        except DataError as error:
            raise RequestRejected(422, f"The upload: {str(error).removeprefix('image given as bytes: ')}") from None
        except MemoryError:
            raise RequestRejected(413, "The picture does not fit into the memory.") from None
        vector = self.model.embed(pixels[None])[0]
        if not vector.isfinite().all():
            raise RequestRejected(422, "The model gives no finite vector for this picture.")
        return self._shown(self.index.answer(vector, k))

    def search_item(self, row: int, k: int) -> dict[str, Any]:
        return self._item(row) | self._shown(self.index.answer(self.index.vectors[row], k, own=row))

    def thumbnail(self, row: int) -> bytes | None:
        """A small JPEG of an item, or None where its file is gone or cannot be read."""
        with self._lock:
            if row in self._thumbnails:
                self._thumbnails.move_to_end(row)
                return self._thumbnails[row]
        try:
            pixels = square(read_image(self.index.path_of(self.index.ids[row]), THUMBNAIL), THUMBNAIL)
        except (DataError, MemoryError, ValueError):  # ValueError: a name that cannot be a file's
            return None
        buffer = io.BytesIO()
        import_extra("PIL.Image", extra="vision").fromarray(pixels.permute(1, 2, 0).numpy()).save(
            buffer, "JPEG", quality=85
        )
        with self._lock:
            self._thumbnails[row] = buffer.getvalue()
            while len(self._thumbnails) > THUMBNAILS:
                self._thumbnails.popitem(last=False)
        return buffer.getvalue()

    # --- what is shown ------------------------------------------------------------------------------------------------

    def _item(self, row: int) -> dict[str, Any]:
        return {"id": self.names[row], "label": self.labels[row]}

    def _shown(self, answer: SearchResult) -> dict[str, Any]:
        hits = [self._item(hit.row) | {"similarity": hit.similarity} for hit in answer.hits]
        return {"hits": hits, "nearest": answer.nearest, "known": answer.known}

    def row_of(self, name: str) -> int:
        if name not in self.rows:
            raise RequestRejected(404, f"No item is named '{shortened(name)}'.")
        return self.rows[name]

    def listed(self, offset: int, limit: int, step: int) -> dict[str, Any]:
        rows = range(offset, len(self.names), step)[:limit]
        return {"total": len(self.names), "items": [self._item(row) for row in rows]}

    def info(self) -> dict[str, Any]:
        index = self.index
        return {
            "version": __version__,
            "items": len(index),
            "classes": len({label for label in index.labels if label is not None}),
            "dim": index.dim,
            "known_above": None if index.threshold is None else index.threshold.value,
            "limits": {
                "upload_bytes": self.limits.upload_bytes,
                "pixels": self.limits.pixels,
                "neighbours": self.limits.neighbours,
            },
        }


def public_names(ids: Sequence[str]) -> list[str]:
    """The names by which items are known outside: their ids, as long as those say nothing of this machine.

    >>> public_names(["robin/1.jpg", "/home/ann/2.jpg"])
    ['robin/1.jpg', 'elsewhere/.../2.jpg']
    """
    names: dict[str, None] = {}
    for id in ids:
        path = PurePath(id)
        name = writable(id)
        if path.is_absolute() or ".." in path.parts:
            digest = hashlib.sha256(id.encode("utf-8", "surrogateescape")).hexdigest()[:8]
            name = f"elsewhere/{digest}/{writable(path.name)}"
        while name in names:  # one of two files whose names cannot be told apart when written
            name += "~"
        names[name] = None
    return list(names)


def writable(text: str) -> str:
    """Text that UTF-8 can hold: what a file name has beyond it is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def content_policy(page: str) -> str:
    """The page may run its own script and style, talk to this server, and nothing else."""
    script, style = (
        " ".join(f"'sha256-{_sha256(block)}'" for block in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    )
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- routes ----------------------------------------------------------------------------------------------------------


def make_app(service: Service) -> ASGIApp:
    """The ASGI application. Whoever makes it also closes the service."""
    limits = service.limits
    described = document(limits, k=K, listed=LISTED, most_listed=MOST_LISTED, locked=service.token is not None)
    k_of = {"k": whole_number(1, limits.neighbours)}
    id_of = {"id": lambda name, value: value}

    async def page(request: Request) -> Response:
        return HTMLResponse(service.page, headers={"Content-Security-Policy": service.policy})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    async def info(request: Request) -> Response:
        parameters(request, {})
        return JSONResponse(service.info())

    async def search(request: Request) -> Response:
        asked = parameters(request, k_of)
        with service.admission.one(upload_size(request, limits)):
            data = await read_upload(request, limits)
            return JSONResponse(await service.work(service.search_image, data, asked.get("k", K)))

    async def items(request: Request) -> Response:
        readers = {
            "offset": whole_number(0, 10**9),
            "limit": whole_number(1, MOST_LISTED),
            "step": whole_number(1, 10**9),
        }
        asked = parameters(request, readers)
        return JSONResponse(service.listed(asked.get("offset", 0), asked.get("limit", LISTED), asked.get("step", 1)))

    async def neighbours(request: Request) -> Response:
        asked = parameters(request, id_of | k_of)
        row = _row(asked)
        with service.admission.one():
            return JSONResponse(await service.work(service.search_item, row, asked.get("k", K)))

    async def thumbnail(request: Request) -> Response:
        row = _row(parameters(request, id_of))
        with service.admission.one():
            made = await service.work(service.thumbnail, row)
        if made is None:
            raise RequestRejected(404, "There is no picture of this item: its file is gone, or cannot be read.")
        # Asked for again each time: another index may be served under this address, with other pictures.
        kept = {"Cache-Control": "private, no-cache", "ETag": f'"{hashlib.sha256(made).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == kept["ETag"]:
            return Response(status_code=304, headers=kept)
        return Response(made, media_type="image/jpeg", headers=kept)

    def _row(asked: dict[str, Any]) -> int:
        if "id" not in asked:
            raise RequestRejected(400, "id: is needed, the name of an item.")
        return service.row_of(asked["id"])

    routes = [
        Route("/", page),
        Route("/health", health),
        Route("/openapi.json", openapi),
        Route("/info", info),
        Route("/search", search, methods=["POST"]),
        Route("/items", items),
        Route("/items/neighbours", neighbours),
        Route("/items/thumbnail", thumbnail),
    ]
    app = Starlette(
        routes=routes, exception_handlers={RequestRejected: _refused, HTTPException: _no_route, Exception: _broken}
    )
    app.router.redirect_slashes = False
    return Guard(app, service)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected)
    return refusal(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    message = (
        f"This address takes {allowed} only." if allowed else "There is nothing here. What there is: /openapi.json."
    )
    return JSONResponse({"error": message}, error.status_code, headers=dict(error.headers or {}))


async def _broken(request: Request, error: Exception) -> Response:
    """Our own mistake; what it was goes to the server's log only."""
    return JSONResponse({"error": "The server failed on this request."}, 500)


def refusal(refused: RequestRejected) -> Response:
    return JSONResponse({"error": refused.message}, refused.status, headers=refused.headers)


class Guard:
    """Stands before the routes: who may ask, what every answer says to a browser, and uploads that nobody read."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        asked_first = "expect" in headers  # such a client sends its body only when it is told to

        async def received() -> Message:
            nonlocal unread, asked_first
            message = await receive()
            asked_first = False
            unread = message["type"] == "http.request" and bool(message.get("more_body"))
            return message

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = MutableHeaders(scope=message)
                said["X-Content-Type-Options"] = "nosniff"
                said["Referrer-Policy"] = "no-referrer"
                said["Cross-Origin-Resource-Policy"] = "same-origin"
                said.setdefault("Cache-Control", "no-store")
                if unread:
                    said["Connection"] = "close"
            elif unread and not message.get("more_body"):
                await send({**message, "more_body": True})
                if not asked_first:
                    await drain(receive)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        refused = self.objection(headers, scope["path"])
        app = self.app if refused is None else refusal(refused)
        await app(scope, received, answered)

    def objection(self, headers: Headers, path: str) -> RequestRejected | None:
        hosts, token = self.service.hosts, self.service.token
        if hosts is not None and host_name(headers.get("host", "")) not in hosts:
            return RequestRejected(421, "This server is not known by that name. Name it with --allow-host.")
        if token is not None and path not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), token.encode())
            if scheme.lower() != "bearer" or not right:
                return RequestRejected(
                    401, "A token is needed: Authorization: Bearer TOKEN.", WWW_Authenticate="Bearer"
                )
        return None


def host_name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> host_name("LocalHost:8000"), host_name("[::1]:80")
    ('localhost', '::1')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
