"""The loss pages match the source, and their code runs."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT
from helpers.rows import ROWS

from nearkin.analysis import information
from nearkin.losses import LOSSES, classes, miners, objective, ranges, registry
from nearkin.ops import geometry, pairs, reductions
from nearkin.report import losses


def generate() -> object:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date() -> None:
    for name, text in generate().pages().items():
        page = ROOT / "docs" / "losses" / name
        assert page.exists(), f"{name} is missing: run python docs/generate.py"
        assert page.read_text() == text, f"{name} is out of date: run python docs/generate.py"
    for name in LOSSES:
        assert (ROOT / "docs" / "losses" / f"{name}.png").exists()


def test_table_rows_have_as_many_cells_as_their_header() -> None:
    """A stray "|" in a docstring or a setting would add a column."""
    for name, text in generate().pages().items():
        cells = 0
        for line in text.splitlines():
            here = line.count("|") if line.startswith("|") else 0
            assert not (cells and here) or here == cells, f"{name}: {line}"
            cells = here


def test_add_a_loss_in_five_minutes() -> None:
    page = (ROOT / "docs" / "add-a-loss.md").read_text()
    known, scope = set(LOSSES), {"__name__": "added"}
    try:
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(compile(block, "docs/add-a-loss.md", "exec"), scope)
        added = set(LOSSES) - known
        assert added == {"hardest_gap", "cosine_margin"}
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        for name in added:
            for example in doctest.DocTestFinder(recurse=False).find(LOSSES[name].function, name, globs=scope):
                runner.run(example)
        assert runner.summarize(verbose=False).failed == 0
        assert not {row.name for row in ROWS} & added
    finally:
        for name in set(LOSSES) - known:
            del LOSSES[name]


@pytest.mark.parametrize(
    "module",
    [pairs, reductions, geometry, miners, objective, information, classes, ranges, registry],
    ids=lambda m: m.__name__,
)
def test_examples(module: object) -> None:
    scope = {**vars(module), "torch": torch}
    assert doctest.testmod(module, globs=scope, optionflags=doctest.ELLIPSIS).failed == 0


def test_the_list_contains_every_loss() -> None:
    text = losses.list_losses()
    for name, entry in LOSSES.items():
        assert f"  {name} " in text
        assert entry.summary in text


@pytest.mark.parametrize("name", list(LOSSES))
def test_explain(name: str) -> None:
    text = losses.explain(name)
    entry = LOSSES[name]
    assert entry.summary in text
    table = losses.settings_table(entry)
    assert [key for key, *_ in table] == list(entry.settings)
    for key, default, _, explanation in table:
        assert f"  {key} " in text
        assert f"default {default}" in text
        assert len(explanation) > 5, f"{key} is not explained"
        assert explanation.endswith("."), f"{key}: the explanation is cut off"
        assert " ".join(explanation.split()) in " ".join(text.split())


@pytest.mark.parametrize("name", list(LOSSES))
def test_gradient_curves(name: str) -> None:
    """Somewhere in the range positives are pulled and negatives are pushed."""
    positive, negative = losses.gradient_curves(name, points=21)
    assert torch.isfinite(positive.grad).all()
    assert torch.isfinite(negative.grad).all()
    assert float(positive.grad.min()) < 0
    # The push of proxy_repulsion is between proxies, that of vicreg between coordinates; that of histogram is in the
    # bins next to a positive only, between these points.
    if name not in ("proxy_repulsion", "vicreg", "histogram"):
        assert float(negative.grad.max()) > 0


def test_explanations_follow_references_and_continuation_lines() -> None:
    def explanations(name: str) -> dict[str, str]:
        return {key: text for key, _, _, text in losses.settings_table(LOSSES[name])}

    assert explanations("mpa_dw") == explanations("mpa_ap") == explanations("mpa")
    assert explanations("mpa")["gamma"] == "Temperature over the centres of a class."
    assert explanations("softmax")["dropout"].startswith("Dropout probability on the embeddings")

    def function() -> None:
        """Summary.

        Args:
            first: One line.
            second: Two lines,
                with a colon: here.

        Returns:
            third: Not an argument.
        """

    assert losses._documented_args(function) == {"first": "One line.", "second": "Two lines, with a colon: here."}


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "new" / "ms.png"
    assert str(plot) in losses.explain("multi_similarity", plot)
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(Exception, match="Did you mean 'multi_similarity'"):
        losses.explain("multisimilarity")
