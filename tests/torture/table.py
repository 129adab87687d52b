"""The table of results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What was done how often, and how it ended."""

    attack: str
    tried: int
    survived: int
    lost: int  # results that differ, damage that went unnoticed, a file outside its folder, a server that stopped
    tracebacks: int  # errors that are not ours, crashes and hangs
    remark: str = ""

    @property
    def passed(self) -> bool:
        return self.tried > 0 and self.survived == self.tried and self.lost == 0 and self.tracebacks == 0


def markdown(rows: list[Row]) -> str:
    """Format the table, with a sum."""
    lines = ["| attack | tried | survived | lost | tracebacks | |", "|---|---|---|---|---|---|"]
    for row in rows:
        numbers = " | ".join(f"{n:,}" for n in (row.tried, row.survived, row.lost, row.tracebacks))
        lines.append(f"| {row.attack} | {numbers} | {row.remark} |")
    sums = [sum(getattr(row, name) for row in rows) for name in ("tried", "survived", "lost", "tracebacks")]
    return "\n".join([*lines, f"| all | {' | '.join(f'{n:,}' for n in sums)} | |"])
