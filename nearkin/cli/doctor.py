"""`nearkin doctor`: installed versions, devices, optional dependencies and known issues of this machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import requires
from typing import TYPE_CHECKING

from nearkin._common.version import __version__, installed_version
from nearkin.cli import OPENMP_WAIT
from nearkin.cli._arguments import parse, show
from nearkin.report.tables import Grid, rich_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from nearkin.training.distributed_check import GradientCheck

# The extras for users, in the order of docs/install.md.
JOBS = {
    "images": "train, report, search",
    "bench": "studies, tuning",
    "serve": "web server",
    "export": "ONNX files",
    "stores": "large collections",
    "tensorboard": "tracker",
    "wandb": "tracker",
}
_BF16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"


@dataclass(frozen=True)
class DoctorArgs:
    """Print versions, devices, optional dependencies and known issues of this machine."""

    distributed: bool = False
    """Compare the gradients of every loss between one and two local processes; exit code 1 if any differ by more than
    1e-5 (relative)."""
    core: bool = False
    """Report, for every loss, host synchronisations, graph breaks of torch.compile, peak memory and time against its
    matrix products, on the GPU if there is one; exit code 1 if any loss synchronises or breaks."""


def run(argv: list[str]) -> None:
    args = parse(DoctorArgs, argv, "nearkin doctor")
    if args.core:
        sys.exit(0 if report_core() else 1)
    if args.distributed:
        from nearkin.training.distributed_check import check_gradients

        rows = check_gradients(2, quiet=False)
        show(*summarize_gradient_check(rows))
        sys.exit(0 if all(row.ok for row in rows) else 1)
    show(*environment_lines())


def report_core(names: Sequence[str] | None = None, n: int = 1024) -> bool:
    """Print the readiness of every loss; return whether none synchronises or breaks the graph."""
    from nearkin.losses.readiness import check_row, rows
    from nearkin.training.device import choose_device

    device = choose_device("auto")
    checked = [check_row(name, device, n) for name in names or rows()]
    cells = [
        (_marked(c.name, c.ok), str(c.syncs), str(c.graph_breaks), f"{c.blocks:.1f}", f"{c.products:.2f}")
        for c in checked
    ]
    table = Grid("", ("loss", "syncs", "graph breaks", "peak blocks", "time / products"), cells, bold=None)
    bad = sum(not row.ok for row in checked)
    summary = f"FAILED: {bad} of {len(checked)} losses with" if bad else f"passed: {len(checked)} losses without"
    note = (
        f"{summary} synchronisations or graph breaks on {device}. Peak memory is beyond similarities and masks, in "
        f"blocks of float32 similarities; N = {n}, D = 512."
    )
    show(table, note)
    return not bad


def _marked(name: str, ok: bool) -> str:
    return name if ok else f"{name} FAILED"


def environment_lines() -> list[str]:
    import torch

    gpus = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    rows = [
        ("nearkin", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"),
        ("OpenMP", _openmp_waiting()),
        ("devices", ", ".join(["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])])),
    ]
    listed: set[str] = set()
    for extra, job in JOBS.items():
        required = [r for r in requires("nearkin") or [] if re.search(rf"extra == ['\"]{extra}['\"]", r)]
        names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in required]
        packages = {name: installed_version(name) for name in names}
        missing = [name for name, installed in packages.items() if installed is None]
        new = [f"{name} {installed}" for name, installed in packages.items() if name not in listed]
        listed |= set(packages)
        status = f"missing: pip install 'nearkin[{extra}]'" if missing else f"installed: {', '.join(new)}"
        rows.append((f"{extra}: {job}", status))
    rows += [("! known issue", issue) for issue in known_issues()] or [("known issues", "none")]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {value}" for name, value in rows]


def _openmp_waiting() -> str:
    """Return how OpenMP's threads wait for work, and who decided it."""
    settings = {name: os.environ[name] for name in (*OPENMP_WAIT, "OMP_WAIT_POLICY") if name in os.environ}
    if not settings:
        return "OpenMP's default waiting policy: no other process kept a core busy when this command started"
    who = "set by nearkin on a busy machine: idle threads sleep early" if settings == OPENMP_WAIT else "as you set it"
    return f"{who} ({', '.join(f'{name}={value}' for name, value in settings.items())})"


def summarize_gradient_check(rows: Sequence[GradientCheck]) -> tuple[RichTable, str]:
    from nearkin.training.distributed_check import TOLERANCE

    def largest(values: Sequence[float | None]) -> str:
        known = [value for value in values if value is not None]
        return f"{max(known):.0e}" if any(known) else "0" if known else "-"

    cells = []
    for name in dict.fromkeys(row.case.loss for row in rows):
        cases = [row for row in rows if row.case.loss == name]
        parts = ("embeddings", "network", "parameters")
        worst_of = [largest([getattr(case, part) for case in cases]) for part in parts]
        cells.append((_marked(name, all(case.ok for case in cases)), str(len(cases)), *worst_of))
    head = ("loss", "cases", "embeddings", "network", "class parameters, memory")
    table = rich_table(Grid("", head, cells, bold=None))
    failed = sorted((row for row in rows if not row.ok), key=lambda row: -row.worst)
    if not failed:
        return table, f"passed: {len(rows)} cases, all gradients within {TOLERANCE:g} (relative) of a single process."
    worst = "".join(f"\n  {row.case}: {row.worst:.0e}" for row in failed[:10])
    return table, f"FAILED: {len(failed)} of {len(rows)} cases differ by more than {TOLERANCE:g}; the largest:{worst}"


def known_issues() -> list[str]:
    issues = []
    # In a separate process, because it is killed on CPUs that report instructions which the machine does not allow.
    probe = subprocess.run([sys.executable, "-c", _BF16_PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        issues.append("bfloat16 matrix products crash on this CPU. nearkin trains in float32 here; do not change that.")
    if (os.cpu_count() or 1) < 2:
        issues.append("only one CPU core: the demo takes about twice as long as stated.")
    return issues
