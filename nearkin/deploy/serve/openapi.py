"""What `nearkin serve` says about itself at /openapi.json: every address, what it takes, what it may answer."""

from __future__ import annotations

from typing import Any

from nearkin._common.version import __version__
from nearkin.deploy.serve.request_limits import TYPES, RequestLimits

Json = dict[str, Any]

LABEL: Json = {"type": ["string", "integer", "null"], "description": "The item's class, where it is known."}
ID: Json = {"type": "string", "description": "The item's name below the indexed folder."}
ITEM: Json = {"id": ID, "label": LABEL}
HITS: Json = {
    "hits": {
        "type": "array",
        "description": "The nearest items, nearest first.",
        "items": {"$ref": "#/components/schemas/Hit"},
    },
    "nearest": {
        "type": "number",
        "description": "The highest cosine similarity of any item, before any re-ranking; -1 where there is none.",
    },
    "known": {
        "type": ["boolean", "null"],
        "description": "Whether that passes the index's threshold; null where the index has none.",
    },
}

REFUSALS = {
    400: "A parameter is missing, unknown or out of range.",
    401: "The token is missing or wrong.",
    404: "There is no such item, or no picture of it.",
    408: "The upload did not arrive in time.",
    413: "The upload has too many bytes, or the picture too many pixels.",
    415: "The Content-Type is none of those taken.",
    422: "The upload cannot be read as a picture.",
    503: "Too much is under way. Come back later.",
}


def document(limits: RequestLimits, *, k: int, listed: int, most_listed: int, locked: bool) -> Json:
    """The OpenAPI document of a server with these limits. locked: whether it asks for a token."""
    neighbours = _number("k", f"How many neighbours; {k} by default.", 1, limits.neighbours, k)
    id = {"name": "id", "in": "query", "required": True, "schema": ID}
    upload = {"required": True, "content": {kind: {"schema": {}} for kind in TYPES}}
    pages = [
        _number("offset", "Items to pass over.", 0, 10**9, 0),
        _number("limit", "How many items at most.", 1, most_listed, listed),
        _number("step", "Take every step-th item only: a sample of the whole.", 1, 10**9, 1),
    ]
    paths = {
        "/": {"get": _page("The web page.", "text/html")},
        "/health": {"get": _answer("Whether the server answers.", "Health")},
        "/openapi.json": {"get": _answer("This document.", None)},
        "/info": {"get": _answer("What is indexed, and what may be sent.", "Info", refusals=[400])},
        "/search": {
            "post": {
                **_answer("The nearest items of a picture.", "Answer", refusals=[400, 408, 413, 415, 422, 503]),
                "parameters": [neighbours],
                "requestBody": upload,
            }
        },
        "/items": {"get": {**_answer("The items of the index.", "Items", refusals=[400]), "parameters": pages}},
        "/items/neighbours": {
            "get": {
                **_answer("The nearest other items of an item.", "ItemAnswer", refusals=[400, 404, 503]),
                "parameters": [id, neighbours],
            }
        },
        "/items/thumbnail": {
            "get": {
                **_page("The middle of an item's picture, as a small JPEG.", "image/jpeg", refusals=[400, 404, 503]),
                "parameters": [id],
            }
        },
    }
    components: Json = {"schemas": _schemas()}
    if locked:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path in ("/info", "/search", "/items", "/items/neighbours", "/items/thumbnail"):
            for operation in paths[path].values():
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = _refusal(401)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "nearkin serve",
            "version": __version__,
            "description": "Find the nearest indexed images of a picture or of an item.",
        },
        "paths": paths,
        "components": components,
    }


def _schemas() -> Json:
    return {
        "Error": _object({"error": {"type": "string", "description": "What is wrong, in one sentence."}}),
        "Health": _object({"status": {"const": "ok"}}),
        "Item": _object(ITEM),
        "Hit": _object({**ITEM, "similarity": {"type": "number", "description": "Cosine, from -1 to 1."}}),
        "Answer": _object(HITS),
        "ItemAnswer": _object({**ITEM, **HITS}),
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
                "dim": {"type": "integer", "description": "Numbers per vector."},
                "known_above": {
                    "type": ["number", "null"],
                    "description": "The similarity above which a query counts as known, where it was calibrated.",
                },
                "limits": _object({name: {"type": "integer"} for name in ("upload_bytes", "pixels", "neighbours")}),
            }
        ),
    }


def _object(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _number(name: str, description: str, low: int, high: int, default: int) -> Json:
    schema = {"type": "integer", "minimum": low, "maximum": high, "default": default}
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _answer(summary: str, schema: str | None, refusals: list[int] | None = None) -> Json:
    shown = {"schema": {"$ref": f"#/components/schemas/{schema}"} if schema else {"type": "object"}}
    return _operation(summary, "application/json", shown, refusals)


def _page(summary: str, kind: str, refusals: list[int] | None = None) -> Json:
    return _operation(summary, kind, {"schema": {}}, refusals)


def _operation(summary: str, kind: str, shown: Json, refusals: list[int] | None) -> Json:
    responses: Json = {"200": {"description": "Success.", "content": {kind: shown}}}
    responses |= {str(status): _refusal(status) for status in refusals or ()}
    return {"summary": summary, "responses": responses}


def _refusal(status: int) -> Json:
    return {
        "description": REFUSALS[status],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
