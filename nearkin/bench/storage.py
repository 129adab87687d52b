"""What the workers of a search share: Optuna's storage, and claims that a killed worker gives up by itself.

On one machine both lie in a journal file and in locked files beside it; on many they lie in a PostgreSQL database,
where a claim is an advisory lock of the worker's own connection. Optuna's heartbeats are not used: they know only of
its databases, take a slow worker for a dead one, and turn one trial into two, so that a budget would not hold exactly.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin._common.files import file_lock
from nearkin.errors import ConfigError, RunError, import_extra

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_OPENING = b'{"op_code":'  # of each line of a journal
# So that the server notices within a minute that a machine is gone, instead of after two hours.
_KEEP_ALIVE = "-c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"


@dataclass(frozen=True)
class Shared:
    """What a worker has of it.

    storage   Optuna's
    claim     claim(what, wait) is a context that says whether `what` is ours until it ends; with wait it will be
    check     refuses to go on where claims may have been lost
    """

    storage: BaseStorage
    claim: Callable[[str, bool], AbstractContextManager[bool]]
    check: Callable[[], object]


def address_of(storage: str | None, out: Path) -> str:
    """Where the search is kept: a PostgreSQL address as SQLAlchemy reads it, or the path of a journal file."""
    if storage is None:
        return str((out / "search.journal").resolve())
    scheme, found, rest = storage.partition("://")
    if not found:
        return str(Path(storage).resolve())
    if scheme not in ("postgresql", "postgresql+psycopg"):
        raise ConfigError(
            f"--storage: '{scheme}://' is not supported. Give postgresql+psycopg://USER@HOST/DATABASE for several "
            f"machines, or the path of a journal file for one."
        )
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(f"postgresql+psycopg://{rest}")
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"--storage: not a database address ({error}).") from None
    if not url.database:
        raise ConfigError("--storage: the address names no database: postgresql+psycopg://USER@HOST/DATABASE.")
    return url.render_as_string(hide_password=False)


def is_database(address: str) -> bool:
    return "://" in address


@contextmanager
def open_shared(address: str) -> Iterator[Shared]:
    """The storage at an address of `address_of`, made if it is not there yet."""
    optuna: Any = import_extra("optuna", "bench")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with (_postgres if is_database(address) else _journal)(address) as shared:
        yield shared


@contextmanager
def _journal(address: str) -> Iterator[Shared]:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = Path(address)
    locks = path.with_name(f"{path.name}.locks")

    def claim(what: str, wait: bool = False) -> AbstractContextManager[bool]:
        return file_lock(locks / what.replace("/", "-"), wait=wait)

    try:
        if path.exists() and _start_of(path) not in (b"", _OPENING):
            raise ValueError("it holds something else")  # before anything of it is mended
        locks.mkdir(parents=True, exist_ok=True)
        lock: Any = _JournalLock(path, locks / "journal")
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except OSError as error:
        raise RunError(f"{path}: cannot keep the search there ({error.strerror}). Choose another --out.") from None
    except (ValueError, KeyError) as error:  # not a journal, or damaged
        raise RunError(f"{path}: not a journal of a search ({error}). Choose another --storage.") from None
    yield Shared(storage, claim, check=lambda: None)  # the kernel keeps locks as long as the process lives


def _start_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(len(_OPENING))


class _JournalLock:
    """Optuna's own lock is a file that a killed process leaves behind for half a minute; this one goes with it."""

    def __init__(self, journal: Path, lock: Path) -> None:
        self._journal, self._lock = journal, lock
        self._held = -1

    def acquire(self) -> bool:
        self._held = os.open(self._lock, os.O_CREAT | os.O_WRONLY)
        fcntl.flock(self._held, fcntl.LOCK_EX)
        self._mend()
        return True

    def release(self) -> None:
        os.close(self._held)

    def _mend(self) -> None:
        """Drop the last line if its writer was killed within it: the next one would be glued to it."""
        with open(self._journal, "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if end and file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)


@contextmanager
def _postgres(address: str) -> Iterator[Shared]:
    psycopg: Any = import_extra("psycopg", "bench")
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage, get_storage
    from sqlalchemy.exc import SQLAlchemyError

    shown = without_password(address)
    try:
        connection = psycopg.connect(
            address.replace("+psycopg", "", 1), autocommit=True, options=_KEEP_ALIVE, connect_timeout=10
        )
    except psycopg.Error as error:
        raise ConfigError(
            f"--storage {shown}: cannot be reached ({' '.join(str(error).split())}).\n"
            "Check the address, and the password in PGPASSWORD or ~/.pgpass."
        ) from None

    @contextmanager
    def claim(what: str, wait: bool = False) -> Iterator[bool]:
        number = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], signed=True)
        ask = "pg_advisory_lock" if wait else "pg_try_advisory_lock"
        mine = connection.execute(f"SELECT {ask}(%s)", (number,)).fetchone()[0] is not False
        try:
            yield mine
        finally:
            if mine and not connection.closed:
                connection.execute("SELECT pg_advisory_unlock(%s)", (number,))

    with connection:
        try:
            with claim("nearkin tables", True):  # two that make the tables at once would stumble over each other
                storage = get_storage(RDBStorage(address))  # the one that studies will use too, with its cache
            try:
                yield Shared(storage, claim, check=lambda: connection.execute("SELECT 1"))
            finally:
                storage.remove_session()
        except (psycopg.Error, SQLAlchemyError, StorageInternalError) as error:
            raise RunError(
                f"--storage {shown}: the connection was lost ({' '.join(str(error).split())[:200]}).\n"
                "The same command goes on where this one stopped."
            ) from None


def without_password(address: str) -> str:
    """The address as it may be printed; the password then comes from PGPASSWORD or ~/.pgpass."""
    if not is_database(address):
        return address
    from sqlalchemy.engine import URL, make_url

    url = make_url(address)
    return str(URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query))
