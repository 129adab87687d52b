"""The OpenAPI document of `nearkin serve`: every path, its parameters and its responses."""

from __future__ import annotations

from typing import Any

from nearkin._common.version import __version__
from nearkin.deploy.serve.request_limits import TYPES, RequestLimits

Json = dict[str, Any]

LABEL: Json = {"type": ["string", "integer", "null"], "description": "Class of the item, if known."}
ID: Json = {"type": "string", "description": "Name of the item: its path below the indexed folder."}
ITEM: Json = {"id": ID, "label": LABEL}
RESULT: Json = {
    "hits": {
        "type": "array",
        "description": "The nearest items, nearest first.",
        "items": {"$ref": "#/components/schemas/Hit"},
    },
    "nearest": {
        "type": "number",
        "description": "Highest cosine similarity of any item, before re-ranking; -1 if there is none.",
    },
    "known": {
        "type": ["boolean", "null"],
        "description": "Whether `nearest` exceeds the threshold; null if the index is not calibrated.",
    },
}

ERRORS = {
    400: "A parameter is missing, unknown or out of range.",
    401: "The token is missing or wrong.",
    404: "No such item, or its image file cannot be read.",
    408: "The upload timed out.",
    413: "The upload has too many bytes, or the image too many pixels.",
    415: "Unsupported Content-Type.",
    422: "The upload cannot be read as an image.",
    503: "Too many concurrent requests, or the request timed out. Try again after Retry-After seconds.",
}


def openapi_document(limits: RequestLimits, *, k: int, limit: int, max_limit: int, needs_token: bool) -> Json:
    """Return the OpenAPI document of a server.

    Args:
        limits: Limits of requests.
        k: Default number of neighbours.
        limit: Default number of items per list.
        max_limit: Largest number of items per list.
        needs_token: Whether data require a token.

    Returns:
        JSON values.
    """
    paths = _paths(limits, k, limit, max_limit)
    components: Json = {"schemas": _schemas()}
    if needs_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path in ("/info", "/search", "/items", "/items/neighbours", "/items/thumbnail"):
            for operation in paths[path].values():
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = _error(401)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "nearkin serve",
            "version": __version__,
            "description": "Find the nearest indexed images of an image or of an indexed item.",
        },
        "paths": paths,
        "components": components,
    }


def _paths(limits: RequestLimits, k: int, limit: int, max_limit: int) -> Json:
    k_parameter = _integer("k", f"Number of neighbours, by default {k}.", 1, limits.neighbours, k)
    id_parameter = {"name": "id", "in": "query", "required": True, "schema": ID}
    upload = {"required": True, "content": {content_type: {"schema": {}} for content_type in TYPES}}
    list_parameters = [
        _integer("offset", "Items to skip.", 0, 10**9, 0),
        _integer("limit", "Largest number of items.", 1, max_limit, limit),
        _integer("step", "Take every step-th item, for a sample of the index.", 1, 10**9, 1),
    ]
    return {
        "/": {"get": _file("The web page.", "text/html")},
        "/health": {"get": _json("Health check.", "Health")},
        "/openapi.json": {"get": _json("This document.", None)},
        "/info": {"get": _json("Size of the index, threshold and limits.", "Info", errors=[400])},
        "/search": {
            "post": {
                **_json("Nearest items of an image.", "SearchResult", errors=[400, 408, 413, 415, 422, 503]),
                "parameters": [k_parameter],
                "requestBody": upload,
            }
        },
        "/items": {"get": {**_json("Items of the index.", "Items", errors=[400]), "parameters": list_parameters}},
        "/items/neighbours": {
            "get": {
                **_json("Nearest other items of an item.", "ItemSearchResult", errors=[400, 404, 503]),
                "parameters": [id_parameter, k_parameter],
            }
        },
        "/items/thumbnail": {
            "get": {
                **_file("Centre crop of an item's image, as a small JPEG.", "image/jpeg", errors=[400, 404, 503]),
                "parameters": [id_parameter],
            }
        },
    }


def _schemas() -> Json:
    return {
        "Error": _object({"error": {"type": "string", "description": "The problem, in one sentence."}}),
        "Health": _object({"status": {"const": "ok"}}),
        "Item": _object(ITEM),
        "Hit": _object({**ITEM, "similarity": {"type": "number", "description": "Cosine similarity, from -1 to 1."}}),
        "SearchResult": _object(RESULT),
        "ItemSearchResult": _object({**ITEM, **RESULT}),
        "Items": _object(
            {
                "total": {"type": "integer"},
                "items": {"type": "array", "items": {"$ref": "#/components/schemas/Item"}},
            }
        ),
        "Info": _object(
            {
                "version": {"type": "string"},
                "items": {"type": "integer"},
                "classes": {"type": "integer"},
                "dim": {"type": "integer", "description": "Dimensions per vector."},
                "threshold": {
                    "type": ["number", "null"],
                    "description": "Similarity above which a query is known; null if the index is not calibrated.",
                },
                "limits": _object({name: {"type": "integer"} for name in ("upload_bytes", "pixels", "neighbours")}),
            }
        ),
    }


def _object(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _integer(name: str, description: str, low: int, high: int, default: int) -> Json:
    schema = {"type": "integer", "minimum": low, "maximum": high, "default": default}
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _json(summary: str, schema: str | None, errors: list[int] | None = None) -> Json:
    content = {"schema": {"$ref": f"#/components/schemas/{schema}"} if schema else {"type": "object"}}
    return _operation(summary, "application/json", content, errors)


def _file(summary: str, content_type: str, errors: list[int] | None = None) -> Json:
    return _operation(summary, content_type, {"schema": {}}, errors)


def _operation(summary: str, content_type: str, content: Json, errors: list[int] | None) -> Json:
    responses: Json = {"200": {"description": "Success.", "content": {content_type: content}}}
    responses |= {str(status): _error(status) for status in errors or ()}
    return {"summary": summary, "responses": responses}


def _error(status: int) -> Json:
    return {
        "description": ERRORS[status],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
