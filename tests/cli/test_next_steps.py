"""The commands that nearkin prints to run next work as printed, wherever it was started from."""

import os
import subprocess
import sys

import pytest

from nearkin.cli import demo
from nearkin.cli._arguments import command_line
from nearkin.cli.train import parse_train

SCRIPT = f"""#!{sys.executable}
import sys
from nearkin import cli
from nearkin.cli import demo
print(demo._next_steps()) if sys.argv[1:] == ["next"] else cli.main()
"""


@pytest.mark.skipif(os.name == "nt", reason="scripts start differently")
@pytest.mark.parametrize("on_path", [False, True], ids=["clone", "installed"])
def test_what_the_demo_suggests_works_as_printed(tmp_path, on_path):
    script = tmp_path / ".venv" / "bin" / "nearkin"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT, encoding="utf-8")
    script.chmod(0o755)
    folders = [str(script.parent)] if on_path else []
    environment = {**os.environ, "PATH": os.pathsep.join([*folders, "/usr/bin", "/bin"])}

    def shell(line: str) -> str:
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    program = "nearkin" if on_path else ".venv/bin/nearkin"
    printed = shell(f"{program} next").splitlines()
    commands = [line for line in printed[1:] if not line.startswith("#")]
    assert commands == [f"{program} {command}" for command in demo.NEXT.values()]
    assert "usage: nearkin losses" in shell(f"{commands[1]} --help")


def test_commands_name_the_program_as_it_was_started(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/nearkin/__main__.py"])
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    assert command_line("report", "my run") == f"{sys.executable} -m nearkin report 'my run'"
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert command_line("report", "my run") == "uv run nearkin report 'my run'"


def test_the_suggested_training_is_accepted():
    command, *_ = demo.NEXT.values()
    recipe, _ = parse_train(command.split()[1:])
    assert recipe.loss.name == recipe.miner.name == "multi_similarity"
