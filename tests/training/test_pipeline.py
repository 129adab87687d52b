"""The whole way, small: train on glyphs by command, judge, write the page."""

import re

import pytest

from nearkin import cli
from nearkin.training.run import Run


@pytest.fixture(scope="module")
def small_run(tmp_path_factory, glyphs_table) -> Run:
    runs = tmp_path_factory.mktemp("runs")
    flags = ["--runs", str(runs), "--train.epochs", "1", "--model.width", "8", "--quiet"]
    cli.main(["train", "glyphs_small", *flags])
    [path] = runs.iterdir()
    return Run(path)


def test_one_short_epoch_already_beats_the_untrained_network(small_run):
    test = small_run.result["test"]
    assert test["trained"]["R@1"]["interval"][0] > test["untrained"]["R@1"]["interval"][1]


def test_report_command_writes_one_file_without_outside_references(small_run, tmp_path, capsys):
    page = tmp_path / "deep" / "page.html"
    cli.main(["report", str(small_run.path), "--out", str(page)])
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|\#)""", text)
    assert text.count("url(") == text.count("url(data:")
    assert "@import" not in text
    assert len(text) < 10_000_000
