"""The socket and the server under `nearkin serve`: bind, answer until Ctrl-C, stop in order."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nearkin.errors import ConfigError

HEAD_SECONDS = 10.0  # within which a request's head must be there
STOP_SECONDS = 5.0  # for requests under way when the server is stopped


def bind(host: str, port: int) -> socket.socket:
    """A socket on that address; port 0 takes any that is free."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port: expected 0 to 65535, got {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: no such address ({error.strerror}).") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: is in use on {host}. Choose another, or 0 for any that is free."
            ) from None
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({error.strerror}).") from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve_until_stopped(app: Any, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until Ctrl-C or a termination signal; requests under way are finished first."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=int(STOP_SECONDS),
    )
    server = _Server(config)
    server.ready = ready
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:
        pass  # the usual way to stop a server
    finally:
        bound.close()


class _Server(uvicorn.Server):
    ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP, with refusals in JSON and an end to its patience with requests whose head never comes."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()  # of the next request, on a connection that is kept
        else:
            self._head_is_there()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "This is not an HTTP request.")

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _head_is_there(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(408, f"The request did not arrive within {HEAD_SECONDS:g} seconds.")

    def _refuse(self, status: int, message: str) -> None:
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
