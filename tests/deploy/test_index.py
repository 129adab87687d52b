"""Search of an index against brute force, and rejection of invalid input."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from helpers.indexing import names, random_index, same
from helpers.oracle import nearness
from helpers.small_runs import make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import nearkin as nk
from nearkin.errors import ConfigError, DataError

Index = nk.Index


@pytest.fixture(scope="module")
def model(photo_folder, tmp_path_factory):
    return nk.load(make_run(tmp_path_factory.mktemp("runs"), photo_folder).path)


# --- against brute force ---------------------------------------------------------------------------------------------


@st.composite
def histories(draw):
    """Additions and removals of vectors with few distinct values: ties, copies, parallel and zero vectors."""
    dim = draw(st.integers(1, 4))
    vector = st.lists(st.integers(-2, 2), min_size=dim, max_size=dim)
    steps = draw(st.lists(st.one_of(st.lists(vector, min_size=1, max_size=5), st.integers(0, 10)), max_size=8))
    return dim, draw(vector), draw(st.lists(vector, min_size=1, max_size=4)), steps, draw(st.integers(1, 12))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(histories())
def test_add_remove_search_against_exact_fractions(history):
    dim, query, first, steps, k = history
    items = [(f"first {n}", v) for n, v in enumerate(first)]
    index = Index(np.array(first, np.float32), [id for id, _ in items])
    for s, step in enumerate(steps):
        if isinstance(step, int):
            if items:
                index.remove([items.pop(step % len(items))[0]])
        else:
            new = [(f"{s} {n}", v) for n, v in enumerate(step)]
            index.add_vectors(np.array([v for _, v in new], np.float32), [id for id, _ in new])
            items += new
    assert index.dim == dim
    # Sorting is stable: ties are in the order in which items were added.
    expected = sorted(items, key=lambda item: -nearness(query, item[1], "cosine"))
    assert [hit.id for hit in index.search(np.array(query, np.float32), k)] == [id for id, _ in expected[:k]]
    for row, (id, vector) in enumerate(items):
        others = sorted(items[:row] + items[row + 1 :], key=lambda item: -nearness(vector, item[1], "cosine"))
        assert [hit.id for hit in index.search_item(id, k)] == [other for other, _ in others[:k]]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 40), st.sampled_from([1e-9, 1e-3, 1.0]))
def test_search_against_float64(seed, count, dim, spread):
    """Including a nearly collapsed model, whose items float32 products cannot distinguish."""
    rng = np.random.default_rng(seed)
    vectors = (rng.normal(size=dim) + spread * rng.normal(size=(count, dim))).astype(np.float32)
    query = vectors[0] + np.float32(spread) * rng.normal(size=dim).astype(np.float32)
    index = Index(vectors, names(count))
    wide = vectors.astype(np.longdouble)
    wide /= np.sqrt((wide**2).sum(1, keepdims=True))
    unit = query.astype(np.longdouble) / np.sqrt((query.astype(np.longdouble) ** 2).sum())
    apart = ((wide - unit) ** 2).sum(1)  # more precise than 1 - cosine
    hits = index.search(query, count)
    found = np.array([hit.row for hit in hits])
    assert sorted(found) == list(range(count))
    # Ranking treats cosines that differ by less than 2^-80 as equal.
    assert (np.diff(apart[found]) >= -1e-15 * apart.max() - 4 * 2.0**-80).all()
    np.testing.assert_allclose([hit.similarity for hit in hits], (1 - apart[found] / 2).astype(float), atol=1e-12)


def test_few_and_many_queries_agree():
    index, rng = random_index(200, 8), np.random.default_rng(1)
    queries = rng.integers(-2, 3, size=(100, 8)).astype(np.float32)
    rows, cosines = index.search_many(queries, 15)
    for query, near, similar in zip(queries, rows, cosines, strict=True):
        hits = index.search(query, 15)
        assert [hit.row for hit in hits] == near.tolist()
        np.testing.assert_allclose([hit.similarity for hit in hits], similar, atol=1e-14)


# --- images ----------------------------------------------------------------------------------------------------------


def test_path_pil_image_and_bytes_give_the_same_result(model, photo_folder):
    paths = sorted(photo_folder.rglob("*.png"))[:20]
    index = Index.build(model, paths, [path.parent.name for path in paths])
    path = paths[7]
    for query in (path, str(path), Image.open(path), model.embed([path])[0]):
        hits = index.search(query, 3)
        assert hits[0].id == str(path)
        assert hits[0].similarity == pytest.approx(1, abs=1e-6)
        assert hits[0].label == path.parent.name
    pixels = torch.from_numpy(np.array(Image.open(path).resize((24, 24)))).permute(2, 0, 1)
    assert index.search(pixels, 1)[0].id == str(path)
    assert path in (index.path_of(hit.id) for hit in index.search(path))


def test_add_and_remove_images(model, photo_folder):
    paths = sorted(photo_folder.rglob("*.png"))[:6]
    index = Index.build(model, paths[:3])
    index.add(paths[3:], ["a", "b", "c"])
    whole = Index.build(model, paths, [None, None, None, "a", "b", "c"])
    assert (index.ids, index.labels) == (whole.ids, whole.labels)
    np.testing.assert_allclose(index.vectors, whole.vectors, atol=1e-6)  # another batch size may round differently
    image = Image.open(paths[0])
    image.load()  # closes the file
    index.add([image], ids=["an image"])
    assert {hit.id for hit in index.search(paths[0], 2)} == {str(paths[0]), "an image"}
    with pytest.raises(DataError, match="is already in the index"):
        index.add([paths[0]])
    with pytest.raises(DataError, match="required for images that are not files"):
        index.add([image])


def test_relative_paths_are_relative_to_the_current_folder(model, tmp_path, monkeypatch):
    """Ids are relative to the folder in which the index was built, where the same name may be another image."""
    for folder, colour in (("a", "blue"), ("b", "red")):
        (tmp_path / folder / "more").mkdir(parents=True)
        for name in ("old.png", "new.png", "more/one.png"):
            Image.new("RGB", (24, 24), colour).save(tmp_path / folder / name)
    monkeypatch.chdir(tmp_path / "a")
    index = Index.build(model, ["./old.png"])
    index.add(["./new.png"])
    monkeypatch.chdir(tmp_path / "a" / "more")
    index.add(["one.png"])
    monkeypatch.chdir(tmp_path / "b")
    index.add(["new.png"])
    assert index.ids == ["./old.png", "./new.png", "more/one.png", str(tmp_path / "b" / "new.png")]
    assert index.path_of(index.ids[2]).samefile(tmp_path / "a" / "more" / "one.png")
    with pytest.raises(DataError, match="is already in the index"):
        index.add(["new.png"])


def test_a_different_model_is_rejected(model, photo_folder, tmp_path):
    paths = sorted(photo_folder.rglob("*.png"))[:4]
    Index.build(model, paths).save(tmp_path / "index")
    other = nk.load(make_run(tmp_path, photo_folder, seed=1).path)
    assert len(Index.load(tmp_path / "index", model).search(paths[0])) == 4
    with pytest.raises(DataError, match="built with a different model"):
        Index.load(tmp_path / "index", other)
    with pytest.raises(ConfigError, match="has no run folder"):
        Index.load(tmp_path / "index").search(paths[0])


def test_the_model_is_loaded_from_the_recorded_run(photo_folder, tmp_path):
    run = make_run(tmp_path, photo_folder)
    paths = sorted(photo_folder.rglob("*.png"))[:4]
    Index.build(run.embedder(), paths, run=run.path).save(tmp_path / "index")
    assert Index.load(tmp_path / "index").search(paths[2], 1)[0].id == str(paths[2])
    run.save("best.pt", {**torch.load(run.path / "best.pt"), "model": nk.load(run.path).state_dict()})
    assert Index.load(tmp_path / "index").search(paths[2], 1)[0].id == str(paths[2])  # the same weights, rewritten
    make_run(tmp_path, photo_folder, seed=2)
    with pytest.raises(DataError, match="built with a different model"):
        Index.load(tmp_path / "index").search(paths[2], 1)


# --- invalid input ---------------------------------------------------------------------------------------------------


def test_small_and_empty_indexes_can_be_searched():
    one = Index([[1.0, 2.0]], ["only"], ["a"])
    assert [hit.id for hit in one.search(np.array([0.0, 1.0]), 100)] == ["only"]
    assert one.search_item("only") == []
    one.remove("only")
    assert len(one) == 0
    assert one.search([1.0, 1.0]) == []
    assert one.search_many(np.ones((40, 2)))[0].shape == (40, 0)
    assert one.duplicates() == ([], 0)
    one.add_vectors([[3.0, 4.0]], ["again"])
    assert one.search([3.0, 4.0])[0].similarity == pytest.approx(1)


def test_an_empty_index_can_be_saved(tmp_path):
    empty = Index(np.empty((0, 5), np.float32), [])
    empty.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert (len(again), again.dim) == (0, 5)
    again.add_vectors(np.eye(5), names(5))
    again.save(tmp_path / "index")
    assert same(Index.load(tmp_path / "index"), again)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (np.ones(3), "expected 6 dimensions as in the index, got 3"),
        (np.full(6, np.nan), "NaN or infinity"),
        (np.array([np.inf, 1, 1, 1, 1, 1]), "NaN or infinity"),
        (np.full(6, 1e30), "norm above 1e\\+15"),
        (np.ones((2, 6)), "one vector"),
        (np.array(["a"] * 6), "cannot be converted to vectors"),
        (None, "got shape"),
    ],
)
def test_invalid_queries(query, message):
    with pytest.raises(DataError, match=message):
        random_index().search(query)


def test_half_precision_is_accepted():
    exact = np.array([[1, 0.5], [0.25, -2]], np.float32)  # exact in bfloat16
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        index = Index(torch.tensor(exact, dtype=dtype), ["a", "b"])
        np.testing.assert_array_equal(index.vectors, exact)
        assert index.search(torch.tensor(exact[1], dtype=dtype))[0].id == "b"


@pytest.mark.parametrize("k", [0, -1, 2.5])
def test_k_must_be_a_positive_integer(k):
    index = random_index()
    for search in (index.search, index.search_many):
        with pytest.raises(ConfigError, match="expected an integer of at least 1"):
            search(np.ones(6) if search == index.search else np.ones((1, 6)), k)
    with pytest.raises(ConfigError, match="expected an integer of at least 1"):
        index.search_item("item 0", k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0], [np.nan]], ["a", "b"]), "NaN or infinity in row 1"),
        (([[1.0], [2.0]], ["a", "a"]), "'a' appears twice"),
        (([[1.0], [2.0]], ["a"]), "expected one per vector, got 1 for 2"),
        (([[1.0], [2.0]], ["a", 7]), "expected strings, got int"),
        (([1.0, 2.0], ["a", "b"]), "expected one row per item"),
        (([[1.0], [2.0]], ["a", "b"], ["x"]), "expected one per item, got 1 for 2"),
        (([[1.0], [2.0]], ["a", "b"], ["x", 1]), "expected all strings or all integers .* got int, str"),
        (([[1.0], [2.0]], ["a", "b"], [0.5, 1.5]), "expected all strings or all integers"),
    ],
)
def test_invalid_items(arguments, message):
    with pytest.raises(DataError, match=message):
        Index(*arguments)


def test_ids_may_be_any_strings(tmp_path):
    odd = ["line\nbreak", "ümläut 鳥 🐦", os.fsdecode(b"not utf-8 \xff"), "", "a/b\\c", '"quoted"']
    index = Index(np.eye(6), odd, [None, *odd[1:]])
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert same(index, again)
    assert [again.search(np.eye(6)[n], 1)[0].id for n in range(6)] == odd


def test_unknown_and_repeated_ids():
    index = random_index()
    for method in (index.search_item, index.remove):
        with pytest.raises(DataError, match="'nobody': no such item"):
            method("nobody")
    with pytest.raises(DataError, match="'item 3' is already in the index"):
        index.add_vectors(np.ones((1, 6)), ["item 3"])
    for bad in (
        lambda: index.add_vectors(np.ones((2, 6)), ["new", "new"]),
        lambda: index.add_vectors(np.ones((1, 6)), ["new"], ["string among integers"]),
        lambda: index.add_vectors(np.ones((1, 5)), ["new"]),
        lambda: index.add_vectors(np.ones((2, 6)), ["new"]),
    ):
        with pytest.raises(DataError):
            bad()
    assert same(index, random_index())
