"""Everything that renders: HTML pages, figures, tables, contact sheets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin._common.lazy import lazy_exports

if TYPE_CHECKING:
    from nearkin.report import contact_sheet
    from nearkin.report.baselines import headline
    from nearkin.report.losses import explain, gradient_curves, list_losses
    from nearkin.report.page import build_report, write_page, write_report, write_tables
    from nearkin.report.print_figures import write_figures
    from nearkin.report.study import build_study_report, write_study_page
    from nearkin.report.tables import result_table
    from nearkin.report.tournament import draw_critical_difference

__all__ = [
    "build_report",
    "build_study_report",
    "contact_sheet",
    "draw_critical_difference",
    "explain",
    "gradient_curves",
    "headline",
    "list_losses",
    "result_table",
    "write_figures",
    "write_page",
    "write_report",
    "write_study_page",
    "write_tables",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "baselines": ("headline",),
        "contact_sheet": ("contact_sheet",),
        "print_figures": ("write_figures",),
        "losses": ("explain", "gradient_curves", "list_losses"),
        "page": ("build_report", "write_page", "write_report", "write_tables"),
        "study": ("build_study_report", "write_study_page"),
        "tables": ("result_table",),
        "tournament": ("draw_critical_difference",),
    },
)
