"""External vector stores, for indexes that outgrow one machine.

    qdrant://HOST:6333/COLLECTION           Qdrant; API key in QDRANT_API_KEY, https with ?https=true
    pgvector://USER@HOST:5432/DB?table=T    PostgreSQL with pgvector; password in PGPASSWORD or ~/.pgpass

`nearkin index --store URL` also writes the vectors there, and `nearkin search --store URL` searches there. The index
folder stays authoritative: the store can be refilled from it. Whether the store searches exactly or approximately
depends on its own configuration; hits are sorted by the float32 cosine that it returns.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np

from nearkin.deploy.index.search import Hit, Vectors, check_vectors
from nearkin.errors import ConfigError, DataError, did_you_mean, import_extra

Payload = dict[str, Any]
EXPECTED = "qdrant://HOST:PORT/COLLECTION or pgvector://HOST/DB?table=NAME"
_BATCH_SIZE = 256  # items per request to Qdrant
_NAMESPACE = uuid.UUID("6f0f8f2e-6f6b-4c0e-9f61-6e6561726b69")  # Qdrant needs UUIDs; they are derived from item ids


class Store(Protocol):
    """Interface of a vector store."""

    name: str  # its URL without secrets

    def write(self, ids: Sequence[str], vectors: Vectors, payload: Sequence[Payload]) -> None:
        """Insert or replace items."""
        ...

    def search(self, vector: Vectors, k: int) -> list[Hit]:
        """Return the k nearest items of a vector [D], nearest first."""
        ...

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items; missing ones are ignored."""
        ...

    def count(self) -> int:
        """Return the number of items."""
        ...


def open_store(url: str, dim: int, model: str) -> Store:
    """Open a vector store, creating its collection or table if needed.

    Args:
        url: Of the form `EXPECTED`.
        dim: Number of dimensions per vector.
        model: Fingerprint of the model that makes the vectors.

    Returns:
        The store.

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
    if parts.scheme == "qdrant":
        return _open_qdrant(url, dim, model)
    if parts.scheme == "pgvector":
        return _open_pgvector(url, dim, model)
    # The URL is not shown: in an unknown format we cannot tell where a password is.
    got = f"a URL that starts with {parts.scheme}:" if parts.scheme else "a URL without a scheme"
    raise ConfigError(f"store: expected {EXPECTED}, got {got}.")


def without_secrets(url: str) -> str:
    """Remove passwords and keys from a store URL, so that it can be shown and saved.

    Example:
        >>> without_secrets("pgvector://me:secret@db/photos?table=birds&password=secret")
        'pgvector://me@db/photos?table=birds'
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    query = [(key, value) for key, value in parse_qsl(parts.query) if "pass" not in key and "key" not in key]
    name = user.partition(":")[0]
    return _join_url(parts.scheme, f"{name}@{host}" if name else host, parts.path, query)


def _join_url(scheme: str, netloc: str, path: str, query: list[tuple[str, str]]) -> str:
    # urlunsplit drops the // of a URL without a host (a socket), which libpq requires.
    return f"{scheme}://{netloc}{path}" + (f"?{urlencode(query, safe='/')}" if query else "")


def _check_utf8(ids: Sequence[str]) -> list[str]:
    for id in ids:
        try:
            id.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"{id!r}: not valid UTF-8, which stores require. Rename the file.") from None
    return list(ids)


def _check_compatible(name: str, store_dim: int, dim: int, store_model: str | None, model: str) -> None:
    if store_dim != dim:
        raise DataError(
            f"{name}: holds vectors with {store_dim} dimensions, expected {dim}. Use another collection or table."
        )
    if store_model is not None and store_model != model:
        raise DataError(
            f"{name}: holds vectors of a different model (weights {store_model[:12]}, got {model[:12]}). "
            "Use another collection or table."
        )


# --- Qdrant ----------------------------------------------------------------------------------------------------------


class QdrantStore:
    """A Qdrant collection."""

    def __init__(self, client: Any, collection: str, dim: int, model: str, name: str = "qdrant") -> None:
        self._models = import_extra("qdrant_client.models", extra="stores")
        self._client, self._collection, self._model, self._dim, self.name = client, collection, model, dim, name
        with _store_errors(name):
            if not client.collection_exists(collection):
                params = self._models.VectorParams(size=dim, distance=self._models.Distance.COSINE)
                client.create_collection(collection, vectors_config=params)
            params = client.get_collection(collection).config.params.vectors
            points, _ = client.scroll(collection, limit=1, with_payload=["model"])
        if not hasattr(params, "size") or params.distance != self._models.Distance.COSINE:
            raise DataError(f"{name}: the collection does not use cosine distance. Use another collection.")
        store_model = (points[0].payload or {}).get("model", "") if points else None
        _check_compatible(name, params.size, dim, store_model, model)

    def write(self, ids: Sequence[str], vectors: Vectors, payload: Sequence[Payload]) -> None:
        """Insert or replace items; see `Store.write`."""
        rows = check_vectors(vectors, self._dim, "vectors")
        points = [
            self._models.PointStruct(id=_point_id(id), vector=row, payload={**values, "id": id, "model": self._model})
            for id, row, values in zip(_check_utf8(ids), rows.tolist(), payload, strict=True)
        ]
        with _store_errors(self.name):
            for start in range(0, len(points), _BATCH_SIZE):
                self._client.upsert(self._collection, points[start : start + _BATCH_SIZE], wait=True)

    def search(self, vector: Vectors, k: int) -> list[Hit]:
        """Return the k nearest items of a vector [D], nearest first."""
        query = check_vectors(np.asarray(vector)[None], self._dim, "query")[0]
        with _store_errors(self.name):
            response = self._client.query_points(self._collection, query=query.tolist(), limit=k, with_payload=True)
        hits = [Hit(p.payload["id"], p.payload.get("label"), float(p.score)) for p in response.points]
        return sorted(hits, key=lambda hit: -hit.similarity)

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items; missing ones are ignored."""
        points = [_point_id(id) for id in _check_utf8(ids)]
        with _store_errors(self.name):
            for start in range(0, len(points), _BATCH_SIZE):
                selector = self._models.PointIdsList(points=points[start : start + _BATCH_SIZE])
                self._client.delete(self._collection, points_selector=selector, wait=True)

    def count(self) -> int:
        """Return the number of items."""
        with _store_errors(self.name):
            return int(self._client.count(self._collection, exact=True).count)


def _point_id(id: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, id))


def _open_qdrant(url: str, dim: int, model: str) -> QdrantStore:
    parts = urlsplit(url)
    collection = parts.path.strip("/")
    if not parts.hostname or not re.fullmatch(r"[\w.-]+", collection):
        raise ConfigError(f"store: expected qdrant://HOST:PORT/COLLECTION, got {without_secrets(url)!r}.")
    for name, value in (settings := dict(parse_qsl(parts.query, keep_blank_values=True))).items():
        if name != "https":  # a mistyped https would send the key unencrypted
            hint = did_you_mean(name, ["https"]) or " Available: https=true. Set the key in QDRANT_API_KEY."
            raise ConfigError(f"store: a Qdrant URL has no setting named {name!r}.{hint}")
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"store: https: expected true or false, got {value!r}.")
    https = settings.get("https", "").lower() == "true"
    key = os.environ.get("QDRANT_API_KEY") or parts.password
    client = import_extra("qdrant_client", extra="stores").QdrantClient(
        host=parts.hostname, port=parts.port or 6333, https=https, api_key=key, timeout=60, check_compatibility=False
    )
    return QdrantStore(client, collection, dim, model, without_secrets(url))


# --- PostgreSQL with pgvector ----------------------------------------------------------------------------------------


class PgvectorStore:
    """A PostgreSQL table with the pgvector extension."""

    def __init__(self, connection: Any, table: str, dim: int, model: str, name: str = "pgvector") -> None:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", table):
            raise ConfigError(f"store: expected a table name of lowercase letters, digits and _, got {table!r}.")
        self._db, self._table, self._dim, self.name = connection, f'"{table}"', dim, name
        with _store_errors(name):
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            [comment] = connection.execute("SELECT obj_description(to_regclass(%s))", [self._table]).fetchone()
            [exists] = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [self._table]).fetchone()
        if exists:
            info = _parse_comment(comment)
            if info is None:
                raise DataError(f"{name}: table {table} was not created by nearkin. Use another one: ?table=NAME.")
            _check_compatible(name, info["dim"], dim, info["model"], model)
            return
        info = {"made_by": "nearkin", "version": 1, "dim": dim, "model": model}
        literal = json.dumps(info).replace("'", "''")  # COMMENT takes no parameters
        with _store_errors(name), connection.transaction():
            connection.execute(
                f"CREATE TABLE {self._table} (id text PRIMARY KEY, place bigserial, payload jsonb NOT NULL, "
                f"embedding vector({int(dim)}) NOT NULL)"
            )
            connection.execute(f"COMMENT ON TABLE {self._table} IS '{literal}'")

    def write(self, ids: Sequence[str], vectors: Vectors, payload: Sequence[Payload]) -> None:
        """Insert or replace items; see `Store.write`."""
        rows = check_vectors(vectors, self._dim, "vectors")
        values = [
            (id, json.dumps(info), str(row))
            for id, row, info in zip(_check_utf8(ids), rows.tolist(), payload, strict=True)
        ]
        with _store_errors(self.name), self._db.transaction(), self._db.cursor() as cursor:
            cursor.executemany(
                f"INSERT INTO {self._table} (id, payload, embedding) VALUES (%s, %s::jsonb, %s::vector) "
                "ON CONFLICT (id) DO UPDATE SET payload = EXCLUDED.payload, embedding = EXCLUDED.embedding",
                values,
            )

    def search(self, vector: Vectors, k: int) -> list[Hit]:
        """Return the k nearest items of a vector [D], nearest first."""
        query = str(check_vectors(np.asarray(vector)[None], self._dim, "query")[0].tolist())
        with _store_errors(self.name):
            found = self._db.execute(
                f"SELECT id, payload, 1 - (embedding <=> %s::vector), place FROM {self._table} "
                "ORDER BY embedding <=> %s::vector LIMIT %s",
                [query, query, k],
            ).fetchall()
        # pgvector returns NaN for a zero vector; here its cosine is 0. Ties are sorted by insertion order.
        rows = [(id, info, 0.0 if cosine != cosine else float(cosine), order) for id, info, cosine, order in found]
        rows.sort(key=lambda row: (-row[2], row[3]))
        return [Hit(id, info.get("label"), cosine) for id, info, cosine, _ in rows]

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items; missing ones are ignored."""
        with _store_errors(self.name):
            self._db.execute(f"DELETE FROM {self._table} WHERE id = ANY(%s)", [_check_utf8(ids)])

    def count(self) -> int:
        """Return the number of items."""
        with _store_errors(self.name):
            return int(self._db.execute(f"SELECT count(*) FROM {self._table}").fetchone()[0])


def _parse_comment(comment: str | None) -> dict[str, Any] | None:
    """Return the table description that nearkin wrote, or None for a table of another program."""
    try:
        info = json.loads(comment or "")
    except ValueError:
        return None
    return info if isinstance(info, dict) and info.get("made_by") == "nearkin" else None


def _open_pgvector(url: str, dim: int, model: str) -> PgvectorStore:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    table = query.pop("table", "nearkin")
    name = without_secrets(url)
    address = _join_url("postgresql", parts.netloc, parts.path, list(query.items()))
    psycopg = import_extra("psycopg", extra="stores")
    with _store_errors(name):
        connection = psycopg.connect(address, autocommit=True, connect_timeout=10)
    return PgvectorStore(connection, table, dim, model, name)


@contextmanager
def _store_errors(name: str) -> Iterator[None]:
    """Convert errors of the client, network or server to a one-line `DataError` that names the store."""
    try:
        yield
    except (DataError, ConfigError, KeyboardInterrupt):
        raise
    except Exception as error:  # every client library has its own exception classes
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"{name}: {reason[:300]}") from None
