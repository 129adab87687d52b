"""When one machine is outgrown: the same items in an engine that exists for it, through its own client.

    qdrant://HOST:6333/COLLECTION           Qdrant; the key of a hosted one in QDRANT_API_KEY, https with ?https=true
    pgvector://USER@HOST:5432/DB?table=T    PostgreSQL with pgvector; the password in PGPASSWORD or ~/.pgpass

`nearkin index --store URL` writes there what it embeds, `nearkin search --store URL` asks there. The folder of the
index stays the truth that the store can be filled from again. How the engine searches (exactly, or by an index of its
own) is the engine's affair; answers come back nearest first, with the cosine as the engine computes it in float32.
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
_AT_ONCE = 256  # items sent to Qdrant in one request
_NAMES = uuid.UUID("6f0f8f2e-6f6b-4c0e-9f61-6e6561726b69")  # Qdrant's points are numbers; ours come from names by this


class Store(Protocol):
    """What an engine must do. name: its address without secrets."""

    name: str

    def write(self, ids: Sequence[str], vectors: Vectors, payload: Sequence[Payload]) -> None:
        """Add items, or replace those that are there. payload: at least {"label": ...} of each."""
        ...

    def search(self, vector: Vectors, k: int) -> list[Hit]: ...

    def remove(self, ids: Sequence[str]) -> None:
        """Take items out; what is not there is passed over."""
        ...

    def count(self) -> int: ...


def open_store(url: str, dim: int, model: str) -> Store:
    """The store at this address, made if it is not there; refused when it holds vectors of another model or length.

    model: the fingerprint of the model that makes the vectors.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme == "qdrant":
            _ = parts.port  # which is looked at only now
    except ValueError:
        raise ConfigError(f"store: expected {EXPECTED}; the host or port of this one cannot be read.") from None
    if parts.scheme == "qdrant":
        return _open_qdrant(url, dim, model)
    if parts.scheme == "pgvector":
        return _open_pgvector(url, dim, model)
    # Of what we do not know we cannot tell where its password stands.
    given = f"one that starts with {parts.scheme}:" if parts.scheme else "neither"
    raise ConfigError(f"store: expected {EXPECTED}, got {given}.")


def without_secrets(url: str) -> str:
    """The address as it may be shown and kept.

    >>> without_secrets("pgvector://me:secret@db/photos?table=birds&password=secret")
    'pgvector://me@db/photos?table=birds'
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    kept = [(key, value) for key, value in parse_qsl(parts.query) if "pass" not in key and "key" not in key]
    name = user.partition(":")[0]
    place = f"{name}@{host}" if name else host
    return _joined(parts.scheme, place, parts.path, kept)


def _joined(scheme: str, place: str, path: str, query: list[tuple[str, str]]) -> str:
    # urlunsplit would leave out the // of an address without a host (a socket), which libpq insists on.
    return f"{scheme}://{place}{path}" + (f"?{urlencode(query, safe='/')}" if query else "")


def _as_text(ids: Sequence[str]) -> list[str]:
    for name in ids:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"{name!r}: its name is not valid UTF-8, which engines demand. Rename the file.") from None
    return list(ids)


def _fits(name: str, found_dim: int, dim: int, found_model: str | None, model: str) -> None:
    if found_dim != dim:
        raise DataError(f"{name}: holds vectors of {found_dim} numbers, these have {dim}. Name another place in it.")
    if found_model is not None and found_model != model:
        raise DataError(
            f"{name}: holds vectors of another model (weights {found_model[:12]}, this one has {model[:12]}). "
            "Name another place in it."
        )


# --- Qdrant ----------------------------------------------------------------------------------------------------------


class QdrantStore:
    """A collection of Qdrant. client: a `qdrant_client.QdrantClient`, also one in memory or on a folder."""

    def __init__(self, client: Any, collection: str, dim: int, model: str, name: str = "qdrant") -> None:
        self._models = import_extra("qdrant_client.models", extra="stores")
        self._client, self._collection, self._model, self._dim, self.name = client, collection, model, dim, name
        with _said(name):
            if not client.collection_exists(collection):
                size = self._models.VectorParams(size=dim, distance=self._models.Distance.COSINE)
                client.create_collection(collection, vectors_config=size)
            size = client.get_collection(collection).config.params.vectors
            some, _ = client.scroll(collection, limit=1, with_payload=["model"])
        if not hasattr(size, "size") or size.distance != self._models.Distance.COSINE:
            raise DataError(f"{name}: the collection compares by something else than the cosine. Name another one.")
        _fits(name, size.size, dim, (some[0].payload or {}).get("model", "") if some else None, model)

    def write(self, ids: Sequence[str], vectors: Vectors, payload: Sequence[Payload]) -> None:
        rows = check_vectors(vectors, self._dim, "vectors")
        points = [
            self._models.PointStruct(id=_point(id), vector=row, payload={**about, "id": id, "model": self._model})
            for id, row, about in zip(_as_text(ids), rows.tolist(), payload, strict=True)
        ]
        with _said(self.name):
            for start in range(0, len(points), _AT_ONCE):
                self._client.upsert(self._collection, points[start : start + _AT_ONCE], wait=True)

    def search(self, vector: Vectors, k: int) -> list[Hit]:
        query = check_vectors(np.asarray(vector)[None], self._dim, "query")[0]
        with _said(self.name):
            found = self._client.query_points(self._collection, query=query.tolist(), limit=k, with_payload=True).points
        hits = [Hit(p.payload["id"], p.payload.get("label"), float(p.score)) for p in found]
        return sorted(hits, key=lambda hit: -hit.similarity)

    def remove(self, ids: Sequence[str]) -> None:
        points = [_point(id) for id in _as_text(ids)]
        with _said(self.name):
            for start in range(0, len(points), _AT_ONCE):
                some = self._models.PointIdsList(points=points[start : start + _AT_ONCE])
                self._client.delete(self._collection, points_selector=some, wait=True)

    def count(self) -> int:
        with _said(self.name):
            return int(self._client.count(self._collection, exact=True).count)


def _point(id: str) -> str:
    return str(uuid.uuid5(_NAMES, id))


def _open_qdrant(url: str, dim: int, model: str) -> QdrantStore:
    parts = urlsplit(url)
    collection = parts.path.strip("/")
    if not parts.hostname or not re.fullmatch(r"[\w.-]+", collection):
        raise ConfigError(f"store: expected qdrant://HOST:PORT/COLLECTION, got {without_secrets(url)!r}.")
    for name, value in (settings := dict(parse_qsl(parts.query, keep_blank_values=True))).items():
        if name != "https":  # a mistyped one would send the key over the open network
            hint = did_you_mean(name, ["https"]) or " There is https=true; the key comes from QDRANT_API_KEY."
            raise ConfigError(f"store: an address of Qdrant has no setting named {name!r}.{hint}")
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
    """A table of PostgreSQL with the vector extension. connection: an autocommitting `psycopg.Connection`."""

    def __init__(self, connection: Any, table: str, dim: int, model: str, name: str = "pgvector") -> None:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", table):
            raise ConfigError(f"store: expected a table name of small letters, digits and _, got {table!r}.")
        self._db, self._table, self._dim, self.name = connection, f'"{table}"', dim, name
        with _said(name):
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            [found] = connection.execute("SELECT obj_description(to_regclass(%s))", [self._table]).fetchone()
            [there] = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [self._table]).fetchone()
        if there:
            about = _about(found)
            if about is None:
                raise DataError(
                    f"{name}: the table {table} is not one of nearkin's. Name another one with ?table=NAME."
                )
            _fits(name, about["dim"], dim, about["model"], model)
            return
        about = {"made_by": "nearkin", "version": 1, "dim": dim, "model": model}
        literal = json.dumps(about).replace("'", "''")  # a comment takes no parameters
        with _said(name), connection.transaction():
            connection.execute(
                f"CREATE TABLE {self._table} (id text PRIMARY KEY, place bigserial, payload jsonb NOT NULL, "
                f"embedding vector({int(dim)}) NOT NULL)"
            )
            connection.execute(f"COMMENT ON TABLE {self._table} IS '{literal}'")

    def write(self, ids: Sequence[str], vectors: Vectors, payload: Sequence[Payload]) -> None:
        rows = check_vectors(vectors, self._dim, "vectors")
        given = [
            (id, json.dumps(about), str(row))
            for id, row, about in zip(_as_text(ids), rows.tolist(), payload, strict=True)
        ]
        with _said(self.name), self._db.transaction(), self._db.cursor() as cursor:
            cursor.executemany(
                f"INSERT INTO {self._table} (id, payload, embedding) VALUES (%s, %s::jsonb, %s::vector) "
                "ON CONFLICT (id) DO UPDATE SET payload = EXCLUDED.payload, embedding = EXCLUDED.embedding",
                given,
            )

    def search(self, vector: Vectors, k: int) -> list[Hit]:
        query = str(check_vectors(np.asarray(vector)[None], self._dim, "query")[0].tolist())
        with _said(self.name):
            found = self._db.execute(
                f"SELECT id, payload, 1 - (embedding <=> %s::vector), place FROM {self._table} "
                "ORDER BY embedding <=> %s::vector LIMIT %s",
                [query, query, k],
            ).fetchall()
        # A vector of zeros has no cosine there; here it is 0.
        rows = [(id, about, 0.0 if cosine != cosine else float(cosine), place) for id, about, cosine, place in found]
        rows.sort(key=lambda row: (-row[2], row[3]))
        return [Hit(id, about.get("label"), cosine) for id, about, cosine, _ in rows]

    def remove(self, ids: Sequence[str]) -> None:
        with _said(self.name):
            self._db.execute(f"DELETE FROM {self._table} WHERE id = ANY(%s)", [_as_text(ids)])

    def count(self) -> int:
        with _said(self.name):
            return int(self._db.execute(f"SELECT count(*) FROM {self._table}").fetchone()[0])


def _about(comment: str | None) -> dict[str, Any] | None:
    try:
        about = json.loads(comment or "")
    except ValueError:
        return None
    return about if isinstance(about, dict) and about.get("made_by") == "nearkin" else None


def _open_pgvector(url: str, dim: int, model: str) -> PgvectorStore:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    table = query.pop("table", "nearkin")
    name = without_secrets(url)
    address = _joined("postgresql", parts.netloc, parts.path, list(query.items()))
    psycopg = import_extra("psycopg", extra="stores")
    with _said(name):
        connection = psycopg.connect(address, autocommit=True, connect_timeout=10)
    return PgvectorStore(connection, table, dim, model, name)


@contextmanager
def _said(name: str) -> Iterator[None]:
    """What an engine or the way to it complains of, as one line that names the store."""
    try:
        yield
    except (DataError, ConfigError, KeyboardInterrupt):
        raise
    except Exception as error:  # each client has its own kinds: of the network, of the protocol, of the engine
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"{name}: {reason[:300]}") from None
