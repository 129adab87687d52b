"""The run folder: what is stored of a training run, written so that no crash leaves an inconsistent state.

result.json is written last: its existence means that the run is complete. docs/architecture.md lists all files.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin._common.files import (
    append_checksum,
    atomic_file,
    atomic_write,
    file_lock,
    full_disk,
    is_locked,
    nan_to_none,
    none_to_nan,
    read_json,
    remove_leftovers,
)
from nearkin._common.version import __version__, installed_version
from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, RunBusyError, RunError

# Entries of the events that others read.
_EVENT_KEYS = {"epoch": {"epoch", "loss", "val"}, "alarm": {"epoch", "kind", "text"}}

if TYPE_CHECKING:
    from nearkin.models.embedder import Embedder


class Run:
    """One run folder.

    Args:
        path: An existing run folder; `Run.create` makes a new one.

    Raises:
        RunError: The folder is not a run, or another version of nearkin wrote it.
    """

    is_writer = True  # of several processes only the main one writes

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "recipe.toml").exists():
            problem = "not a run folder (recipe.toml is missing)" if self.path.exists() else "no such folder"
            raise RunError(f"{self.path}: {problem}. `nearkin train` prints the folder of its run.")
        try:
            self.recipe = Recipe.from_toml(self.path / "recipe.toml")
        except ConfigError:
            written_by = self.stored_environment.get("packages", {}).get("nearkin")
            if written_by in (None, __version__):
                raise
            raise RunError(
                f"{self.path}: written by nearkin {written_by}, which {__version__} cannot read. "
                f"Train it again, or install nearkin=={written_by}."
            ) from None

    @classmethod
    def create(cls, runs: str | Path, key: str, recipe: Recipe) -> Run:
        """Open the run with this key, or create its folder. Its data may have moved: the newest paths are stored."""
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
                f"{path}: cannot write the run folder ({error.strerror}). Choose another folder with --runs DIR."
            ) from None
        return cls(path)

    @property
    def result(self) -> dict[str, Any] | None:
        """The stored result, or None while the run is incomplete."""
        stored = self._read_json("result.json")
        if stored is None:
            return None
        try:
            tables = {name: none_to_nan(stored[name]) for name in ("test", "differences") if stored.get(name)}
            result = {**stored, **tables}
            _check_result(result)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            damage = f"{self.path / 'result.json'}: damaged ({type(error).__name__}: {error})"
            raise RunError(f"{damage}. Delete the file to evaluate again.") from None
        return result

    @property
    def stored_environment(self) -> dict[str, Any]:
        """The stored `environment`; empty if there is none."""
        return self._read_json("env.json") or {}

    @property
    def failed(self) -> dict[str, Any] | None:
        """Why the run failed, or None."""
        return self._read_json("failed.json")

    def events(self) -> list[dict[str, Any]]:
        """Return the events of events.jsonl; a last line cut off by a crash is skipped."""
        try:
            lines = (self.path / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except UnicodeDecodeError as error:
            raise RunError(f"{self.path / 'events.jsonl'}: damaged ({error}).") from None
        events: list[dict[str, Any]] = []
        try:
            for line in lines:
                if line.endswith("\n"):
                    events.append(json.loads(line))
                    if not _EVENT_KEYS.get(events[-1]["event"], set()) <= events[-1].keys():
                        raise ValueError("incomplete")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"{self.path / 'events.jsonl'}: line {lines.index(line) + 1} is damaged ({type(error).__name__}: "
                f"{error}). Delete the file to go on without the history."
            ) from None
        return events

    def embedder(self, module: Any = None, preprocess: Any = None) -> Embedder:
        """Load the model of the best epoch; arguments as for `nearkin.load`."""
        from nearkin.models.saved import load

        return load(self.path, module, preprocess)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        try:
            content = read_json(self.path / name)
            if not isinstance(content, dict):
                raise ValueError(f"expected an object, got {type(content).__name__}")
            return content
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.path / name}: cannot be read ({error}). Restore it, or delete it to train again."
            ) from None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run for this process. A second process gets `RunBusyError`; a killed one releases the lock."""
        if not self.is_writer:
            yield
            return
        with ExitStack() as stack:
            with _write_errors(self.path / "lock"):
                acquired = stack.enter_context(file_lock(self.path / "lock"))
            if not acquired:
                raise _busy(self.path)
            remove_leftovers(self.path)
            yield

    def log(self, **event: Any) -> None:
        """Append an event to events.jsonl."""
        if not self.is_writer:
            return
        path = self.path / "events.jsonl"
        with _write_errors(path), open(path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(nan_to_none(event), allow_nan=False) + "\n")

    def events_size(self) -> int:
        """Return the size of events.jsonl in bytes."""
        path = self.path / "events.jsonl"
        return path.stat().st_size if path.exists() else 0

    def rewind_events(self, size: int) -> None:
        """Drop events logged after the checkpoint that is being resumed; they will be logged again."""
        path = self.path / "events.jsonl"
        with _write_errors(path):
            if self.is_writer and self.events_size() > size:
                os.truncate(path, size)

    def save(self, name: str, state: dict[str, Any], *, keep: str | None = None) -> None:
        """Replace a checkpoint atomically; the previous one stays as `keep`, in case the new one gets damaged."""
        import torch
        from torch.utils._pytree import tree_leaves, tree_map_only

        if not self.is_writer:
            return
        target = self.path / name
        # One written on a GPU or XLA is to be read on any machine.
        state = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), state)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(state) if torch.is_tensor(tensor))
        try:
            with atomic_file(target, keep=self.path / keep if keep else None, size=size) as temporary:
                with open(temporary, "wb") as file:
                    torch.save(state, file)
                append_checksum(temporary)
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch hides it behind a RuntimeError
            reason = getattr(cause, "strerror", None) or error
            rest = "The previous one is intact." if target.exists() else "Fix that and run the same command again."
            raise RunError(f"{target}: cannot write the checkpoint ({reason}). {rest}") from None

    def require_space(self, size: int) -> None:
        """Refuse to start what could not be saved later: `size` bytes of checkpoints."""
        free = shutil.disk_usage(self.path).free
        if self.is_writer and free < size:
            needs = f"needs ~{math.ceil(size / 1e6):,} MB for checkpoints, {free // 10**6:,} MB are free"
            raise RunError(
                f"No space left on {self.path}: {needs}. Free some space, or choose another folder with --runs DIR."
            )

    def finish(self, result: dict[str, Any]) -> None:
        """Write result.json, which marks the run as complete."""
        if not self.is_writer:
            return
        target = self.path / "result.json"
        with _write_errors(target):
            (self.path / "failed.json").unlink(missing_ok=True)
            atomic_write(target, json.dumps(nan_to_none(result), indent=2, allow_nan=False))

    def fail(self, reason: str, **details: Any) -> None:
        """Write failed.json; `details` are further JSON values, such as the epoch and the files of the batch."""
        if not self.is_writer:
            return
        target = self.path / "failed.json"
        with _write_errors(target):
            atomic_write(target, json.dumps({"reason": reason, **details, "time": _now()}, indent=2))


def refuse_if_busy(recipe: Recipe, runs: str | Path) -> None:
    """Raise `RunBusyError` if another process is training this recipe, without reading its data to compute its key."""
    recipe = _with_full_paths(recipe)
    for stored in Path(runs).glob("*/recipe.toml"):
        lock = stored.with_name("lock")
        with suppress(ConfigError, OSError):  # a folder that another version wrote, or that is being deleted
            unfinished = lock.exists() and not stored.with_name("result.json").exists()
            if unfinished and Recipe.from_toml(stored) == recipe and is_locked(lock):
                raise _busy(stored.parent)


def _busy(path: Path) -> RunBusyError:
    return RunBusyError(f"{path}: another process is training this run. Wait for it or stop it.")


def _check_result(result: dict[str, Any]) -> None:
    protocol, test = result["protocol"], result["test"]
    numbers = [protocol["epoch"], *protocol["classes"].values()]
    numbers += [result[name] or 0 for name in ("val_R@1", "val_MAP@R")]
    tables = [*(test or {}).values(), *(result["differences"].values() if test else ())]
    intervals = [value for metrics in tables for value in metrics.values()]
    if test:
        intervals += [test[name]["R@1"] for name in ("trained", *test, *result["differences"])]
        intervals += [metrics[name] for metrics in result["differences"].values() for name in ("R@1", "MAP@R")]
    for value in intervals:
        low, high = value["interval"]
        numbers += [value["mean"], low, high]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("expected numbers")
    "".join(result.get("notes", []))


def _with_full_paths(recipe: Recipe) -> Recipe:
    """Resolve paths, so that the run finds its data from any working directory."""
    root, weights = recipe.data.root, recipe.model.weights
    data = replace(recipe.data, root=root and root.resolve())
    if weights in ("none", "default"):
        return replace(recipe, data=data)
    return replace(recipe, data=data, model=replace(recipe.model, weights=str(Path(weights).resolve())))


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Report a full disk or a read-only folder as an error that names the file."""
    try:
        yield
    except OSError as error:
        error = full_disk(error, target) or error
        raise RunError(
            f"{target}: cannot be written ({error.strerror or error}). "
            "Nothing stored is lost: fix that and run the same command again to resume."
        ) from None


def environment() -> dict[str, Any]:
    from nearkin.training.distributed import world_size

    packages = ("nearkin", "torch", "numpy", "torchvision", "timm", "pillow")
    return {
        "time": _now(),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "processes": world_size(),
        "packages": {name: installed_version(name) for name in packages},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Return the git commit if nearkin runs from its own checkout (not from a .venv inside another project's)."""
    here = Path(__file__)
    try:
        for arguments in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
            done = subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True, timeout=5)
            if done.returncode:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
