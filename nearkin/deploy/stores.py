"""External vector stores, for indexes that outgrow one machine.

The index folder stays authoritative: the store can be refilled from it. Whether the store searches exactly or
approximately depends on its own configuration; hits are sorted by the float32 cosine that it returns.
"""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np

from nearkin.deploy.index.search import Hit, Label, Vectors, check_vectors
from nearkin.errors import ConfigError, DataError, UserError, did_you_mean, import_extra

EXPECTED = "qdrant://HOST:PORT/COLLECTION or pgvector://HOST/DB?table=NAME"
_BATCH_SIZE = 256  # items per request to Qdrant
_NAMESPACE = uuid.UUID("6f0f8f2e-6f6b-4c0e-9f61-6e6561726b69")  # Qdrant needs UUIDs; they are derived from item ids


def open_store(url: str, dim: int, model: str) -> "Store":
    """Open a vector store, creating its collection or table if needed.

    Args:
        url: Of the form `EXPECTED`. Credentials may be in QDRANT_API_KEY, or in PGPASSWORD or ~/.pgpass.
        dim: Number of dimensions per vector.
        model: Fingerprint of the model that makes the vectors.

    Returns:
        The store; close it, or use it in a `with` statement.

    Raises:
        ConfigError: If the URL is invalid.
        DataError: If it cannot be reached, or holds vectors of another model or dimension.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme == "qdrant":
            _ = parts.port  # validated on access
    except ValueError:
        raise ConfigError(f"store: expected {EXPECTED}; host or port cannot be parsed.") from None
    stores: dict[str, type[Store]] = {"qdrant": QdrantStore, "pgvector": PgvectorStore}
    if parts.scheme not in stores:
        # The URL is not shown: in an unknown format we cannot tell where a password is.
        got = f"a URL that starts with {parts.scheme}:" if parts.scheme else "a URL without a scheme"
        raise ConfigError(f"store: expected {EXPECTED}, got {got}.")
    store_type, name = stores[parts.scheme], without_secrets(url)
    with _store_errors(name):
        client, table = store_type.connect(url)
    try:
        return store_type(client, table, dim, model, name)
    except UserError:
        client.close()
        raise


def without_secrets(url: str) -> str:
    """Remove passwords and keys from a store URL, so that it can be shown and saved."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    query = [(key, value) for key, value in parse_qsl(parts.query) if "pass" not in key and "key" not in key]
    name = user.partition(":")[0]
    return _join_url(parts.scheme, f"{name}@{host}" if name else host, parts.path, query)


def _join_url(scheme: str, netloc: str, path: str, query: list[tuple[str, str]]) -> str:
    # urlunsplit drops the // of a URL without a host (a socket), which libpq requires.
    return f"{scheme}://{netloc}{path}" + (f"?{urlencode(query, safe='/')}" if query else "")


@contextmanager
def _store_errors(name: str) -> Iterator[None]:
    """Convert errors of the client, network or server to a one-line `DataError` that names the store."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # every client library has its own exception classes
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"{name}: {reason[:300]}") from None


class Store(AbstractContextManager["Store"]):
    """A vector store; `name` is its URL without secrets. Subclasses implement the methods that start with _."""

    def __init__(self, client: Any, table: str, dim: int, model: str, name: str = "store") -> None:
        self.client, self.table, self.dim, self.model, self.name = client, table, dim, model, name
        with _store_errors(name):
            self._open()

    def write(self, ids: Sequence[str], vectors: Vectors, labels: Sequence[Label]) -> None:
        rows = check_vectors(vectors, self.dim, "vectors").tolist()
        with _store_errors(self.name):
            self._write(zip(_check_utf8(ids), rows, labels, strict=True))

    def search(self, vector: Vectors, k: int) -> list[Hit]:
        """Return the k nearest items of a vector [D], nearest first."""
        query = check_vectors(np.asarray(vector)[None], self.dim, "query")[0]
        with _store_errors(self.name):
            return sorted(self._search(query.tolist(), k), key=lambda hit: -hit.similarity)

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items; missing ones are ignored."""
        with _store_errors(self.name):
            for start in range(0, len(ids), _BATCH_SIZE):
                self._remove(_check_utf8(ids[start : start + _BATCH_SIZE]))

    def count(self) -> int:
        with _store_errors(self.name):
            return self._count()

    def close(self) -> None:
        self.client.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_compatible(self, dim: int, model: str | None) -> None:
        if dim != self.dim:
            problem = f"with {dim} dimensions, expected {self.dim}"
        elif model is not None and model != self.model:
            problem = f"of a different model (weights {model[:12]}, got {self.model[:12]})"
        else:
            return
        raise DataError(f"{self.name}: holds vectors {problem}. Use another collection or table.")

    # What the two stores implement: connect() returns a client and the collection or table that a URL names;
    # _open() creates it, or checks that an existing one is compatible.
    connect: Callable[[str], tuple[Any, str]]
    _open: Callable[[], None]
    _write: Callable[[Iterable[tuple[str, list[float], Label]]], None]
    _search: Callable[[list[float], int], list[Hit]]
    _remove: Callable[[list[str]], None]
    _count: Callable[[], int]


def _check_utf8(ids: Sequence[str]) -> list[str]:
    for id in ids:
        try:
            id.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"{id!r}: not valid UTF-8, which stores require. Rename the file.") from None
    return list(ids)


class QdrantStore(Store):
    @staticmethod
    def connect(url: str) -> tuple[Any, str]:
        parts = urlsplit(url)
        collection = parts.path.strip("/")
        if not parts.hostname or not re.fullmatch(r"[\w.-]+", collection):
            raise ConfigError(f"store: expected qdrant://HOST:PORT/COLLECTION, got {without_secrets(url)!r}.")
        settings = dict(parse_qsl(parts.query, keep_blank_values=True))
        https = settings.pop("https", "false").lower()
        for name in settings:  # a mistyped https would send the key unencrypted
            hint = did_you_mean(name, ["https"]) or " Available: https=true. Set the key in QDRANT_API_KEY."
            raise ConfigError(f"store: a Qdrant URL has no setting named {name!r}.{hint}")
        if https not in ("true", "false"):
            raise ConfigError(f"store: https: expected true or false, got {https!r}.")
        key = os.environ.get("QDRANT_API_KEY") or parts.password
        server = {"host": parts.hostname, "port": parts.port or 6333, "https": https == "true", "api_key": key}
        qdrant = import_extra("qdrant_client", extra="stores")
        return qdrant.QdrantClient(**server, timeout=60, check_compatibility=False), collection

    def _open(self) -> None:
        self._models = import_extra("qdrant_client.models", extra="stores")
        cosine = self._models.Distance.COSINE
        if not self.client.collection_exists(self.table):
            self.client.create_collection(self.table, self._models.VectorParams(size=self.dim, distance=cosine))
        params = self.client.get_collection(self.table).config.params.vectors
        if not hasattr(params, "size") or params.distance != cosine:
            raise DataError(f"{self.name}: the collection does not use cosine distance. Use another collection.")
        points, _ = self.client.scroll(self.table, limit=1, with_payload=["model"])
        self._check_compatible(params.size, (points[0].payload or {}).get("model", "") if points else None)

    def _write(self, items: Iterable[tuple[str, list[float], Label]]) -> None:
        points = [
            self._models.PointStruct(
                id=_point_id(id), vector=row, payload={"label": label, "id": id, "model": self.model}
            )
            for id, row, label in items
        ]
        self.client.upload_points(self.table, points, batch_size=_BATCH_SIZE, wait=True)

    def _search(self, query: list[float], k: int) -> list[Hit]:
        response = self.client.query_points(self.table, query=query, limit=k, with_payload=True)
        return [Hit(p.payload["id"], p.payload.get("label"), float(p.score)) for p in response.points]

    def _remove(self, ids: list[str]) -> None:
        selector = self._models.PointIdsList(points=[_point_id(id) for id in ids])
        self.client.delete(self.table, points_selector=selector, wait=True)

    def _count(self) -> int:
        return int(self.client.count(self.table, exact=True).count)


def _point_id(id: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, id))


class PgvectorStore(Store):
    """A PostgreSQL table with the pgvector extension. Its comment names dimension and model."""

    @staticmethod
    def connect(url: str) -> tuple[Any, str]:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        table = query.pop("table", "nearkin")
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", table):
            raise ConfigError(f"store: expected a table name of lowercase letters, digits and _, got {table!r}.")
        address = _join_url("postgresql", parts.netloc, parts.path, list(query.items()))
        psycopg = import_extra("psycopg", extra="stores")
        return psycopg.connect(address, autocommit=True, connect_timeout=10), f'"{table}"'

    def _open(self) -> None:
        self.client.execute("CREATE EXTENSION IF NOT EXISTS vector")
        exists, comment = self.client.execute(
            "SELECT to_regclass(%s) IS NOT NULL, obj_description(to_regclass(%s))", [self.table, self.table]
        ).fetchone()
        if exists:
            found = re.fullmatch(r"nearkin vectors of ([0-9]+) dimensions, model (.*)", comment or "")
            if found is None:
                raise DataError(
                    f"{self.name}: {self.table} was not created by nearkin. Use another table: ?table=NAME."
                )
            self._check_compatible(int(found[1]), found[2])
            return
        model = self.model.replace("'", "''")  # COMMENT takes no parameters
        with self.client.transaction():
            self.client.execute(
                f"CREATE TABLE {self.table} (id text PRIMARY KEY, place bigserial, payload jsonb NOT NULL, "
                f"embedding vector({self.dim}) NOT NULL)"
            )
            comment = f"nearkin vectors of {self.dim} dimensions, model {model}"
            self.client.execute(f"COMMENT ON TABLE {self.table} IS '{comment}'")

    def _write(self, items: Iterable[tuple[str, list[float], Label]]) -> None:
        values = [(id, json.dumps({"label": label}), str(row)) for id, row, label in items]
        with self.client.transaction(), self.client.cursor() as cursor:
            cursor.executemany(
                f"INSERT INTO {self.table} (id, payload, embedding) VALUES (%s, %s::jsonb, %s::vector) "
                "ON CONFLICT (id) DO UPDATE SET payload = EXCLUDED.payload, embedding = EXCLUDED.embedding",
                values,
            )

    def _search(self, query: list[float], k: int) -> list[Hit]:
        # pgvector returns NaN for a zero vector, which sorts above all numbers; here its cosine is 0.
        found = self.client.execute(
            f"SELECT id, payload, 1 - (embedding <=> %s::vector), place FROM {self.table} "
            "ORDER BY embedding <=> %s::vector LIMIT %s",
            [str(query), str(query), k],
        ).fetchall()
        found.sort(key=lambda row: row[3])  # ties in the order of insertion
        return [Hit(id, info.get("label"), 0.0 if cosine != cosine else float(cosine)) for id, info, cosine, _ in found]

    def _remove(self, ids: list[str]) -> None:
        self.client.execute(f"DELETE FROM {self.table} WHERE id = ANY(%s)", [ids])

    def _count(self) -> int:
        return int(self.client.execute(f"SELECT count(*) FROM {self.table}").fetchone()[0])
