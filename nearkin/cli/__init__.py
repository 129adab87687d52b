"""The command line: one module per command, which parses flags, calls one function and prints.

A command's module is imported only when it runs, and heavy imports stay inside functions, so that help is fast.
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

# Usage and summary of each command, which is a module in this folder with a function `run(argv)`.
_USAGE = {
    "demo": "train, evaluate and report on built-in data (two minutes on two CPU cores)",
    "train [RECIPE]": "train with a named recipe, a .toml file, or --data FOLDER (or .csv) with your images",
    "evaluate PATH": "retrieval metrics of a run or of a features.npz, with confidence intervals",
    "report RUN [RUN ...]": "one self-contained HTML page for a run, or for a comparison of runs",
    "index RUN FOLDER": "embed images with a run's model and make them searchable",
    "search DIR IMAGE": 'nearest images in an index, or "unknown"',
    "serve DIR": "web page and JSON API to search an index by image",
    "export RUN": "save the model as an ONNX or torch file that runs without nearkin",
    "data list|check|get": "list benchmarks, check images and labels, download a benchmark",
    "losses [NAME]": "list the available losses, or explain one",
    "tune [RECIPE]": "tune hyperparameters of losses on validation classes, with equal trial budgets",
    "bench run STUDY": "compare methods under one protocol over seeds, resumable (also: plan, status, work)",
    "papers [NAME]": "the tables and figures of four papers: published values, and the study that reruns each",
    "tournament STUDY": "rank methods over experiments and test which differences are significant",
    "doctor": "versions, devices, optional dependencies, known issues",
}
COMMANDS = tuple(usage.split()[0] for usage in _USAGE)

# OpenMP reads these when torch is imported. Its threads would spin for milliseconds before they sleep, which slows
# training several times as soon as another process needs a core. For GNU's and LLVM's implementation.
OPENMP_WAIT = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "0"}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. User errors are printed in one or two lines, with exit code 2.

    Args:
        argv: The arguments; by default those of the process.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    for name, value in OPENMP_WAIT.items():
        os.environ.setdefault(name, value)
    if not args or args[0] in {"-h", "--help", "help"}:
        print(f"nearkin {__version__}: train embeddings, evaluate them on unseen classes, search with them.\n")
        for usage, summary in _USAGE.items():
            print(f"  nearkin {usage:20} {summary}")
        print("\nRun `nearkin COMMAND --help` for details.")
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
        _print_error(str(error))
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":  # only the main process prints
            print(f"\n{_interrupt_message(str(interrupt), args)}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # disk full, folder missing or not writable
        path = f"{error.filename}: " if error.filename else ""
        _print_error(f"{path}{error.strerror or error}.")
        sys.exit(2)


def _print_error(message: str) -> None:
    from nearkin._common.progress import escape_controls

    print(f"nearkin: {escape_controls(message)}", file=sys.stderr)


def _interrupt_message(reason: str, args: list[str]) -> str:
    """Return what to print after Ctrl-C; `reason` is empty if no step was interrupted, so that nothing is lost."""
    if not reason:
        return "stopped; repeat the same command to resume" if args[0] == "train" else "stopped"
    command = "the same torchrun command" if "RANK" in os.environ else shlex.join(["nearkin", *args])
    return f"{reason}; the checkpoint is saved. To resume:\n  {command}"
