"""The command line: one module per command, which parses flags, calls one function and prints.

A command's module is imported only when it runs, and heavy imports stay inside functions, so that help is fast.
"""

import importlib
import os
import re
import sys
import threading
from collections.abc import Sequence

from nearkin._common.plugins import add_plugin_files
from nearkin._common.processes import check_address_space, keep_freed_memory, other_processes_run
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
    "search DIR IMAGE": 'nearest images in an index; "unknown" below its threshold, if it has one',
    "serve DIR": "web page and JSON API to search an index by image",
    "export RUN": "save the model as an ONNX or torch file that runs without nearkin",
    "features FOLDER": "features of your images by a pretrained network, in one .npz file",
    "data list|check|get": "list benchmarks, check images and labels, download a benchmark",
    "losses [NAME]": "list the available losses, or explain one",
    "tune [RECIPE]": "tune hyperparameters of losses on validation classes, with equal trial budgets",
    "bench run STUDY": "compare methods under one protocol over seeds, resumable (also: plan, status, work)",
    "papers [NAME]": "the tables and figures of four papers: published values, and the study that reruns each",
    "tournament STUDY": "rank methods over experiments and test which differences are significant",
    "cache list|prune": "show and delete cached images and features",
    "doctor": "versions, devices, optional dependencies, known issues",
}
_HELP_END = """
Run `nearkin COMMAND --help` for details. Any command takes --import FILE.py, a file of your own losses,
miners, backbones, datasets or recipes."""
RESUMABLE = ("train", "features", "index", "tune", "bench")
COMMANDS = tuple(usage.split()[0] for usage in _USAGE)
# Of torch on a CPU and a GPU, of Python's threads, of the operating system and of its loader of shared libraries.
_OUT_OF_MEMORY = re.compile("can't allocate|out of memory|can't start new thread|Cannot allocate|failed to map segment")

# OpenMP reads these when torch is imported. Its threads would spin for milliseconds before they sleep, which slows
# training 2.5 times as soon as another process needs a core. Sleeping early costs up to 17 % on an idle machine, so
# it is chosen only on a busy one. For GNU's and LLVM's implementation.
OPENMP_WAIT = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. User errors are printed in one or two lines, with exit code 2.

    Args:
        argv: The arguments; by default those of the process.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in {"-h", "--help", "help"}:
        print(f"nearkin {__version__}: train embeddings, evaluate them on unseen classes, search with them.\n")
        for usage, summary in _USAGE.items():
            print(f"  nearkin {usage:20} {summary}")
        print(_HELP_END)
        return
    if args[0] in {"-V", "--version"}:
        print(f"nearkin {__version__}")
        return
    command = args
    try:
        args = _import_plugins(args)
        if not args:
            raise ConfigError("No command given. See: nearkin --help.")
        if args[0] not in COMMANDS:
            hint = did_you_mean(args[0], COMMANDS) or " See: nearkin --help."
            raise ConfigError(f"No command named '{args[0]}'.{hint}")
        if other_processes_run():
            for name, value in OPENMP_WAIT.items():
                os.environ.setdefault(name, value)
        if not {"-h", "--help"} & set(args):
            check_address_space()
            keep_freed_memory()
        _announce_slow_import()
        importlib.import_module(f"nearkin.cli.{args[0]}").run(args[1:])
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":  # only the main process prints
            print(f"\n{_interrupt_message(str(interrupt), command)}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError, MemoryError, RuntimeError, ImportError) as error:
        message = _explain(error)
        if message is None:
            raise
        from nearkin._common.progress import escape_controls

        print(f"nearkin: {escape_controls(message)}", file=sys.stderr)
        sys.exit(2)


def _import_plugins(args: list[str]) -> list[str]:
    """Note the files given with --import, for the registries to import. Returns the other arguments."""
    others: list[str] = []
    files: list[str] = []
    words = iter(args)
    for word in words:
        flag, _, file = word.partition("=")
        if flag == "--import":
            files.append(file or next(words, ""))
        else:
            others.append(word)
    add_plugin_files(files)
    return others


def _announce_slow_import() -> None:
    """Say on a terminal why nothing happens, if importing torch takes long, as it does the first time."""

    def announce() -> None:
        if "torch" in sys.modules and not hasattr(sys.modules["torch"], "compile"):  # defined near its end
            print("loading torch ...", file=sys.stderr)

    if sys.stderr.isatty():
        timer = threading.Timer(1.5, announce)
        timer.daemon = True
        timer.start()


def _explain(error: Exception) -> str | None:
    """Return what to print about an error of the user, or of the machine: memory, disk full, folder not writable."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200].rstrip(".")
        return (
            f"out of memory ({reason}). Free some or use less: smaller batches (--train.batch-size, "
            "--train.micro-batch-size), smaller images, fewer --workers."
        )
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename else ""
        return f"{path}{error.strerror or error}."
    return None


def _interrupt_message(reason: str, args: list[str]) -> str:
    """Return what to print after Ctrl-C; `reason` is empty if no step was interrupted, so that nothing is lost."""
    if not reason:
        return "stopped; repeat the same command to resume" if set(args) & set(RESUMABLE) else "stopped"
    from nearkin.cli._arguments import command_line

    command = "the same torchrun command" if "RANK" in os.environ else command_line(*args)
    return f"{reason}; the checkpoint is saved. To resume:\n  {command}"
