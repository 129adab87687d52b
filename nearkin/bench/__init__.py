"""Fair comparisons: studies under one protocol, tuning with equal budgets, tournaments and their statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin._common.lazy import lazy_exports

if TYPE_CHECKING:
    from nearkin.bench.presets import PRESETS, find_study
    from nearkin.bench.protocols import Protocol
    from nearkin.bench.results import Result, read_results
    from nearkin.bench.study import Study, Trial
    from nearkin.bench.summary import summarize
    from nearkin.bench.tournament import Tournament, run_tournament
    from nearkin.bench.trials import StudyFolder

__all__ = [
    "PRESETS",
    "Protocol",
    "Result",
    "Study",
    "StudyFolder",
    "Tournament",
    "Trial",
    "find_study",
    "read_results",
    "run_tournament",
    "summarize",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "presets": ("PRESETS", "find_study"),
        "protocols": ("Protocol",),
        "results": ("Result", "read_results"),
        "study": ("Study", "Trial"),
        "summary": ("summarize",),
        "tournament": ("Tournament", "run_tournament"),
        "trials": ("StudyFolder",),
    },
)
