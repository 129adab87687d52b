"""The HTTP server of `nearkin serve`: bind a socket, serve until Ctrl-C, shut down gracefully."""

import errno
import os
import socket
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

from nearkin.errors import ConfigError

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 chooses a free one."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port: expected 0 to 65535, got {port}.")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        dualstack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=dualstack)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: invalid address ({error.strerror}).") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port {port}: in use on {host}. Choose another port, or 0 for a free one.") from None
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({reason}).") from None


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve_until_stopped(app: ASGIApp, sock: socket.socket) -> None:
    """Serve on a socket of `bind` until Ctrl-C or a termination signal; active requests are finished first."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=65_536,  # bytes of request line and headers
        limit_concurrency=1000,  # connections; uvicorn rejects the requests of further ones with status 503
    )
    with sock, suppress(KeyboardInterrupt):  # the usual way to stop a server
        uvicorn.Server(config).run(sockets=[sock])
