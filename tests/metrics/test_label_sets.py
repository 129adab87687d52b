"""Several labels per item, and levels of a hierarchy, against a float64 loop over the pairs."""

import numpy as np
import pytest
import torch

import nearkin as nk
from nearkin.metrics import rank, score_levels


def expected(x, labels, gallery=None, gallery_labels=None):
    """R@1, RP and MAP@R of every query whose relevant items share a label with it; NaN without any."""
    own = gallery is None
    g, g_labels = (x, labels) if own else (gallery, gallery_labels)
    rows = []
    for i, vector in enumerate(x):
        others = [j for j in range(len(g)) if not (own and j == i)]
        cosine = [vector @ g[j] / np.linalg.norm(vector) / np.linalg.norm(g[j]) for j in others]
        hits = [(labels[i] & g_labels[others[k]]).any() for k in np.argsort(cosine)[::-1]]
        total = sum(hits)
        precision = [sum(hits[: k + 1]) / (k + 1) * hits[k] for k in range(total)]
        rows.append([float(hits[0]), sum(hits[:total]) / total, sum(precision) / total] if total else [np.nan] * 3)
    return np.array(rows)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(150, 5)), rng.random((150, 7)) < 0.15  # some rows have no label


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, lambda labels: labels.tolist()])
def test_items_that_share_a_label_are_relevant(data, kind):
    x, labels = data
    scores = nk.score(x, kind(labels), ks=(1,), singletons="exclude")
    want = expected(x, labels)
    assert np.isnan(want).any()
    for column, name in enumerate(("R@1", "RP", "MAP@R")):
        np.testing.assert_allclose(scores.per_query[name], want[:, column], atol=1e-12)
    assert scores.interval("R@1")[0] < scores["R@1"] < scores.interval("R@1")[1]
    assert np.array_equal(rank(x, labels).total, (labels.astype(int) @ labels.T > 0).sum(1) - labels.any(1))


def test_a_query_against_a_gallery(data):
    x, labels = data
    split = x[:60], labels[:60], x[60:], labels[60:]
    scores = nk.score(*split, ks=(1,), singletons="exclude")
    np.testing.assert_allclose(scores.per_query["MAP@R"], expected(*split)[:, 2], atol=1e-12)


def test_a_ranking_larger_than_the_memory_gives_the_same_scores(data):
    x, _ = data
    labels = np.random.default_rng(1).random((150, 7)) < 0.5
    in_parts, whole = nk.score(x, labels, memory="1MB"), nk.score(x, labels)
    assert in_parts.per_query.ranking is None
    assert in_parts.means() == whole.means()


def test_one_label_each_is_the_usual_case(data):
    x, _ = data
    labels = np.arange(150) % 12
    several, one = nk.score(x, labels[:, None] == np.arange(12)), nk.score(x, labels)
    assert {name: several[name] for name in several} == {name: one[name] for name in one}
    assert set(several.classes) == {str(c) for c in range(12)}


def test_groups_are_excluded(data):
    x, labels = data
    alone = nk.score(x, labels, groups=np.arange(150))  # every item its own group: nothing else is excluded
    assert alone["MAP@R"] == nk.score(x, labels)["MAP@R"]
    assert np.isnan(nk.score(x, labels, groups=np.zeros(150, dtype=int), singletons="exclude")["R@1"])


def test_what_cannot_be_used_is_refused(data):
    x, labels = data
    with pytest.raises(nk.UserError, match="for levels of a hierarchy use score_levels"):
        nk.score(x, labels.astype(int))
    with pytest.raises(nk.UserError, match="nothing can match"):
        nk.score(x, labels, x, labels[:, :3])
    with pytest.raises(nk.UserError, match="nothing can match"):
        nk.score(x, labels, x, np.arange(150))
    with pytest.raises(nk.UserError, match="takes one label per row"):
        nk.score(x, labels, backend="numba")
    with pytest.raises(nk.UserError, match="140 labels for 150 rows"):
        nk.score(x, labels[:140])
    for wrong in (labels, np.arange(150)):
        with pytest.raises(nk.UserError, match="expected a column per level"):
            score_levels(x, wrong)
    with pytest.raises(nk.UserError, match="gallery_labels: expected a column per level"):
        score_levels(x, np.ones((150, 2), dtype=int), x, np.ones((150, 3), dtype=int))


def test_levels_of_a_hierarchy(data):
    x, _ = data
    fine = np.arange(150) % 30
    levels = np.stack([fine, fine // 5], axis=1)
    got = score_levels(x, torch.as_tensor(levels), ks=(1, 10))
    want = [nk.score(x, levels[:, level], ks=(1, 10)) for level in range(2)]
    assert [s.means() for s in got] == [s.means() for s in want]
    assert len(score_levels(x[:50], levels[:50], x[50:], levels[50:])) == 2
