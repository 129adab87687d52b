"""The ranking engine is exact for any ties, backend, block size, number of threads and order of rows."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.oracle import clustered, integer_nearness, lists, nearness, tie_groups, tie_groups_of_matrix
from helpers.paths import GOLDEN, SHARED
from hypothesis import given, settings
from hypothesis import strategies as st

import nearkin as nk
from nearkin.errors import ConfigError, DataError, MissingExtraError
from nearkin.metrics import _count_numba, _count_torch, _tile_kernels, _vectors, ranking
from nearkin.metrics.ranking import neighbours, rank

BACKENDS = ("torch", "numba")
VARIANTS = (*BACKENDS, "torch on a GPU")


def choose(variant, monkeypatch):
    """Return the backend; the variant with a float32 product, made for GPUs, also runs on the CPU."""
    if variant == "torch on a GPU":
        monkeypatch.setattr(_count_torch, "_FLOAT32_DEVICES", ("cpu",))
    return variant.split()[0]


def groups_of(r):
    return [
        list(zip(r.above[a:b].tolist(), r.relevant[a:b].tolist(), r.size[a:b].tolist(), strict=True))
        for a, b in zip(r.start[:-1], r.start[1:], strict=True)
    ]


def assert_same(a, b):
    for name in ("start", "above", "relevant", "size", "items", "codes"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@st.composite
def tied_sets(draw):
    """Few distinct values in few dimensions: many ties, copies, parallel and zero vectors, singleton classes."""
    n = draw(st.integers(1, 9))
    dim = draw(st.integers(1, 4))
    unit = draw(st.sampled_from([1.0, 0.1, 1 / 3, 1e-20, 1e15]))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rows = draw(st.lists(st.lists(st.integers(-2, 2), min_size=dim, max_size=dim), min_size=n, max_size=n))
    labels = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    groups = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    # Small units would count as zero vectors for the cosine; that has its own test.
    return np.array(rows, dtype=dtype) * dtype(unit), np.array(labels), np.array(groups), unit


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of a few rows, so that small inputs span many tiles. Tests of larger inputs set it back."""
    monkeypatch.setattr(_count_numba, "TILE", 4)


COMMON = {"derandomize": True, "deadline": None, "max_examples": 60}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_single_set_against_exact_fractions(variant, similarity, monkeypatch):
    backend = choose(variant, monkeypatch)

    @settings(**COMMON)
    @given(tied_sets(), st.booleans())
    def check(data, grouped):
        x, labels, groups, unit = data
        if unit == 1e-20 and similarity == "cosine":
            return
        options = {"groups": groups} if grouped else {}
        got = rank(x, labels, similarity=similarity, backend=backend, **options)
        want = lists(x, labels, similarity=similarity, **options)
        assert groups_of(got) == [tie_groups(items) for items in want]
        assert got.items.tolist() == [len(items) for items in want]

    check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_query_against_gallery_against_exact_fractions(backend, similarity):
    @settings(**COMMON)
    @given(tied_sets(), st.data())
    def check(data, more):
        g, g_labels, gallery_groups, unit = data
        if unit == 1e-20 and similarity == "cosine":
            return
        picked = more.draw(st.lists(st.integers(0, len(g) - 1), min_size=1, max_size=6))
        times = more.draw(st.lists(st.sampled_from([1, 1, 3]), min_size=len(picked), max_size=len(picked)))
        q = g[picked] * np.array(times)[:, None].astype(g.dtype)
        q_labels = more.draw(st.lists(st.integers(0, 4), min_size=len(picked), max_size=len(picked)))
        q_groups = more.draw(st.lists(st.integers(0, 2), min_size=len(picked), max_size=len(picked)))
        groups = {"groups": q_groups, "gallery_groups": gallery_groups} if more.draw(st.booleans()) else {}
        got = rank(q, q_labels, g, g_labels, similarity=similarity, backend=backend, **groups)
        want = lists(q, q_labels, g, g_labels, similarity=similarity, **groups)
        assert groups_of(got) == [tie_groups(items) for items in want]

    check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_binary_codes_of_unit_length_tie_exactly(backend):
    # In float64 the sums of +-c*c differ in the last bit by the order of the signs; the similarities do not.
    rng = np.random.default_rng(0)
    x = (np.sign(rng.standard_normal((30, 21))) / np.sqrt(21)).astype(np.float32)
    labels = rng.integers(0, 6, 30)
    assert groups_of(rank(x, labels, backend=backend)) == [tie_groups(items) for items in lists(x, labels)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
@pytest.mark.parametrize(("offset", "noise"), [(1.0, 1e-7), (1.0, 1e-4), (1000.0, 1e-3)])
def test_nearly_collapsed_models_are_ranked_exactly(variant, similarity, offset, noise, monkeypatch):
    backend = choose(variant, monkeypatch)
    rng = np.random.default_rng(1)
    x = (offset + noise * rng.standard_normal((24, 16))).astype(np.float32)
    labels = np.arange(24) // 4
    got = rank(x, labels, similarity=similarity, backend=backend)
    assert groups_of(got) == [tie_groups(items) for items in lists(x, labels, similarity=similarity)]


def integer_codes(kind):
    """Integer vectors with copies, a zero vector and parallel vectors."""
    rng = np.random.default_rng(2)
    levels = {"signs": [-1, 1], "bits": [0, 1], "small integers": [-3, -1, 0, 0, 2, 5]}[kind]
    codes = rng.choice(levels, (150, 12))
    codes[40] = 0 if kind != "signs" else 1
    codes[:4], codes[4:8] = codes[8], 2 * codes[9] if kind == "small integers" else codes[9]
    return codes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
@pytest.mark.parametrize("kind", ["signs", "bits", "small integers"])
def test_integer_codes_tie_exactly(variant, similarity, kind, monkeypatch):
    backend, codes = choose(variant, monkeypatch), integer_codes(kind)
    monkeypatch.setattr(_count_numba, "TILE", 32)
    labels = np.minimum(np.arange(150) % 40, 6)  # classes of 3, 4 and over 100 items
    want = tie_groups_of_matrix(integer_nearness(codes, similarity), labels)
    for factor in (1.0, 2.0) if kind == "small integers" else (1.0, np.float32(1 / np.sqrt(21))):
        x = (factor * codes).astype(np.float32)
        assert _vectors.prepare(torch.as_tensor(x), None, similarity)[0].codes is not None
        assert groups_of(rank(x, labels, similarity=similarity, backend=backend)) == want


def test_one_vector_that_is_no_code_is_noticed():
    codes = integer_codes("bits").astype(np.float32)
    labels = np.arange(150) % 40
    codes[149] += np.float32(0.3)
    for similarity in ("cosine", "euclidean"):
        assert _vectors.prepare(torch.as_tensor(codes), None, similarity)[0].codes is None
        base = rank(codes, labels, similarity=similarity, backend="numba")
        assert_same(base, rank(codes, labels, similarity=similarity, backend="torch"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("classes", [2, 60])
@pytest.mark.parametrize("equal", [0, 250])
def test_large_classes_and_equal_vectors(variant, classes, equal, monkeypatch):
    """Above 128 relevant items per query the tiles are float64; a small budget ranks some queries at a time."""
    backend = choose(variant, monkeypatch)
    monkeypatch.setattr(_count_numba, "TILE", 64)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((320, 16)).astype(np.float32)
    x[rng.permutation(320)[:equal]] = x[0]
    labels = rng.permutation(np.arange(320) % classes)
    distinct, index = np.unique(x, axis=0, return_inverse=True)
    unit = distinct.astype(float) / np.linalg.norm(distinct.astype(float), axis=1, keepdims=True)
    near = (unit @ unit.T)[index.ravel()][:, index.ravel()]
    want = tie_groups_of_matrix(near, labels)
    for memory in ("1GB", "1MB"):
        assert groups_of(rank(x, labels, backend=backend, memory=memory)) == want


def test_zero_and_vanishing_vectors_have_cosine_zero():
    x = np.array([[0.0, 0.0], [1e-13, 0.0], [1.0, 0.0], [-1.0, 0.1], [0.0, 1.0]])
    for backend in BACKENDS:
        got = rank(x[[2]], [0], x[[0, 1, 3, 4]], [0, 1, 2, 3], backend=backend)
        assert groups_of(got) == [[(0, 1, 3)]]  # both zero vectors and the orthogonal one tie at 0
    assert neighbours(x, k=1)[1][0] == 0.0


def test_backends_agree_on_inputs_of_several_tiles(monkeypatch):
    monkeypatch.setattr(_count_numba, "TILE", 512)
    x, labels = clustered(1500, 128, samples_per_class=20, noise=2.0)
    assert 0.3 < nk.score(x, labels, backend="numba")["R@1"] < 0.95
    assert_same(rank(x, labels, backend="numba"), rank(x, labels, backend="torch"))


def test_cub_features_have_their_known_recall_in_both_backends(monkeypatch):
    path = SHARED / "data" / "cub_efficientnet_lite0_224.npz"
    if not path.exists():
        pytest.skip(f"{path} is missing: features of the CUB photos")
    monkeypatch.setattr(_count_numba, "TILE", 512)
    with np.load(path) as file:
        test = file["labels"] >= 100
        x, labels = file["features"][test], file["labels"][test]
    scores = nk.score(x, labels, backend="numba")
    for name, percent in {"R@1": 57.88, "R@2": 69.97, "R@4": 80.79, "R@8": 88.72}.items():
        assert 100 * scores[name] == pytest.approx(percent, abs=0.02)
    half = np.arange(0, len(x), 3)
    assert_same(rank(x[half], labels[half], backend="numba"), rank(x[half], labels[half], backend="torch"))


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_result_depends_on_nothing_but_the_data(similarity, monkeypatch):
    monkeypatch.setattr(_count_numba, "TILE", 512)
    x, labels = clustered(900, 24, samples_per_class=6, noise=1.5)
    x[::7] = x[3]  # copies across classes
    x[1::5] = np.round(x[1::5] * 2) / 2  # coarse values: ties between different vectors
    base = rank(x, labels, similarity=similarity, backend="numba")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert_same(base, rank(x, labels, similarity=similarity, backend="numba"))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    for tile in (64, 100, 1000):
        monkeypatch.setattr(_count_numba, "TILE", tile)
        assert_same(base, rank(x, labels, similarity=similarity, backend="numba"))
    for memory in ("1MB", "3MB", "1GB"):
        assert_same(base, rank(x, labels, similarity=similarity, backend="torch", memory=memory))
    shuffled = np.random.default_rng(5).permutation(len(x))
    first, second = (
        nk.score(x, labels, similarity=similarity),
        nk.score(x[shuffled], labels[shuffled], similarity=similarity),
    )
    for name in first.per_query:
        np.testing.assert_array_equal(first.per_query[name][shuffled], second.per_query[name], err_msg=name)
        assert first[name] == second[name]
        assert first.interval(name) == second.interval(name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gallery_larger_than_the_memory_budget(backend, monkeypatch):
    monkeypatch.setattr(_count_numba, "TILE", 512)
    x, labels = clustered(1100, 200, samples_per_class=4, noise=1.5)
    assert_same(rank(x, labels, backend=backend, memory="1MB"), rank(x, labels, backend=backend))
    index, value = neighbours(x[:50], x, k=3, memory="1MB")
    want, similarity = neighbours(x[:50], x, k=3)
    np.testing.assert_array_equal(index, want)
    np.testing.assert_array_equal(value, similarity)


def test_reduced_precision_setting_is_ignored_and_restored():
    x, labels = clustered(60, 8, samples_per_class=3, noise=1.0)
    torch.set_float32_matmul_precision("high")
    try:
        got = rank(x, labels, backend="numba")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_same(got, rank(x, labels, backend="torch"))


def test_large_classes_use_binary_search():
    x, labels = clustered(400, 8, samples_per_class=100, noise=2.0)
    x = np.round(x * 4) / 4
    assert_same(rank(x, labels, backend="numba"), rank(x, labels, backend="torch"))


def test_the_error_bound_holds():
    """Keys of both products stay within VectorSet.error_bounds of the true ones (64-bit mantissa)."""
    rng = np.random.default_rng(2)
    for offset, dim, similarity in [
        (0, 512, "cosine"),
        (3, 300, "cosine"),
        (50, 100, "euclidean"),
        (0, 2, "euclidean"),
    ]:
        x = torch.as_tensor((offset + rng.standard_normal((300, dim))).astype(np.float32))
        vectors, _ = _vectors.prepare(x, None, similarity)
        bound32, bound64 = vectors.error_bounds(vectors)
        z = x.numpy().astype(np.longdouble)
        if similarity == "cosine":
            z /= np.sqrt((z**2).sum(1, keepdims=True))
        else:
            z = z * np.longdouble(vectors.pow2[0].item())
        z = z * vectors.scale
        true = np.stack([-((z - row) ** 2).sum(1) / 2 for row in z])
        order = torch.arange(300)
        for dtype, bound in ((torch.float32, bound32), (torch.float64, bound64)):
            got = (vectors.query_matrix(order).to(dtype) @ vectors.gallery_matrix(order, dtype).T).double().numpy()
            error = got - true
            error -= error.mean()  # all keys share a constant
            assert (np.abs(error) <= bound.numpy()[:, None]).all()
        # In parts, as the numba backend sums it: fewer terms in a row, a smaller bound.
        left, right = (m.float() for m in (vectors.query_matrix(order), vectors.gallery_matrix(order, torch.float32)))
        parts = [slice(k, k + 128) for k in range(0, left.shape[1], 128)]
        error = sum(left[:, p] @ right[:, p].T for p in parts).double().numpy() - true
        part_bound = vectors.error_bounds(vectors, 128)[0]
        assert (np.abs(error - error.mean()) <= part_bound.numpy()[:, None]).all()
        assert (part_bound < 0.4 * bound32).all() if dim == 512 else (part_bound <= bound32).all()


def test_exact_distance_is_symmetric_and_identical_in_both_backends():
    rng = np.random.default_rng(3)
    for dtype in (np.float32, np.float64):
        x = (rng.standard_normal((40, 33)) * 10.0 ** rng.integers(-5, 5, (40, 1))).astype(dtype)
        x[0] = np.arange(33) - 11
        x[1] = 3 * x[0]
        x[2] = 0
        for similarity in ("cosine", "euclidean"):
            p, _ = _vectors.prepare(torch.as_tensor(x), None, similarity)
            i, j = (v.ravel() for v in np.meshgrid(np.arange(40), np.arange(40)))
            distance = _vectors.exact_distance(p, p, i, j)
            np.testing.assert_array_equal(distance, _vectors.exact_distance(p, p, j, i))
            arrays = _count_numba._arrays(p)
            loop = [_tile_kernels.exact_pair(p.cosine, arrays, a, arrays, b) for a, b in zip(i, j, strict=True)]
            np.testing.assert_array_equal(distance, loop)
            if similarity == "cosine":
                assert distance[(i == 0) & (j == 1)] == 0.0  # parallel
                want = [float(nearness(x[a], x[b], similarity)) for a, b in zip(i, j, strict=True)]
                length = [float(np.sqrt(np.sum(x[a].astype(float) ** 2))) or 1.0 for a in i]
                root = np.sign(want) * np.sqrt(np.abs(want)) / length
                np.testing.assert_allclose(1 - distance, root, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------------------- known defects of other libraries


def test_collapse_is_not_rewarded_and_row_order_does_not_matter():
    x = np.ones((1000, 16), dtype=np.float32)
    labels = np.repeat([0, 1], [900, 100])
    chance = (900 * 899 + 100 * 99) / 1000 / 999
    for backend in BACKENDS:
        for order in (np.arange(1000), np.arange(1000)[::-1]):
            scores = nk.score(x, labels[order], ks=(1,), backend=backend)
            assert scores["P@1"] == pytest.approx(chance, abs=1e-12)
            assert scores["R@1"] == pytest.approx(chance, abs=1e-12)
            assert scores.bounds("R@1") == (0.0, 1.0)
    assert any("collapsed" in note for note in scores.notes)


def test_vectors_too_small_for_a_direction_are_not_called_equal():
    x = np.float32([[1e-13, 0], [0, 2e-13], [0, 0], [1, 0], [0, 1], [1, 1]])
    labels = [0, 0, 1, 1, 2, 2]
    small = "3 of 6 gallery vectors have a norm of at most 1e-12, too small for a direction; "
    assert nk.score(x, labels, ks=(1,)).notes[-1] == small + "their cosine with everything counts as 0."
    assert not any("equal" in note or "identical" in note for note in nk.score(x, labels, ks=(1,)).notes)
    assert not any("identical" in note for note in nk.score(x[:3], labels[:3], ks=(1,)).notes)
    by_distance = nk.score(x, labels, ks=(1,), similarity="euclidean")
    assert not any("gallery" in note for note in by_distance.notes)


@pytest.mark.parametrize("kind", [np.int64, np.uint64, object, str])
def test_large_label_ids_are_not_confused(kind):
    ids = [2**24, 2**24 + 1, 2**24 + 2, 2**24 + 3]
    if kind in (np.uint64, object):
        ids = [2**63 + i for i in range(4)]
    labels = np.array([str(i) for i in ids] if kind is str else ids, dtype=None if kind is str else kind)
    x = np.eye(4, 3, dtype=np.float32) + 0.1
    assert nk.score(x, labels, singletons="zero")["P@1"] == 0.0
    assert nk.score(x, labels, x, labels)["P@1"] == 1.0
    other = labels.astype(object) if kind is np.uint64 else labels
    assert nk.score(x, labels, x, other)["P@1"] == 1.0


def test_self_is_excluded_by_index_not_by_rank():
    # Every item has an exact copy with another label; dropping the first column would keep the self match.
    x = np.repeat(np.eye(4, dtype=np.float32), 2, axis=0)
    labels = np.array([0, 1, 0, 1, 2, 3, 2, 3])
    for backend in BACKENDS:
        assert nk.score(x, labels, backend=backend)["R@1"] == 0.0
    assert neighbours(x, k=1)[0].ravel().tolist() == [1, 0, 3, 2, 5, 4, 7, 6]


# ------------------------------------------------------------------------------------------------------- neighbours


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_neighbours_against_exact_fractions(similarity):
    @settings(**COMMON)
    @given(tied_sets(), st.integers(1, 8))
    def check(data, k):
        x, _, _, unit = data
        if len(x) <= k or unit == 1e-20:
            return
        got, values = neighbours(x, k=k, similarity=similarity)
        for i in range(len(x)):
            others = [j for j in range(len(x)) if j != i]
            want = sorted(others, key=lambda j: (-nearness(x[i], x[j], similarity), j))[:k]
            assert got[i].tolist() == want
        assert (np.diff(values, axis=1) <= 1e-9 * unit).all()

    check()


@pytest.mark.parametrize("k", [1, 3, 7])
def test_neighbours_among_many_copies(k):
    """Of copies the first by index are returned; the query is excluded even when it is not among the first."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3))[rng.integers(0, 4, 60)]
    near = x @ x.T / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(x, axis=1))
    everyone = np.arange(60)
    for i, got in enumerate(neighbours(x, k=k)[0].tolist()):
        assert got == sorted(everyone[everyone != i].tolist(), key=lambda j, i=i: (-near[i, j].round(9), j))[:k]
    for i, got in enumerate(neighbours(x[:9], x, k=k)[0].tolist()):
        assert got == sorted(everyone.tolist(), key=lambda j, i=i: (-near[i, j].round(9), j))[:k]
    same = neighbours(np.ones((5, 2)), k=4)[0].tolist()
    assert same == [[j for j in range(5) if j != i] for i in range(5)]


def test_neighbours_match_the_golden_order():
    golden = json.loads(GOLDEN.read_text())["metrics"]
    x = np.array(golden["embeddings"])
    assert neighbours(x, k=10)[0].tolist() == golden["ranking_first_10"]
    index, value = neighbours(x[:5], x, k=1)
    assert index.ravel().tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(value, 1.0)
    distance = -neighbours(x[:5], x, k=3, similarity="euclidean")[1]
    want = np.sort(np.linalg.norm(x[:5, None] - x[None], axis=-1), axis=1)[:, :3]
    np.testing.assert_allclose(distance, want, atol=1e-12)


# ------------------------------------------------------------------------------------------ accepted and rejected input


def test_accepted_input():
    x, labels = clustered(12, 4, samples_per_class=3, noise=0.5)
    base = rank(x, labels)
    assert_same(base, rank(torch.tensor(x, requires_grad=True), torch.tensor(labels)))
    assert_same(base, rank(x, labels.astype(np.uint8)))
    assert_same(rank(x.tolist(), labels.tolist()), rank(x.astype(np.float64), labels))
    assert_same(base, rank(np.asfortranarray(x), [f"class {c}" for c in labels]))
    assert_same(base, rank(x, torch.tensor(labels, dtype=torch.int16)))
    assert_same(base, rank(x[::-1][::-1], labels[::-1][::-1]))
    assert_same(base, rank(np.ascontiguousarray(x[::-1])[::-1], labels))  # strides below 0
    assert_same(base, rank(x.astype(">f4"), labels.astype(">i8")))
    fixed = x.copy()
    fixed.setflags(write=False)
    assert_same(base, rank(fixed, labels))
    names = [f"klass é{c}" for c in labels]
    assert_same(rank(x, names, x, names), rank(x, names, x, [name.encode() for name in names]))
    half = x.astype(np.float16)
    assert_same(rank(half, labels), rank(half.astype(np.float32), labels))
    whole = np.round(10 * x).astype(np.int32)
    assert_same(rank(whole, labels), rank(whole.astype(np.float64), labels))
    mixed = [2**63 + int(c) if c else -1 for c in labels]  # NumPy would convert these to float
    assert rank(x, mixed).total.tolist() == base.total.tolist()
    assert_same(base, rank(x, np.array(labels, dtype=object)))
    assert_same(rank(x, labels, x.astype(np.float64), labels), rank(x.astype(np.float64), labels, x, labels))
    bf16 = torch.tensor(x).bfloat16()
    assert_same(rank(bf16, labels), rank(bf16.float(), labels))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, y: rank(x, y.astype(float)), DataError, "labels: expected integers or strings, got float64"),
        (lambda x, y: rank(x, y[:-1]), DataError, "labels: 11 labels for 12 rows of embeddings"),
        (lambda x, y: rank(x[0], y), DataError, r"embeddings: expected one row per item, \[N, D\]; got shape \(4,\)"),
        (lambda x, y: rank(x[:0], y[:0]), DataError, "embeddings: nothing to rank"),
        (
            lambda x, y: rank(np.where(np.eye(12, 4, k=-2), np.nan, x), y),
            DataError,
            "NaN in 4 of 12 rows .first: row 2",
        ),
        (lambda x, y: rank(np.where(np.eye(12, 4), np.inf, x), y), DataError, "infinite values in 4 of 12"),
        (lambda x, y: rank(x, y[:, None]), DataError, r"labels: expected one label per row, \[N\]; got int64 of shape"),
        (lambda x, y: rank(x, y, x[:, :3], y), DataError, "gallery: 3 dimensions, but the query has 4"),
        (lambda x, y: rank(x, y, x), ConfigError, "gallery labels are missing"),
        (lambda x, y: rank(x, y, None, y), ConfigError, "gallery is missing"),
        (lambda x, y: rank(x, y, x, y.astype(str)), DataError, "nothing can match"),
        (lambda x, y: rank(x, [None] * 12), DataError, "expected integers or strings, got NoneType"),
        (lambda x, y: rank(x, y, similarity="cosin"), ConfigError, "Did you mean 'cosine'"),
        (lambda x, y: rank(x, y, memory="lots"), ConfigError, "memory: expected a size such as"),
        (lambda x, y: rank(x, y, backend="cuda"), ConfigError, "backend: expected 'auto'"),
        (lambda x, y: rank(x, y, groups=[1, 2]), DataError, "groups: 2 labels for 12 rows"),
        (lambda x, y: rank(x, y, x, y, groups=y), ConfigError, "both groups and gallery_groups"),
        (lambda x, y: neighbours(x, k=12), ConfigError, "k: expected 1 to 11"),
        (lambda x, y: rank([["a", "b"]], [1]), DataError, "embeddings: cannot be read as a matrix"),
    ],
)
def test_errors_name_the_argument_and_the_problem(call, error, message):
    x, labels = clustered(12, 4, samples_per_class=3, noise=0.5)
    with pytest.raises(error, match=message):
        call(x, labels)


def test_without_numba(monkeypatch):
    x, labels = clustered(60, 4, samples_per_class=3, noise=0.5)
    monkeypatch.setattr(ranking, "_MIN_NUMBA_PAIRS", 0)
    base = rank(x, labels)
    monkeypatch.setattr(ranking, "has_numba", lambda: False)
    assert_same(base, rank(x, labels))
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(MissingExtraError, match=r"nearkin\[images\]"):
        rank(x, labels, backend="numba")


def test_small_inputs_do_not_import_numba():
    code = (
        "import sys, numpy as np, nearkin as nk\n"
        "nk.score(np.eye(6), [0, 0, 1, 1, 2, 2])\n"
        "assert not {'numba', 'sklearn', 'faiss', 'scipy', 'torchvision'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("backend", BACKENDS)
def test_progress_and_plan(backend, capsys):
    seen = []
    x, labels = clustered(40, 4, samples_per_class=4, noise=0.5)
    rank(x, labels, backend=backend, progress=seen.append, verbose=True)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert "ranking 40 queries against 40 items of 4 dimensions" in capsys.readouterr().err
    rank(x, labels)
    assert capsys.readouterr().err == ""


def test_error_in_a_thread_is_raised(monkeypatch):
    def broken(*_args):
        raise RuntimeError("broken tile")

    monkeypatch.setattr(_tile_kernels, "mask_class", broken)
    x, labels = clustered(40, 4, samples_per_class=4, noise=0.5)
    threads = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="broken tile"):
        rank(x, labels, backend="numba")
    assert torch.get_num_threads() == threads
