"""Every command in the documentation runs, in a folder that contains the files it names.

Commands that cannot run here are listed with the reason. A command that is neither run nor listed fails the test, and
so does a listed command that no page shows any more.
"""

import contextlib
import io
import re
import shlex
import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.studies import small_study, write_features

from nearkin import cli
from nearkin._common.progress import Reporter
from nearkin.bench.trials import StudyFolder, work
from nearkin.training import recipes
from nearkin.training.loop import fit

pytestmark = pytest.mark.slow

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Placeholders in the pages -> names in the folder of this test.
PLACEHOLDERS = {"studies/NAME": "studies/tiny"}

DOWNLOAD = "needs downloads; its recipe is tested in test_recipes.py"
SERVER = "needs a running server; see test_serve.py"
INSTALL = "changes the environment; see test_wheel.py"
LONG = "takes minutes; other tests run a smaller version"
PLUGIN = "registers a loss in this process; see test_plugins.py"
NOT_RUN = {
    "nearkin train --data photos/ --loss hardest_gap --import my_losses.py": PLUGIN,
    "nearkin losses hardest_gap --import my_losses.py": PLUGIN,
    "nearkin bench run features --data photos.npz --losses hardest_gap triplet --import my_losses.py "
    "--workers 2": PLUGIN,
    "nearkin export runs/RUN --to hub -o USER/NAME": "needs the Hub; see test_model_card.py",
    "make demo": LONG,
    "make test": "would run this test",
    "nearkin bench run tiny": LONG,
    "nearkin bench run features --data features.npz": LONG,
    "nearkin bench run features --data photos/": LONG,
    "nearkin bench run mpa-table7 --data CUB_200_2011 --weights bn_inception=bn_inception-52deb4733.pth": DOWNLOAD,
    "nearkin bench run mpa-table7 --data CUB_200_2011 --backbones efficientnet_lite0 --change data.image_size=128 "
    "train.steps=40 train.batch_size=90 model.freeze_norm=statistics": DOWNLOAD,
    "nearkin data get cub --root data": DOWNLOAD,
    "nearkin train --data data/CUB_200_2011": DOWNLOAD,
    "nearkin train ce_cub --data CUB_200_2011": DOWNLOAD,
    "nearkin train cub_lite --freeze backbone": DOWNLOAD,
    "nearkin train cub_lite --log tensorboard --train.ema 0.999 --train.patience 5": DOWNLOAD,
    "nearkin train --data photos/ --budget 30m": LONG,
    "nearkin train --data photos/ --freeze stages --model.views 2 --distil runs/LARGE": LONG,
    "nearkin train folder_finetune --data photos/ --train.epochs 10 --train.micro-batch-size 32": LONG,
    "nearkin train ice_cub --data CUB_200_2011 --weights bn_inception-52deb4733.pth": DOWNLOAD,
    "nearkin train mpa_cub:mpa_ap --data CUB_200_2011 --weights bn_inception-52deb4733.pth": DOWNLOAD,
    "nearkin train thesis_proxy_anchor:cars:googlenet:64 --data data": DOWNLOAD,
    "nearkin tune glyphs_small --losses proxy_anchor multi_similarity --trials 20 --out tuned": LONG,
    "nearkin tune --data features.npz --losses all --workers 2 --out tuned": LONG,
    "nearkin tune --data photos/ --losses all --out tuned": LONG,
    "nearkin doctor --distributed": "tested in test_distributed.py",
    "torchrun --nproc-per-node 4 -m nearkin train glyphs_small": "tested with two processes in test_torchrun.py",
}
NOT_RUN_PREFIXES = {
    "curl ": SERVER,
    "pip install ": INSTALL,
    "uv pip install ": INSTALL,
    "UV_TORCH_BACKEND=cpu make setup": INSTALL,
    ". .venv/bin/activate": INSTALL,
    "nearkin serve ": SERVER,
    "python3 -c ": SERVER,
    "nearkin tune cub_lite ": "needs a PostgreSQL server or a cluster; see test_tune.py",
}


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            lines = [re.split(r"\s+#", line)[0].strip() for line in block.splitlines()]
            found += [(page.relative_to(ROOT).as_posix(), line) for line in lines if line and not line.startswith("#")]
    return found


def runs_here(command: str) -> bool:
    listed = command in NOT_RUN or command.startswith(tuple(NOT_RUN_PREFIXES))
    # Vector databases need their servers; see test_stores.py.
    return not listed and "qdrant://" not in command and "pgvector://" not in command


@pytest.fixture(scope="module")
def docs_folder(tmp_path_factory, photo_folder):
    """A folder with all files that the pages name."""
    here = tmp_path_factory.mktemp("docs")
    shutil.copytree(photo_folder, here / "photos")
    (here / "photos" / "class 0").rename(here / "photos" / "robin")
    for path in (here / "photos" / "robin").iterdir():
        from PIL import Image

        Image.open(path).convert("RGB").save(path.with_suffix(".jpg"))
        path.unlink()
    for name, source in (("new.jpg", "robin/00.jpg"), ("old.jpg", "robin/01.jpg")):
        shutil.copy(here / "photos" / source, here / name)
    files = sorted(path for path in (here / "photos").rglob("*.*") if path.is_file())
    rows = [f"{path.relative_to(here)},{path.parent.name}" for path in files]
    (here / "photos.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    write_features(here / "features.npz")
    recipe = recipes.from_scratch()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=here / "photos", image_size=24, val_fraction=0.2),
        model=replace(recipe.model, width=4, dim=16),
        train=replace(recipe.train, epochs=1, batch_size=8, samples_per_class=2),
    )
    quiet = Reporter(quiet=True)
    for seed, names in ((0, ("birds", "KEY", "RUN", "A", "FIRST")), (1, ("B", "SECOND"))):
        run = fit(replace(recipe, seed=seed), here / "made", device="cpu", reporter=quiet)
        for name in names:
            shutil.copytree(run.path, here / "runs" / name)
    np.save(here / "query.npy", np.ones(16, dtype=np.float32))
    study = small_study(here / "features.npz", name="tiny", seeds=(0,))
    work(StudyFolder.begin(here / "studies" / "tiny", study), here / "runs", device="cpu", reporter=quiet)
    (here / "study.toml").write_text(replace(study, name="mine", sizes=(4,)).to_toml())
    (here / "results.csv").write_text("experiment,method,value\na,x,1\na,y,2\nb,x,1\nb,y,3\n")
    (here / "tuned").mkdir()
    (here / "tuned" / "proxy_anchor.toml").write_text(study.trials()[0].recipe.to_toml())
    return here


def test_every_command_runs(docs_folder, monkeypatch):
    monkeypatch.chdir(docs_folder)
    all_commands = commands()
    assert len(all_commands) > 60
    for page, command in all_commands:
        if not runs_here(command):
            continue
        for placeholder, name in PLACEHOLDERS.items():
            command = command.replace(placeholder, name)
        argv = shlex.split(command)
        assert argv[0] == "nearkin", f"{page}: {command}"
        code, output = run_command(argv[1:])
        # `data check` exits with 1 if it finds a problem, and images of 24 pixels are one.
        allowed = (0, 1) if argv[1:3] == ["data", "check"] else (0,)
        assert code in allowed, f"{page}: {command}\n{output}"


def run_command(argv: list[str]) -> tuple[int, str]:
    """Return the exit code and the output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main(argv)
        except SystemExit as exit_:
            return int(exit_.code or 0), out.getvalue()
    return 0, out.getvalue()


def test_every_exception_is_still_in_the_documentation():
    documented = {command for _, command in commands()}
    assert set(NOT_RUN) <= documented
    for prefix in NOT_RUN_PREFIXES:
        assert any(command.startswith(prefix) for command in documented), prefix
