"""The public API: its names, and what importing it loads."""

import subprocess
import sys

import nearkin as nk


def test_every_public_name_can_be_imported():
    assert sorted(nk.__all__) == nk.__all__
    for name in nk.__all__:
        assert getattr(nk, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(nk, "no_such_name")


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_the_core_does_not_import_torchvision_or_timm():
    loaded = modules_after("import nearkin as nk; nk.Objective, nk.score, nk.losses, nk.fit")
    assert "torch" in loaded
    assert not loaded & {"torchvision", "timm", "matplotlib", "PIL", "jinja2", "tyro"}


def test_import_and_help_do_not_import_torch():
    loaded = modules_after("import nearkin, nearkin.cli; nearkin.cli.main(['--help'])")
    assert not loaded & {"torch", "numpy", "rich", "tyro"}


def test_dir_lists_the_public_names_only():
    assert [name for name in dir(nk) if not name.startswith("__")] == nk.__all__
    assert "__version__" in dir(nk)
    assert dir(nk.samplers)  # a public module: nk.samplers.BalancedSampler
