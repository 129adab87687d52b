"""HTML pages as single files (a template with inline script and styles that fetches nothing), and errors of writing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nearkin._common.files import atomic_write
from nearkin._common.version import __version__
from nearkin.errors import RunError, UserError, import_extra


@contextmanager
def writing(what: str, target: Path, advice: str = "", error: type[UserError] = RunError) -> Iterator[None]:
    """Report an output that cannot be written as a user error with advice."""
    try:
        yield
    except OSError as reason:
        raise error(f"{target}: cannot write the {what} ({reason.strerror or reason}).{advice}") from None


def render_template(
    template: str, script: str, styles: Sequence[str], values: Mapping[str, Any], **filters: Any
) -> str:
    """Render a template of this package. A content security policy allows its script by hash and no other code."""
    jinja2 = import_extra("jinja2", extra="images")
    loader = jinja2.PackageLoader("nearkin.report", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= filters
    code = loader.get_source(environment, script)[0]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return environment.get_template(template).render(  # type: ignore[no-any-return]
        version=__version__,
        script=code,
        script_hash=f"sha256-{digest}",
        style="".join(loader.get_source(environment, name)[0] for name in styles),
        **values,
    )


def write_html(text: str, out: Path) -> Path:
    with writing("page", out, " Choose another path with --out."):
        out.parent.mkdir(parents=True, exist_ok=True)
        # Class names may come from file names that are not valid Unicode.
        atomic_write(out, text.encode("utf-8", "replace"))
    return out
