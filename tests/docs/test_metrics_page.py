"""The code of docs/metrics.md and of the docstrings runs and says what is claimed."""

import doctest
import re

import pytest
from helpers.paths import ROOT

from nearkin.analysis import hardness
from nearkin.metrics import _problem, clustering, ranking, retrieval, scores

PAGE = ROOT / "docs" / "metrics.md"


def test_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 6
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert "40 queries of 4 classes, cosine" in out
    assert "difference" in out
    nk, np = names["nk"], names["np"]
    scores = nk.score(names["collapsed"], np.repeat([0, 1], [900, 100]))
    assert round(scores["R@1"], 4) == 0.8198
    assert scores.bounds("R@1") == (0.0, 1.0)
    assert names["nmi"](names["labels_of_pairs"], names["random"]) == pytest.approx(0.9, abs=0.05)
    assert names["ami"](names["labels_of_pairs"], names["random"]) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("module", [_problem, clustering, hardness, scores, ranking, retrieval])
def test_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
