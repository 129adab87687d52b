"""Models on the Hugging Face Hub: `nk.load("hf:user/name")` and `Embedder.push_to_hub("user/name")`."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nearkin.errors import ConfigError, RunError, import_extra

PREFIX = "hf:"
TIMEOUT = 5.0  # seconds to wait for an answer
_FILES = ["model.json", "model.safetensors"]
_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def download(address: str) -> Path:
    """Download "hf:user/name" or "hf:user/name@REVISION", or find it in the cache. Returns the folder of its files."""
    repo, _, revision = _check_name(address.removeprefix(PREFIX)).partition("@")
    hub: Any = import_extra("huggingface_hub", extra="images")
    with _hub_errors(repo):
        options = {"revision": revision or None, "allow_patterns": _FILES, "etag_timeout": TIMEOUT}
        folder = Path(hub.snapshot_download(repo, **options))
    if not (folder / _FILES[0]).exists():
        raise RunError(f"{PREFIX}{repo}: has no {_FILES[0]}, so it is not a model of nearkin. Load it with timm.")
    return folder


def push(model: Any, repo: str, card: str, *, private: bool) -> str:
    """Upload what `Embedder.save` writes, and a model card. Returns the address of the commit."""
    if "@" in _check_name(repo):
        raise ConfigError(f"{repo}: push without a revision: USER/NAME.")
    hub: Any = import_extra("huggingface_hub", extra="images")
    with tempfile.TemporaryDirectory() as folder, _hub_errors(repo):
        model.save(folder)
        Path(folder, "README.md").write_text(card, encoding="utf-8")
        api = hub.HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a model of nearkin"))


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name}: not the name of a model on the Hugging Face Hub. Expected USER/NAME.")
    return name


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn the many errors of the Hub's client into one of ours."""
    try:
        yield
    except (RunError, ConfigError):
        raise
    except Exception as error:  # of huggingface_hub, of its HTTP client, of the network and the disk
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(". ")
        raise RunError(
            f"{PREFIX}{repo}: {type(error).__name__}: {reason[:200]}.\n"
            "Check the name, the connection and your token (hf auth login), or give a local folder."
        ) from None
