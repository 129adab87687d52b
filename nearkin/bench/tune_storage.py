"""State shared by the workers of a search: Optuna's storage, and locks that are released when a worker dies.

On one machine these are a journal file and lock files next to it; on several, a PostgreSQL database with advisory locks
of each worker's connection. Optuna's heartbeats are not used: they only support its databases, mistake a slow worker
for a dead one, and run a trial twice, so that the budget would not be exact.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin._common.files import file_lock
from nearkin.errors import ConfigError, RunError, import_extra

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_JOURNAL_PREFIX = b'{"op_code":'  # start of each line of a journal
# The server then notices a lost machine within a minute instead of two hours.
_KEEP_ALIVE = "-c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"


@dataclass(frozen=True)
class SharedStorage:
    """A worker's connection to the shared state."""

    storage: BaseStorage  # optuna's storage
    # lock(name, wait) yields whether this worker has the lock; with `wait` it blocks until it does
    lock: Callable[[str, bool], AbstractContextManager[bool]]
    check: Callable[[], object]  # raises if locks may have been lost


def storage_address(storage: str | None, out: Path) -> str:
    """Return --storage as a PostgreSQL URL that SQLAlchemy reads, or as an absolute path."""
    if storage is None or not is_database(storage):
        return str(Path(storage or out / "search.journal").resolve())
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(storage)
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"--storage: not a valid database URL ({error}).") from None
    expected = "postgresql+psycopg://USER@HOST/DATABASE"
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise ConfigError(
            f"--storage: '{url.drivername}://' is not supported. Use {expected} for several machines, "
            "or the path of a journal file for one."
        )
    if not url.database:
        raise ConfigError(f"--storage: the URL names no database. Expected {expected}.")
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def is_database(address: str) -> bool:
    return "://" in address


@contextmanager
def open_storage(address: str) -> Iterator[SharedStorage]:
    """Open the storage of a search; create it if it does not exist. Yields the storage, until the block ends."""
    optuna: Any = import_extra("optuna", extra="bench")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with (_postgres if is_database(address) else _journal)(address) as opened:
        yield opened


@contextmanager
def _journal(address: str) -> Iterator[SharedStorage]:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = Path(address)
    locks = path.with_name(f"{path.name}.locks")

    def lock(name: str, wait: bool = False) -> AbstractContextManager[bool]:
        return file_lock(locks / name.replace("/", "-"), wait=wait)

    try:
        if path.exists():
            with open(path, "rb") as file:
                if file.read(len(_JOURNAL_PREFIX)) not in (b"", _JOURNAL_PREFIX):
                    raise ValueError("unexpected content")  # before the lock repairs it
        locks.mkdir(parents=True, exist_ok=True)
        journal_lock: Any = _JournalLock(path, locks / "journal")
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=journal_lock))
    except OSError as error:
        raise RunError(f"{path}: cannot store the search there ({error.strerror}). Choose another --out.") from None
    except (ValueError, KeyError) as error:  # not a journal, or damaged
        raise RunError(f"{path}: not the journal of a search ({error}). Choose another --storage.") from None
    yield SharedStorage(storage, lock, check=lambda: None)  # file locks last as long as the process


class _JournalLock:
    """A lock that is released with its process; Optuna's own outlives a killed process by half a minute."""

    def __init__(self, journal: Path, lock: Path) -> None:
        self._journal, self._lock, self._held = journal, lock, ExitStack()

    def acquire(self) -> bool:
        self._held.enter_context(file_lock(self._lock, wait=True))
        with open(self._journal, "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if end and file.read(1) != b"\n":  # left by a killed writer: the next line would be appended to it
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._held.close()


@contextmanager
def _postgres(address: str) -> Iterator[SharedStorage]:
    psycopg: Any = import_extra("psycopg", extra="bench")
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
            "Check the URL, and the password in PGPASSWORD or ~/.pgpass."
        ) from None

    @contextmanager
    def lock(name: str, wait: bool = False) -> Iterator[bool]:
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        function = "pg_advisory_lock" if wait else "pg_try_advisory_lock"
        acquired = connection.execute(f"SELECT {function}(%s)", (key,)).fetchone()[0] is not False
        try:
            yield acquired
        finally:
            if acquired and not connection.closed:
                connection.execute("SELECT pg_advisory_unlock(%s)", (key,))

    with connection:
        try:
            with lock("nearkin tables", True):  # two workers that create the tables at once would fail
                storage = get_storage(RDBStorage(address))  # wraps it in the cache that studies use
            try:
                yield SharedStorage(storage, lock, check=lambda: connection.execute("SELECT 1"))
            finally:
                storage.remove_session()
        except (psycopg.Error, SQLAlchemyError, StorageInternalError) as error:
            raise RunError(
                f"--storage {shown}: the connection was lost ({' '.join(str(error).split())[:200]}).\n"
                "Run the same command again to resume."
            ) from None


def without_password(address: str) -> str:
    """Return an address without its password, for printing; the password can come from PGPASSWORD or ~/.pgpass."""
    if not is_database(address):
        return address
    from sqlalchemy.engine import URL, make_url

    url = make_url(address)
    return str(URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query))
