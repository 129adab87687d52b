"""The commands `nearkin serve` and `nearkin export`: parse, call, print."""

from __future__ import annotations

import os
import sys
from ipaddress import ip_address
from pathlib import Path

from nearkin.arguments import leading, parse
from nearkin.errors import ConfigError, need

SERVE, EXPORT = "nearkin serve DIR", "nearkin export RUN --to onnx|torch -o FILE"


def serve(argv: list[str]) -> None:
    from nearkin.deploy.serve_flags import ServeArgs

    folder, flags = leading(argv, "the folder of an index", SERVE, ServeArgs)
    args = parse(ServeArgs, flags, SERVE)
    for module in ("starlette", "uvicorn"):
        need(module, extra="serve")
    from nearkin.deploy.commands import load_model, run_of
    from nearkin.deploy.index import Index
    from nearkin.deploy.limits import Limits
    from nearkin.deploy.listening import answer_until_stopped, bind, url_of
    from nearkin.deploy.serve import LOOPBACK, Service, make_app

    token = _token(args.token_file)
    bound = bind(args.host, args.port)  # first, because a model takes seconds to load
    address = str(bound.getsockname()[0])
    loopback = ip_address(address).is_loopback
    limits = Limits(
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
        answer_until_stopped(make_app(service), bound, ready)
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


def export(argv: list[str]) -> None:
    from nearkin.deploy.serve_flags import ExportArgs

    target, flags = leading(argv, "a run folder", EXPORT, ExportArgs)
    args = parse(ExportArgs, flags, EXPORT)
    from nearkin.deploy.export import export_run
    from nearkin.progress import Reporter

    print(export_run(Path(target), args.to, args.out, images=args.images, reporter=Reporter(quiet=args.quiet)))
