"""`nearkin serve`: an index as a web page and a JSON API."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from nearkin.cli._arguments import leading, parse
from nearkin.cli._models import load_model, run_of
from nearkin.errors import ConfigError, import_extra

SERVE = "nearkin serve DIR"


@dataclass(frozen=True)
class ServeArgs:
    """Serve an index as a web page and a JSON API.

    nearkin serve photos.index                          (then open the address it prints)

    nearkin serve photos.index --host 0.0.0.0 --token-file token.txt

    The API describes itself at /openapi.json. Ctrl-C stops it. A running server does not see changes of the index.
    """

    host: str = "127.0.0.1"
    """The address to listen on; by default only this machine can reach it."""
    port: int = 8000
    """The port; 0 takes any that is free."""
    token_file: Path | None = None
    """File whose first line every request for data must bear (Authorization: Bearer). Or set NEARKIN_TOKEN."""
    allow_host: tuple[str, ...] = ()
    """Further names by which the server may be called, for example behind a proxy; any, unless it listens on a loopback
    address."""
    workers: int = 2
    """Pictures worked on at once."""
    upload_bytes: int = 20_000_000
    """Largest upload."""
    pixels: int = 50_000_000
    """Largest picture, by width times height."""
    upload_seconds: float = 20.0
    """Time within which an upload must arrive."""
    work_seconds: float = 30.0
    """Time within which an answer must be found."""
    waiting: int = 64
    """Requests under way at once; further ones are told to come back."""
    run: Path | None = None
    """The run folder of the model, where it is not at the place that the index names."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""


def run(argv: list[str]) -> None:
    folder, flags = leading(argv, "the folder of an index", SERVE, ServeArgs)
    args = parse(ServeArgs, flags, SERVE)
    for module in ("starlette", "uvicorn"):
        import_extra(module, extra="serve")
    from nearkin.deploy.index.index import Index
    from nearkin.deploy.serve.app import LOOPBACK, Service, make_app
    from nearkin.deploy.serve.request_limits import RequestLimits
    from nearkin.deploy.serve.server import bind, serve_until_stopped, url_of

    token = _token(args.token_file)
    bound = bind(args.host, args.port)  # first, because a model takes seconds to load
    address = str(bound.getsockname()[0])
    loopback = ip_address(address).is_loopback
    limits = RequestLimits(
        upload_bytes=args.upload_bytes,
        pixels=args.pixels,
        upload_seconds=args.upload_seconds,
        work_seconds=args.work_seconds,
        waiting=args.waiting,
    )
    opened = Index.load(folder)
    opened.use(load_model(args.run or run_of(opened), args.device))
    service = Service(
        opened,
        limits=limits,
        workers=args.workers,
        token=token,
        hosts=(*LOOPBACK, address, *args.allow_host) if loopback else args.allow_host or None,
    )
    if not loopback and token is None:
        print("nearkin: others can reach this server, and it asks for no token (--token-file).", file=sys.stderr)

    def ready() -> None:
        print(f"{len(service.index):,} items at {url_of(bound)} (Ctrl-C stops it)", flush=True)

    try:
        serve_until_stopped(make_app(service), bound, ready)
    finally:
        service.close()
    print("stopped")


def _token(file: Path | None) -> str | None:
    """From a file or the environment: on the command line other users of the machine could read it."""
    if file is None:
        given = os.environ.get("NEARKIN_TOKEN") or None
        if given is not None and not given.strip():
            raise ConfigError("NEARKIN_TOKEN: is blank. Unset it, or give a token.")
        return given and given.strip()
    try:
        token = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file {file}: cannot be read ({getattr(error, 'strerror', None) or error})."
        ) from None
    if not token:
        raise ConfigError(f"--token-file {file}: its first line is empty.")
    return token
