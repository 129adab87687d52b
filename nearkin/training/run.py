"""A run folder: what is stored of a training run, written so that no crash can leave a half-truth.

recipe.toml   first write           events.jsonl    one line per epoch, append only
env.json      versions, machine     last.pt best.pt written aside, then renamed
per_query.npz  values per query      result.json     last write: its existence means done
failed.json   the reason            (either result or failed, never both)
vectors.npz   of the judged images, where a network was fine-tuned; may be deleted
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin._common.files import atomic_write, file_lock, nan_to_none, none_to_nan
from nearkin.config.recipe import Recipe
from nearkin.errors import RunBusyError, RunError

if TYPE_CHECKING:
    from nearkin.models.embedder import Embedder


class Run:
    """One run folder. Opening an existing one reads it; `Run.create` makes it."""

    is_writer = True  # of several processes only the first does

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "recipe.toml").exists():
            raise RunError(f"{self.path}: not a run folder (it holds no recipe.toml).")
        self.recipe = Recipe.from_toml(self.path / "recipe.toml")

    @classmethod
    def create(cls, runs: str | Path, key: str, recipe: Recipe) -> Run:
        """The run of this key below `runs`, made if it is not there yet.

        A recipe of the same key differs in nothing that changes a number, but it may know where the data lie now.
        """
        path = Path(runs) / key
        recipe = _with_full_paths(recipe)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not (path / "recipe.toml").exists():
                atomic_write(path / "env.json", json.dumps(environment(), indent=2))
                atomic_write(path / "recipe.toml", recipe.to_toml())
            elif cls(path).recipe != recipe:
                atomic_write(path / "recipe.toml", recipe.to_toml())
        except OSError as error:
            raise RunError(
                f"{path}: cannot write the run folder ({error.strerror}). Choose another place with --runs DIR."
            ) from None
        return cls(path)

    # --- what is there ------------------------------------------------------------------------------------------------

    @property
    def result(self) -> dict[str, Any] | None:
        """What `evaluate_final` stored, or None while the run is not done."""
        stored = self._read_json("result.json")
        return stored and {
            **stored,
            **{name: none_to_nan(stored[name]) for name in ("test", "gain") if stored.get(name)},
        }

    @property
    def failed(self) -> dict[str, Any] | None:
        """Why the run failed, or None."""
        return self._read_json("failed.json")

    def events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl; a last line cut by a crash is left out."""
        try:
            lines = (self.path / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def embedder(self) -> Embedder:
        """The model of the best epoch."""
        from nearkin.models.embedder import load

        return load(self.path)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / name}: cannot be read ({error}). Remove the file to train again.") from None

    # --- writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the run for this process; a second process is told, a killed one lets go by itself."""
        if not self.is_writer:
            yield
            return
        with ExitStack() as stack:
            with _trouble_said(self.path / "lock"):
                ours = stack.enter_context(file_lock(self.path / "lock"))
            if not ours:
                raise RunBusyError(f"{self.path}: another process is training this run. Wait for it, or stop it.")
            yield

    def log(self, **event: Any) -> None:
        if not self.is_writer:
            return
        path = self.path / "events.jsonl"
        with _trouble_said(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(nan_to_none(event), allow_nan=False) + "\n")

    def events_size(self) -> int:
        path = self.path / "events.jsonl"
        return path.stat().st_size if path.exists() else 0

    def rewind_events(self, size: int) -> None:
        """Drop what was logged after the checkpoint that is being resumed; it will be logged again."""
        path = self.path / "events.jsonl"
        with _trouble_said(path):
            if self.is_writer and self.events_size() > size:
                os.truncate(path, size)

    def save(self, name: str, state: dict[str, Any], *, keep: str | None = None) -> None:
        """Write a checkpoint aside, then rename it, so that a crash leaves the earlier one whole.

        With keep, the earlier one stays beside it, for the case that a disk damages what it has written.
        """
        import torch

        if not self.is_writer:
            return
        target = self.path / name
        aside = target.with_name(f"{name}.tmp")
        try:
            with open(aside, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if keep is not None and target.exists():
                target.replace(self.path / keep)
            aside.replace(target)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            aside.unlink(missing_ok=True)
            raise RunError(f"{target}: cannot write the checkpoint ({error}). The earlier one is kept.") from None

    def finish(self, result: dict[str, Any]) -> None:
        if not self.is_writer:
            return
        target = self.path / "result.json"
        with _trouble_said(target):
            (self.path / "failed.json").unlink(missing_ok=True)
            atomic_write(target, json.dumps(nan_to_none(result), indent=2, allow_nan=False))

    def fail(self, reason: str, **details: Any) -> None:
        if not self.is_writer:
            return
        target = self.path / "failed.json"
        with _trouble_said(target):
            atomic_write(target, json.dumps({"reason": reason, **details, "time": _now()}, indent=2))


def _with_full_paths(recipe: Recipe) -> Recipe:
    """So that the run finds its data from anywhere."""
    root, weights = recipe.data.root, recipe.model.weights
    data = replace(recipe.data, root=root and root.resolve())
    if weights in ("none", "default"):
        return replace(recipe, data=data)
    return replace(recipe, data=data, model=replace(recipe.model, weights=str(Path(weights).resolve())))


@contextmanager
def _trouble_said(target: Path) -> Iterator[None]:
    """A full disk, or a folder that is not ours to write, as an error that names the file."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{target}: cannot be written ({error.strerror or error}). "
            "What was stored is kept: mend that, and the same command goes on."
        ) from None


def environment() -> dict[str, Any]:
    """What the run ran on: versions, machine, command."""
    packages: dict[str, str | None] = {}
    for name in ("nearkin", "torch", "numpy", "torchvision", "timm", "pillow"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "time": _now(),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": packages,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The source's git commit, where nearkin runs from a checkout (not from a .venv inside another project's)."""
    here = Path(__file__)
    try:
        for question in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
            done = subprocess.run(["git", *question], cwd=here.parent, capture_output=True, text=True, timeout=5)
            if done.returncode:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
