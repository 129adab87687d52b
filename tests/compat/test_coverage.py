"""The coverage table has every public class of pytorch-metric-learning, and says the truth about ours."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
from helpers.paths import ROOT

from nearkin.compat import pml
from nearkin.compat.pml.coverage import COVERAGE, DIFFERENCES
from nearkin.errors import UnknownNameError

MODULES = ("losses", "miners", "reducers", "distances", "regularizers", "samplers")
ROWS = [(module, name, row) for module, names in COVERAGE.items() for name, row in names.items()]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_class_of_pml_is_listed(module: str) -> None:
    pytest.importorskip("pytorch_metric_learning", reason="lists the classes of pytorch-metric-learning")
    theirs = importlib.import_module(f"pytorch_metric_learning.{module}")
    assert {name for name, value in vars(theirs).items() if inspect.isclass(value)} == set(COVERAGE[module])


@pytest.mark.parametrize(("module", "name", "row"), ROWS, ids=[f"{m}.{n}" for m, n, _ in ROWS])
def test_classes_exist_unless_they_are_absent(module: str, name: str, row) -> None:
    ours = importlib.import_module(f"nearkin.compat.pml.{module}")
    if row.status == "absent":
        with pytest.raises(UnknownNameError, match="Use instead"):
            getattr(ours, name)
    else:
        assert inspect.isclass(getattr(ours, name))
    assert bool(row.note) == (row.status != "same")


def test_at_least_85_percent_are_the_same() -> None:
    status = [row.status for module, _, row in ROWS if module in MODULES]
    assert status.count("same") >= 0.85 * len(status)


@pytest.mark.parametrize(("module", "name", "row"), ROWS, ids=[f"{m}.{n}" for m, n, _ in ROWS])
def test_arguments_and_defaults(module: str, name: str, row) -> None:
    """Every argument of PML's class is one of ours, in the same order and with the same default."""
    pytest.importorskip("pytorch_metric_learning", reason="compares with pytorch-metric-learning")
    if row.status == "absent":
        return
    theirs, ours = (
        inspect.signature(getattr(importlib.import_module(f"{package}.{module}"), name)).parameters
        for package in ("pytorch_metric_learning", "nearkin.compat.pml")
    )
    want = {n: p.default for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    want.pop("aggregation_func", None)  # a function of its own in each
    got = {n: p.default for n, p in ours.items() if n in want}
    assert list(got.items()) == list(want.items())


@pytest.mark.parametrize("name", ["trainers", "testers", "datasets"])
def test_absent_modules_say_what_to_use(name: str) -> None:
    with pytest.raises(UnknownNameError, match="Use instead: nearkin"):
        getattr(pml, name)
    with pytest.raises(UnknownNameError, match="Use instead: nearkin"):
        exec(f"from nearkin.compat.pml import {name}")


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'ContrastiveLoss'"):
        pml.losses.ContrastivLoss  # noqa: B018
    with pytest.raises(UnknownNameError, match="GenericPairLoss"):
        pml.utils.loss_and_miner_utils  # noqa: B018


def test_it_needs_no_optional_package_and_nothing_imports_it() -> None:
    code = (
        "import sys\n"
        "for name in ('torchvision', 'timm', 'faiss', 'pytorch_metric_learning', 'sklearn'): sys.modules[name] = None\n"
        "import nearkin, nearkin.losses, nearkin.metrics\n"
        "assert not any(name.startswith('nearkin.compat') for name in sys.modules)\n"
        "import nearkin.compat.pml\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_page_shows_the_table_and_the_differences() -> None:
    page = (ROOT / "docs" / "from-pml.md").read_text(encoding="utf-8")
    for module, name, row in ROWS:
        assert f"| `{module}.{name}` | {row.status} | {row.note} |" in page
    for text in DIFFERENCES.values():
        assert f"- {text}" in page
