"""The page of a run: values against brute force, edge cases, figures, tables and files."""

import base64
import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.scored import QUIET, clouds, cosines, vectors

import nearkin as nk
from nearkin import cli
from nearkin.errors import RunError
from nearkin.models.heads import unit
from nearkin.report import contents, gallery, svg_charts
from nearkin.report.contact_sheet import printable
from nearkin.report.contents import PageItems, comparison_headline
from nearkin.report.gallery import load_eval_data
from nearkin.report.page import build_report, render, safe_json, write_page, write_report
from nearkin.report.study_overview import format_size
from nearkin.report.svg_charts import Series, histogram, line_chart
from nearkin.report.tables import percent
from nearkin.training import recipes


@pytest.fixture(scope="module")
def features_run(tmp_path_factory):
    """Twenty classes of twelve rows; two rows of the first test class are duplicates."""
    folder = tmp_path_factory.mktemp("features")
    recipe = clouds(folder, classes=20, samples_per_class=12, dim=24, seed=0, duplicates={121: 120})
    recipe = replace(recipe, model=replace(recipe.model, dim=16), train=replace(recipe.train, epochs=2))
    return nk.fit(recipe, folder / "runs", reporter=QUIET)


@pytest.fixture(scope="module")
def features_report(features_run):
    return build_report([features_run], reporter=QUIET)


# --- values -----------------------------------------------------------------------------------------------------------


def test_neighbours_classes_and_confusions_match_brute_force(features_run, features_report):
    sim, labels = cosines(features_run)
    analysis, names = features_report.analyses[0], features_report.items["class_names"]
    order = np.argsort(-np.round(sim, 9), axis=1, kind="stable")[:, :8]  # duplicates tie: by index
    assert analysis["neighbours"] == order.tolist()
    assert np.allclose(np.array(analysis["similarities"]) / 1000, np.take_along_axis(sim, order, 1), atol=6e-4)
    right = labels[order[:, 0]] == labels
    assert analysis["R@1"] == right.astype(int).tolist()
    for row in analysis["classes"]:
        mine = labels == int(names[row["class"]])
        assert row["R@1"] == pytest.approx(right[mine].mean(), abs=1e-4)
        confused = labels[order[mine, 0]][~right[mine]]
        if len(confused):
            assert row["count"] == np.bincount(confused).max()
    _, counts = np.unique(np.stack([labels, labels[order[:, 0]]])[:, ~right], axis=1, return_counts=True)
    top = sorted(counts.tolist(), reverse=True)[: contents.MAX_CONFUSED_PAIRS]
    assert [pair["count"] for pair in analysis["confused_pairs"]] == top
    for pair in analysis["confused_pairs"]:
        a, b = int(names[pair["class"]]), int(names[pair["confused_with"]])
        expected = np.flatnonzero((labels == a) & (labels[order[:, 0]] == b))
        assert pair["items"] == expected.tolist()


def test_recall_by_size_truncates_and_normalizes(features_run, features_report):
    emb, labels = vectors(features_run)
    emb = emb[:, :8]
    emb /= np.linalg.norm(emb, axis=1, keepdims=True)
    sim = emb @ emb.T
    np.fill_diagonal(sim, -np.inf)
    sizes = features_report.analyses[0]["recall_by_size"]
    assert [row["size"] for row in sizes] == [8, 16]
    assert sizes[0]["R@1"] == pytest.approx((labels[sim.argmax(1)] == labels).mean(), abs=1e-4)
    assert sizes[1]["R@1"] == pytest.approx(features_run.result["test"]["trained"]["R@1"]["mean"], abs=1e-4)


def test_confident_errors_are_errors(features_run, features_report):
    sim, labels = cosines(features_run)
    listed = features_report.analyses[0]["example_queries"]["confident_errors"]
    nearest = labels[sim.argmax(1)]
    assert all(nearest[item] != labels[item] for item in listed)
    assert len(listed) == min(gallery.MAX_QUERIES, int((nearest != labels).sum()))


def test_near_duplicates_are_found_in_the_original_features(features_report):
    duplicates = features_report.analyses[0]["near_duplicates"]
    assert duplicates["by_features"]
    assert [0, 1] in [pair["items"] for pair in duplicates["pairs"] if pair["exact"]]


def test_the_csv_in_the_page_lists_label_errors_in_order(features_report):
    errors = features_report.analyses[0]["label_errors"]
    text = base64.b64decode(errors["csv"].partition("base64,")[2]).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == errors["csv_rows"] == 120
    assert [int(row["row"]) for row in rows[:5]] == [suspect["item"] for suspect in errors["suspects"][:5]]
    assert rows[0]["path"].startswith("row ")


# --- every type of run has a page -------------------------------------------------------------------------------------


def test_a_search_run_shows_validation_and_leaves_the_test_sealed(tiny_recipe, tmp_path):
    run = nk.fit(tiny_recipe, tmp_path, final=False, reporter=QUIET)
    report = build_report([run], reporter=QUIET)
    assert report.items["split"] == "validation"
    assert report.items["total"] == 24  # two classes of twelve
    page = render(report)
    assert "still sealed" in page
    assert not any(event["event"] == "holdout_opened" for event in run.events())


def test_cached_embeddings_are_used_only_if_they_match(tiny_recipe, tmp_path):
    run = nk.fit(tiny_recipe, tmp_path, reporter=QUIET)
    cache, good = run.path / "vectors.npz", (run.path / "vectors.npz").read_bytes()
    data = load_eval_data(run, reporter=QUIET)
    torch.testing.assert_close(data.emb, run.embedder().embed(data.table.images), rtol=0, atol=0)
    with np.load(cache) as stored:
        arrays = dict(stored)
    assert arrays["rows"].tolist() == data.table.row_numbers.tolist()
    np.savez(cache, **{**arrays, "vectors": -arrays["vectors"]})  # distinguishable from new embeddings
    torch.testing.assert_close(load_eval_data(run, reporter=QUIET).emb, -data.emb)
    broken = {**arrays, "vectors": -arrays["vectors"], "of": np.array("test of other data by other weights")}
    np.savez(tmp_path / "other.npz", **broken)
    for content in ((tmp_path / "other.npz").read_bytes(), good[:-100], good[:200] + b"?" + good[201:], b"", None):
        cache.unlink()
        if content is not None:
            cache.write_bytes(content)
        assert torch.equal(load_eval_data(run, reporter=QUIET).emb, data.emb)
        assert torch.equal(unit(torch.from_numpy(np.load(cache)["vectors"])), data.emb)  # and cached again


def test_no_validation_and_no_test_gives_a_page_without_images(tiny_recipe, tmp_path):
    recipe = replace(tiny_recipe, data=replace(tiny_recipe.data, val_fraction=0.0))
    report = build_report([nk.fit(recipe, tmp_path, final=False, reporter=QUIET)], reporter=QUIET)
    assert report.items is None
    assert "no images on this page" in render(report)
    assert "not evaluated" in render(report)


def test_no_validation_and_a_frozen_backbone(tiny_recipe, tmp_path):
    recipe = replace(
        tiny_recipe,
        data=replace(tiny_recipe.data, val_fraction=0.0),
        model=replace(tiny_recipe.model, freeze="backbone"),
    )
    report = build_report([nk.fit(recipe, tmp_path, reporter=QUIET)], reporter=QUIET)
    assert report.analyses[0]["near_duplicates"]["by_features"]
    page = render(report)
    assert "no validation: last epoch" in page
    assert page.count("<polyline") >= 5  # the loss and the diagnostics are there


def test_missing_or_changed_data_leave_a_page_with_the_metrics(features_run, tmp_path, monkeypatch):
    root = features_run.recipe.data.root
    hidden = root.rename(root.with_suffix(".away"))
    try:
        page = write_page(features_run, tmp_path / "a.html", reporter=QUIET).read_text()
        assert "no images on this page" in page
        assert 'id="metrics"' in page
        stored = dict(np.load(hidden))
        np.savez(root, features=stored["features"] + 1, labels=stored["labels"])
        assert "have changed since" in build_report([features_run], reporter=QUIET).no_images_reason
    finally:
        hidden.rename(root)


def test_a_run_without_its_environment_file_has_a_page(features_run, tmp_path):
    moved = (features_run.path / "env.json").rename(tmp_path / "env.json")
    try:
        report = build_report([features_run], reporter=QUIET)
    finally:
        moved.rename(features_run.path / "env.json")
    assert report.summaries[0]["environment"] == {}
    assert "Environment" not in render(report)


def test_files_are_named_relative_to_the_data_folder(tiny_recipe, photo_folder, tmp_path):
    """For a folder and for a table in it; files elsewhere are named by their parent folder only."""
    data = tmp_path / "data"
    shutil.copytree(photo_folder, data)
    for folder in sorted(data.iterdir()):
        (folder / "deep").mkdir()
        for path in sorted(folder.glob("*.png"))[::2]:
            path.rename(folder / "deep" / path.name)
    files = sorted(path.relative_to(data) for path in data.rglob("*.png"))
    (data / "here.csv").write_text("path,label\n" + "".join(f"{file},{file.parts[0]}\n" for file in files))
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "t.csv").write_text("path,label\n" + "".join(f"{data / f},{f.parts[0]}\n" for f in files))
    for source, root in (("folder", data), ("table", data / "here.csv"), ("table", tmp_path / "away" / "t.csv")):
        recipe = replace(tiny_recipe, data=replace(tiny_recipe.data, source=source, root=root, val_fraction=0.0))
        recipe = replace(recipe, train=replace(recipe.train, epochs=1))
        report = build_report([nk.fit(recipe, tmp_path / f"runs of {root.name}", reporter=QUIET)], reporter=QUIET)
        encoded = report.analyses[0]["label_errors"]["csv"].partition(",")[2]
        rows = list(csv.DictReader(io.StringIO(base64.b64decode(encoded).decode())))
        assert len(rows) == 48  # four classes of twelve
        assert {row["path"] for row in rows} == set(report.items["names"])
        if root.parent.name == "away":
            assert all(len(Path(row["path"]).parts) == 2 for row in rows)
        else:
            assert all((data / row["path"]).is_file() and row["path"].startswith(row["label"]) for row in rows)
        assert str(tmp_path) not in render(report)


def test_an_unfinished_run_is_refused(features_run, tmp_path):
    (tmp_path / "recipe.toml").write_text((features_run.path / "recipe.toml").read_text())
    with pytest.raises(RunError, match="not finished"):
        build_report([nk.Run(tmp_path)], reporter=QUIET)


# --- comparison -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def second_run(features_run):
    recipe = replace(features_run.recipe, model=replace(features_run.recipe.model, dim=6), seed=1)
    return nk.fit(recipe, features_run.path.parent, reporter=QUIET)


def test_fixed_and_broken_queries_are_those_whose_nearest_neighbour_changed(features_run, second_run):
    report = build_report([features_run, second_run], reporter=QUIET)
    right = []
    for run in (features_run, second_run):
        sim, labels = cosines(run)
        right.append(labels[sim.argmax(1)] == labels)
    [comparison] = report.comparisons
    assert sorted(comparison["fixed"]["items"]) == np.flatnonzero(~right[0] & right[1]).tolist()
    assert sorted(comparison["broken"]["items"]) == np.flatnonzero(right[0] & ~right[1]).tolist()
    gain = next(row for row in comparison["metrics"] if row["name"] == "R@1")
    assert gain["difference"] == pytest.approx(right[1].mean() - right[0].mean(), abs=1e-6)
    assert gain["low"] <= gain["difference"] <= gain["high"]
    for row in comparison["classes"]:
        mine = labels == int(report.items["class_names"][row["class"]])
        assert row["gain"] == pytest.approx(right[1][mine].mean() - right[0][mine].mean(), abs=1e-4)
    assert ("model.dim", ["16", "6"]) in report.differing_settings


def test_runs_evaluated_on_different_images_are_refused(features_run, tmp_path, capsys):
    data = replace(features_run.recipe.data, split="by_class")
    other = nk.fit(replace(features_run.recipe, data=data), tmp_path, reporter=QUIET)
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(features_run.path), str(other.path)])
    assert stop.value.code == 2
    assert "cannot be compared: their test classes differ" in capsys.readouterr().err
    with pytest.raises(RunError, match="given twice"):
        build_report([features_run, features_run], reporter=QUIET)


def test_the_comparison_claims_no_more_than_the_interval():
    def row(low, high):
        return [{"name": "R@1", "low": low, "high": high}]

    assert "B is better than A: 1.0 to 3.0 points" in comparison_headline(row(0.01, 0.03), "A", "B")
    assert "B is worse than A: 1.0 to 3.0 points" in comparison_headline(row(-0.03, -0.01), "A", "B")
    assert "not significant" in comparison_headline(row(-0.01, 0.01), "A", "B")
    assert "Too few classes" in comparison_headline(row(None, None), "A", "B")


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_command_writes_page_figures_tables_and_json(features_run, second_run, tmp_path, capsys):
    flags = ["--figures", tmp_path / "f", "--tables", tmp_path / "t", "--json", tmp_path / "r.json", "--quiet"]
    cli.main(["report", str(features_run.path), str(second_run.path), "-o", str(tmp_path / "p.html"), *map(str, flags)])
    printed = capsys.readouterr().out.splitlines()
    names = {"learning", "similarity", "size", "classes", "comparison"}
    assert {path.name for path in (tmp_path / "f").iterdir()} == {f"{n}.{s}" for n in names for s in ("png", "svg")}
    assert len(printed) == 4 + 2 * len(names)
    assert (tmp_path / "f" / "size.png").read_bytes().startswith(b"\x89PNG")
    mean = 100 * features_run.result["test"]["trained"]["R@1"]["mean"]
    for name in ("numbers.md", "numbers.tex"):
        assert f"{mean:.1f} (" in (tmp_path / "t" / name).read_text()
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["names"] == ["A: norm_softmax", "B: norm_softmax"]
    assert stored["analyses"][0]["neighbours"]
    assert (tmp_path / "p.html").stat().st_size < 1_000_000


def test_the_page_has_no_paths_of_this_machine(features_run, features_report):
    page = render(features_report)
    assert str(features_run.recipe.data.root.parent) not in page
    assert "command" not in json.dumps(features_report.to_dict()["runs"][0]["environment"])


def test_a_page_that_cannot_be_written_says_so(features_report, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write the page"):
        write_report(features_report, tmp_path / "file" / "page.html")


# --- parts ------------------------------------------------------------------------------------------------------------


def test_json_in_a_page_cannot_end_its_element():
    nasty = {"a": "</script><!--&", "b": "\u2028\u2029"}
    text = safe_json(nasty)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == nasty


def test_the_pca_map_matches_a_singular_value_decomposition():
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    unit = x.numpy() / np.linalg.norm(x.numpy(), axis=1, keepdims=True)
    centred = unit - unit.mean(0)
    _, _, vt = np.linalg.svd(centred.astype(np.float64))
    expected = centred @ vt[:2].T
    got = gallery.pca(x).astype(float)
    for axis in (0, 1):
        assert abs(np.corrcoef(got[:, axis], expected[:, axis])[0, 1]) > 0.9999
    assert np.ptp(got, axis=0).max() == gallery.MAP_SIZE
    assert gallery.pca(torch.ones(3, 4)).tolist() == [[500, 500]] * 3


def test_a_map_of_many_points_samples_whole_classes():
    labels = np.repeat(np.arange(100), 7)
    rows = gallery.sample(labels, np.arange(700), max_rows=70)
    assert len(rows) == 70
    assert set(np.bincount(labels[rows])) == {0, 7}


def test_page_rows_grow_from_the_first_rows_to_their_neighbours():
    near = np.stack([(np.arange(100) + 1) % 100, (np.arange(100) + 2) % 100], axis=1)
    rows = gallery.choose_rows([near], np.array([10]), max_rows=9)
    assert rows.tolist() == list(range(10, 19))
    assert gallery.choose_rows([near], np.array([10]), max_rows=100).tolist() == list(range(100))
    assert PageItems.from_rows(rows, 100).items_of([9, 10, 18, 19]) == [0, 8]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_sprite_sheet_has_the_images_in_order(channels):
    from PIL import Image

    from nearkin.data.images import ArrayImages

    grey = np.linspace(0, 250, 11).astype(np.uint8)
    pixels = np.broadcast_to(grey[:, None, None, None], (11, channels, 20, 20)).copy()
    sprites = gallery.make_sprite_sheet(ArrayImages(pixels), np.arange(11), reporter=QUIET)
    assert (sprites.columns, sprites.rows, sprites.side) == (4, 3, 96)
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(sprites.uri.partition(",")[2]))).convert("L")).astype(int)
    for tile, value in enumerate(grey):
        y, x = tile // 4 * 96, tile % 4 * 96
        assert np.abs(sheet[y + 8 : y + 88, x + 8 : x + 88] - int(value)).max() <= 6


def test_numbers_and_names_are_formatted_for_readers():
    assert svg_charts._ticks(0, 100) == [0, 25, 50, 75, 100]
    assert svg_charts._ticks(0.31, 0.34) == [0.31, 0.32, 0.33, 0.34]
    assert (percent(0.1234), percent(None), percent(-0.02, "+.1f")) == ("12.3", "-", "-2.0")
    assert (format_size(2_300_000), format_size(5e9)) == ("2 MB", "5.0 GB")
    assert printable("a\nb\udcff é") == "a\\nb\\udcff é"


def test_charts_skip_missing_values_and_accept_single_points():
    assert line_chart([Series("loss", [1, 2], [None, None])], "nothing") == ""
    assert histogram([("a", [0, 0]), ("b", [1, 0])], "nothing", -1, 1) == ""
    one = line_chart([Series('<b>"', [1], [0.0])], "one point")
    assert "<b>" not in one
    assert one.count("<circle") == 1
    assert "nan" not in one
    gaps = line_chart([Series("a", [1, 2, 3], [np.nan, 2.0, 4.0]), Series("b", [1, 2], [np.nan, np.inf])], "gaps")
    assert gaps == line_chart([Series("a", [2, 3], [2.0, 4.0]), Series("b", [1, 2], [None, None])], "gaps")
    assert "nan" not in gaps


def test_an_in_shop_split_searches_queries_in_the_gallery(tmp_path):
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(12), 8)
    names = np.array([f"{c:02d}" for c in labels])
    part = np.where(labels < 8, "train", np.where(np.arange(96) % 8 < 3, "query", "gallery"))
    features = (rng.normal(size=(12, 10))[labels] + 0.5 * rng.normal(size=(96, 10))).astype(np.float32)
    np.savez(tmp_path / "f.npz", features=features, labels=names, part=part)
    recipe = recipes.features_default()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=tmp_path / "f.npz"),
        model=replace(recipe.model, dim=4),
        train=replace(recipe.train, epochs=1),
    )
    data = load_eval_data(nk.fit(recipe, tmp_path, reporter=QUIET), reporter=QUIET)
    assert len(data) == 32
    assert (data.table.part[data.queries] == "query").all()
    assert (data.table.part[data.neighbours] == "gallery").all()
    assert not (data.neighbours == np.arange(32)[:, None]).any()
    assert np.isnan(data.per_row("R@1")).sum() == 20
