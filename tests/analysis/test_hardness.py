"""Hard classes, confusions and hubs on sets small enough to verify by hand."""

import numpy as np
import pytest

import nearkin as nk
from nearkin.analysis.hardness import class_table, confused_pairs, hardest, hubness, hubs
from nearkin.errors import ConfigError
from nearkin.metrics.ranking import neighbours
from nearkin.metrics.scores import Scores

# Two cats near each other, one cat among the dogs, two dogs, one bird (a singleton).
X = np.array([[1.0, 0.0], [1.0, 0.05], [0.1, 1.0], [0.0, 1.0], [0.05, 1.0], [-1.0, -1.0]])
LABELS = ["cat", "cat", "cat", "dog", "dog", "bird"]


def test_class_table_is_sorted_hardest_first():
    rows = class_table(nk.score(X, LABELS), ("R@1",))
    assert [(r.label, r.queries) for r in rows] == [("bird", 1), ("dog", 2), ("cat", 3)]
    assert [r.means["R@1"] for r in rows] == pytest.approx([0.0, 0.5, 2 / 3])
    rows = class_table(nk.score(X, LABELS), ("MAP@R",))
    assert rows[-1].label == "bird"  # excluded by the metric: last
    with pytest.raises(ConfigError):
        class_table(nk.score(X, LABELS), ())


def test_confused_pairs_and_hubs():
    index, _ = neighbours(X, k=1)
    assert index.ravel().tolist()[:5] == [1, 0, 4, 4, 2]
    pairs = confused_pairs(index, LABELS)
    assert {(p.label, p.taken_for, p.count) for p in pairs} == {
        ("cat", "dog", 1),
        ("dog", "cat", 1),
        ("bird", "cat", 1),
    }
    assert next(p for p in pairs if p.label == "cat").share == pytest.approx(1 / 3)
    assert confused_pairs(index, LABELS, top=1) == pairs[:1]
    first = hubs(index, LABELS)[0]
    assert (first.item, first.lists, first.wrong) == (0, 2, 1)
    assert hubness([[0], [0], [0], [0]], items=4) > 1
    with pytest.raises(ConfigError, match="neighbours: expected integer"):
        hubs(X, LABELS)


def test_confused_pairs_of_a_gallery():
    pairs = confused_pairs([[0], [1]], ["cat", "cat"], ["dog", "cat"])
    assert [(p.label, p.taken_for, p.count, p.share) for p in pairs] == [("cat", "dog", 1, 0.5)]


def test_hardest_queries():
    values = {"MAP@R": np.array([0.5, np.nan, 0.0, 0.0, 1.0]), "MRR": np.array([1.0, np.nan, 0.2, 0.1, 1.0])}
    assert hardest(Scores(values, np.arange(5))).tolist() == [3, 2, 0, 4]
    assert hardest(Scores(values, np.arange(5)), top=1).tolist() == [3]


@pytest.mark.parametrize("index", [-1, 3])
def test_indices_outside_the_gallery_raise(index):
    for call in (lambda n: confused_pairs(n, [0, 1, 1]), lambda n: hubs(n, [0, 1, 1]), lambda n: hubness(n, 3)):
        with pytest.raises(ConfigError, match="indices of 3 items"):
            call([[1], [0], [index]])
