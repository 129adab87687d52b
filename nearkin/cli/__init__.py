"""The command line: one module per command, each parses its flags, calls one function and prints.

A command's module is imported when it runs, and heavy imports stay inside its functions, so help is instant.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Sequence

from nearkin._common.version import __version__
from nearkin.errors import ConfigError, UserError, did_you_mean

__all__ = ["COMMANDS", "main"]

HELP = """\
nearkin {version}: train embeddings, judge them on classes never seen, put them to use.

  nearkin demo                 train, judge and report on built-in data: two minutes on two cores
  nearkin train [RECIPE]       train by a named recipe, a .toml file, or --data FOLDER (or .csv) of your images
  nearkin evaluate PATH        retrieval metrics of a run's model or of a features.npz, with intervals
  nearkin report RUN [RUN]     one self-contained HTML page for a run, or for one against another
  nearkin index RUN FOLDER     make images searchable by a run's model
  nearkin search DIR IMAGE     the nearest images, or "unknown"
  nearkin serve DIR            a page and a JSON API to search by dropping an image
  nearkin export RUN           the model as an ONNX or torch file that runs without nearkin
  nearkin data list|check|get  benchmarks and your own images: what there is, what is off, how to get it
  nearkin losses [NAME]        the losses there are, or one explained
  nearkin tune [RECIPE]        search losses' settings on validation classes, each with the same number of trials
  nearkin bench run STUDY      many trainings under one protocol, resumable, with error bars (plan, status)
  nearkin tournament STUDY     rank losses over experiments and say which differences are settled
  nearkin doctor               versions, devices, extras, and trouble known for this machine

Each command teaches itself: nearkin train --help
"""

# Each is a module of this folder with a function `run(argv)`.
COMMANDS = (
    "demo",
    "train",
    "evaluate",
    "report",
    "index",
    "search",
    "serve",
    "export",
    "data",
    "losses",
    "tune",
    "bench",
    "tournament",
    "doctor",
)


def main(argv: Sequence[str] | None = None) -> None:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in {"-h", "--help", "help"}:
        print(HELP.format(version=__version__), end="")
        return
    if args[0] in {"-V", "--version"}:
        print(f"nearkin {__version__}")
        return
    try:
        if args[0] not in COMMANDS:
            hint = did_you_mean(args[0], COMMANDS) or " See: nearkin --help."
            raise ConfigError(f"No command named '{args[0]}'.{hint}")
        importlib.import_module(f"nearkin.cli.{args[0]}").run(args[1:])
    except UserError as error:
        print(f"nearkin: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stopped:
        if os.environ.get("RANK", "0") == "0":  # of several processes one talks
            print(f"\n{_how_to_go_on(str(stopped), args)}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that is not there or not ours
        place = f"{error.filename}: " if error.filename else ""
        print(f"nearkin: {place}{error.strerror or error}.", file=sys.stderr)
        sys.exit(2)


def _how_to_go_on(stopped: str, args: list[str]) -> str:
    """What to say after a Ctrl-C. `stopped` is empty where it came between two checkpoints: nothing is lost there."""
    if not stopped:
        return "stopped; the same command goes on from what is stored" if args[0] == "train" else "stopped"
    again = "the same torchrun command again" if "RANK" in os.environ else shlex.join(["nearkin", *args])
    return f"{stopped}; the checkpoint is written. To go on:\n  {again}"
