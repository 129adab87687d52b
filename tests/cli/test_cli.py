"""The command line: user errors print one or two lines and exit with code 2, never with a traceback."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.small_runs import make_result, make_run

import nearkin as nk
from nearkin import cli
from nearkin.cli import doctor
from nearkin.cli._arguments import show
from nearkin.cli.train import parse_train
from nearkin.config.recipe import ComponentConfig


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = 0
    try:
        cli.main([str(a) for a in args])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "No command named 'trian'. Did you mean 'train'?"),
        (["train", "glyps_small"], "Did you mean 'glyphs_small'?"),
        (["train", "nosuch.toml"], "nosuch.toml: no such recipe file"),
        (["train", "--loss", "proxyanchor"], "No loss named 'proxyanchor'. Did you mean 'proxy_anchor'?"),
        (["train", "--loss.alfa", "3"], "no setting 'alfa'. Did you mean 'alpha'?"),
        (["train", "--train.batchsize", "3"], "Did you mean '--train.batch-size'?"),
        (["train", "--lr", "3"], "Did you mean '--train.lr'?"),
        (["train", "--data", "/no/such/folder"], "/no/such/folder: no such file or folder"),
        (["train", "--data"], "--data: missing value"),
        (["train", "--device", "nonsense"], "device 'nonsense' cannot be used here"),
        (["train", "--model.backbone", "smal_conv"], "Did you mean 'small_conv'?"),
        (["train", "--model.pool", "averag"], "Did you mean 'average'?"),
        (["train", "--miner.epsilon", "1"], "no miner is selected"),
        (["evaluate", "\x1b[2Jnone.npz"], r"\x1b[2Jnone.npz: no such file"),  # not the escape code itself
        (["evaluate"], "missing argument: a run folder or a features.npz"),
        (["evaluate", "none.npz"], "none.npz"),
        (["report", "."], "not a run folder"),
        (["losses", "tripplet"], "Did you mean 'triplet'?"),
        (["losses", "--figure", "x.png"], "--figure: no loss given"),
        (["demo", "more"], "more: no such argument"),
    ],
)
def test_user_errors_name_the_fix(capsys, args, message):
    code, out, err = run(capsys, *args)
    assert code == 2
    assert message in err
    assert out == ""
    assert len(err.strip().splitlines()) <= 2
    assert "Traceback" not in err


def test_a_wrong_value_names_the_flag(capsys):
    """In one line, without the usage that tyro prints in a box."""
    for argv, message in {
        ("train", "--train.epochs", "ten"): "--train.epochs: expected an integer, got 'ten'.",
        ("train", "--train.epochs"): "Missing value for argument '--train.epochs'. Expected 1 values.",
        ("train", "--train.batch-size", "1"): "train.batch_size: expected at least 2, got 1.",
        ("train", "--model.dim", "9" * 20): f"model.dim: expected at most 65,536, got {'9' * 20}.",
        ("train", "--train.optimizer", "x"): (
            "invalid choice 'x' for argument '--train.optimizer'. Expected one of ('adamw', 'sgd')."
        ),
        ("tune", "--workers", "x"): "--workers: expected an integer, got 'x'.",
    }.items():
        code, _, err = run(capsys, *argv)
        assert code == 2
        assert err == f"nearkin: {message} See: nearkin {argv[0]} [RECIPE] --help.\n"


def test_a_runs_folder_that_cannot_be_written_is_named(capsys, tmp_path, glyphs_table):
    (tmp_path / "file").touch()
    code, _, err = run(capsys, "train", "--runs", tmp_path / "file")
    assert code == 2
    assert "cannot write the run folder" in err
    assert "--runs DIR" in err


def test_help_covers_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in cli.COMMANDS:
        assert f"nearkin {name}" in out
        code, shown, _ = run(capsys, name, "--help")
        assert code == 0
        assert "usage" in shown.lower()
    assert "Run `nearkin COMMAND --help` for details." in out
    assert "--loss.SETTING VALUE" in run(capsys, "train", "--help")[1]
    assert run(capsys)[1] == out
    assert run(capsys, "--version")[1].startswith("nearkin ")


def test_flags_change_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    recipe, args = parse_train(
        ["glyphs_small", "--loss.alpha=8", "--train.epochs", "2", "--model.dim=16", "--seed", "4", "--runs", "x"]
    )
    assert recipe.loss == ComponentConfig("proxy_anchor", {"alpha": 8, "margin": 0.1})
    assert (recipe.train.epochs, recipe.model.dim, recipe.seed, args.runs) == (2, 16, 4, Path("x"))
    recipe, _ = parse_train(["--loss", "triplet", "--loss.margin", "0.2", "--miner.name", "semihard"])
    assert recipe.loss == ComponentConfig("triplet", {"margin": 0.2})  # another loss does not inherit alpha
    assert recipe.miner == ComponentConfig("semihard")
    recipe, _ = parse_train(["from_scratch", "--data", "photos", "--data.image-size", "32", "--train.class-lr", "0.5"])
    assert (recipe.data.source, recipe.data.root, recipe.data.image_size) == ("folder", Path("photos").resolve(), 32)
    assert recipe.train.class_lr == 0.5


def test_sums_of_losses_reductions_and_regularizers(tmp_path):
    recipe, _ = parse_train(["--loss", "proxy_anchor + 0.1*contrastive + 2*triplet"])
    assert recipe.loss.name == "proxy_anchor+0.1*contrastive+2*triplet"
    assert [(weight, part.name) for weight, part in recipe.loss.parts] == [
        (1.0, "proxy_anchor"),
        (0.1, "contrastive"),
        (2.0, "triplet"),
    ]
    path = tmp_path / "sum.toml"
    path.write_text(recipe.to_toml())
    assert parse_train([str(path), "--seed", "1"])[0].loss == recipe.loss
    assert parse_train([str(path), "--loss", "triplet"])[0].loss == ComponentConfig("triplet")
    recipe, _ = parse_train(["--loss", "triplet", "--reduction", "nonzero", "--loss.regularizers=lp=0.1,zero_mean=2"])
    assert recipe.loss == ComponentConfig("triplet", {"reduction": "nonzero"}, {"lp": 0.1, "zero_mean": 2.0})
    path.write_text(recipe.to_toml())
    recipe, _ = parse_train([str(path), "--loss.regularizers", "lp=1"])
    assert recipe.loss.regularizers == {"lp": 1.0, "zero_mean": 2.0}
    assert parse_train(["thesis_triplet", "--loss", "softmax+contrastive"])[0].miner is not None
    assert parse_train(["thesis_triplet", "--loss", "softmax+arcface"])[0].miner is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "proxy_anchor+x*triplet"], "--loss proxy_anchor+x*triplet: expected a name, or a sum such as"),
        (["--loss", "proxy_anchor+", "--seed", "1"], "--loss proxy_anchor+: expected a name, or a sum"),
        (["--loss", "2*triplet", "--loss.margin", "1"], "--loss.margin: 2*triplet is a sum. Write the settings"),
        (["--loss", "ice+nca", "--reduction", "sum"], "--loss.reduction: ice+nca is a sum. Write the settings"),
        (["--loss.regularizers", "lp"], "--loss.regularizers lp: expected weights such as lp=0.01"),
    ],
)
def test_sums_that_cannot_be_read_are_refused(flags, message):
    with pytest.raises(nk.UserError) as error:
        parse_train(flags)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["photos", "photos.csv", "features.npz"])
def test_data_given_as_a_recipe_suggests_the_flag(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).touch() if "." in name else Path(name).mkdir()
    code, _, err = run(capsys, "train", name)
    assert code == 2
    assert f"To train on it: nearkin train --data {name}\n" in err


def test_show_prints_the_recipe_that_the_data_would_be_trained_with(capsys, photo_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "train", "--data", str(photo_folder), "--show", "--train.epochs", "7")
    assert (code, list(tmp_path.iterdir())) == (0, [])
    assert "recipe: a head on frozen EfficientNet-Lite0 features" in err
    (tmp_path / "shown.toml").write_text(out)
    shown = nk.Recipe.from_toml(tmp_path / "shown.toml")
    expected = nk.recipes.folder_default()
    assert shown.loss == expected.loss
    assert (shown.model, shown.data.root, shown.train.epochs) == (expected.model, photo_folder, 7)
    assert "--show" in run(capsys, "tune", "--show")[2]  # refused, not ignored


def test_help_says_which_recipe_is_used_when(capsys):
    out = run(capsys, "train", "--help")[1]
    for name in ("features_default for", "from_scratch for 2,000", "folder_finetune with a CUDA GPU", "--show"):
        assert name in " ".join(out.replace("│", " ").split())


def test_the_recipes_miner_is_dropped_if_a_new_loss_cannot_use_it():
    assert parse_train(["thesis_triplet"])[0].miner is not None
    assert parse_train(["thesis_triplet", "--loss", "proxy_anchor"])[0].miner is None
    assert parse_train(["thesis_triplet", "--loss", "contrastive"])[0].miner is not None
    assert parse_train(["thesis_triplet", "--miner", "none"])[0].miner is None
    recipe, _ = parse_train(["thesis_triplet", "--loss", "proxy_anchor", "--miner", "semihard"])
    assert recipe.miner == ComponentConfig("semihard")  # given explicitly, so the loss will reject it


def test_ctrl_c_says_how_to_resume(capsys, monkeypatch):
    def pressed(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("nearkin.cli.train.run", pressed)
    code, out, err = run(capsys, "train")
    assert (code, out) == (130, "")
    assert "repeat the same command to resume" in err
    monkeypatch.setenv("RANK", "1")  # only the main process prints
    assert run(capsys, "train")[2] == ""


def test_losses_are_listed_explained_and_drawn(capsys, tmp_path):
    from nearkin.losses.registry import LOSSES

    code, out, _ = run(capsys, "losses")
    assert code == 0
    assert all(name in out for name in LOSSES)
    lines = " ".join(out.split())
    for text in ("In the tables of: thesis, mpa.", "regularizers: added", "mpa = Multi Proxy Anchor"):
        assert text in lines
    assert "In the tables of: cross_entropy" in lines[lines.index(" spce ") : lines.index(" cosface ")]
    code, out, _ = run(capsys, "losses", "proxy_anchor", "--figure", tmp_path / "p.png")
    assert code == 0
    assert "alpha" in out
    assert "Kim" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_doctor_prints_versions_extras_devices_and_known_issues(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for word in (
        "python",
        "torch",
        "cores",
        "OpenMP",
        "cpu",
        "images: train",
        "installed: ",
        "stores: ",
        "known issue",
    ):
        assert word in out


def test_threads_sleep_early_only_beside_busy_processes_and_never_against_the_user(monkeypatch):
    def policy(*, busy: bool, **chosen: str) -> str:
        unset = {**cli.OPENMP_WAIT, "OMP_WAIT_POLICY": ""}
        monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in unset} | chosen)
        monkeypatch.setattr(cli, "other_processes_run", lambda: busy)
        with pytest.raises(SystemExit):
            cli.main(["doctor", "--help"])
        return doctor._openmp_waiting()

    assert "default waiting policy" in policy(busy=False)
    assert "on a busy machine" in policy(busy=True)
    assert os.environ["GOMP_SPINCOUNT"] == "10000"
    assert "as you set it (GOMP_SPINCOUNT=7" in policy(busy=True, GOMP_SPINCOUNT="7")


def test_evaluate_reads_features(capsys, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(5), 4)
    np.savez(tmp_path / "f.npz", features=np.eye(5)[labels] + 0.01 * rng.normal(size=(20, 5)), labels=labels)
    code, out, _ = run(capsys, "evaluate", tmp_path / "f.npz", "--out", tmp_path / "per.npz")
    assert code == 0
    assert "R@1" in out
    assert "100.0" in out
    assert (tmp_path / "per.npz").exists()


def test_evaluate_prints_the_metrics_that_a_run_stored(capsys, tmp_path, photo_folder):
    stored = make_run(tmp_path, photo_folder)
    code, _, err = run(capsys, "evaluate", stored.path)
    assert code == 2
    assert "this run is not finished" in err
    rng = np.random.default_rng(0)
    scores = nk.score(rng.normal(size=(12, 3)), np.repeat(np.arange(4), 3))
    scores.save(stored.path / "per_query.npz")
    stored.finish(make_result())
    assert run(capsys, "evaluate", stored.path)[1] == scores.table() + "\n"
    code, out, _ = run(capsys, "evaluate", stored.path, "--ks", "1", "4")
    assert [line.split()[0] for line in out.splitlines() if "R@" in line] == ["R@1", "R@4"]
    code, _, err = run(capsys, "evaluate", stored.path, "--ks", "1", "16")  # only from embeddings, which it lacks
    assert code == 2
    assert "this run has no saved embeddings" in err


@pytest.mark.parametrize("args", [["evaluate", "f.npz", "--out"], ["losses", "triplet", "--figure"]])
def test_a_file_that_cannot_be_written_is_named(capsys, tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    np.savez("f.npz", features=np.eye(4), labels=[0, 0, 1, 1])
    code, _, err = run(capsys, *args, "/proc/nearkin/x.png")
    assert code == 2
    assert "/proc/nearkin" in err
    assert len(err.strip().splitlines()) == 1


def test_brackets_in_names_are_not_markup(capsys):
    show("run: old [runs]/x [/b]")
    assert capsys.readouterr().out == "run: old [runs]/x [/b]\n"


def test_the_installed_command_and_the_module_print_the_same():
    script = shutil.which("nearkin", path=str(Path(sys.executable).parent))
    assert script, "nearkin is not installed beside this Python"
    by_script = subprocess.run([script, "--help"], capture_output=True, text=True)
    by_module = subprocess.run([sys.executable, "-m", "nearkin", "--help"], capture_output=True, text=True)
    assert by_script.returncode == by_module.returncode == 0
    assert by_script.stdout == by_module.stdout


def test_control_characters_in_names_are_printed_as_text(capsys, tmp_path):
    """A file name must not clear the terminal or hide lines."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "\x1b[2J\x1b[31mx.png").write_bytes(b"no image")
    code, out, err = run(capsys, "data", "check", tmp_path)
    assert code == 1
    assert r"\x1b[2J" in out
    assert "\x1b" not in out + err
    show("\x1b]0;title\x07")
    assert capsys.readouterr().out == "\\x1b]0;title\n"  # rich itself drops the bell


def test_an_npz_with_an_unknown_compression_is_an_error_of_that_file(capsys, tmp_path):
    np.savez(tmp_path / "f.npz", features=np.eye(4), labels=np.arange(4))
    data = bytearray((tmp_path / "f.npz").read_bytes())
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        start = -1
        while (start := data.find(signature, start + 1)) >= 0:
            data[start + offset] = 97
    (tmp_path / "f.npz").write_bytes(data)
    for command in (["evaluate", tmp_path / "f.npz"], ["train", "--data", tmp_path / "f.npz"]):
        code, _, err = run(capsys, *command)
        assert code == 2
        assert "f.npz: cannot be read" in err
        assert "compression" in err


def test_a_study_without_losses_is_refused(capsys, tmp_path):
    (tmp_path / "s.toml").write_text('name = "x"\nbase = "glyphs_small"\n')
    code, _, err = run(capsys, "bench", "plan", tmp_path / "s.toml")
    assert (code, err) == (2, f"nearkin: {tmp_path / 's.toml'}: losses: missing.\n")


@pytest.mark.parametrize(
    ("allocate", "reason"),
    [(np.empty, "Unable to allocate 8.00 PiB"), (torch.empty, "can't allocate memory: you tried to allocate")],
    ids=["numpy", "torch"],
)
def test_out_of_memory_is_one_line(capsys, monkeypatch, allocate, reason):
    monkeypatch.setattr("nearkin.cli.losses.run", lambda argv: allocate(1 << 50))
    code, _, err = run(capsys, "losses")
    assert code == 2
    assert err.startswith("nearkin: out of memory (")
    assert reason in err
    assert "--train.batch-size" in err
    assert err.count("\n") == 1


def test_other_runtime_errors_are_not_taken_for_it(capsys, monkeypatch):
    def fail(argv):
        raise RuntimeError("a bug")

    monkeypatch.setattr("nearkin.cli.losses.run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run(capsys, "losses")


LIMITED = """
import resource, sys
from nearkin.cli import main
resource.setrlimit(resource.RLIMIT_AS, (600_000_000, resource.RLIM_INFINITY))
for args in sys.argv[1:]:
    try:
        main(args.split())
    except SystemExit as end:
        print("exit", end.code, args)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce this limit")
def test_too_little_address_space_is_refused_before_torch_aborts():
    commands = ["train glyphs_small", "evaluate run", "index run photos", "search x.index x.png", "train --help"]
    done = subprocess.run([sys.executable, "-c", LIMITED, *commands], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "exit 2" in line] == [f"exit 2 {c}" for c in commands[:4]]
    assert "usage: nearkin train" in done.stdout
    refused = done.stderr.splitlines()
    assert len(refused) == 4
    assert set(refused) == {
        "nearkin: The limit on the address space is 0.6 GB (ulimit -v), too little to load torch. "
        "Raise it, e.g. ulimit -v unlimited; docs/install.md lists how much memory each command needs."
    }


def test_a_slow_import_of_torch_is_announced_on_a_terminal(capsys, monkeypatch):
    class StartedTimer:
        def __init__(self, seconds, function):
            assert seconds < 2
            self.start = function

    monkeypatch.setattr("threading.Timer", StartedTimer)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run(capsys, "losses", "--help")[2] == ""  # torch is loaded
    monkeypatch.setitem(sys.modules, "torch", object())  # as in the middle of its import
    assert run(capsys, "losses", "--help")[2] == "loading torch ...\n"
