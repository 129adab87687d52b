"""The command line: parse, call one function, print. Heavy imports stay inside the commands, so help is instant."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin import __version__
from nearkin.arguments import leading, parse, show
from nearkin.errors import ConfigError, RunError, UserError, did_you_mean

if TYPE_CHECKING:
    from nearkin.metrics import Scores

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


# --- what each command takes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DemoArgs:
    """Train on the built-in glyphs, judge on characters never seen in training, and write a page to look at."""

    runs: Path = Path("runs")
    """Folder in which run folders are kept."""
    page: Path | None = None
    """Where to write the HTML page; by default report.html in the run folder."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""
    quiet: bool = False
    """Print the final table only."""


@dataclass(frozen=True)
class EvaluateArgs:
    """Retrieval metrics in percent, each with its 95 % interval over classes.

    nearkin evaluate features.npz           (arrays `features` [N, D] and `labels` [N])

    nearkin evaluate runs/<key>             (the stored values of a finished run)
    """

    ks: tuple[int, ...] = ()
    """The k of R@k and nDCG@k; 1 2 4 8 when left out, and for a run those that it stored."""
    out: Path | None = None
    """Write the value of every query to this .npz file."""


@dataclass(frozen=True)
class LossesArgs:
    """List the losses by family, or explain one: formula, settings and ranges, when to use it.

    nearkin losses

    nearkin losses multi_similarity --picture gradient.png
    """

    picture: Path | None = None
    """Draw how hard the loss pulls and pushes over similarity, as a PNG file."""


@dataclass(frozen=True)
class DataListArgs:
    """List the sources that nearkin reads: images, classes, and where to get them."""


@dataclass(frozen=True)
class DataCheckArgs:
    """Say what is off with images before they are trained on, worst first; exit code 1 if a number would be wrong.

    nearkin data check photos/ --json report.json

    nearkin data check photos.csv

    nearkin data check cub --root data
    """

    root: Path = Path("data")
    """Where a benchmark named by its name lies."""
    json: Path | None = None
    """Write the whole report, every case named, to this file."""
    cases: int = 3
    """How many cases of each kind are printed."""
    quiet: bool = False
    """Print the report only."""


@dataclass(frozen=True)
class DoctorArgs:
    """Print versions, devices, extras, and trouble known for this machine."""

    distributed: bool = False
    """Run every loss on one and on two local processes and print how far the gradients differ; exit code 1 if any does
    by more than 1e-5."""


# --- the commands ----------------------------------------------------------------------------------------------------


def demo(argv: list[str]) -> None:
    args = parse(DemoArgs, argv, "nearkin demo")
    from nearkin.demo import NEXT, run_demo
    from nearkin.progress import Reporter
    from nearkin.report.text import headline, result_table

    reporter = Reporter(quiet=args.quiet)
    run, page = run_demo(args.runs, page=args.page, device=args.device, reporter=reporter)
    show(result_table(run), headline(run), f"\npage: {page}\nrun:  {run.path}\n", NEXT)


def report(argv: list[str]) -> None:
    from nearkin.report.commands import report as run

    run(argv)


def evaluate(argv: list[str]) -> None:
    target, flags = leading(argv, "a run folder or a features.npz", "nearkin evaluate PATH", EvaluateArgs)
    args = parse(EvaluateArgs, flags, "nearkin evaluate PATH")
    from nearkin.metrics import score_file

    if Path(target).is_dir():
        scores = _stored_scores(Path(target), args.ks)
    else:
        scores = score_file(target, **({"ks": args.ks} if args.ks else {}))
    print(scores.table())
    if args.out is not None:
        scores.save(args.out)
        print(f"per query: {args.out}")


def _stored_scores(folder: Path, ks: tuple[int, ...]) -> Scores:
    """What a run stored when its test classes were opened, at these k or at all that it has."""
    from nearkin.metrics import Scores
    from nearkin.runs import Run

    if Run(folder).result is None:
        raise RunError(f"{folder}: this run is not finished. Run its training command again to go on.")
    scores = Scores.load(folder / "perquery.npz")
    if not set(ks) <= set(scores.ks):
        has = " ".join(str(k) for k in scores.ks)
        raise ConfigError(f"--ks: the run stored k = {has}. For others embed the images and evaluate a features.npz.")
    scores.ks = ks or scores.ks
    return scores


def losses(argv: list[str]) -> None:
    named = argv[:1] if argv and not argv[0].startswith("-") else []
    args = parse(LossesArgs, argv[len(named) :], "nearkin losses [NAME]")
    if args.picture is not None and not named:
        raise ConfigError("--picture: name a loss to draw, for example: nearkin losses triplet --picture triplet.png.")
    from nearkin.losses.explain import explain, list_losses

    print(explain(named[0], args.picture) if named else list_losses())


def data(argv: list[str]) -> None:
    actions = {"list": data_list, "check": data_check, "get": data_get}
    if argv[:1] in ([], ["-h"], ["--help"]):
        print("usage: nearkin data list | check NAME|FOLDER|FILE | get NAME   (each has --help)")
        return
    if argv[0] not in actions:
        hint = did_you_mean(argv[0], actions) or f" There are: {', '.join(actions)}."
        raise ConfigError(f"nearkin data: no action named '{argv[0]}'.{hint}")
    actions[argv[0]](argv[1:])


def data_list(argv: list[str]) -> None:
    parse(DataListArgs, argv, "nearkin data list")
    from nearkin.data.get import source_table

    show(source_table())


def data_check(argv: list[str]) -> None:
    target, flags = leading(argv, "a benchmark, a folder or a file", "nearkin data check NAME|PATH", DataCheckArgs)
    args = parse(DataCheckArgs, flags, "nearkin data check NAME|PATH")
    from nearkin.data.check import check_target, render, write_json
    from nearkin.progress import Reporter

    report = check_target(target, args.root, Reporter(quiet=args.quiet))
    show(render(report, cases=args.cases))
    if args.json is not None:
        write_json(report, args.json)
        print(f"report: {args.json}")
    if not report.ok:
        sys.exit(1)


def data_get(argv: list[str]) -> None:
    from nearkin.data.get import GetArgs

    name, flags = leading(argv, "a benchmark's name", "nearkin data get NAME", GetArgs)
    args = parse(GetArgs, flags, "nearkin data get NAME")
    from nearkin.data.get import get
    from nearkin.progress import Reporter

    print(get(name, args.root, given=args.from_, sha256=args.sha256, reporter=Reporter(quiet=args.quiet)))


def doctor(argv: list[str]) -> None:
    args = parse(DoctorArgs, argv, "nearkin doctor")
    if args.distributed:
        from nearkin.distributed_check import certificate
        from nearkin.doctor import certify
        from nearkin.progress import Reporter

        rows = certificate(2, reporter=Reporter())
        show(*certify(rows))
        sys.exit(0 if all(row.ok for row in rows) else 1)
    from nearkin.doctor import examine

    show(examine())


def bench(argv: list[str]) -> None:
    from nearkin.bench.commands import bench as run

    run(argv)


def tournament(argv: list[str]) -> None:
    from nearkin.bench.commands import tournament as run

    run(argv)


def tune(argv: list[str]) -> None:
    from nearkin.bench.tune_command import tune as run

    run(argv)


def train(argv: list[str]) -> None:
    from nearkin.train_command import train as run

    run(argv)


def index(argv: list[str]) -> None:
    from nearkin.deploy.commands import index as run

    run(argv)


def search(argv: list[str]) -> None:
    from nearkin.deploy.commands import search as run

    run(argv)


def serve(argv: list[str]) -> None:
    from nearkin.deploy.serve_commands import serve as run

    run(argv)


def export(argv: list[str]) -> None:
    from nearkin.deploy.serve_commands import export as run

    run(argv)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo,
    "train": train,
    "evaluate": evaluate,
    "report": report,
    "index": index,
    "search": search,
    "serve": serve,
    "export": export,
    "data": data,
    "losses": losses,
    "tune": tune,
    "bench": bench,
    "tournament": tournament,
    "doctor": doctor,
}


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
        COMMANDS[args[0]](args[1:])
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
