"""`nearkin serve`: serve an index as a web page and a JSON API."""

import os
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from nearkin._common.words import counted
from nearkin.cli._arguments import INDEX_FOLDER, Device, load_index, parse_target
from nearkin.errors import ConfigError, require_extra

LIMITS = ("max_upload_bytes", "max_pixels", "upload_timeout", "timeout", "max_requests")


@dataclass(frozen=True)
class ServeArgs:
    """Serve an index as a web page and a JSON API.

    nearkin serve photos.index                          (then open the printed URL)

    nearkin serve photos.index --host 0.0.0.0 --token-file token.txt

    The API is described at /docs. Stop the server with Ctrl-C. Restart it after the index has changed.
    """

    host: str = "127.0.0.1"  # Address to listen on; by default reachable only from this machine.
    port: int = 8000  # Port; 0 chooses a free one.
    token_file: Path | None = None
    """File whose first line is the token that clients must send (Authorization: Bearer). Or set NEARKIN_TOKEN."""
    allow_host: tuple[str, ...] = ()
    """Additional accepted host names, for example behind a proxy. Only a server on a loopback address restricts host
    names by default."""
    workers: int = 2  # Images processed in parallel.
    max_upload_bytes: int = 20_000_000  # Maximum size of an upload in bytes.
    max_pixels: int = 50_000_000
    """Maximum number of pixels of a JPEG (width times height); of other formats half as many."""
    upload_timeout: float = 20.0  # Time limit in seconds for receiving an upload.
    timeout: float = 30.0  # Time limit in seconds for a response, including time in the queue.
    max_requests: int = 64  # Maximum number of requests being processed or queued; further ones get status 503.
    run: Path | None = None  # Run folder of the model, if it has moved since indexing.
    device: Device = "auto"


def run(argv: list[str]) -> None:
    folder, args = parse_target(ServeArgs, argv, "nearkin serve DIR", INDEX_FOLDER)
    require_extra("serve", "fastapi", "fastapi_swagger", "python_multipart", "uvicorn", "PIL")
    from nearkin.deploy.serve.app import make_app
    from nearkin.deploy.serve.request_limits import RequestLimits
    from nearkin.deploy.serve.server import LOOPBACK_HOSTS, bind, serve_until_stopped, url_of
    from nearkin.deploy.serve.service import Service

    token = _read_token(args.token_file)
    # Listen before loading the model, which takes seconds: a port in use is reported at once.
    with bind(args.host, args.port) as sock:
        address = str(sock.getsockname()[0])
        loopback = ip_address(address).is_loopback
        index = load_index(folder, run=args.run, device=args.device, model=True)
        service = Service(
            index,
            limits=RequestLimits(**{name: getattr(args, name) for name in LIMITS}),
            workers=args.workers,
            token=token,
            hosts=(*LOOPBACK_HOSTS, address, *args.allow_host) if loopback else args.allow_host or None,
        )
        if not loopback and token is None:
            print("nearkin: other machines can access this server without a token (--token-file).", file=sys.stderr)
        print(f"serving {counted(len(index), 'item')} at {url_of(sock)} (stop with Ctrl-C)", flush=True)
        try:
            serve_until_stopped(make_app(service), sock)
        finally:
            service.close()
    print("stopped")


def _read_token(file: Path | None) -> str | None:
    """Read the token from a file or the environment; other users could read it from a command line."""
    if file is None:
        token = os.environ.get("NEARKIN_TOKEN") or None
        if token is not None and not token.strip():
            raise ConfigError("NEARKIN_TOKEN: is blank. Unset it, or set a token.")
        return token and token.strip()
    try:
        token = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--token-file {file}: cannot read ({reason}).") from None
    if not token:
        raise ConfigError(f"--token-file {file}: the first line is empty.")
    return token
