"""Every command that the documentation shows is run, in a folder where what it names is there.

What cannot be run here is listed with the reason; a command that is neither run nor listed fails the test, and so does
a listed one that no page shows any more.
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
# What a page leaves to the reader to fill in, as it is called in the folder of this test.
NAMED = {"studies/NAME": "studies/tiny"}

DOWNLOAD = "needs images or weights that are downloaded; its recipe is tested in test_recipes.py"
SERVER = "a server; test_serve.py starts it and asks"
LONG = "takes minutes; run in the same form, smaller, by other tests"
ELSEWHERE = {
    "make demo": LONG,
    "make test": "this is it",
    "nearkin bench run tiny": LONG,
    "nearkin bench run features --data features.npz": LONG,
    "nearkin data get cub --root data": DOWNLOAD,
    "nearkin train --data data/CUB_200_2011": DOWNLOAD,
    "nearkin train ce_cub --data CUB_200_2011": DOWNLOAD,
    "nearkin train cub_lite --freeze backbone": DOWNLOAD,
    "nearkin train cub_lite --log tensorboard --train.ema 0.999 --train.patience 5": DOWNLOAD,
    "nearkin train folder_finetune --data photos/ --train.epochs 10 --train.micro-batch-size 32": LONG,
    "nearkin train ice_cub --data CUB_200_2011 --weights bn_inception-52deb4733.pth": DOWNLOAD,
    "nearkin train mpa_cub:mpa_ap --data CUB_200_2011 --weights bn_inception-52deb4733.pth": DOWNLOAD,
    "nearkin train thesis_proxy_anchor:cars:googlenet:64 --data data": DOWNLOAD,
    "nearkin tune glyphs_small --losses proxy_anchor multi_similarity --trials 20 --out tuned": LONG,
    "nearkin tune --data features.npz --losses all --workers 2 --out tuned": LONG,
    "nearkin doctor --distributed": "test_distributed.py runs the same check",
    "torchrun --nproc-per-node 4 -m nearkin train glyphs_small": "test_torchrun.py runs two processes",
}
BEGINNINGS = {
    "curl ": SERVER,
    "nearkin serve ": SERVER,
    "python3 -c ": SERVER,
    "nearkin tune cub_lite ": "needs a PostgreSQL server or a cluster; test_tune.py has both in small form",
}
STORES = "qdrant:// and pgvector:// need their servers; test_index_stores.py has them"


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            lines = [re.split(r"\s+#", line)[0].strip() for line in block.splitlines()]
            found += [(page.relative_to(ROOT).as_posix(), line) for line in lines if line and not line.startswith("#")]
    return found


def runs_here(command: str) -> bool:
    listed = command in ELSEWHERE or command.startswith(tuple(BEGINNINGS))
    return not listed and "qdrant://" not in command and "pgvector://" not in command


@pytest.fixture(scope="module")
def place(tmp_path_factory, photo_folder):
    """A folder with everything that the pages name."""
    here = tmp_path_factory.mktemp("docs")
    shutil.copytree(photo_folder, here / "photos")
    (here / "photos" / "class 0").rename(here / "photos" / "robin")
    for path in (here / "photos" / "robin").iterdir():
        from PIL import Image

        Image.open(path).convert("RGB").save(path.with_suffix(".jpg"))
        path.unlink()
    for name, taken in (("new.jpg", "robin/00.jpg"), ("old.jpg", "robin/01.jpg")):
        shutil.copy(here / "photos" / taken, here / name)
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


def test_every_command_runs(place, monkeypatch):
    monkeypatch.chdir(place)
    shown = commands()
    assert len(shown) > 60
    for page, command in shown:
        if not runs_here(command):
            continue
        for asked, filled in NAMED.items():
            command = command.replace(asked, filled)
        words = shlex.split(command)
        assert words[0] == "nearkin", f"{page}: {command}"
        code, said = outcome(words[1:])
        # `data check` says by 1 that something is off, which is so with pictures of 24 pixels.
        allowed = (0, 1) if words[1:3] == ["data", "check"] else (0,)
        assert code in allowed, f"{page}: {command}\n{said}"


def outcome(words: list[str]) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main(words)
        except SystemExit as stopped:
            return int(stopped.code or 0), out.getvalue()
    return 0, out.getvalue()


def test_what_is_listed_as_run_elsewhere_is_shown_somewhere():
    shown = {command for _, command in commands()}
    assert set(ELSEWHERE) <= shown
    for beginning in BEGINNINGS:
        assert any(command.startswith(beginning) for command in shown), beginning
