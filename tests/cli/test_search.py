"""`nearkin search`: contact sheet, output in the terminal and as JSON, usage errors."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.small_runs import make_run
from PIL import Image

import nearkin as nk
from nearkin.cli import index as index_command
from nearkin.cli import search as search_command
from nearkin.deploy.index.search import Hit
from nearkin.errors import ConfigError, DataError, UserError
from nearkin.report.contact_sheet import GREY, RIGHT, WRONG, SheetRow, contact_sheet

# --- contact sheet ---------------------------------------------------------------------------------------------------


def test_sheet_borders_show_whether_labels_match(photo_folder, tmp_path):
    paths = sorted((photo_folder / "class 1").iterdir())[:3]
    hits = [Hit("a", "class 1", 0.9), Hit("b", "class 2", 0.8), Hit("c", None, 0.7), Hit("d", "x", 0.6)]
    files = [paths[0], paths[1], paths[2], tmp_path / "gone.png"]
    rows = [SheetRow(paths[0], "query.png", "class 1", hits, True), SheetRow(None, "v.npy", None, hits, False)]
    out = contact_sheet(rows, [files, files], tmp_path / "deep" / "sheet.png")
    with Image.open(out) as sheet:
        assert sheet.format == "PNG"
        shown = sheet.convert("RGB")
    step = 148 + 10 + 12

    def edge(row, column):
        left = 20 + step + 26 + column * step
        return "#{:02x}{:02x}{:02x}".format(*shown.getpixel((left + 2, 20 + 80 + row * (148 + 10 + 38 + 12))))

    assert [edge(0, c) for c in range(4)] == [RIGHT, WRONG, GREY, WRONG]
    assert [edge(1, c) for c in range(4)] == [GREY] * 4
    # The images are drawn; the tile of the missing file is plain.
    tile = (20 + step + 26 + 5, 25, 20 + step + 26 + 5 + 148, 25 + 148)
    assert np.asarray(shown.crop(tile)).std() > 20
    missing = tuple(v + 3 * step if n % 2 == 0 else v for n, v in enumerate(tile))
    assert np.asarray(shown.crop(missing)).std() < 20


def test_sheets_with_unusual_text_and_size(tmp_path):
    hits = [Hit("x" * 500, "line\nbreak 鳥 \udcff" * 20, 1.0)]
    assert contact_sheet([SheetRow(None, "", "a", hits)], [[tmp_path]], tmp_path / "a.png").exists()
    assert contact_sheet([SheetRow(None, "no hits", None, [])], [[]], tmp_path / "b.png").exists()
    with pytest.raises(DataError, match="too many"):
        contact_sheet([SheetRow(None, "", None, [])] * 101, [[]] * 101, tmp_path / "c.png")
    with pytest.raises(DataError, match="fewer with -k"):
        contact_sheet([SheetRow(None, "", None, hits * 51)], [[tmp_path] * 51], tmp_path / "c.png")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the sheet"):
        contact_sheet([SheetRow(None, "", "a", hits)], [[tmp_path]], tmp_path / "file" / "a.png")


# --- command ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def indexed(photo_folder, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("indexed")
    run = make_run(root, photo_folder)
    build = [str(run.path), str(photo_folder), "-o", str(root / "index"), "--quiet", "--calibrate"]
    index_command.run(build)
    assert nk.Index.load(root / "index").threshold is None  # most known images would be unknown: name the rate
    index_command.run([*build, "--false-accept-rate", "0.01"])
    return root / "index"


def call(capsys, *args) -> str:
    search_command.run([str(a) for a in args])
    return capsys.readouterr().out


def test_output_in_the_terminal(indexed, photo_folder, capsys):
    lines = call(capsys, indexed, photo_folder / "class 3" / "02.png", "-k", 4).splitlines()
    assert lines[0].endswith("class 3/02.png  (class 3)")
    assert re.fullmatch(r"   1  1\.0000  class 3  class 3/02\.png", next(x for x in lines if x.startswith("   1")))
    assert lines[-1].startswith("   4")


def test_output_as_json(indexed, photo_folder, tmp_path, capsys):
    np.save(tmp_path / "v.npy", nk.Index.load(indexed).vectors[:2])
    args = (photo_folder / "class 3" / "02.png", "--item", "class 1/00.png", "--vector", tmp_path / "v.npy")
    output = json.loads(call(capsys, indexed, *args, "--json", "-k", 500))
    assert [q["label"] for q in output["queries"]] == ["class 3", "class 1", None, None]
    assert [len(q["hits"]) for q in output["queries"]] == [120, 119, 120, 120]
    index = nk.Index.load(indexed)
    for query, item in zip(output["queries"], ["class 3/02.png", "class 1/00.png"], strict=False):
        plain = index.search_item(item, 119)
        ids = [hit["id"] for hit in query["hits"] if hit["id"] != item]
        assert ids == [hit.id for hit in plain]
    assert all(Path(hit["path"]).is_file() for hit in output["queries"][0]["hits"])
    assert output["threshold"] == index.threshold.value
    assert [q["known"] for q in output["queries"]] == [q["nearest"] > output["threshold"] for q in output["queries"]]


def test_an_unknown_query_is_reported(indexed, tmp_path, capsys):
    Image.new("RGB", (40, 30), "black").save(tmp_path / "black.png")
    output = call(capsys, indexed, tmp_path / "black.png", "-k", 1)
    assert "unknown: highest similarity" in output
    assert "(1.00% false accepts)" in output


def test_duplicates_are_listed(photo_folder, tmp_path, capsys):
    run = make_run(tmp_path, photo_folder)
    shutil.copytree(photo_folder / "class 1", tmp_path / "photos")
    shutil.copy(tmp_path / "photos" / "00.png", tmp_path / "photos" / "copy.png")
    index_command.run([str(run.path), str(tmp_path / "photos"), "-o", str(tmp_path / "index"), "--quiet"])
    capsys.readouterr()
    output = call(capsys, tmp_path / "index", "--duplicates", "--min-similarity", 0.999999)
    assert output.splitlines()[0] == "1.000000  00.png  copy.png"
    assert "1 pair with a cosine of at least 0.999999 among 13 items" in output
    listed = json.loads(call(capsys, tmp_path / "index", "--duplicates", "--min-similarity", 0.999999, "--json"))[
        "listed"
    ]
    assert [(pair["first"], pair["second"]) for pair in listed] == [("00.png", "copy.png")]


def test_rerank_flags(indexed, photo_folder, capsys):
    image = photo_folder / "class 3" / "02.png"
    plain = call(capsys, indexed, image)
    assert call(capsys, indexed, image, "--rerank", "none") == plain
    assert call(capsys, indexed, image, "--rerank", "reciprocal") != plain
    assert call(capsys, indexed, image, "--rerank", "expansion", "--exact") == plain


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Pass images, --item ID or --vector"),
        (["nowhere.jpg"], r"nowhere\.jpg: no such file or folder"),
        (["--item", "nobody"], "'nobody': no such item"),
        (["--item", "class 1/00.png", "-k", "0"], "-k: expected at least 1"),
        (["--vector", "nowhere.npy"], r"nowhere\.npy: no such file or folder"),
        (["--vector", "wrong.npy"], "expected 16 dimensions as in the index, got 3"),
        (["--vector", "nan.npy"], "NaN or infinity"),
        (["--vector", "pickled.npy"], "cannot read as an .npy file"),
        (["--vector", "cube.npy"], "expected one vector"),
        (["--vector", "damaged.npz"], "cannot read as an .npy file"),
        (["--item", "class 1/00.png", "--rerank", "expandion"], "Did you mean 'expansion'"),
        (["--item", "class 1/00.png", "--store", "mysql://x"], "expected qdrant://"),
        (["--item", "class 1/00.png", "--shet", "x"], "Did you mean '--sheet'"),
        (["--duplicates", "--item", "a"], "takes no query"),
        (["--duplicates", "--min-similarity", "2"], "expected a cosine"),
        (["--item", "class 1/00.png", "--min-similarity", "0.9"], "--min-similarity: only applies with --duplicates"),
        (
            ["--item", "class 1/00.png", "--exact", "--store", "qdrant://h/c"],
            "--exact: does not apply to external",
        ),
        (["wrong.npy", "--run", "nowhere"], "no trained model here"),
    ],
)
def test_usage_errors(indexed, args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("wrong.npy", np.ones(3))
    Path("damaged.npz").write_bytes(b"PK\3\4 no more than that")
    np.save("nan.npy", np.full(16, np.nan))
    np.save("pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save("cube.npy", np.ones((2, 2, 16)))
    with pytest.raises(UserError, match=message):
        search_command.run([str(indexed), *args])


def test_a_folder_without_an_index(tmp_path):
    with pytest.raises(DataError, match="no index found"):
        search_command.run([str(tmp_path), "--item", "a"])


def test_a_moved_run(indexed, photo_folder, tmp_path):
    run = make_run(tmp_path, photo_folder)
    index_command.run([str(run.path), str(photo_folder / "class 1"), "-o", str(tmp_path / "index"), "--quiet"])
    run.path.rename(tmp_path / "moved")
    image = str(photo_folder / "class 1" / "00.png")
    with pytest.raises(ConfigError, match="Pass its new location with --run RUN"):
        search_command.run([str(tmp_path / "index"), image])
    search_command.run([str(tmp_path / "index"), image, "--run", str(tmp_path / "moved")])


# --- documentation ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands_in_search_md_run(photo_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for c, name in enumerate(["robin", "wren", "finch", "crow", "gull", "swan"]):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(4):
            image = Image.open(photo_folder / f"class {c}" / f"{i:02d}.png")
            image.save(tmp_path / "photos" / name / f"{i:02d}.jpg")
    rows = [f"photos/{name}/00.jpg,{name}" for name in ("robin", "wren")]
    (tmp_path / "photos.csv").write_text("\n".join(["path,label", *rows]))
    for name in ("new.jpg", "old.jpg"):
        shutil.copy(tmp_path / "photos" / "wren" / "01.jpg", tmp_path / name)
    np.save("query.npy", np.ones(16))
    make_run(tmp_path / "runs", tmp_path / "photos", name="birds")
    page = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    shown = [
        line.partition("#")[0].strip()
        for block in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(shown) > 12
    for line in shown:
        program, command, *rest = shlex.split(line)
        assert program == "nearkin"
        if "://" in line:  # needs a vector store: tests/deploy/test_stores.py
            continue
        if "--hnsw-min-items" in line:
            pytest.importorskip("faiss", reason="faiss is not installed (nearkin[stores])")
        {"index": index_command.run, "search": search_command.run}[command](rest)
        assert capsys.readouterr().out
    assert (tmp_path / "found.png").exists()
