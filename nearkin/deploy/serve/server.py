"""The HTTP server of `nearkin serve`: bind a socket, serve until Ctrl-C, shut down gracefully."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nearkin.errors import ConfigError

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
HEADER_TIMEOUT = 10.0  # seconds for the headers of a request to arrive
SHUTDOWN_TIMEOUT = 5.0  # seconds for active requests to finish at shutdown


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Args:
        host: Address or host name.
        port: 0 chooses a free port.

    Returns:
        The socket.

    Raises:
        ConfigError: If the address is invalid or in use.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port: expected 0 to 65535, got {port}.")
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket_type, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: invalid address ({error.strerror}).") from None
    try:
        if os.name != "nt":  # where it would allow two servers on one port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port {port}: in use on {host}. Choose another port, or 0 for a free one.") from None
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({error.strerror}).") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve_until_stopped(app: Any, sock: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until Ctrl-C or a termination signal; active requests are finished first.

    Args:
        app: ASGI application.
        sock: From `bind`; closed at the end.
        on_ready: Called when the server accepts requests.
    """
    config = uvicorn.Config(
        app,
        http=TimeoutProtocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=int(SHUTDOWN_TIMEOUT),
    )
    server = _Server(config)
    server.on_ready = on_ready
    try:
        server.run(sockets=[sock])
    except KeyboardInterrupt:
        pass  # the usual way to stop a server
    finally:
        sock.close()


class _Server(uvicorn.Server):
    on_ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with JSON errors and a timeout for request headers."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Stop the timeout when the headers are complete."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._start_timer()  # also for the next request on a keep-alive connection
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Reply to invalid HTTP in JSON."""
        self._reject(400, "Invalid HTTP request.")

    def _start_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_timeout(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._reject(408, f"The request did not arrive within {HEADER_TIMEOUT:g} seconds.")

    def _reject(self, status: int, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
