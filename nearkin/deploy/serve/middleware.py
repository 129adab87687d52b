"""ASGI middleware of `nearkin serve`: host and token checks, and security headers."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearkin.deploy.serve.request_limits import RequestRejected, drain

PUBLIC_PATHS = {"/", "/health", "/openapi.json"}  # reveal nothing about the index, so they need no token


class SecurityMiddleware:
    """Check host name and token, set security headers, and drain the uploads of rejected requests.

    Args:
        app: The application to protect.
        hosts: Accepted host names; None accepts any.
        token: Bearer token required for data; None requires none.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, token: str | None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as ASGI prescribes."""
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
                response_headers["X-Content-Type-Options"] = "nosniff"
                response_headers["Referrer-Policy"] = "no-referrer"
                response_headers["Cross-Origin-Resource-Policy"] = "same-origin"
                response_headers.setdefault("Cache-Control", "no-store")
                if unread:
                    response_headers["Connection"] = "close"
            elif unread and not message.get("more_body"):
                await send({**message, "more_body": True})
                if not awaits_continue:
                    await drain(receive)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        rejection = self._check(headers, scope["path"])
        app = self.app if rejection is None else error_response(rejection)
        await app(scope, tracked_receive, secured_send)

    def _check(self, headers: Headers, path: str) -> RequestRejected | None:
        if self.hosts is not None and host_name(headers.get("host", "")) not in self.hosts:
            return RequestRejected(421, "Unknown host name. Allow it with --allow-host.")
        if self.token is not None and path not in PUBLIC_PATHS:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            matches = hmac.compare_digest(token.strip().encode("latin-1"), self.token.encode())
            if scheme.lower() != "bearer" or not matches:
                return RequestRejected(
                    401, "A valid token is required: Authorization: Bearer TOKEN.", WWW_Authenticate="Bearer"
                )
        return None


def error_response(error: RequestRejected) -> Response:
    """Convert a rejection to a JSON response.

    Args:
        error: The rejection.

    Returns:
        A response with body {"error": message}.
    """
    return JSONResponse({"error": error.message}, error.status, headers=error.headers)


def host_name(host: str) -> str:
    """Return the host name of a Host header without its port.

    Args:
        host: The header's value.

    Returns:
        The name in lower case; empty if it is invalid.

    Example:
        >>> host_name("LocalHost:8000"), host_name("[::1]:80")
        ('localhost', '::1')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def content_security_policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only the page's inline script and style, and this server.

    Args:
        page: HTML text.

    Returns:
        The header's value.
    """
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
