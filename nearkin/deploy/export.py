"""`nearkin export`: a trained model as one file that runs without nearkin, checked against the model before it is kept.

    nearkin export runs/<key> --to onnx -o birds.onnx

What goes in is uint8 [B, C, H, W] (red, green, blue), what comes out is one vector per picture, of length 1 unless the
model was made with `normalize = false`: scaling, the order of the colours and normalisation are inside. How a photo is
cut to H x W is written in the file itself, as JSON, and once more beside it.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearkin._common.files import atomic_write
from nearkin._common.progress import Reporter
from nearkin._common.version import __version__
from nearkin.data import glyphs
from nearkin.data.listing import list_image_files
from nearkin.data.reading import MAX_ASPECT
from nearkin.data.splits import make_split
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS
from nearkin.deploy.images import model_input
from nearkin.deploy.index.trained import listed_table, training_part
from nearkin.errors import ConfigError, DataError, RunError, UserError, import_extra
from nearkin.models.embedder import Embedder, load
from nearkin.models.heads import unit
from nearkin.training.run import Run

FORMAT, VERSION = "nearkin export", 1
KEY = "nearkin"  # under which the facts stand in an ONNX file; in a .pt2 file it is nearkin.json
MAX_DIFFERENCE = 1e-4  # between the file's vectors and the model's; more means that they are not the same network
CHECKED = 64  # pictures on which they are compared
LARGEST = 1_900_000_000  # bytes of weights; an ONNX file ends at 2 GiB

Kind = Literal["onnx", "torch"]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Checks:
    """Pictures to compare on, uint8 [N, C, H, W]; what they are, for the file; and a note for the person only."""

    pixels: Tensor
    what: str
    note: str = ""


@dataclass(frozen=True)
class Exported:
    """A written file: how far its vectors are from the model's at most, and on which pictures that was found."""

    path: Path
    facts_path: Path
    facts: dict[str, Any]
    difference: float
    checks: Checks

    def __str__(self) -> str:
        shape = " x ".join(str(n) for n in self.facts["input"]["shape"][1:])
        return (
            f"{self.path}: {self.path.stat().st_size / 1e6:,.1f} MB, {self.facts['model']['backbone']}, "
            f"pictures of {shape} to vectors of {self.facts['output']['shape'][1]}\n"
            f"largest difference to the model itself: {self.difference:.1e}, on {self.checks.what}{self.checks.note}\n"
            f"how to cut pictures, and what the model is: {self.facts_path}"
        )


class Network(nn.Module):
    """The whole way inside the file: pixels uint8 [B, C, H, W] in, vectors out. A copy, on the CPU."""

    def __init__(self, model: Embedder) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        # Activations that overwrite their input give the same numbers, but take the exporter many times as long.
        for module in self.model.modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        vectors = self.model(images)
        return unit(vectors) if self.model.model.normalize else vectors


def export_run(
    path: Path, to: Kind, out: Path, *, images: Path | None = None, reporter: Reporter | None = None
) -> Exported:
    """Export the model of a run, or of a folder that `Embedder.save` wrote.

    images: a folder of pictures to compare on; otherwise the run's own validation images, otherwise random pictures.
    """
    model = load(path)
    run = Run(path) if (path / "recipe.toml").exists() else None
    _refuse_features(model)
    reporter = reporter or Reporter(quiet=True)
    checks = from_folder(model, images) if images is not None else own_checks(model, run, reporter)
    return export(model, to, out, checks=checks, run=run, reporter=reporter)


def export(
    model: Embedder,
    to: Kind,
    out: Path,
    *,
    checks: Checks | None = None,
    run: Run | None = None,
    reporter: Reporter | None = None,
) -> Exported:
    """Write the file and its facts beside it. Nothing is kept when it does not agree with the model."""
    _refuse_features(model)
    _check_target(to, out)
    for module in ("onnxscript", "onnxruntime") if to == "onnx" else ():
        import_extra(module, extra="export")  # before the work, not after it
    reporter = reporter or Reporter(quiet=True)
    checks = random_checks(model) if checks is None else checks
    about = facts(model, run, reporter)
    network = Network(model)
    reporter.info("tracing the network")
    with _quietly():
        program = traced(network)
        aside = out.with_name(f".{out.name}.{os.getpid()}.part{out.suffix}")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            if to == "onnx":
                reporter.info("translating it to ONNX")
                write_onnx(program, aside, about)
            else:
                # To the memory first: on a full disk torch's own writer ends the process.
                torch.export.save(program, packed := io.BytesIO(), extra_files={f"{KEY}.json": json.dumps(about)})
                aside.write_bytes(packed.getbuffer())
            reporter.info(f"comparing the file with the model on {checks.what}")
            difference = largest_difference(model, aside, to, checks.pixels)
            aside.replace(out)
            about["checked"] = {"on": checks.what, "largest_difference": difference}
            beside = out.with_name(f"{out.name}.json")
            atomic_write(beside, json.dumps(about, indent=1))
        except OSError as error:
            raise RunError(f"{out}: cannot write the model ({error.strerror or error}).") from None
        finally:
            if out.parent.is_dir():
                aside.unlink(missing_ok=True)
    return Exported(out, beside, about, difference, checks)


def facts(model: Embedder, run: Run | None = None, reporter: Reporter | None = None) -> dict[str, Any]:
    """What one must know to use the file without nearkin, as plain values."""
    reporter = reporter or Reporter(quiet=True)
    channels, side, width = model.image_shape
    augment = AUGMENTS[model.augment]
    return {
        "format": FORMAT,
        "version": VERSION,
        "nearkin": __version__,
        "input": {
            "name": "images",
            "type": "uint8",
            "shape": ["batch", channels, side, width],
            "channels": "RGB" if channels == 3 else "grey" if channels == 1 else "as in training",
        },
        "output": {
            "name": "vectors",
            "type": "float32",
            "shape": ["batch", model.dim],
            "unit_length": model.model.normalize,
        },
        # Lay over `transparent_over`, cut a side that is more than `most_aspect` times the other to its middle, shrink
        # to `shorter_side` (never enlarge), take the middle `shown` of every `stored` pixels, scale to `side`.
        "cut": {
            "augment": model.augment,
            "transparent_over": "white",
            "most_aspect": MAX_ASPECT,
            "side": side,
            "shorter_side": augment.stored_side(side),
            "stored": augment.stored,
            "shown": augment.shown,
            "squeezed": bool(getattr(augment.view, "keywords", {}).get("squeezed")),
            "boxes": run is not None and run.recipe.data.crop_to_boxes,
        },
        "model": model.config_dict()["model"],
        "fingerprint": model.fingerprint(),
        "trained_on": None if run is None else _trained_on(run, reporter),
    }


def traced(network: Network) -> torch.export.ExportedProgram:
    """The network as a graph that takes any number of pictures."""
    sample = torch.zeros((2, *network.model.image_shape), dtype=torch.uint8)  # 2: of 1 it would make a constant
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(network, (sample,), dynamic_shapes={"images": {0: batch}})
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)  # the paths of this machine's files
    return program


def write_onnx(program: torch.export.ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    weights = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    if weights > LARGEST:
        raise ConfigError(f"export: {weights / 1e9:.1f} GB of weights do not fit an ONNX file (2 GB). Use --to torch.")
    made = torch.onnx.export(program, dynamo=True, input_names=["images"], output_names=["vectors"], verbose=False)
    assert made is not None
    graph: Any = made.model.graph
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    for part in (graph, *graph.all_nodes(), *values):
        part.metadata_props.clear()  # the exporter's notes to itself
    _name_batch(values, graph.inputs[0].shape[0])
    made.model.metadata_props[KEY] = json.dumps(about)
    made.model.producer_name, made.model.producer_version = "nearkin", __version__
    made.save(path)


def _name_batch(values: list[Any], found: Any) -> None:
    """Call the free size "batch" in every shape; the exporter forgets the name and gives it a number (s34)."""
    for value in values:
        for place, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size == found:
                value.shape[place] = "batch"


def largest_difference(model: Embedder, path: Path, to: Kind, pixels: Tensor) -> float:
    """How far any number of the file's vectors is from the model's; refused above MOST_DIFFERENCE."""
    run_file = opened(path, to)
    largest = 0.0
    # Batches of several sizes, one picture among them: the batch size is free, and that is checked as well.
    for batch in torch.split(pixels, _sizes(len(pixels))):
        wanted = model.embed(batch)
        found = torch.from_numpy(run_file(batch.numpy()))
        if found.shape != wanted.shape:
            raise RunError(
                f"export: the file gives {list(found.shape)}, the model {list(wanted.shape)}. Nothing is kept."
            )
        largest = max(largest, float((found - wanted).abs().max().nan_to_num(torch.inf)))
    if not largest <= MAX_DIFFERENCE:
        raise RunError(
            f"export: the file's vectors are off the model's by up to {largest:.1e}, more than {MAX_DIFFERENCE:.0e}; "
            "it is not kept.\nTry the other form: --to torch or --to onnx."
        )
    return largest


def opened(path: Path, to: Kind) -> Any:
    """An exported file as a function from uint8 [B, C, H, W] to vectors, run by what its users will run it with."""
    if to == "onnx":
        session = import_extra("onnxruntime", extra="export").InferenceSession(
            str(path), providers=["CPUExecutionProvider"]
        )
        return lambda pixels: session.run(None, {"images": pixels})[0]
    module = torch.export.load(path).module()

    def run(pixels: NDArray[np.uint8]) -> Vectors:
        with torch.inference_mode():
            return module(torch.from_numpy(pixels)).numpy()  # type: ignore[no-any-return]

    return run


# --- pictures to compare on ------------------------------------------------------------------------------------------


def from_folder(model: Embedder, folder: Path, most: int = CHECKED) -> Checks:
    """Up to `most` images below a folder, evenly spread over it; those that cannot be read are passed over."""
    if not folder.is_dir():
        raise DataError(f"--images {folder}: there is no such folder.")
    paths = list_image_files(folder, [], [])
    pixels = _read(model, [(path, None) for path in _spread(paths, most)])
    if not len(pixels):
        raise DataError(f"--images {folder}: none of the {len(paths):,} image files below it can be read.")
    return Checks(pixels, f"{len(pixels)} images of a folder", f", {folder}")


def own_checks(model: Embedder, run: Run | None, reporter: Reporter) -> Checks:
    """The run's validation images (training images where it has none), or random pictures where they are gone."""
    if run is None:
        return random_checks(model, "the folder names no data")
    try:
        table, name = _pictures_of(run, reporter)
        rows = np.array(_spread(range(len(table)), CHECKED))
        if not table.paths:
            pixels = table.images.read(rows)
        else:
            boxes = [None if table.boxes is None else table.boxes[row].tolist() for row in rows]
            pixels = _read(model, [(table.paths[row], box) for row, box in zip(rows, boxes, strict=True)])
    except (UserError, OSError) as error:
        return random_checks(model, f"the run's data cannot be used: {str(error).splitlines()[0]}")
    if not len(pixels):
        return random_checks(model, "none of the run's images can be read")
    return Checks(pixels, f"{len(pixels)} {name} images of the run")


def _pictures_of(run: Run, reporter: Reporter) -> tuple[Table, str]:
    """The run's validation rows, or those it trained on, by their files."""
    data = run.recipe.data
    table = glyphs.load() if data.source == "glyphs" else listed_table(data, reporter)
    split = make_split(table, data)[0]
    return (split.train, "training") if split.val is None else (split.val, "validation")


def random_checks(model: Embedder, why: str = "") -> Checks:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (16, *model.image_shape), dtype=torch.uint8, generator=generator)
    return Checks(pixels, f"{len(pixels)} random pictures", f" ({why.rstrip('.')})" if why else "")


def _read(model: Embedder, sources: Sequence[tuple[Path, Any]]) -> Tensor:
    pixels = []
    for path, box in sources:
        try:
            pixels.append(model_input(model, path, box))
        except DataError:
            continue
    return torch.stack(pixels) if pixels else torch.empty((0, *model.image_shape), dtype=torch.uint8)


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    return [items[i] for i in np.linspace(0, len(items) - 1, min(most, len(items))).astype(int)]


def _sizes(count: int) -> list[int]:
    """Batches of 1, 2, 3, ... pictures up to 32, together `count`."""
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(len(sizes) + 1, 32, count - sum(sizes)))
    return sizes


# --- refusals and silence --------------------------------------------------------------------------------------------


def _trained_on(run: Run, reporter: Reporter) -> dict[str, Any]:
    """The source, and the names of the classes learned from where the run's data are still there and unchanged."""
    try:
        names = sorted(training_part(run, reporter).names)
    except (UserError, OSError):
        names = []
    return {"source": run.recipe.data.source, "classes": names or None}


def _refuse_features(model: Embedder) -> None:
    if model.backbone is None:
        raise ConfigError("export: this model takes ready features, not pictures. Export the network that makes them.")


def _check_target(to: str, out: Path) -> None:
    suffixes = {"onnx": ".onnx", "torch": ".pt2"}
    if to not in suffixes:
        raise ConfigError(f"--to {to}: there are onnx and torch.")
    if out.suffix != suffixes[to]:
        raise ConfigError(f"-o {out}: a file for {to} ends in {suffixes[to]}, so that others know it by its name.")
    if out.is_dir():
        raise ConfigError(f"-o {out}: is a folder. Give the name of a file.")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporters' warnings about themselves; what matters here is the comparison."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
