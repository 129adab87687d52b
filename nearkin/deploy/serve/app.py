"""The ASGI application of `nearkin serve`: a web page and a JSON API.

    GET  /                 the page: drop, paste or choose an image, see its neighbours, continue from any of them
    POST /search?k=10      neighbours of the image in the body
    GET  /items/neighbours?id=ID&k=10    neighbours of an indexed item
    GET  /items/thumbnail?id=ID          a small JPEG of it
    GET  /items?offset=0&limit=50&step=1 list of indexed items
    GET  /info  /health  /openapi.json

Images are read and embedded in worker threads, so that the server stays responsive.
"""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from nearkin.deploy.serve.middleware import SecurityMiddleware, error_response
from nearkin.deploy.serve.openapi import openapi_document
from nearkin.deploy.serve.request_limits import RequestRejected, integer, parse_query, read_upload, upload_size
from nearkin.deploy.serve.service import Service

__all__ = ["Service", "make_app"]

DEFAULT_K, DEFAULT_LIMIT, MAX_LIMIT = 10, 50, 500  # neighbours and items per response


def make_app(service: Service) -> ASGIApp:
    """Create the ASGI application.

    Args:
        service: The index to serve. The caller closes it.

    Returns:
        The application, for any ASGI server.
    """
    limits = service.limits
    document = openapi_document(
        limits, k=DEFAULT_K, limit=DEFAULT_LIMIT, max_limit=MAX_LIMIT, needs_token=service.token is not None
    )
    k_parser = {"k": integer(1, limits.neighbours)}
    id_parser = {"id": lambda name, value: value}
    page_parsers = {"offset": integer(0, 10**9), "limit": integer(1, MAX_LIMIT), "step": integer(1, 10**9)}

    async def page(request: Request) -> Response:
        return HTMLResponse(service.page, headers={"Content-Security-Policy": service.page_policy})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def openapi(request: Request) -> Response:
        return JSONResponse(document)

    async def info(request: Request) -> Response:
        parse_query(request, {})
        return JSONResponse(service.info())

    async def search(request: Request) -> Response:
        query = parse_query(request, k_parser)
        with service.limiter.acquire(upload_size(request, limits)):
            data = await read_upload(request, limits)
            return JSONResponse(await service.run(service.search_image, data, query.get("k", DEFAULT_K)))

    async def items(request: Request) -> Response:
        query = parse_query(request, page_parsers)
        return JSONResponse(
            service.list_items(query.get("offset", 0), query.get("limit", DEFAULT_LIMIT), query.get("step", 1))
        )

    async def neighbours(request: Request) -> Response:
        query = parse_query(request, id_parser | k_parser)
        row = _row(query)
        with service.limiter.acquire():
            return JSONResponse(await service.run(service.search_item, row, query.get("k", DEFAULT_K)))

    async def thumbnail(request: Request) -> Response:
        row = _row(parse_query(request, id_parser))
        with service.limiter.acquire():
            jpeg = await service.run(service.thumbnail, row)
        if jpeg is None:
            raise RequestRejected(404, "The image file of this item is missing or cannot be read.")
        # Revalidated each time: another index with other images may be served under the same address.
        headers = {"Cache-Control": "private, no-cache", "ETag": f'"{hashlib.sha256(jpeg).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(jpeg, media_type="image/jpeg", headers=headers)

    def _row(query: dict[str, Any]) -> int:
        if "id" not in query:
            raise RequestRejected(400, "id: required, the name of an item.")
        return service.row_of(query["id"])

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
        routes=routes,
        exception_handlers={RequestRejected: _on_rejected, HTTPException: _on_no_route, Exception: _on_error},
    )
    app.router.redirect_slashes = False
    return SecurityMiddleware(app, service.hosts, service.token)


async def _on_rejected(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected)
    return error_response(error)


async def _on_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    message = f"Method not allowed. Use {allowed}." if allowed else "Not found. See /openapi.json."
    return JSONResponse({"error": message}, error.status_code, headers=dict(error.headers or {}))


async def _on_error(request: Request, error: Exception) -> Response:
    """Hide the details of an internal error, which only the server's log shows."""
    return JSONResponse({"error": "Internal server error."}, 500)
