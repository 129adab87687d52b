"""Pages as files: one template, its script and styles inline, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearkin._common.files import atomic_write
from nearkin._common.version import __version__
from nearkin.errors import RunError, import_extra


def fill(template: str, script: str, styles: Sequence[str], values: Mapping[str, Any], **filters: Any) -> str:
    """A template of this package as text. Its script is allowed by its hash; any other code on the page is inert."""
    jinja2 = import_extra("jinja2", extra="report")
    loader = jinja2.PackageLoader("nearkin.report", "templates")
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= filters
    code = loader.get_source(made, script)[0]
    allowed = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return made.get_template(template).render(  # type: ignore[no-any-return]
        version=__version__,
        script=code,
        script_hash=f"sha256-{allowed}",
        style="".join(loader.get_source(made, name)[0] for name in styles),
        **values,
    )


def write_html(text: str, out: Path) -> Path:
    """The page, written whole or not at all."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A file name that is no valid Unicode can become a class name; it must not keep a page from being written.
        atomic_write(out, text.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{out}: cannot write the page ({error.strerror}). Choose another place with --out.") from None
    return out
