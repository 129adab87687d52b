"""Damaged and hostile files, with a fixed seed: each is read, or rejected with an error of ours. Never a traceback, a
crash or a hang; and one flipped bit in what we write is always noticed.

Cases run in a forked process, with a time limit each; if one ends the process, the next goes on in another.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture.table import Row

CASE_SECONDS = 20  # for reading one file
HOSTILE_VALUES = (
    *("0", "-1", "1e999", "nan", "99999999999999999999", "0.5", "true", "null", '""', '"x"', "[]", "{}", "[[[]]]"),
    *('"\\u001b[2J"', '"../../etc/passwd"', '"\\ud800"', "[" * 5000, "9" * 5000, "-0.0", "1e-320", "2026-01-01"),
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Damage a file as a disk, a copy or an attacker would."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 2, 4, 16, 64, 1000))
        part = bytes(changed[at : at + length])
        match rng.randrange(7):
            case 0 | 1 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + length]
            case 4:
                changed[at:at] = part
            case 5:
                changed[at : at + length] = rng.choice((b"\0", b"\xff", b"\x7f")) * len(part)
            case _:
                to = rng.randrange(len(changed) + 1)
                changed[to : to + length] = part
    return bytes(changed)


def mutate_text(data: bytes, rng: random.Random) -> bytes:
    """Damage a text file byte by byte, or replace, remove and repeat its values and lines."""
    if rng.random() < 0.3:
        return mutate(data, rng)
    text = data.decode("utf-8", "replace")
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind = rng.randrange(4)
        if kind < 2:
            tokens = list(re.finditer(r'"[^"\n]*"|-?[0-9.]+(e-?[0-9]+)?|true|false|null|\[[^][]*\]', text))
            if tokens:
                token = rng.choice(tokens)
                text = text[: token.start()] + rng.choice(HOSTILE_VALUES) + text[token.end() :]
        else:
            lines = text.splitlines(keepends=True) or [""]
            at = rng.randrange(len(lines))
            lines[at : at + 1] = [] if kind == 2 else [lines[at], rng.choice(lines)]
            text = "".join(lines)
    return text.encode("utf-8", "replace")


def flip_one_bit(data: bytes, rng: random.Random) -> bytes:
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


# --- running cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A file to damage, and how it is read."""

    name: str
    path: Path
    read: Callable[[], Any]
    mutation: Callable[[bytes, random.Random], bytes] = mutate
    same: bool = False  # what is read must equal what was written, or be rejected
    restore: Callable[[], None] = lambda: None  # undoes what reading a damaged file changed


def outcomes(read: Callable[[Any], str], cases: Iterable[Any]) -> Iterator[str]:
    """Yield what `read` returns for every case; "crash ..." if it ends or blocks the process."""
    pending = list(cases)
    while pending:
        receiver, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receiver)
            _run_cases(read, pending, sender)
        os.close(sender)
        with os.fdopen(receiver) as lines:
            results = [json.loads(line) for line in lines]
        _, status = os.waitpid(pid, 0)
        yield from results
        pending = pending[len(results) :]
        if pending:
            yield f"crash: the process ended with {os.waitstatus_to_exitcode(status)}"
            pending = pending[1:]


def _run_cases(read: Callable[[Any], str], cases: list[Any], sender: int) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)  # decoders in C print there
    _limit_memory(4 << 30)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even in C
    for case in cases:
        signal.alarm(CASE_SECONDS)
        try:
            result = read(case)
        except BaseException:
            result = f"traceback: {traceback.format_exc(limit=-4)}"
        os.write(sender, json.dumps(result[:2000]).encode() + b"\n")
    os._exit(0)


def _limit_memory(more: int) -> None:
    """A file may claim any size: memory beyond this is refused, instead of taken from the machine."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))


def _read(target: Target, data: bytes, expected: Any) -> str:
    from nearkin.errors import UserError

    target.path.write_bytes(data)
    try:
        found = target.read()
    except UserError as error:
        return f"rejected: {error}"
    except OSError as error:  # the command line prints these in one line
        return f"rejected: {error}" if error.strerror else f"traceback: {traceback.format_exc(limit=-4)}"
    finally:
        target.restore()
    return "read" if not target.same or found == expected else "unnoticed"


def attack_file(target: Target, count: int, seed: int, mutation: Callable[..., bytes] | None = None) -> Row:
    """Read damaged versions of a file."""
    rng = random.Random(seed)
    original, expected = target.path.read_bytes(), target.read()
    target.restore()
    assert not target.same or target.read() == expected
    cases = [(mutation or target.mutation)(original, rng) for _ in range(count)]
    if mutation is flip_one_bit:  # nothing may be read, not even what is equal
        results = [
            "unnoticed" if r == "read" else r for r in outcomes(lambda data: _read(target, data, expected), cases)
        ]
    else:
        results = list(outcomes(lambda data: _read(target, data, expected), cases))
    target.path.write_bytes(original)
    target.restore()
    what = "flipped bit: " if mutation is flip_one_bit else "damaged "
    return summarize(what + target.name, results, rejected=mutation is not flip_one_bit)


def summarize(name: str, results: list[str], *, rejected: bool = True) -> Row:
    unnoticed = sum(result == "unnoticed" for result in results)
    bad = [result for result in results if result.startswith(("crash", "traceback"))]
    for text in sorted({re.sub(r"0x[0-9a-f]+", "", result) for result in bad})[:5]:
        print(f"--- {name}: {len(bad)} of {len(results)}\n{text[-1200:]}", file=sys.stderr)
    refused = sum(result.startswith("rejected") for result in results)
    remark = (
        f"{refused:,} rejected, {len(results) - refused - len(bad):,} read" if rejected else f"{refused:,} detected"
    )
    return Row(name, len(results), len(results) - len(bad) - unnoticed, unnoticed, len(bad), remark)


# --- images ----------------------------------------------------------------------------------------------------------


def make_images() -> dict[str, bytes]:
    """One small file per format and kind of coding."""
    import numpy as np
    from helpers.serving import encode
    from PIL import Image

    smooth = np.linspace(0, 255, 40 * 30 * 3).reshape(30, 40, 3).astype(np.uint8)
    colour = Image.fromarray(smooth ^ np.random.default_rng(0).integers(0, 16, smooth.shape).astype(np.uint8))
    grey, palette, alpha = colour.convert("L"), colour.convert("P"), colour.convert("RGBA")
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = {"save_all": True, "append_images": [palette.rotate(90, expand=False)]}
    return {
        "a.jpg": encode(colour, "JPEG", exif=exif),
        "progressive.jpg": encode(colour, "JPEG", progressive=True),
        "cmyk.jpg": encode(colour.convert("CMYK"), "JPEG"),
        "a.png": encode(alpha, "PNG", exif=exif),
        "16 bit.png": encode(Image.fromarray(smooth[..., 0].astype(np.uint16) * 257), "PNG"),
        "palette.png": encode(palette, "PNG", transparency=3),
        "a.webp": encode(colour, "WEBP"),
        "lossless.webp": encode(alpha, "WEBP", lossless=True),
        "a.gif": encode(palette, "GIF", **frames),
        "a.tif": encode(colour, "TIFF"),
        "lzw.tif": encode(alpha, "TIFF", compression="tiff_lzw"),
        "deflate.tif": encode(grey, "TIFF", compression="tiff_adobe_deflate"),
        "jpeg.tif": encode(colour, "TIFF", compression="jpeg"),
        "a.bmp": encode(colour, "BMP"),
        "1 bit.bmp": encode(grey.convert("1"), "BMP"),
    }


def attack_images(folder: Path, count: int, seed: int) -> Row:
    """Read damaged images, some with the header of one file and the rest of another."""
    from nearkin.data.reading import read_image, read_size
    from nearkin.errors import DataError

    rng = random.Random(seed)
    images = list(make_images().values())
    cases = []
    for number in range(count):
        data = images[number % len(images)]
        if rng.random() < 0.15:
            cut = rng.randrange(1, min(len(data), 400))
            data = data[:cut] + rng.choice(images)[cut:]
        cases.append(mutate(data, rng))
    path = folder / "image.jpg"

    def read(data: bytes) -> str:
        path.write_bytes(data)
        with suppress(DataError):
            read_size(path)
        try:
            pixels = read_image(path, 16)
        except DataError as error:
            return f"rejected: {error}"
        height, width = pixels.shape[1:]
        return "read" if pixels.shape[0] == 3 and 1 <= min(height, width) <= 16 else f"traceback: {pixels.shape}"

    return summarize("damaged images, 6 formats", list(outcomes(read, cases)))


# --- files of ours ---------------------------------------------------------------------------------------------------


def make_targets(folder: Path) -> list[Target]:
    """Write one file of each format that we read, with the function that reads it."""
    import numpy as np
    import torch
    from helpers.small_runs import make_run
    from helpers.studies import small_study, write_features

    import nearkin as nk
    from nearkin.bench.study import Study
    from nearkin.bench.trials import Outcome, StudyFolder
    from nearkin.config.recipe import DataConfig, Recipe
    from nearkin.data.sources import list_source, load_features
    from nearkin.deploy.index.items import FileStamp
    from nearkin.deploy.index.storage import Journal
    from nearkin.models.weights import load_checkpoint, read_state_dict
    from nearkin.report.baselines import headline
    from nearkin.report.contents import summarize_run
    from nearkin.report.tables import result_table
    from nearkin.training.factory import validate_recipe
    from nearkin.training.run import Run

    photos = next(path for path in (folder.parent / "inputs/photos",) if path.exists())
    trained = next((folder.parent / "inputs/runs").iterdir())
    run = folder / "run"
    shutil.copytree(trained, run)
    small = make_run(folder, photos, name="small").path
    model = nk.load(small)
    model.save(folder / "saved")
    index = nk.Index(
        np.random.default_rng(0).normal(size=(40, 8)), [f"{i}.png" for i in range(40)], [i % 4 for i in range(40)]
    )
    index.save(folder / "x.index")
    vectors = next((folder / "x.index").glob("vectors-*.npy"))
    features = write_features(folder / "clouds.npz")
    study = small_study(features)
    (folder / "study.toml").write_text(study.to_toml())
    studies = StudyFolder.begin(folder / "study", study)
    trial = studies.trials[0]
    studies.write(trial, Outcome(trial.id, "done", run="x", test={"R@1": 0.5}, intervals={"R@1": (0.4, 0.6)}))
    torch.save({"state_dict": {"w": torch.ones(3, 3)}}, folder / "foreign.pth")
    rows = "\n".join(
        f"{path},{path.parent.name},{'train' if n % 2 else 'test'}" for n, path in enumerate(photos.rglob("*.png"))
    )
    (folder / "photos.csv").write_text(f"path,label,split\n{rows}\n")
    journal = Journal(_made(folder / "journal.index"), "model", 4)
    for n in range(4):
        stamps = [FileStamp(n, n, f"{n:064x}")] * 3
        journal.append([f"{n} {i}" for i in range(3)], stamps, np.full((3, 4), n, np.float32))
    lines = journal.path.read_bytes()

    def digest(model: Any) -> str:
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()

    def read_index() -> Any:
        found = nk.Index.load(folder / "x.index")
        return found.ids, found.labels, found.vectors.tobytes(), len(found.search(found.vectors[0], k=3))

    def read_journal() -> Any:
        entries = Journal(journal.folder, "model", 4).entries
        assert all(vector.tolist() == [float(name.partition(" ")[0])] * 4 for name, (_, vector) in entries.items())

    def read_result() -> Any:
        opened = Run(run)
        if opened.result is None:
            return None
        return headline(opened), result_table(opened)

    def read_study() -> Any:
        return [str(trial) for trial in Study.from_toml(folder / "study.toml").trials()]

    def read_recipe() -> Any:
        validate_recipe(Recipe.from_toml(folder / "recipe.toml"))

    shutil.copy(run / "recipe.toml", folder / "recipe.toml")
    checkpoint = ("model", "objective", "optimizer", "scaler", "epoch", "step", "events_size")
    return [
        Target("best.pt", small / "best.pt", lambda: digest(nk.load(small)), same=True),
        Target(
            "last.pt", run / "last.pt", lambda: sorted(load_checkpoint(run / "last.pt", keys=checkpoint)), same=True
        ),
        Target(
            "model.safetensors",
            folder / "saved/model.safetensors",
            lambda: digest(nk.load(folder / "saved")),
            same=True,
        ),
        Target("vectors.npy", vectors, read_index, same=True),
        Target("manifest.json", folder / "x.index/manifest.json", read_index, mutate_text, same=True),
        Target(
            "journal of an index", journal.path, read_journal, restore=lambda: journal.path.write_bytes(lines) and None
        ),
        Target("model.json", folder / "saved/model.json", lambda: nk.load(folder / "saved"), mutate_text),
        Target(".npz of features", features, lambda: load_features(features)),
        Target(".pth of weights", folder / "foreign.pth", lambda: read_state_dict(folder / "foreign.pth")),
        Target("recipe.toml", folder / "recipe.toml", read_recipe, mutate_text),
        Target("result.json", run / "result.json", read_result, mutate_text),
        Target("events.jsonl", run / "events.jsonl", lambda: summarize_run(Run(run)), mutate_text),
        Target("outcome of a trial", studies._file(trial.id, "json"), studies.results, mutate_text),
        Target("study.toml", folder / "study.toml", read_study, mutate_text),
        Target(
            "CSV",
            folder / "photos.csv",
            lambda: list_source(DataConfig(source="table", root=folder / "photos.csv")),
            mutate_text,
        ),
    ]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
