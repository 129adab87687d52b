"""`nearkin export --to hub`: the card has the protocol and the metrics of the run."""

import pytest
import torch
from helpers.hub import hub  # noqa: F401  (a fixture)
from helpers.small_runs import make_run

import nearkin as nk
from nearkin.cli import main
from nearkin.deploy import model_card
from nearkin.errors import RunError


def test_the_command_pushes_the_model_with_its_metrics(hub, tmp_path, tiny_recipe, quiet, capsys):  # noqa: F811
    run = nk.fit(tiny_recipe, tmp_path, reporter=quiet)
    main(["export", str(run.path), "--to", "hub", "-o", "me/photos"])
    assert "me/photos" in capsys.readouterr().out
    card = hub["me/photos"]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: nearkin\n")
    trained = run.result["test"]["trained"]["R@1"]
    low, high = (100 * bound for bound in trained["interval"])
    assert f"| {100 * trained['mean']:.1f} ({low:.1f} to {high:.1f}) |" in card
    classes = run.result["protocol"]["classes"]
    assert f"{classes['train']} classes for training" in card
    assert 'nk.load("hf:me/photos")' in card
    for baseline in run.result["test"]:
        assert baseline == "trained" or f"| {baseline} |" in card
    pixels = torch.randint(0, 256, (2, *run.embedder().image_shape), dtype=torch.uint8)
    assert torch.equal(nk.load("hf:me/photos").embed(pixels), run.embedder().embed(pixels))


@pytest.mark.parametrize(
    ("flags", "message"),
    [("hub --images .", "--images: has no effect with --to hub"), ("torch --private", "--private: has no effect")],
)
def test_flags_that_cannot_be_used_are_refused(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path), "-o", "x/y", "--to", *flags.split()])
    assert message in capsys.readouterr().err


def test_an_unfinished_run_has_no_card(tmp_path, photo_folder):
    run = make_run(tmp_path, photo_folder)  # without a result
    with pytest.raises(RunError, match="has no result yet"):
        model_card(nk.Run(run.path), "me/photos")
