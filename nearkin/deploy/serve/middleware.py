"""ASGI middleware of `nearkin serve`: host and token checks, and security headers."""

import asyncio
import base64
import hashlib
import hmac
import re
from collections.abc import Collection
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PUBLIC_PATHS = re.compile(r"/|/health|/openapi\.json|/docs(/.*)?")  # reveal nothing about the index: no token needed
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
MAX_DRAIN_BYTES, MAX_DRAIN_SECONDS = 64_000_000, 2.0


class SecurityMiddleware:
    """Check host name and token (None accepts any), set security headers, drain the uploads of rejected requests."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, token: str | None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        awaits_continue = "expect" in headers  # such a client sends its body only when told to continue

        async def tracked_receive() -> Message:
            nonlocal unread, awaits_continue
            message = await receive()
            awaits_continue = False
            unread = message["type"] == "http.request" and bool(message.get("more_body"))
            return message

        async def secured_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                response_headers.update(SECURITY_HEADERS)
                response_headers.setdefault("Cache-Control", "no-store")
                if unread:
                    response_headers["Connection"] = "close"
            elif unread and not message.get("more_body"):
                await send({**message, "more_body": True})
                if not awaits_continue:
                    await drain(receive)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            try:
                await send(message)
            except h11.LocalProtocolError:  # the body was not HTTP: uvicorn has answered with 400 and closes the socket
                await asyncio.sleep(0)

        rejection = self._check(headers, scope["path"])
        app = self.app if rejection is None else error_response(rejection)
        if scope["method"] == "HEAD":  # as GET; the server omits the body
            scope = {**scope, "method": "GET"}
        await app(scope, tracked_receive, secured_send)

    def _check(self, headers: Headers, path: str) -> HTTPException | None:
        if self.hosts is not None and host_name(headers.get("host", "")) not in self.hosts:
            return HTTPException(421, "Unknown host name. Allow it with --allow-host.")
        if self.token is not None and not PUBLIC_PATHS.fullmatch(path):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            matches = hmac.compare_digest(token.strip().encode("latin-1"), self.token.encode())
            if scheme.lower() != "bearer" or not matches:
                message = "A valid token is required: Authorization: Bearer TOKEN."
                return HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
        return None


async def drain(receive: Receive) -> None:
    """Discard the rest of a rejected upload: closing a socket with unread data may hide the response from a client."""
    left = MAX_DRAIN_BYTES
    try:
        async with asyncio.timeout(MAX_DRAIN_SECONDS):
            while left > 0:
                message = await receive()
                if not message.get("more_body"):
                    return
                left -= len(message["body"])
    except TimeoutError:
        return


def error_response(error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


def host_name(host: str) -> str:
    """Return the host name of a Host header in lower case and without its port; empty if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def content_security_policy(page: str) -> str:
    """Return a Content-Security-Policy that allows the page's inline script and style, and files of this server."""
    blocks = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.DOTALL)
    digests = (hashlib.sha256(block.encode()).digest() for block in blocks)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'self' {hashes}; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
