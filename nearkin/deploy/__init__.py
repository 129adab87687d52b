"""Use trained models: search index, web server, export, external vector stores."""

from typing import TYPE_CHECKING

from nearkin._common.lazy import lazy_exports

if TYPE_CHECKING:
    from nearkin.deploy import export
    from nearkin.deploy.export import export_run
    from nearkin.deploy.index.index import Index
    from nearkin.deploy.index.search import Hit, SearchResult
    from nearkin.deploy.serve.app import make_app
    from nearkin.deploy.serve.service import Service
    from nearkin.deploy.stores import open_store

__all__ = ["Hit", "Index", "SearchResult", "Service", "export", "export_run", "make_app", "open_store"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "export": ("export", "export_run"),
        "index.index": ("Index",),
        "index.search": ("Hit", "SearchResult"),
        "serve.app": ("make_app",),
        "serve.service": ("Service",),
        "stores": ("open_store",),
    },
)
