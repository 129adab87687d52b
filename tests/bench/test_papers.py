"""Published values: against the texts, against the golden values, and for consistency."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from helpers.paths import GOLDEN, SHARED

from nearkin.bench import papers
from nearkin.bench.papers import published
from nearkin.errors import ConfigError

TEXTS = {"ice": "000_*", "cross_entropy": "001_*", "thesis": "002_*", "mpa": "003_*"}


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def texts():
    if not (SHARED / "papers").is_dir():
        pytest.skip(f"{SHARED / 'papers'} is missing")
    paths = {name: next((SHARED / "papers").glob(pattern)) for name, pattern in TEXTS.items()}
    return {name: path.read_text(encoding="utf-8").splitlines() for name, path in paths.items()}


def values_by_row():
    """Return printed values by table row, in the order of the columns."""
    rows = defaultdict(list)
    for p in papers.all_values():
        rows[p.paper, p.table, p.dataset, p.method, p.distance, p.variant].append(p)
    return rows


def test_every_row_is_in_the_text_of_its_paper(texts):
    # Dashes, reference marks and stray digits of a split column may separate two values.
    squeezed = {name: [re.sub(r"\s|\\pm", "", line) for line in lines] for name, lines in texts.items()}
    for key, values in values_by_row().items():
        paper, table, *_ = key
        digits = 2 if paper == "thesis" and table != "text of 4.1" else 1
        shown = [f"{p.printed:.{digits}f}" + (f"{p.spread:.2f}" if p.spread else "") for p in values]
        pattern = ".{0,3}".join(map(re.escape, shown))
        name = re.escape(papers._bare_name(values[0].method).replace(" ", ""))
        if paper == "cross_entropy" or values[0].variant:
            name = ""  # the method is not on the line of its values
        elif paper in ("ice", "thesis") and "text" in table:
            name, pattern = "", rf"{values[0].printed:g}0?"
        lines = [line for line in squeezed[paper] if shown[0] in line]
        assert any(re.search(rf"{name}.*{pattern}", line) for line in lines), key


def test_number_of_values():
    counts = Counter((p.paper, p.table) for p in papers.all_values())
    for table in ("6", "7", "8", "9", "10", "20", "21"):
        assert [counts["thesis", table + part] for part in "abcd"] == [40] * 4
    assert [counts["thesis", table] for table in ("17", "18", "19")] == [44] * 3
    assert [counts["thesis", table] for table in ("12", "13", "14", "16")] == [3, 20, 8, 3]
    # From the layout of its table 4: 12 + 12 rows of 6, 10 of 4, 10 of 6, minus the dashes.
    assert counts["cross_entropy", "4"] == 72 - 13 + 72 - 13 + 40 - 2 + 60 - 8
    assert [counts["mpa", table] for table in "45678"] == [8 * 4 + 5 * 8] * 2 + [5 * 3 + 5 * 6] + [20, 20]


def test_scores_of_the_tournament_against_golden_values(golden):
    names = golden["S2_table11"]["names"]
    for table, scores in golden["S2_table11"]["r1_scores"].items():
        part = [p for p in published(paper="thesis") if p.table == table]
        printed = {p.method: p.printed for p in part}
        assert [printed[name] for name in names] == scores


def test_folds_and_validation_shares(golden):
    folds = [p for p in published(paper="thesis") if p.table == "13"]
    assert [p.printed for p in folds] == golden["S2_table13"]["test"]
    assert [p.variant for p in folds] == [f"fold {i}" for i in range(1, 11)]
    assert np.mean([p.printed for p in folds]) == pytest.approx(63.605)
    assert np.std([p.printed for p in folds], ddof=1) == pytest.approx(0.595, abs=5e-4)
    best = [p for p in published(paper="thesis", split="validation") if p.table == "13"]
    assert len(best) == 10
    assert all(p.printed > 94 for p in best)
    shares = {p.variant: p.printed for p in published(paper="thesis") if p.table == "14"}
    assert shares == {"70/30": 61.28, "80/20": 62.74, "90/10": 64.38, "95/5": 62.92}


def test_recall_increases_with_k_except_where_noted():
    decreasing = set()
    for key, values in values_by_row().items():
        recall = [p for p in values if p.metric.startswith("R@") and p.split == "test"]
        recall.sort(key=lambda p: int(p.metric.removeprefix("R@")))
        for low, high in pairwise(recall):
            if high.printed < low.printed:
                decreasing.add((key[1], high.metric))
                assert high.note
                assert high.percent is None or high.percent >= low.printed
    assert decreasing == {("10b", "R@10"), ("10d", "R@1000")}
    arcface = {(p.table, p.metric): p for p in published(loss="arcface", dataset="sop", metric=None)}
    assert [arcface["10b", f"R@{k}"].percent for k in (1, 10, 100, 1000)] == [73.14, None, None, None]
    assert arcface["10d", "R@1000"].printed == 34.27
    assert arcface["10d", "R@1000"].percent == 94.27


def test_differing_quotes_have_a_note():
    quoted = defaultdict(list)
    for p in papers.all_values():
        if not p.own and p.paper != "thesis":
            quoted[p.dataset, p.loss or papers._bare_name(p.method), p.metric].append(p)
    differ = [values for values in quoted.values() if len({p.printed for p in values}) > 1]
    assert len(differ) == 13
    assert all(p.note for values in differ for p in values)


def test_reprinted_tables():
    reprints = [p for p in papers.all_values() if p.repeats]
    assert len(reprints) == 3 * 40
    for p in reprints:
        original = [q for q in papers.all_values() if (q.paper, q.table) == (p.paper, p.repeats)]
        assert [(q.printed, q.dataset) for q in original if (q.method, q.metric) == (p.method, p.metric)] == [
            (p.printed, p.dataset)
        ]


def test_losses_are_registered():
    from nearkin.losses import LOSSES

    assert {p.loss for p in papers.all_values() if p.loss} <= set(LOSSES)
    unmapped = {papers._bare_name(p.method) for p in papers.all_values() if not p.loss}
    assert unmapped == {"HTL", "ABE", "HDC", "DREML", "EPSHN", "D&C", "Clusteing"}
    for row in papers.table_15():
        if row.setting not in ("epsilon", "class_lr"):  # settings of the miner and of training
            assert row.setting in LOSSES[row.loss].settings


@pytest.mark.parametrize(
    ("filters", "values"),
    [
        ({"dataset": "cub", "loss": "proxy_anchor", "network": "resnet50", "dim": 512}, [69.48]),
        ({"dataset": "CUB", "loss": "ProxyAnchor", "network": "ResNet-50", "dim": 512}, [69.48]),
        ({"dataset": "cars", "loss": "softmax", "own": True}, [89.1, 89.3]),
        ({"dataset": "inshop", "loss": "multi_similarity", "metric": "R@50"}, [99.2]),
        ({"dataset": "cub", "loss": "mpa_ap", "metric": "nDCG@8"}, [61.3]),
        ({"dataset": "sop", "loss": "mpa", "metric": "MAP@R"}, [49.6]),
        ({"dataset": "sop", "loss": "ice"}, [77.3]),
        ({"dataset": "cub", "loss": "proxy_repulsion_batch"}, [65.42]),
        ({"dataset": "cub", "loss": "HDC", "own": False}, [60.7, 53.6]),
        ({"dataset": "glyphs"}, []),
        ({"loss": "spce"}, []),
        ({"loss": ""}, []),
    ],
)
def test_published(filters, values):
    assert [p.printed for p in published(**filters)] == values


def test_attributes_of_a_value():
    (value,) = published(dataset="cub", loss="soft_triple", paper="thesis", dim=512, own=True)[-1:]
    assert (value.source, value.own) == ("thesis, table 16", True)
    assert "66.76" in value.note
    (value,) = published(dataset="cub", loss="mpa", metric="MAP@R")
    assert (value.network, value.dim, value.setup[:18]) == ("bn_inception", 512, "mean of three runs")
    (value,) = published(dataset="cub", loss="lifted_song")
    assert (value.own, value.network, value.dim, value.distance) == (False, "googlenet", None, "euclidean")


def test_table_11_and_its_misprints(golden):
    by_name = golden["S2_table11"]["rows"]
    for row in papers.table_11():
        assert [row.total, row.mean, row.std] == by_name[row.method]["printed"]
        assert row.total == by_name[row.method]["total"]
        assert row.corrected_mean == pytest.approx(by_name[row.method]["mean"], abs=5e-3)
        assert row.corrected_std == pytest.approx(by_name[row.method]["std_sample"], abs=5e-3)
        wrong = (row.mean, row.std) != (row.corrected_mean, row.corrected_std)
        assert wrong == bool(row.note)
    assert [row.loss for row in papers.table_11() if row.note] == ["soft_triple", "lifted_structure", "triplet"]


def test_table_15():
    best = {(row.loss, row.setting): row.best for row in papers.table_15()}
    assert [best["multi_similarity", s] for s in ("base", "alpha", "beta", "epsilon")] == [0.8, 18, 76, 0.4]
    assert [best["soft_triple", s] for s in ("margin", "scale", "class_lr", "gamma", "tau")] == [0.4, 78, 5e-5, 58, 0.4]
    assert [best["proxy_anchor", s] for s in ("margin", "alpha")] == [0.1, 32]
    steps = {(row.loss, row.setting): (row.best - row.low) / row.step for row in papers.table_15()}
    assert [key for key, count in steps.items() if abs(count - round(count)) > 1e-6] == [("soft_triple", "gamma")]


def test_gaps_and_papers():
    assert [(gap.paper, gap.table) for gap in papers.gaps()] == [("ice", "2"), ("ice", "3")]
    assert set(papers.papers()) == set(TEXTS)
    assert {p.paper for p in papers.all_values()} == set(TEXTS)


def test_unusable_values_count_as_failed():
    results = papers.thesis_results("sop", "R@100")
    (failed,) = [r for r in results if r.value is None]
    assert failed.method == "arcface"
    assert "Not believable" in failed.reason
    assert len(papers.thesis_results("cars")) == 120
    with pytest.raises(ConfigError, match="Available: cub, cars, sop"):
        papers.thesis_results("inshop")
    with pytest.raises(ConfigError, match=r"no R@3 for cub. Available: R@1, R@2, R@4, R@8"):
        papers.thesis_results("cub", "R@3")


def modules_after(code):
    process = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(process.stdout.split())


def test_imports_are_lightweight():
    loaded = modules_after(
        "import nearkin.bench.papers, nearkin.cli.bench\nimport nearkin.report.tables, nearkin.report.tournament"
    )
    assert not loaded & {"torch", "scipy", "matplotlib", "rich", "tyro", "pandas"}
    assert "numpy" not in modules_after("import nearkin.bench, nearkin.cli.bench")
