"""Writing files so that a crash leaves the old one or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_aside(target: Path, content: str | bytes) -> None:
    """Write beside the target, then rename over it."""
    aside = target.with_name(f"{target.name}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
