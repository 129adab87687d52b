"""The ASGI application of `nearkin serve`: a web page and a JSON API, described at /docs and /openapi.json."""

import hashlib
import re

from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from nearkin._common.version import __version__
from nearkin.deploy.serve import service as api
from nearkin.deploy.serve.middleware import SecurityMiddleware, content_security_policy, error_response
from nearkin.deploy.serve.request_limits import FORM_TYPE, TYPES
from nearkin.deploy.serve.service import Error, Service, shorten
from nearkin.errors import did_you_mean

__all__ = ["Service", "make_app"]

DEFAULT_K, DEFAULT_LIMIT, MAX_LIMIT, MAX_OFFSET = 10, 50, 500, 10**9  # neighbours and items per response
REJECTED = (
    "Rejected: 400 a parameter is missing, unknown or out of range; 401 wrong token; 404 no such item, or no image of "
    "it; 408 the upload timed out; 413 too many bytes or pixels; 415 unsupported Content-Type; 422 not an image."
)
BUSY = "Too many concurrent requests, or the request timed out. Try again after Retry-After seconds."
FORM = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}, "required": ["file"]}
UPLOAD = {"content": {type: {"schema": FORM if type == FORM_TYPE else {}} for type in (*TYPES, FORM_TYPE)}}


def make_app(service: Service) -> ASGIApp:
    """Create the ASGI application.

    Args:
        service: The index to serve. The caller closes it.

    Returns:
        The application, for any ASGI server.
    """
    app = FastAPI(
        title="nearkin serve",
        version=__version__,
        description="Find the nearest indexed images of an image or of an indexed item.",
        docs_url=None,  # FastAPI's own page loads Swagger UI from a CDN
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _on_rejected, Exception: _on_error},
    )
    data = APIRouter(
        dependencies=[Depends(_check_parameters)],
        responses={"4XX": {"model": Error, "description": REJECTED}, 503: {"model": Error, "description": BUSY}},
    )
    if service.token is not None:  # SecurityMiddleware checks it; this describes it
        data.dependencies.append(Depends(HTTPBearer(auto_error=False)))
    k_query = Query(DEFAULT_K, ge=1, le=service.limits.neighbours, description="Number of neighbours.")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        """The web page."""
        return _html(service.page)

    @app.get("/health")
    async def health() -> api.Health:
        """Health check."""
        return api.Health()

    @data.get("/info")
    async def info() -> api.Info:
        """Size of the index, threshold and limits."""
        index = service.index
        return api.Info(
            version=__version__,
            items=len(index),
            classes=len({label for label in index.labels if label is not None}),
            dim=index.dim,
            threshold=None if index.threshold is None else index.threshold.value,
            limits=api.Limits.model_validate(service.limits, from_attributes=True),
        )

    @data.post("/search", openapi_extra={"requestBody": {"required": True, **UPLOAD}})
    async def search(request: Request, k: int = k_query) -> api.SearchResponse:
        """Nearest items of an image."""
        async with service.uploads.read(request) as image:
            return await service.search(image, k)

    @data.get("/items")
    async def items(
        offset: int = Query(0, ge=0, le=MAX_OFFSET, description="Items to skip."),
        limit: int = Query(DEFAULT_LIMIT, ge=1, le=MAX_LIMIT, description="Largest number of items."),
        step: int = Query(1, ge=1, le=MAX_OFFSET, description="Take every step-th item, for a sample of the index."),
    ) -> api.Items:
        """Items of the index."""
        rows = range(offset, len(service.names), step)[:limit]
        return api.Items(total=len(service.names), items=[service.item(row) for row in rows])

    @data.get("/items/neighbours")
    async def neighbours(id: api.Id, k: int = k_query) -> api.ItemSearchResponse:
        """Nearest other items of an item."""
        return await service.run(service.search_item, service.row_of(id), k)

    @data.get("/items/thumbnail", response_class=Response, responses={200: {"content": {"image/jpeg": {}}}})
    async def thumbnail(request: Request, id: api.Id) -> Response:
        """Centre crop of an item's image, as a small JPEG."""
        jpeg = await service.run(service.thumbnail, service.row_of(id))
        # Revalidated each time: another index with other images may be served under the same address.
        headers = {"Cache-Control": "private, no-cache", "ETag": f'"{hashlib.sha256(jpeg).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(jpeg, media_type="image/jpeg", headers=headers)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title="nearkin serve",
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="data:,",
        )
        return _html(bytes(page.body).decode())

    app.include_router(data)
    # The files of Swagger UI come from an installed package, so that the page works without internet.
    app.mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")]))
    return SecurityMiddleware(app, service.hosts, service.token)


async def _check_parameters(request: Request) -> None:
    """Check query parameters against the OpenAPI document, more strictly than FastAPI and with one-sentence errors."""
    operation = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    known = {parameter["name"]: parameter for parameter in operation.get("parameters", ())}
    given = request.query_params
    for name in given:
        if name not in known:
            raise HTTPException(400, f"Unknown parameter '{shorten(name)}'.{did_you_mean(name, known)}")
        if len(given.getlist(name)) > 1:
            raise HTTPException(400, f"{name}: given more than once.")
        value, schema = given[name], known[name]["schema"]
        if "maximum" in schema:
            low, high = schema["minimum"], schema["maximum"]
            if not re.fullmatch(r"[0-9]{1,12}", value) or not low <= int(value) <= high:
                raise HTTPException(400, f"{name}: expected an integer from {low} to {high}, got '{shorten(value)}'.")
    for name, parameter in known.items():
        if parameter["required"] and name not in given:
            raise HTTPException(400, f"{name}: required, {parameter['description']}")


def _html(page: str) -> Response:
    return HTMLResponse(page, headers={"Content-Security-Policy": content_security_policy(page)})


async def _on_rejected(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.detail == "Not Found":
        error.detail = "Not found. See /docs."
    elif error.detail == "Method Not Allowed":
        error.detail = f"Method not allowed. Use {(error.headers or {})['Allow']}."
    return error_response(error)


async def _on_error(request: Request, error: Exception) -> Response:
    """Hide the details of an internal error, which only the server's log shows."""
    return JSONResponse({"error": "Internal server error."}, 500)
