"""Where the tests find the repository and, beside it, data too large for it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"  # CUB photos and features; tests that need them skip where it is missing
GOLDEN = ROOT / "tests" / "golden" / "golden.json"
