"""The tables and figures of the four papers as studies: their plans, their tables, and a rehearsal of each."""

import csv
import json
from dataclasses import replace

import pytest
import torch
from helpers.paths import GOLDEN
from helpers.studies import small_study, write_features

from nearkin._common.progress import Reporter
from nearkin.bench import papers
from nearkin.bench.narrow import narrow, requirements
from nearkin.bench.paper_studies import paper_studies
from nearkin.bench.presets import find_study
from nearkin.bench.results import read_results
from nearkin.bench.study import Dataset
from nearkin.bench.trials import Outcome, StudyFolder, work
from nearkin.cli import main
from nearkin.cli.bench import _join_repeated
from nearkin.errors import ConfigError, DataError
from nearkin.losses import LOSSES, Objective
from nearkin.report import paper_computed, study_overview
from nearkin.report import study as study_page
from nearkin.report.paper_tables import paper_cells
from nearkin.report.study import build_study_report, write_study_figures
from nearkin.training import recipes

K8, SOP = "R@1 R@2 R@4 R@8", "R@1 R@10 R@100 R@1000"
MPA = "R@1 R@2 R@4 R@8 nDCG@2 nDCG@4 nDCG@8 MAP@R"
# The index of the papers' tables and figures, by hand: parts, rows of a part (with quoted ones), columns of each part.
INDEX = {
    "ice-table2": (1, 6, SOP),
    "ice-table3": (3, 12, f"{K8} {SOP}"),  # on SOP with the MS that its text quotes
    "ice-batch": (1, 6, "R@1"),
    "ice-size": (5, 1, "R@1"),
    "ce-table4": (4, 12, "R@1 R@2 R@4 R@8 R@16 R@32 R@10 R@100 R@1000 R@20 R@30 R@40 R@50"),
    "ce-spce": (2, 3, "R@1"),
    "thesis-table6": (4, 10, K8),
    "thesis-table7": (4, 10, K8),
    "thesis-table8": (4, 10, K8),
    "thesis-table9": (4, 10, K8),
    "thesis-table10": (4, 10, SOP),
    "thesis-table20": (4, 10, K8),
    "thesis-table21": (4, 10, K8),
    "thesis-table12": (1, 3, "R@1"),
    "thesis-table13": (1, 10, "val:R@1 R@1"),
    "thesis-table14": (1, 4, "val:R@1 R@1"),
    "thesis-table16": (1, 3, "R@1"),
    "thesis-table17": (1, 12, K8),
    "thesis-table18": (1, 12, K8),
    "thesis-table19": (1, 12, SOP),
    "thesis-fig1": (1, 1, K8),
    "thesis-fig27": (1, 10, K8),
    "thesis-fig28": (4, 10, K8),
    "thesis-fig29": (4, 10, K8),
    "thesis-fig30": (4, 10, K8),
    "thesis-fig31": (3, 10, K8),
    "mpa-table4": (1, 13, MPA),
    "mpa-table5": (1, 13, MPA),
    "mpa-table6": (1, 10, "R@1 R@10 R@100 nDCG@10 nDCG@100 MAP@R"),
    "mpa-table7": (1, 5, "R@1 nDCG@2 nDCG@4 nDCG@8"),
    "mpa-table8": (1, 5, "R@1 nDCG@2 nDCG@4 nDCG@8"),
    "mpa-fig2": (1, 5, "R@1 nDCG@2 nDCG@4 nDCG@8"),
    "mpa-fig3": (1, 5, "R@1 nDCG@2 nDCG@4 nDCG@8"),
}
COMPUTED = {"ce-table2", "thesis-table11", "thesis-table15", "mpa-table1", "mpa-table3"}
FIGURES = {
    **{f"thesis-table{n}": {"bars", "sizes"} for n in (6, 7, 8, 9, 10, 20, 21)},
    **{f"thesis-table{n}": {"bars"} for n in (17, 18, 19)},
    **{f"mpa-table{n}": {"recall"} for n in (4, 5, 6)},
    **{key: {"variants"} for key in ("mpa-table7", "mpa-table8", "mpa-fig2", "mpa-fig3", "ice-table2")},
    **{key: {"recall"} for key in ("ice-table3", "ice-batch", "ce-table4")},
    **{key: {"sizes"} for key in ("ice-size", "thesis-fig28", "thesis-fig29", "thesis-fig30")},
    "ce-spce": {"training"},
    "thesis-table14": {"ratios"},
    "thesis-fig1": {"tsne"},
    "thesis-fig27": {"bars"},
    "thesis-fig31": {"networks"},
}


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


def cells_of(study, tmp_path):
    return paper_cells(StudyFolder(tmp_path, study))


def test_every_row_of_the_index_is_a_study():
    assert set(paper_studies()) == set(INDEX) | COMPUTED
    assert len(paper_studies()) >= 30


@pytest.mark.parametrize("name", INDEX)
def test_plan_without_data_has_the_rows_and_columns_of_the_paper(name, tmp_path):
    cells = cells_of(find_study(name), tmp_path)
    parts, rows, columns = INDEX[name]
    assert len({cell.part for cell in cells}) == parts
    assert max(len({cell.row for cell in cells if cell.part == part}) for part in {c.part for c in cells}) == rows
    assert list(dict.fromkeys(cell.metric for cell in cells)) == list(dict.fromkeys(columns.split()))


@pytest.mark.parametrize("name", INDEX)
def test_every_published_value_has_its_cell(name, tmp_path):
    study = paper_studies()[name]
    shown = sorted(cell.published for cell in cells_of(find_study(name), tmp_path) if cell.published == cell.published)
    values = [p for p in study.published if p.percent is not None]
    if name == "thesis-fig27":
        values = [p for p in values if p.dim == 128]
    if name == "thesis-fig31":
        values = [p for p in values if p.dim == 512]
    if name == "ice-table3":
        assert [p.percent for p in values] == [77.3, 78.2]
    assert shown == sorted(p.percent for p in values)


def test_methods_to_come_are_counted_and_fill_in_when_their_loss_is_registered(tmp_path, monkeypatch, capsys):
    missing = ["Struct Clust", "Spectral Clust", "RLL"]
    assert paper_studies()["ice-table3"].not_yet == []
    for name in ("facility_location", "spectral_clustering", "ranked_list"):
        monkeypatch.delitem(LOSSES, name)
    assert paper_studies()["ice-table3"].not_yet == missing
    cells = cells_of(find_study("ice-table3"), tmp_path)
    assert {cell.row for cell in cells if cell.status == "not yet"} == set(missing)
    main(["papers"])
    assert "RLL" in capsys.readouterr().out
    monkeypatch.setitem(LOSSES, "ranked_list", replace(LOSSES["triplet"], name="ranked_list"))
    assert paper_studies()["ice-table3"].not_yet == missing[:2]
    assert "ranked_list" in find_study("ice-table3").method_names


# --- computed tables -------------------------------------------------------------------------------------------------


def test_toy_rankings_have_the_25_printed_values(golden):
    grid = paper_computed.toy_rankings()
    printed = [list(row["printed"].values()) for row in golden["S3_table3"]]
    assert [[float(cell) for cell in row[1:]] for row in grid.rows] == printed
    assert [row[0] for row in grid.rows] == [str(row["rel"]) for row in golden["S3_table3"]]


def test_gradient_factors_are_those_of_table_1():
    printed = {
        "ProxyNCA": "stability N-N",
        "ProxyAnchor": "similarity P-P N-N",
        "SoftTriple": "stability manifold N-N P-N",
        "MPA": "manifold similarity P-P N-N",
        "MPA-DW": "stability manifold similarity N-N",
        "MPA-AP": "stability manifold similarity N-N P-N",
    }
    grid = paper_computed.gradient_factors()
    found = {row[0]: " ".join(f for f, mark in zip(grid.head[1:], row[1:], strict=True) if mark) for row in grid.rows}
    assert found == printed


def test_tournament_has_the_totals_and_the_corrected_means(golden):
    rows = {row[0]: row for row in paper_computed.tournament_table().rows}
    for row in papers.table_11():
        assert float(rows[row.loss][1]) == golden["S2_table11"]["rows"][row.method]["total"]
        assert float(rows[row.loss][2]) == pytest.approx(row.corrected_mean, abs=5e-3)
        assert float(rows[row.loss][3]) == pytest.approx(row.corrected_std, abs=6e-3)


def test_decomposition_of_a_features_file(tmp_path, capsys):
    main(["papers", "ce-table2", str(write_features(tmp_path / "f.npz"))])
    output = capsys.readouterr().out
    assert all(name in output for name in ("Center", "Contrastive", "SNCA", "Multi-Similarity", "PCE", "SPCE"))
    emb, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in paper_computed.decomposition(emb, labels).rows}
    assert rows["Contrastive"][:2] == [2.0, 0.0]  # squared distance 2 to one positive; negatives beyond the margin
    assert rows["Center"][0] == 1.0  # half the sum of four squared distances of 1/2


# --- narrowing, and what is needed before a study can run ------------------------------------------------------------


def test_narrowing_and_transfer(tmp_path):
    weights = tmp_path / "w.pth"
    weights.write_bytes(b"")
    study = narrow(
        find_study("ice-table2"),
        datasets=["cub"],
        backbones=["efficientnet_lite0"],
        losses=["s=16", "s=64"],
        sizes=[64],
        seeds=[1],
        protocol="fixed",
        weights=[f"efficientnet_lite0={weights}"],
        change=["train.epochs=2", "data.image_size=128", "model.freeze_norm=statistics", "data.cache=false"],
    )
    trials = study.trials()
    recipe = trials[0].recipe
    assert [t.method for t in trials] == ["s=16", "s=64"]
    assert (recipe.data.source, recipe.data.val_fraction, recipe.data.image_size) == ("cub", 0.1, 128)
    assert (recipe.model.backbone, recipe.model.dim, recipe.model.weights) == ("efficientnet_lite0", 64, str(weights))
    assert (recipe.model.freeze_norm, recipe.data.cache) == ("statistics", False)  # words need no quotes
    assert (recipe.train.epochs, recipe.train.steps, recipe.seed) == (2, None, 1)  # epochs replace the recipe's steps


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"datasets": ["birds"]}, "--datasets: the study has no dataset 'birds'"),
        ({"losses": ["K=3"]}, "--losses: the study has no method 'K=3'"),
        ({"weights": ["bn_inception"]}, "expected BACKBONE=FILE"),
        ({"weights": ["bn_inception=none.pth"]}, "none.pth: no such file"),
        ({"change": ["train.epochs"]}, "expected KEY=VALUE"),
    ],
)
def test_unusable_flags_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        narrow(find_study("mpa-table7"), **flags)


def test_missing_weights_and_data_are_refused_before_any_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["bench", "run", "thesis-table7", "--quiet"])
    error = capsys.readouterr().err
    assert "nearkin data get cub" in error
    assert "--weights bn_inception=FILE" in error
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="does not contain cub, cars, sop, inshop"):
        find_study("ce-table4", tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        find_study("thesis-table7", tmp_path / "nowhere")
    study = find_study("thesis")  # the preset, which used to fail trial by trial
    assert any("--weights bn_inception=FILE" in line for line in requirements(study, study.trials()))


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (["--weights", "a=1", "--seeds", "0", "--weights", "b=2"], ["--seeds", "0", "--weights", "a=1", "b=2"]),
        (
            ["--change=train.lr=1", "--change", "x=2", "y=3", "--full"],
            ["--full", "--change", "train.lr=1", "x=2", "y=3"],
        ),
        (["--seeds", "0", "1", "--quiet"], ["--seeds", "0", "1", "--quiet"]),
    ],
)
def test_flags_that_are_given_several_times(words, joined):
    assert _join_repeated(words, "--weights", "--change") == joined


def test_own_images_take_the_place_of_a_single_dataset(tmp_path):
    features = write_features(tmp_path / "mine.npz")
    (dataset,) = find_study("mpa-table7", features).datasets
    assert (dataset.name, dataset.source, dataset.recipe) == ("mine", "features", "cub")


# --- outputs of a study ----------------------------------------------------------------------------------------------


def test_results_of_a_study_have_every_metric_and_the_validation_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = small_study(
        write_features(tmp_path / "clouds.npz"),
        sizes=(4,),
        seeds=(0,),
        change={
            "data": {"split": "half"},
            "train": {"epochs": 1, "batch_size": 32},
            "eval": {"metrics": ["R@3", "nDCG@2"], "similarity": "both"},
        },
    )
    folder = StudyFolder.begin(tmp_path / "study", study)
    work(folder, tmp_path / "runs", device="cpu", reporter=Reporter(quiet=True))
    monkeypatch.setattr(study_overview, "rank_methods", lambda folder: (None, list(folder.study.method_names)))
    study_overview.write_report_files(folder)
    rows = list(csv.DictReader((folder.path / "results.csv").open()))
    assert len(rows) == 2
    for row, trial in zip(rows, folder.trials, strict=True):
        outcome = folder.outcome(trial)
        stored = json.loads((tmp_path / "runs" / outcome.run / "result.json").read_text())
        assert float(row["val R@1"]) == pytest.approx(100 * stored["val_R@1"])
        for metric in ("R@1", "R@3", "nDCG@2"):
            assert float(row[metric]) == pytest.approx(100 * stored["test"]["trained"][metric]["mean"])
        assert outcome.euclidean["R@3"] == stored["euclidean"]["R@3"]["mean"]
    assert "\\begin{tabular}" in (folder.path / "numbers.tex").read_text()
    assert [r.value for r in read_results(folder.path / "results.csv")] == [float(row["R@1"]) for row in rows]


@pytest.fixture
def wide_study(tmp_path):
    """Eight methods on two datasets at two sizes, with made-up outcomes: the method's number plus the dataset's."""
    losses = ("norm_softmax", "triplet", "margin", "contrastive", "npair", "snca", "ice", "proxy_anchor")
    features = write_features(tmp_path / "clouds.npz")
    datasets = (Dataset("clouds", "features", features), Dataset("others", "features", features))
    folder = StudyFolder.begin(tmp_path / "wide", small_study(features, losses=losses, datasets=datasets, seeds=(0,)))
    for trial in folder.trials:
        number = losses.index(trial.method) if trial.dataset == "clouds" else -losses.index(trial.method)
        test = {"R@1": 0.5 + 0.01 * number, "MAP@R": 0.5 - 0.01 * number}
        intervals = {name: [value - 0.1, value + 0.1] for name, value in test.items()}
        folder.write(trial, Outcome(trial.id, "done", test=test, intervals=intervals, label=trial.label))
    return folder


def test_figures_of_a_study_draw_every_method_for_each_dataset(wide_study, tmp_path, monkeypatch):
    monkeypatch.setattr(study_page, "rank_methods", lambda folder: (None, list(folder.study.method_names)))
    write_study_figures(build_study_report(wide_study.path), tmp_path / "figures")
    drawn = (tmp_path / "figures" / "sizes.svg").read_text()  # matplotlib writes each text as a comment as well
    assert all(drawn.count(f"<!-- {name} -->") == 2 for name in wide_study.study.method_names)
    assert drawn.count("<!-- clouds -->") == drawn.count("<!-- others -->") == 1


def test_a_tournament_can_be_narrowed_to_a_dataset_and_another_metric(wide_study):
    def best(**only):
        return max(wide_study.results(**only), key=lambda result: result.value).method

    assert best(dataset="clouds") == best(dataset="others", metric="MAP@R") == "proxy_anchor"
    assert best(dataset="others") == best(dataset="clouds", metric="MAP@R") == "norm_softmax"
    with pytest.raises(ConfigError, match="--dataset: the study has no dataset 'birds'"):
        wide_study.results(dataset="birds")
    with pytest.raises(ConfigError, match=r"--backbone: the study has no backbone 'resnet50'\. Available: none"):
        wide_study.results(backbone="resnet50")


def test_rehearsal_on_own_features(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features = write_features(tmp_path / "mine.npz", classes=50, samples_per_class=9)
    study = narrow(find_study("mpa-table7", features), losses=["K=4"], seeds=[0], rehearse=True)
    folder = StudyFolder.begin(tmp_path / "study", study)
    work(folder, tmp_path / "runs", device="cpu", reporter=Reporter(quiet=True))
    cells = paper_cells(folder)
    assert {(cell.row, cell.dataset, cell.status) for cell in cells} == {("K = 4", "mine", "")}
    (run,) = (tmp_path / "runs").iterdir()
    protocol = json.loads((run / "result.json").read_text())["protocol"]
    assert protocol["classes"] == {"train": 24, "val": 0, "test": 24}  # 48 of the 50 classes


def test_lifted_structure_of_the_thesis_is_not_a_triplet_loss():
    recipe = recipes.find("thesis_lifted_structure")
    emb = torch.randn(20, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.arange(20) // 5
    gradients = []
    for miner in (recipe.miner.name, "hard"):
        objective = Objective("lifted_structure", miner=miner, **recipe.loss.settings)
        gradients.append(torch.autograd.grad(objective(emb, labels), emb)[0])
    assert not torch.allclose(*gradients)


# --- rehearsals ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rehearse_every_study(tmp_path, monkeypatch, capsys):
    """One after the other in one process: studies that share recipes share their runs."""
    monkeypatch.chdir(tmp_path)
    for name, paper in paper_studies().items():
        main(["bench", "plan", name, "--tflops", "60"])  # without data
        plan = capsys.readouterr().out
        assert "bn_inception=FILE" in plan or "bn_inception" not in str(paper.study)
        main(["bench", "run", name, "--rehearse", "--quiet", "--device", "cpu"])
        output = capsys.readouterr().out
        folder = tmp_path / "studies" / (f"{name}-rehearsal" if paper.study else name)
        texts = {kind: (folder / f"table.{kind}").read_text() for kind in ("md", "tex", "csv")}
        if paper.study:
            assert "REHEARSAL" in texts["md"], name
            assert "REHEARSAL" in texts["tex"], name
        if name in COMPUTED:
            continue
        assert "REHEARSAL" in output, name
        parts, _, columns = INDEX[name]
        rows = list(csv.DictReader(texts["csv"].splitlines()))
        assert len({row["part"] for row in rows}) == parts
        assert {row["metric"] for row in rows} == set(columns.split())
        trained = [row for row in rows if row["status"] not in ("quoted", "not yet")]
        assert all(row["status"] == "" and float(row["ours"]) >= 0 for row in trained), name
        drawn = {path.stem for path in (folder / "figures").glob("*.png")}
        assert drawn == {path.stem for path in (folder / "figures").glob("*.svg")} == FIGURES.get(name, set()), name
