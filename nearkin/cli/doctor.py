"""`nearkin doctor`: what is installed, what the machine has, and trouble known for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import TYPE_CHECKING

from rich.table import Table as RichTable
from rich.text import Text

from nearkin._common.version import __version__
from nearkin.cli._arguments import parse, show

if TYPE_CHECKING:
    from nearkin.training.distributed_check import GradientCheck

_BF16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"


@dataclass(frozen=True)
class DoctorArgs:
    """Print versions, devices, extras, and trouble known for this machine."""

    distributed: bool = False
    """Run every loss on one and on two local processes and print how far the gradients differ; exit code 1 if any does
    by more than 1e-5."""


def run(argv: list[str]) -> None:
    args = parse(DoctorArgs, argv, "nearkin doctor")
    if args.distributed:
        from nearkin._common.progress import Reporter
        from nearkin.training.distributed_check import check_gradients

        rows = check_gradients(2, reporter=Reporter())
        show(*certify(rows))
        sys.exit(0 if all(row.ok for row in rows) else 1)
    show(examine())


def examine() -> RichTable:
    """A table of facts; lines that start with ! are trouble."""
    import torch

    table = RichTable(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("nearkin", __version__)
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    table.add_row("torch", torch.__version__)
    table.add_row("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads")
    table.add_row("devices", ", ".join(devices()))
    for extra, (present, missing) in sorted(extras().items()):
        state = "ready: " + ", ".join(present) if not missing else f"missing {', '.join(missing)}"
        cure = f"  (pip install 'nearkin[{extra}]')" if missing else ""
        table.add_row(f"extra {extra}", state + cure)
    for problem in known_issues():
        table.add_row(Text("! trouble", style="bold red"), problem)
    return table


def certify(rows: Sequence[GradientCheck]) -> tuple[RichTable, str]:
    """What the gradients of several processes differ by from those of one, loss by loss, and a verdict in words."""
    from nearkin.training.distributed_check import TOLERANCE

    def shown(values: Sequence[float | None]) -> str:
        present = [value for value in values if value is not None]
        return f"{max(present):.0e}" if any(present) else "0" if present else "-"

    table = RichTable(box=None, padding=(0, 2, 0, 0))
    for title in ("loss", "cases", "embeddings", "network", "class parameters, memory"):
        table.add_column(title, justify="left" if title == "loss" else "right")
    for name in dict.fromkeys(row.case.loss for row in rows):
        ours = [row for row in rows if row.case.loss == name]
        table.add_row(
            name,
            str(len(ours)),
            shown([row.embeddings for row in ours]),
            shown([row.network for row in ours]),
            shown([row.parameters for row in ours]),
            style=None if all(row.ok for row in ours) else "bold red",
        )
    bad = sorted((row for row in rows if not row.ok), key=lambda row: -row.worst)
    if not bad:
        return table, f"certified: {len(rows)} cases, all within {TOLERANCE:g} (relative) of one process."
    listed = "".join(f"\n  {row.case}: {row.worst:.0e}" for row in bad[:10])
    return (
        table,
        f"NOT certified: {len(bad)} of {len(rows)} cases differ by more than {TOLERANCE:g}, the worst:{listed}",
    )


def devices() -> list[str]:
    import torch

    found = ["cpu"]
    found += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def extras() -> dict[str, tuple[list[str], list[str]]]:
    """Each extra's packages, as (present with version, missing), read from the installed package itself."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for requirement in metadata("nearkin").get_all("Requires-Dist") or []:
        name, _, condition = requirement.partition(";")
        if "extra ==" not in condition or name.startswith("nearkin") or "'all'" in condition.replace('"', "'"):
            continue
        extra = condition.partition("extra ==")[2].strip().strip("'\"")
        package = name.strip().partition("[")[0]
        for sign in "<>=!~ ":
            package = package.partition(sign)[0]
        present, missing = found.setdefault(extra, ([], []))
        try:
            present.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    return found


def known_issues() -> list[str]:
    """Known trouble of this machine, each with what to do."""
    found = []
    # In a process of its own: where the CPU claims instructions that the machine does not allow, it is killed.
    probe = subprocess.run([sys.executable, "-c", _BF16_PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        found.append("bfloat16 matrix products crash on this CPU; nearkin trains in float32 here, keep it so.")
    if (os.cpu_count() or 1) < 2:
        found.append("one core only: the demo will take about twice as long as stated.")
    return found
