"""A script written for pytorch-metric-learning gives the same numbers with only its import lines changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.compat_matching import TOLERANCE, assert_close
from helpers.paths import ROOT

pytest.importorskip("pytorch_metric_learning", reason="compares with pytorch-metric-learning")
pytest.importorskip("faiss", reason="pytorch-metric-learning searches with faiss")

SCRIPT = (ROOT / "tests" / "compat" / "pml_script.py").read_text(encoding="utf-8")


def run(source: str, dtype: torch.dtype) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "pml_script"}
    exec(compile(source, "pml_script.py", "exec"), names)
    return names["run"](dtype)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # from PML
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_same_numbers_with_other_imports(dtype: torch.dtype) -> None:
    changed = SCRIPT.replace("from pytorch_metric_learning", "from nearkin.compat.pml")
    lines = [(a, b) for a, b in zip(SCRIPT.splitlines(), changed.splitlines(), strict=True) if a != b]
    assert lines
    assert all(a.startswith("from pytorch_metric_learning") for a, _ in lines)
    got, want = run(changed, dtype), run(SCRIPT, dtype)
    assert list(got) == list(want)
    for name, value in want.items():
        tolerance = TOLERANCE[dtype] if "reciprocal" not in name else 1e-6  # PML averages it in float32
        assert_close(got[name], value, tolerance, name)
