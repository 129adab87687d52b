"""Vector stores against the index: Qdrant's client in memory, a real PostgreSQL with pgvector if available."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack

import numpy as np
import pytest
from helpers.oracle import clustered
from helpers.small_runs import make_run

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.cli import index as index_command
from nearkin.cli import search as search_command
from nearkin.deploy.index import builder, storage
from nearkin.deploy.index.sources import find_images
from nearkin.deploy.stores import QdrantStore, open_store, without_secrets
from nearkin.errors import ConfigError, DataError

DIM = 12


@pytest.fixture
def address(pgvector_url: str) -> str:
    """The URL of a database with pgvector."""
    return pgvector_url.replace("postgresql:", "pgvector:")


@pytest.fixture(params=["qdrant", pytest.param("pgvector", marks=pytest.mark.slow)])
def open_again(request):
    """Return a function that opens the same collection or table, as a later process would."""
    if request.param == "qdrant":
        client = pytest.importorskip("qdrant_client", reason="qdrant-client is not installed (nearkin[stores])")
        memory = client.QdrantClient(":memory:")
        yield lambda dim=DIM, model="model a": QdrantStore(memory, "birds", dim, model)
        return
    url = f"{request.getfixturevalue('address')}?table=birds"
    with ExitStack() as stack:
        yield lambda dim=DIM, model="model a": stack.enter_context(open_store(url, dim, model))


def test_a_store_agrees_with_the_index(open_again):
    vectors, labels = clustered(90, DIM, 9, 0.5)
    ids = [f"class {c}/{n} é\n.jpg" for n, c in enumerate(labels)]
    index = nk.Index(vectors, ids, [f"class {c}" for c in labels])
    store = open_again()
    assert store.count() == 0
    assert store.search(vectors[0], 5) == []
    store.write(ids, vectors, index.labels)
    assert store.count() == 90

    def check_agreement(queries):
        for query in queries:
            expected, actual = index.search(query, 7), store.search(query, 7)
            assert [(hit.id, hit.label) for hit in actual] == [(hit.id, hit.label) for hit in expected]
            np.testing.assert_allclose([h.similarity for h in actual], [h.similarity for h in expected], atol=1e-6)

    rng = np.random.default_rng(1)
    check_agreement(rng.normal(size=(10, DIM)).astype(np.float32))
    store.remove([*ids[:10], "missing"])
    index.remove(ids[:10])
    assert store.count() == 80
    check_agreement(vectors[:12])
    # Writing an id again replaces the item, also from a later process.
    again = open_again()
    again.write([ids[20]], -vectors[20:21], ["flipped"])
    assert again.count() == 80
    assert again.search(-vectors[20], 1)[0].label == "flipped"
    assert len(again.search(vectors[0], 1000)) == 80


def test_incompatible_vectors_are_rejected(open_again):
    store = open_again()
    store.write(["a"], np.ones((1, DIM), np.float32), [None])
    with pytest.raises(DataError, match="vectors of a different model"):
        open_again(model="model b")
    with pytest.raises(DataError, match=f"holds vectors with {DIM} dimensions, expected 5"):
        open_again(dim=5)
    with pytest.raises(DataError, match=f"expected {DIM} dimensions as in the index, got 3"):
        store.search(np.ones(3), 1)
    with pytest.raises(DataError, match="NaN"):
        store.write(["b"], np.full((1, DIM), np.nan), [None])
    with pytest.raises(DataError, match="not valid UTF-8"):
        store.write([os.fsdecode(b"\xff")], np.ones((1, DIM), np.float32), [None])
    assert store.search(np.ones(DIM, np.float32), 3)[0].label is None


def test_zero_vectors(open_again):
    store = open_again()
    store.write(["zero", "one"], np.array([np.zeros(DIM), np.ones(DIM)], np.float32), ["z", "o"])
    hits = store.search(np.ones(DIM, np.float32), 2)
    assert [hit.id for hit in hits] == ["one", "zero"]
    assert hits[1].similarity == pytest.approx(0, abs=1e-6)


def test_updates_keep_the_store_in_sync(open_again, photo_folder, tmp_path):
    """With `update_index`, as the command does; interrupted once, and pruned."""
    photos = tmp_path / "photos"
    for c in range(3):
        shutil.copytree(photo_folder / f"class {c}", photos / f"class {c}")
    model = nk.load(make_run(tmp_path, photo_folder, dim=DIM).path)
    out, quiet = tmp_path / "index", Reporter(quiet=True)
    store = open_again()

    def update(**options):
        with storage.lock_index(out):
            return builder.update_index(
                model, find_images(photos), out, batch_size=8, store=store, reporter=quiet, **options
            )

    class Interrupted(Exception):
        pass

    real, store.write = store.write, lambda *args: (_ for _ in ()).throw(Interrupted)
    with pytest.raises(Interrupted):
        update()
    store.write = real
    index, summary = update()
    assert store.count() == len(index) == summary.embedded == 36
    assert index.store == store.name
    (photos / "class 1" / "03.png").unlink()
    shutil.move(photos / "class 0" / "00.png", photos / "class 2" / "new.png")
    index, summary = update(prune=True)
    assert (summary.embedded, summary.pruned) == (1, 2)
    assert store.count() == len(index) == 35
    for id in index.ids[::7]:
        actual = [hit.similarity for hit in store.search(index.vectors[index.row_of(id)], 5)]
        np.testing.assert_allclose(
            actual, [h.similarity for h in index.search(index.vectors[index.row_of(id)], 5)], atol=1e-6
        )
    # An index built without the store fills it.
    store.remove(index.ids)
    with storage.lock_index(out):
        builder.update_index(model, find_images(photos), out, reporter=quiet)
    assert store.count() == 0
    index, summary = update()
    assert (summary.embedded, store.count()) == (0, 35)
    store.write(["foreign"], np.ones((1, DIM), np.float32), [None])
    assert any("holds 36 items, the index 35" in note for note in update()[1].notes)


@pytest.mark.slow
def test_index_and_search_commands_with_a_store(address, photo_folder, tmp_path, capsys):
    run = make_run(tmp_path, photo_folder, dim=DIM)
    url = f"{address}?table=by_command"
    where = ["-o", str(tmp_path / "index"), "--quiet", "--store", url]
    index_command.run([str(run.path), str(photo_folder), *where])
    query = [str(tmp_path / "index"), str(photo_folder / "class 1" / "00.png"), "--item", "class 2/05.png", "-k", "5"]
    capsys.readouterr()
    search_command.run(query)
    plain = capsys.readouterr().out
    search_command.run([*query, "--store", url])
    assert capsys.readouterr().out == plain
    assert "by_command" in (tmp_path / "index" / "manifest.json").read_text()


@pytest.mark.slow
def test_a_foreign_table_is_not_touched(address):
    import psycopg

    with psycopg.connect(address.replace("pgvector:", "postgresql:"), autocommit=True) as database:
        database.execute("CREATE TABLE IF NOT EXISTS other_table (a int)")
    with pytest.raises(DataError, match="was not created by nearkin"):
        open_store(f"{address}?table=other_table", DIM, "model a")
    with pytest.raises(ConfigError, match="lowercase letters"):
        open_store(f"{address}?table=x%22;drop", DIM, "model a")


def test_an_unreachable_store_gives_a_one_line_error():
    pytest.importorskip("psycopg", reason="psycopg is not installed (nearkin[stores])")
    with pytest.raises(DataError) as caught:
        open_store("pgvector://me:secret@127.0.0.1:9/photos", 4, "m")
    assert "secret" not in str(caught.value)
    assert "pgvector://me@127.0.0.1:9/photos" in str(caught.value)
    pytest.importorskip("qdrant_client", reason="qdrant-client is not installed (nearkin[stores])")
    with pytest.raises(DataError, match=r"qdrant://127\.0\.0\.1:9/birds: "):
        open_store("qdrant://127.0.0.1:9/birds", 4, "m")


@pytest.mark.parametrize(
    "url",
    [
        *("birds", "mysql://x/y", "qdrant://host", "qdrant:///birds", "postgres://me:secret@db/x"),
        *("qdrant://:secret@host:abc/c", "qdrant://host:99999/c", "qdrant://me:secret@[::1/c", "pgvector://[::1/db"),
    ],
)
def test_invalid_urls(url):
    with pytest.raises(ConfigError, match="store: expected") as caught:
        open_store(url, 4, "m")
    assert "secret" not in str(caught.value)


def test_unknown_qdrant_settings_are_rejected():
    """A mistyped https would send the key unencrypted."""
    with pytest.raises(ConfigError, match=r"no setting named 'htps'\. Did you mean 'https'"):
        open_store("qdrant://host/birds?htps=true", 4, "m")
    with pytest.raises(ConfigError, match="https: expected true or false, got 'yes'"):
        open_store("qdrant://host/birds?https=yes", 4, "m")


def test_secrets_are_removed():
    assert without_secrets("qdrant://:key@host:1/c?api_key=k&https=true") == "qdrant://host:1/c?https=true"
    assert without_secrets("pgvector://u:p@h/db?sslpassword=x&table=t") == "pgvector://u@h/db?table=t"
    assert without_secrets("pgvector:///db?host=/tmp/s&table=t") == "pgvector:///db?host=/tmp/s&table=t"
