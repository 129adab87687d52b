"""Search ranks as score does; open-set thresholds and re-ranking against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.oracle import clustered
from helpers.paths import SHARED
from helpers.small_runs import make_run

import nearkin as nk
from nearkin.deploy.index.openset import calibrate, calibrate_items, leave_class_out
from nearkin.deploy.index.rerank import Expansion, Reciprocal, apply_rerank, choose_rerank, expanded, k_reciprocal
from nearkin.deploy.index.search import near_pairs, nearest
from nearkin.errors import ConfigError, DataError, UserError

CUB = SHARED / "data" / "CUB_200_2011"
FEATURES = SHARED / "data" / "cub_efficientnet_lite0_224.npz"


def unit(vectors):
    wide = np.asarray(vectors, np.float64)
    return wide / np.linalg.norm(wide, axis=-1, keepdims=True)


# --- the same ranking as score ---------------------------------------------------------------------------------------


def relevant_ranks(rows, labels, query) -> list[int]:
    """Return the number of items above each relevant one, nearest first."""
    return [n for n, row in enumerate(rows) if labels[row] == labels[query]]


def test_search_ranks_all_cub_test_photos_as_score_does():
    if not FEATURES.exists():
        pytest.skip(f"{FEATURES.name} is not available")
    with np.load(FEATURES) as stored:
        test = stored["labels"] >= 100
        # Every eighth dimension: all photos and near ties in an eighth of the time.
        vectors = np.ascontiguousarray(stored["features"][test][:, ::8].astype(np.float32))
        labels, ids = stored["labels"][test], stored["paths"][test].tolist()
    index = nk.Index(vectors, ids, labels)
    assert len(index) == 5924
    scores = nk.score(vectors, labels)
    rows, _ = index.search_many(vectors, 9)
    others = np.array([row[row != own][:8] for own, row in enumerate(rows)])
    for k in (1, 2, 4, 8):
        np.testing.assert_array_equal((labels[others[:, :k]] == labels[:, None]).any(1), scores.per_query[f"R@{k}"])
    ranking = nk.rank(vectors, labels)
    assert (ranking.size == 1).all()  # no ties, so every rank is unique
    for own in range(0, 5924, 400):
        hits = [hit.row for hit in index.search_item(ids[own], 5923)]
        assert relevant_ranks(hits, labels, own) == ranking.above[ranking.start[own] : ranking.start[own + 1]].tolist()
        assert hits[:8] == others[own].tolist()


def test_search_ranks_embedded_cub_photos_as_score_does(tmp_path):
    if not CUB.exists():
        pytest.skip(f"{CUB.name} is not available")
    folders = sorted((CUB / "images").iterdir())[100:104]
    paths = [path for folder in folders for path in sorted(folder.glob("*.jpg"))[:25]]
    labels = [path.parent.name for path in paths]
    model = nk.load(make_run(tmp_path, CUB, side=48).path)
    index = nk.Index.build(model, paths, labels)
    index.save(tmp_path / "index")
    index = nk.Index.load(tmp_path / "index", model)
    vectors = model.embed(paths)
    ranking, scores = nk.rank(vectors, labels), nk.score(vectors, labels)
    for own, path in enumerate(paths):
        hits = [hit.row for hit in index.search_item(str(path), len(paths))]
        assert relevant_ranks(hits, labels, own) == ranking.above[ranking.start[own] : ranking.start[own + 1]].tolist()
        assert float(labels[hits[0]] == labels[own]) == scores.per_query["R@1"][own]
    assert index.search(paths[40], 1)[0].id == str(paths[40])


def test_ties_are_broken_as_in_ranking():
    rng = np.random.default_rng(0)
    vectors = rng.integers(-1, 2, (300, 3)).astype(np.float32)  # many copies and parallel vectors
    labels = np.arange(300) % 7
    index = nk.Index(vectors, [str(n) for n in range(300)], labels)
    near, _ = nk.neighbours(vectors, k=20)
    ranking = nk.rank(vectors, labels)
    for own in range(0, 300, 5):
        hits = [hit.row for hit in index.search_item(str(own), 299)]
        assert hits[:20] == near[own].tolist()
        # Every relevant item is inside its group of ties.
        groups = slice(ranking.start[own], ranking.start[own + 1])
        inside = [
            rank
            for above, size in zip(ranking.above[groups], ranking.size[groups], strict=True)
            for rank in range(above, above + size)
        ]
        assert set(relevant_ranks(hits, labels, own)) <= set(inside)


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_near_pairs_against_every_pair():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(120, 5)).astype(np.float32)
    vectors[70:90] = vectors[20:40]  # copies
    vectors[95] = 0
    cosines = unit(np.where(vectors.any(1, keepdims=True), vectors, 1))
    cosines = cosines @ cosines.T
    cosines[95, :] = cosines[:, 95] = 0
    expected = {(i, j) for i in range(120) for j in range(i + 1, 120) if cosines[i, j] >= 0.9 - 1e-12}
    pairs, count = near_pairs(vectors, 0.9)
    assert {(i, j) for i, j, _ in pairs} == expected
    assert count == len(expected)
    assert [cosine for *_, cosine in pairs[:20]] == [1.0] * 20
    assert near_pairs(vectors, 0.9, max_pairs=5) == (pairs[:5], count)
    with pytest.raises(ConfigError, match="expected a cosine"):
        near_pairs(vectors, 3)


def test_a_collapsed_model_gives_all_pairs():
    pairs, count = near_pairs(np.ones((300, 4), np.float32), 0.99, max_pairs=10)
    assert (len(pairs), count) == (10, 300 * 299 // 2)


# --- open-set thresholds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("false_accept", [0, 0.01, 0.07, 0.1, 0.5, 0.99])
def test_the_threshold_is_the_lowest_with_the_false_accept_rate(false_accept):
    rng = np.random.default_rng(0)
    unknown, known = np.round(rng.normal(0.4, 0.1, 100), 2), rng.normal(0.7, 0.1, 50)  # rounded, for ties
    found = calibrate(known, unknown, false_accept)
    assert np.mean([found.accepts(s) for s in unknown]) <= false_accept
    lower = [s for s in unknown if s < found.value]
    if lower:
        assert np.mean(unknown > max(lower)) > false_accept
    assert found.true_accept == pytest.approx(np.mean(known > found.value))
    assert found.true_accept_interval[0] <= found.true_accept <= found.true_accept_interval[1]


def test_a_threshold_that_rejects_most_known_queries_names_the_rate_that_accepts_half():
    known, unknown = np.linspace(0, 1, 101), np.linspace(-0.3, 0.7, 101)
    found = calibrate(known, unknown, 0.01)
    assert found.half_rate == pytest.approx(np.mean(unknown > 0.5), abs=0.011)
    assert f"about half with --false-accept-rate {found.half_rate:.2f}" in str(found)
    again = calibrate(known, unknown, found.half_rate)
    assert again.true_accept == pytest.approx(0.5, abs=0.03)
    assert "called unknown" not in str(calibrate(known, unknown, 0.5))


@pytest.mark.slow
def test_the_false_accept_interval_holds_on_new_classes():
    """Classes differ by an offset; the interval covers the rate on a large new sample about as often as stated."""
    rng = np.random.default_rng(0)

    def draw(classes):
        codes = np.repeat(np.arange(classes), 20)
        return rng.normal(0, 1, classes)[codes] + rng.normal(0, 1, len(codes)), codes.tolist()

    inside = 0
    for _ in range(25):
        sims, classes = draw(40)
        found = calibrate(sims + 3, sims, 0.05, known_classes=classes, unknown_classes=classes)
        rate = np.mean(draw(4000)[0] > found.value)
        inside += found.false_accept_interval[0] <= rate <= found.false_accept_interval[1]
    assert inside >= 22


def test_leave_class_out_against_loops():
    vectors, labels = clustered(60, 5, 6, 0.5)
    labels = [*labels[:59].tolist(), 99]  # the last is a singleton
    queries = np.array([0, 5, 17, 40, 59])
    known, unknown = leave_class_out(vectors, labels, queries)
    cosines = unit(vectors) @ unit(vectors).T
    for n, q in enumerate(queries.tolist()):
        others = [cosines[q, j] for j in range(60) if j != q]
        foreign = [cosines[q, j] for j in range(60) if labels[j] != labels[q]]
        assert unknown[n] == pytest.approx(max(foreign), abs=1e-12)
        assert np.isnan(known[n]) if q == 59 else known[n] == pytest.approx(max(others), abs=1e-12)


def test_unknown_classes_are_rejected():
    vectors, labels = clustered(200, 16, 10, 0.3)
    index = nk.Index(vectors[:150], [str(n) for n in range(150)], [f"class {c}" for c in labels[:150]])
    threshold = index.calibrate(0.05)
    assert threshold.false_accept_interval[0] <= 0.05 <= threshold.false_accept_interval[1]
    known = [index.answer(v).known for v in vectors[150:]]
    assert np.mean(known) < 0.2
    assert np.mean([index.answer(vectors[r], exclude=r).known for r in range(150)]) > 0.95
    assert index.answer(vectors[0]).nearest == pytest.approx(1)


def test_items_without_a_label_are_searched_when_calibrating():
    """Search finds them too, so a rate measured without them would not hold."""
    rng = np.random.default_rng(0)
    vectors, labels = clustered(200, 8, 20, 0.4)
    unlabelled = rng.normal(size=(2000, 8)).astype(np.float32)
    names = [f"class {c}" for c in labels] + [None] * 2000
    index = nk.Index(np.concatenate([vectors, unlabelled]), [str(n) for n in range(2200)], names)
    index.calibrate(0.05)
    assert np.mean([index.answer(v).known for v in rng.normal(size=(300, 8)).astype(np.float32)]) < 0.1
    # A class named "None" is not the same as no label.
    _, unknown = leave_class_out(np.eye(2, dtype=np.float32) + 1, ["None", None], np.array([0]))
    assert unknown[0] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5], [0.1], 1.0), "expected a fraction from 0 to below 1"),
        (([0.5], []), "unknown similarities"),
        (([np.nan], [0.1]), "known similarities: NaN"),
    ],
)
def test_invalid_similarities(arguments, message):
    with pytest.raises(UserError, match=message):
        calibrate(*arguments)


def test_calibration_needs_labels():
    vectors = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    with pytest.raises(DataError, match="at least two classes"):
        calibrate_items(vectors, ["a"] * 10, np.arange(10))
    with pytest.raises(DataError, match="at least two classes"):
        nk.Index(vectors, [str(n) for n in range(10)]).calibrate()
    with pytest.raises(DataError, match="expected one per similarity, got 1 for 2"):
        calibrate([0.1, 0.2], [0.1], known_classes=["a"])


# --- re-ranking ------------------------------------------------------------------------------------------------------


def slow_k_reciprocal(query, near, k1, k2, weight):
    """Follow the definition, set by set."""
    points = unit(np.concatenate([query[None], near]))
    n = len(points)
    d = [[1 - float(points[i] @ points[j]) for j in range(n)] for i in range(n)]
    order = [[i, *sorted((j for j in range(n) if j != i), key=lambda j, i=i: (d[i][j], j))] for i in range(n)]

    def mutual(i, k):
        return {j for j in order[i][: k + 1] if i in order[j][: k + 1]}

    weights = []
    for i in range(n):
        own = mutual(i, k1)
        wide = set(own)
        for j in own:
            other = mutual(j, round(k1 / 2))
            if len(other & own) >= 2 / 3 * len(other) - 1e-9:
                wide |= other
        total = sum(np.exp(-(d[i][j] if j != i else 0.0)) for j in wide)
        weights.append([np.exp(-(d[i][j] if j != i else 0.0)) / total if j in wide else 0.0 for j in range(n)])
    smooth = [[sum(weights[m][j] for m in order[i][:k2]) / len(order[i][:k2]) for j in range(n)] for i in range(n)]
    out = []
    for i in range(1, n):
        low = sum(min(a, b) for a, b in zip(smooth[0], smooth[i], strict=True))
        high = sum(max(a, b) for a, b in zip(smooth[0], smooth[i], strict=True))
        out.append((1 - weight) * (1 - low / high) + weight * d[0][i])
    return out


@pytest.mark.parametrize(("k1", "k2", "weight"), [(4, 2, 0.3), (1, 1, 0.0), (6, 3, 1.0), (50, 50, 0.5), (5, 1, 0.1)])
def test_k_reciprocal_against_sets(k1, k2, weight):
    rng = np.random.default_rng(k1)
    near = rng.normal(size=(15, 4)).astype(np.float32)
    query = rng.normal(size=4).astype(np.float32)
    found = k_reciprocal(query, near, k1=k1, k2=k2, weight=weight)
    np.testing.assert_allclose(found, slow_k_reciprocal(query, near, k1, k2, weight), atol=1e-12)


def test_expansion_against_a_loop():
    rng = np.random.default_rng(0)
    query, near = rng.normal(size=6).astype(np.float32), rng.normal(size=(4, 6)).astype(np.float32)
    cosines = unit(near) @ unit(query)
    total = unit(query).copy()
    for cosine, item in zip(cosines, unit(near), strict=True):
        if cosine > 0:
            total += cosine**3 * item
    np.testing.assert_allclose(expanded(query, near, cosines, 3.0), unit(total), atol=1e-7)


def test_re_ranking_returns_plain_cosines():
    vectors, _ = clustered(80, 6, 8, 0.8)

    def find(query, k):
        rows, cosines = nearest(query[None], vectors, k)
        return rows[0], cosines[0]

    plain = find(vectors[3], 80)
    for option in (Expansion(k=4), Reciprocal(k1=5, k2=2, depth=30)):
        rows, cosines = apply_rerank(vectors[3], vectors, 10, option, find)
        assert len(set(rows.tolist())) == 10
        np.testing.assert_allclose(cosines, unit(vectors[rows]) @ unit(vectors[3]), atol=1e-12)
    # With all weight on the cosine distance, or with depth 1, the order stays the same.
    assert apply_rerank(vectors[3], vectors, 10, Reciprocal(weight=1.0), find)[0].tolist() == plain[0][:10].tolist()
    assert apply_rerank(vectors[3], vectors, 1, Reciprocal(depth=1), find)[0].tolist() == plain[0][:1].tolist()


@pytest.mark.slow
def test_re_ranking_is_selected_only_if_it_helps():
    # Elongated classes: neighbours of neighbours are of the class where the query's own are not.
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 20)
    centres = rng.normal(size=(12, 24))
    stretched = (
        centres[labels] + np.linspace(-2.0, 2.0, 20)[np.arange(240) % 20, None] * rng.normal(size=(12, 24))[labels]
    )
    vectors = (stretched + 0.35 * rng.normal(size=(240, 24))).astype(np.float32)
    options = (Expansion(k=3), Reciprocal(k1=8, k2=3, depth=60))
    choice = choose_rerank(vectors, labels.tolist(), options)
    assert choice.option is not None
    gain = dict(choice.gains)[choice.option]
    assert gain.low > 0
    assert gain.first == pytest.approx(nk.score(vectors, labels)["MAP@R"], abs=1e-12)
    assert choose_rerank(vectors, labels.tolist(), options, metric="R@1").gains[0][1].first == pytest.approx(
        nk.score(vectors, labels)["R@1"]
    )
    shuffled = choose_rerank(vectors, rng.permutation(labels).tolist(), options)
    assert shuffled.option is None
    assert "re-ranking: none (no significant gain)" in str(shuffled)


def test_an_index_applies_and_saves_re_ranking(tmp_path):
    vectors, labels = clustered(60, 8, 6, 0.6)
    index = nk.Index(vectors, [str(n) for n in range(60)], labels)
    index.rerank = Reciprocal(k1=6, k2=2, depth=20)
    index.save(tmp_path / "index")
    again = nk.Index.load(tmp_path / "index")
    assert again.rerank == index.rerank
    moved = 0
    for n in range(60):
        ranked, plain = again.search_item(str(n), 5), again.search_item(str(n), 5, exact=True)
        assert str(n) not in {hit.id for hit in ranked}
        moved += ranked != plain
    assert moved > 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Expansion(k=0), "expected k >= 1"),
        (lambda: Reciprocal(weight=2), r"weight in \[0, 1\]"),
        (lambda: choose_rerank(np.ones((4, 2), np.float32), ["a"] * 4), "at least two classes"),
        (lambda: choose_rerank(np.ones((4, 2), np.float32), ["a", "a", "b", "b"], metric="R@7"), "expected 'MAP@R'"),
    ],
)
def test_invalid_re_ranking(make, message):
    with pytest.raises(UserError, match=message):
        make()
