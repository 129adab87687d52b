"""Everything that renders: HTML pages, figures, tables, contact sheets."""

from nearkin._common.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
