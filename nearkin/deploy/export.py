"""Export a trained model to a single ONNX or torch.export file that runs without nearkin; its metadata say how."""

import copy
import hashlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearkin._common.files import atomic_file, atomic_write
from nearkin._common.progress import Reporter
from nearkin._common.version import __version__
from nearkin.data.reading import MAX_ASPECT, MIN_DRAFT_FACTOR
from nearkin.data.transforms import AUGMENTS
from nearkin.deploy.images import (
    CheckImages,
    check_images_from_folder,
    check_images_of_run,
    input_dtype,
    random_check_images,
)
from nearkin.deploy.index.sources import read_training_classes
from nearkin.errors import ConfigError, RunError, UserError, import_extra
from nearkin.models.embedder import Embedder
from nearkin.models.heads import unit
from nearkin.models.lora import merge_lora
from nearkin.models.saved import load
from nearkin.training.run import Run

FORMAT, VERSION = "nearkin export", 1
METADATA_KEY = "nearkin"  # of an ONNX file; in a .pt2 file it is nearkin.json
MAX_DIFFERENCE = 1e-4  # of a vector element between file and model; more means that they are not the same network
MAX_ONNX_BYTES = 1_900_000_000  # of weights; ONNX files are limited to 2 GiB

Target = Literal["onnx", "torch"]


@dataclass(frozen=True)
class Exported:
    path: Path  # the file
    metadata_path: Path  # the JSON file next to it
    metadata: dict[str, Any]  # its content
    difference: float  # largest difference of any vector element from the model's
    checks: CheckImages  # the images on which that was measured

    def __str__(self) -> str:
        shape = " x ".join(str(n) for n in self.metadata["input"]["shape"][1:])
        return (
            f"{self.path}: {self.path.stat().st_size / 1e6:,.1f} MB, {self.metadata['model']['backbone']}, "
            f"images {shape} to {self.metadata['output']['shape'][1]} dimensions\n"
            f"largest difference from the model: {self.difference:.1e}, on {self.checks.what}{self.checks.note}\n"
            f"preprocessing and model details: {self.metadata_path}"
        )


class ExportModel(nn.Module):
    """The exported network: uint8 pixels [B, C, H, W] in, vectors out."""

    def __init__(self, model: Embedder) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        merge_lora(self.model)
        # In-place activations make the exporter many times slower and change no result.
        for module in self.model.modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        """Return the vectors [B, D] of images [B, C, H, W]."""
        vectors = self.model(images)
        return unit(vectors) if self.model.model.normalize else vectors


def export_run(
    path: Path, to: Target, out: Path, *, images: Path | None = None, reporter: Reporter | None = None
) -> Exported:
    """Export the model of a run, or of a folder written by `Embedder.save`.

    Args:
        path: The run folder.
        to: "onnx" or "torch".
        out: The file to write, ending in .onnx or .pt2.
        images: Folder of images to compare file and model on; by default the run's validation images, or random images
            if those are gone.
        reporter: Shows progress.

    Returns:
        The exported file.
    """
    model = load(path)
    run = Run(path) if (path / "recipe.toml").exists() else None
    _check_takes_images(model)
    reporter = reporter or Reporter(quiet=True)
    checks = check_images_of_run(model, run, reporter) if images is None else check_images_from_folder(model, images)
    return export(model, to, out, checks=checks, run=run, reporter=reporter)


def export(
    model: Embedder,
    to: Target,
    out: Path,
    *,
    checks: CheckImages | None = None,
    run: Run | None = None,
    reporter: Reporter | None = None,
) -> Exported:
    """Export a model, and write its metadata next to it. Nothing is saved if the file does not reproduce the model."""
    _check_takes_images(model)
    suffixes = {"onnx": ".onnx", "torch": ".pt2"}
    if to not in suffixes:
        raise ConfigError(f"--to {to}: expected onnx or torch.")
    if out.suffix != suffixes[to]:
        raise ConfigError(f"-o {out}: expected a file name that ends in {suffixes[to]} for --to {to}.")
    if out.is_dir():
        raise ConfigError(f"-o {out}: is a folder. Expected a file name.")
    for module in ("onnxscript", "onnxruntime") if to == "onnx" else ():
        import_extra(module, extra="export")  # fail before the work, not after it
    reporter = reporter or Reporter(quiet=True)
    checks = random_check_images(model) if checks is None else checks
    metadata = export_metadata(model, run, reporter)
    network = ExportModel(model)
    reporter.info("tracing the model")
    with _silence_exporters():
        program = trace(network)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(out) as temporary:
                if to == "onnx":
                    reporter.info("converting it to ONNX")
                    write_onnx(program, temporary, metadata)
                else:
                    # Via memory: on a full disk torch's own writer terminates the process.
                    extra_files = {f"{METADATA_KEY}.json": json.dumps(metadata)}
                    torch.export.save(program, buffer := io.BytesIO(), extra_files=extra_files)
                    temporary.write_bytes(buffer.getbuffer())
                reporter.info(f"comparing the file with the model on {checks.what}")
                difference = largest_difference(model, temporary, to, checks.pixels)
                with open(temporary, "rb") as file:
                    metadata["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
            metadata["checked"] = {"on": checks.what, "largest_difference": difference}
            metadata_path = out.with_name(f"{out.name}.json")
            atomic_write(metadata_path, json.dumps(metadata, indent=1))
        except OSError as error:
            raise RunError(f"{out}: cannot write the model ({error.strerror or error}).") from None
    return Exported(out, metadata_path, metadata, difference, checks)


def export_metadata(model: Embedder, run: Run | None = None, reporter: Reporter | None = None) -> dict[str, Any]:
    """Describe what is needed to use the file without nearkin. Returns JSON values."""
    channels, side = model.image_shape[0], model.image_shape[-1]
    augment = AUGMENTS[model.augment]
    trained_on: dict[str, Any] | None = None
    if run is not None:
        trained_on = {"source": run.recipe.data.source, "classes": None}
        with suppress(UserError, OSError):  # the run's data are gone or have changed
            trained_on["classes"] = sorted(read_training_classes(run, reporter or Reporter(quiet=True)).names) or None
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "nearkin": __version__,
        "input": {
            "name": "images",
            "type": str(input_dtype(model))[6:],
            "shape": ["batch", *model.image_shape],
            "channels": "RGB" if channels == 3 else "grey" if channels == 1 else "as in training",
        },
        "output": {
            "name": "vectors",
            "type": "float32",
            "shape": ["batch", model.dim],
            "unit_length": model.model.normalize,
        },
        # docs/export.md has this as code. A JPEG whose shorter side is at least `reduce_jpeg_from` times too long is
        # reduced by the decoder. Composite over `background`; centre-crop a side longer than `max_aspect` times the
        # other; downscale to `shorter_side` (never upscale); centre-crop to `crop_size` of every `resize_size` pixels;
        # resize to `image_size`.
        "preprocessing": {
            "augment": model.augment,
            "background": "white",
            "reduce_jpeg_from": MIN_DRAFT_FACTOR,
            "max_aspect": MAX_ASPECT,
            "image_size": side,
            "shorter_side": augment.stored_side(side),
            "resize_size": augment.resize_size,
            "crop_size": augment.crop_size,
            "squash": bool(getattr(augment.evaluate, "keywords", {}).get("squash")),
            "crop_to_boxes": run is not None and run.recipe.data.crop_to_boxes,
        },
        "model": model.config_dict()["model"],
        "fingerprint": model.fingerprint(),
        "trained_on": trained_on,
    }
    if model.own is not None and not model.takes_pixels:
        metadata["preprocessing"] = {"function": model.own.inputs.identity or None}  # of the user; not part of the file
    return metadata


def trace(network: ExportModel) -> torch.export.ExportedProgram:
    """Trace a network with a dynamic batch size. Returns its graph."""
    # A batch of 1 would become a constant.
    sample = torch.zeros((2, *network.model.image_shape), dtype=input_dtype(network.model))
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(network, (sample,), dynamic_shapes={"images": {0: batch}})
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)  # contains file paths of this machine
    return program


def write_onnx(program: torch.export.ExportedProgram, path: Path, metadata: dict[str, Any]) -> None:
    """Convert a traced network to ONNX."""
    weights = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    if weights > MAX_ONNX_BYTES:
        raise ConfigError(f"export: {weights / 1e9:.1f} GB of weights exceed the 2 GB of ONNX files. Use --to torch.")
    onnx = torch.onnx.export(program, dynamo=True, input_names=["images"], output_names=["vectors"], verbose=False)
    assert onnx is not None
    graph: Any = onnx.model.graph
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    for part in (graph, *graph.all_nodes(), *values):
        part.metadata_props.clear()  # debug information of the exporter
    batch = graph.inputs[0].shape[0]  # named by the exporter, such as s34
    for value in values:
        for n, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size == batch:
                value.shape[n] = "batch"
    onnx.model.metadata_props[METADATA_KEY] = json.dumps(metadata)
    onnx.model.producer_name, onnx.model.producer_version = "nearkin", __version__
    onnx.save(path)


def largest_difference(model: Embedder, path: Path, to: Target, pixels: Tensor) -> float:
    """Compare an exported file with its model. Returns the largest difference of any vector element."""
    run_file = load_exported(path, to)
    start, size, largest = 0, 1, 0.0
    while start < len(pixels):
        batch = pixels[start : start + size]
        start, size = start + size, min(size + 1, 32)  # several sizes, to check that the batch size is dynamic
        expected = model.embed(batch)
        actual = torch.from_numpy(run_file(batch.numpy()))
        if actual.shape != expected.shape:
            shapes = f"{list(actual.shape)}, the model {list(expected.shape)}"
            raise RunError(f"export: the file returns shape {shapes}; not saved.")
        largest = max(largest, float((actual - expected).abs().max().nan_to_num(torch.inf)))
    if not largest <= MAX_DIFFERENCE:
        raise RunError(
            f"export: the file's vectors differ from the model's by up to {largest:.1e}, more than "
            f"{MAX_DIFFERENCE:.0e}; not saved.\nTry the other format: --to torch or --to onnx."
        )
    return largest


def load_exported(path: Path, to: Target) -> Any:
    """Load an exported file with the runtime its users will use."""
    if to == "onnx":
        runtime = import_extra("onnxruntime", extra="export")
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda pixels: session.run(None, {"images": pixels})[0]
    module = torch.export.load(path).module()

    def run(pixels: NDArray[np.uint8]) -> Any:
        with torch.inference_mode():
            return module(torch.from_numpy(pixels)).numpy()

    return run


def _check_takes_images(model: Embedder) -> None:
    if model.backbone is None:
        raise ConfigError("export: this model takes precomputed features, not images. Export their backbone instead.")
    if model.own is not None and not model.own.is_module:
        raise ConfigError("export: this model is a function, of which there is no graph. Wrap an nn.Module.")


@contextmanager
def _silence_exporters() -> Iterator[None]:
    """Suppress the exporters' own warnings; the comparison decides whether the file is correct."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
