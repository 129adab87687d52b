"""`nearkin tournament`: reading CSV and JSON; writing Markdown, LaTeX, CSV, PNG and SVG; the command."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT

from nearkin.bench import papers
from nearkin.bench.results import Result, read_results
from nearkin.bench.tournament import run_tournament
from nearkin.cli.tournament import run as tournament
from nearkin.errors import UserError
from nearkin.report import tables
from nearkin.report.tournament import draw_critical_difference, pairs_csv, ranks_csv, standings_csv, standings_grid

pytest.importorskip("scipy", reason="the extra bench is not installed")
pytest.importorskip("matplotlib", reason="the extra images is not installed")

ODD = "a_b & 50% [red] | #1 $x$"


def make_results(methods, experiments=8, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Result(f"x{e}", name, 0, round(float(60 - 2 * k + rng.normal(0, 1)), 2))
        for e in range(experiments)
        for k, name in enumerate(methods)
    ]


@pytest.fixture(scope="module")
def ranked():
    return run_tournament(make_results([ODD, "b", "c"]))


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def csv_rows(results):
    return [{**vars(r), "value": "" if r.value is None else r.value, "reason": r.reason or ""} for r in results]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_csv_and_json_give_the_same_results(tmp_path):
    results = [*make_results(["a", "b"]), Result("x8", "a", 3, None, "went NaN, epoch 2"), Result("x8", "b", 3, 0.5)]
    csv_file = write_csv(tmp_path / "r.csv", csv_rows(results))
    json_file = tmp_path / "r.JSON"
    json_file.write_text(json.dumps([vars(r) for r in results]))
    assert read_results(csv_file) == results
    assert read_results(json_file) == results


def test_seed_and_reason_are_optional(tmp_path):
    path = tmp_path / "r.csv"
    path.write_bytes('\ufeffexperiment,method,value\r\n"x\n",  a ,1.5\r\nx,b,\r\ny,b,nan\r\n'.encode())
    first, second, third = read_results(path)
    assert first == Result("x", "a", 0, 1.5)
    assert second == Result("x", "b", 0, None, "no reason given")
    assert third == Result("y", "b", 0, None, "the value is nan")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.csv", None, "no such file or folder. Expected 'papers'"),
        ("r.txt", "x", "expected a .csv or .json file"),
        ("r.csv", "", "the column 'experiment' is missing; found none"),
        ("r.csv", "experiment,method,value\n", "contains no results"),
        ("r.csv", "experiment,method,score\nx,a,1\n", "unknown column 'score'"),
        ("r.csv", "experiment,methods,value\nx,a,1\n", "Did you mean 'method'?"),
        ("r.csv", "experiment,value\nx,1\n", "the column 'method' is missing; found experiment, value"),
        ("r.csv", "experiment,method,value\nx,a,high\n", "line 2: value: expected a number, got 'high'"),
        ("r.csv", "experiment,method,value\nx,a,1,2\n", "line 2: more cells than the header has columns"),
        ("r.csv", "experiment,method,value,seed\nx,a,1,0.5\n", "seed: expected an integer, got '0.5'"),
        ("r.csv", "experiment,method,value,seed\nx,a,1,inf\n", "seed: expected an integer, got 'inf'"),
        ("r.csv", "experiment,method,value,reason\nx,a,1,oom\n", "line 2: x, a, seed 0: both a value (1)"),
        ("r.csv", "experiment,method,value\nx,,1\n", "needs an experiment and a method"),
        ("r.json", "{", "not a valid json file"),
        ("r.json", "{}", "expected a list of objects"),
        ("r.json", '[{"experiment": "x", "method": "a", "value": [1]}]', "entry 1: value: expected a number"),
        ("r.json", '[{"experiment": "x", "method": "a", "value": true}]', "expected a number, got 'True'"),
    ],
)
def test_invalid_files(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        tournament([str(path)])
    assert len(str(caught.value).splitlines()) <= 2


def test_large_seeds_are_exact(tmp_path):
    rows = [f"x,a,{seed},1.5" for seed in (2**60, 2**60 + 1, "3.0")]
    (tmp_path / "r.csv").write_text("\n".join(["experiment,method,seed,value", *rows]))
    assert [result.seed for result in read_results(tmp_path / "r.csv")] == [2**60, 2**60 + 1, 3]


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "r.csv"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError, match="not a valid csv file"):
        read_results(path)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_markdown_and_latex_survive_odd_names(ranked):
    grid = standings_grid(ranked)
    lines = tables.markdown(grid).splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(grid.head) + 1}
    assert len(lines) == 5
    tex = tables.latex(grid)
    assert r"a\_b \& 50\% [red] | \#1 \$x\$ &" in tex
    assert tex.count(r"\\") == 4
    assert "\n{}[a] &" in tables.latex(standings_grid(run_tournament(make_results(["[a]", "b"]))))
    body = tex[tex.index("\\toprule") :]
    assert len(re.findall(r"(?<!\\)&", body)) == 4 * (len(grid.head) - 1)


def test_csv_has_full_precision(ranked):
    rows = list(csv.DictReader(io.StringIO(standings_csv(ranked))))
    assert [row["method"] for row in rows] == [s.method for s in ranked.standings]
    assert [float(row["std"]) for row in rows] == [s.std for s in ranked.standings]
    pairs = list(csv.DictReader(io.StringIO(pairs_csv(ranked))))
    assert [float(row["p_holm"]) for row in pairs] == [p.p_holm for p in ranked.pairs]
    ranks = list(csv.DictReader(io.StringIO(ranks_csv(ranked))))
    assert [float(row[ODD]) for row in ranks] == ranked.ranks[:, 0].tolist()


def test_standings_show_failures_only_if_there_are_any(ranked):
    assert "failed" not in standings_grid(ranked).head
    with_failure = run_tournament(
        [*make_results(["a", "b"]), Result("x8", "a", 0, None, "oom"), Result("x8", "b", 0, 50.0)]
    )
    grid = standings_grid(with_failure)
    assert grid.head[-2:] == ("ranked", "failed")
    assert {row[0]: row[-2:] for row in grid.rows} == {"a": ("8/9", "1"), "b": ("9/9", "0")}


def test_diagram(ranked, tmp_path):
    png, svg = (
        draw_critical_difference(ranked, tmp_path / "sub" / "d.png"),
        draw_critical_difference(ranked, tmp_path / "d.svg"),
    )
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    again = draw_critical_difference(ranked, tmp_path / "again.svg")
    assert again.read_bytes() == svg.read_bytes()
    with pytest.raises(UserError, match=r"expected a .png or .svg file, got '.pdf'"):
        draw_critical_difference(ranked, tmp_path / "d.pdf")
    with pytest.raises(UserError, match="needs at least two experiments"):
        draw_critical_difference(run_tournament(make_results(["a", "b"], experiments=1)), tmp_path / "d.png")


@pytest.mark.parametrize("count", [2, 3, 25])
def test_diagram_of_few_and_many_methods(count, tmp_path):
    ranked = run_tournament(make_results([f"method_number_{i}" for i in range(count)], experiments=4), draws=100)
    assert draw_critical_difference(ranked, tmp_path / "d.png").stat().st_size > 5000


# --- the command -----------------------------------------------------------------------------------------------------


def test_papers(capsys, tmp_path):
    tournament(["papers", "--out", str(tmp_path / "t"), "--pairs"])
    out = capsys.readouterr().out
    assert re.search(r"soft_triple +38 +3.17 +1.19 +0 +5 +2", out)
    assert "proxy_anchor is better than all others." in out
    assert re.search(r"soft_triple +arcface +10-2 +2.13 +0.088", out)
    assert max(map(len, out.splitlines()[:70])) <= 150
    names = [Path(line).name for line in out.splitlines() if line.startswith(str(tmp_path))]
    assert names == [
        *("tournament.md", "standings.csv", "pairs.csv", "ranks.csv", "standings.tex", "pairs.tex"),
        *("critical_difference.png", "critical_difference.svg"),
    ]
    assert all((tmp_path / "t" / name).stat().st_size for name in names)


def test_other_tables_of_the_papers(capsys):
    tournament(["papers", "--dataset", "sop", "--metric", "R@10"])
    out = capsys.readouterr().out
    assert (
        "arcface: 1 of 4 runs failed (first: thesis, table 10b: sop bn_inception 128, seed 0: thesis, table 10b" in out
    )
    assert "3 of 4 experiments have a value for every method; without arcface it would be 4." in out


def test_results_from_a_file(capsys, tmp_path):
    results = [*make_results([ODD, "b", "c"]), Result("x0", "c", 1, None, "out of memory")]
    tournament([str(write_csv(tmp_path / "r.csv", csv_rows(results)))])
    out = capsys.readouterr().out
    assert ODD in out
    assert "c: 1 of 9 runs failed (first: x0, seed 1: out of memory)." in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "missing argument: 'papers', the folder of a study, or a .csv or .json file"),
        (["papers", "--alpa", "0.1"], "Did you mean '--alpha'?"),
        (["papers", "--alpha", "2"], "alpha: expected a fraction"),
        (["papers", "--dataset", "inshop"], "Available: cub, cars, sop"),
        (["papers", "--metric", "R@3"], "Available: R@1, R@2"),
        (["r.csv", "--metric", "R@1"], "--metric: a file is ranked by its own values"),
    ],
)
def test_errors_have_a_fix(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.csv").touch()
    with pytest.raises(UserError, match=re.escape(message)):
        tournament(argv)


def test_a_folder_that_cannot_be_write_csv(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="taken: cannot write the tables"):
        tournament(["papers", "--out", str(tmp_path / "taken"), "--draws", "100"])


def test_help(capsys):
    with pytest.raises(SystemExit) as exited:
        tournament(["--help"])
    assert not exited.value.code
    assert "nearkin tournament papers" in capsys.readouterr().out


# --- the documentation -----------------------------------------------------------------------------------------------


def test_documentation_shows_the_computed_values():
    page = (ROOT / "docs" / "tournament.md").read_text(encoding="utf-8")
    ranked = run_tournament(papers.thesis_results())
    standings = {s.method: s for s in ranked.standings}
    for row in papers.table_11():
        s = standings[row.loss]
        cells = [f"`{row.loss}`", f"{s.total:g}", f"{row.mean:g}", f"{s.mean:.2f}", f"{row.std:g}", f"{s.std:.2f}"]
        line = next(line for line in page.splitlines() if line.startswith(f"| `{row.loss}` |"))
        assert [cell.strip(" *") for cell in line.strip("| ").split("|")][:6] == cells
        wrong = (row.mean, row.std) != (row.corrected_mean, row.corrected_std)
        assert ("**" in line) == wrong
    pair = next(p for p in ranked.pairs if (p.first, p.second) == ("soft_triple", "multi_similarity"))
    assert f"about {pair.more_experiments} more experiments" in page
    assert f"{sum(p.significant for p in ranked.pairs)} of the {len(ranked.pairs)} pairs " in page
    image = ROOT / "docs" / "images" / "critical_difference.png"
    assert image.stat().st_size < 100_000
