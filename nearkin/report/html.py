"""HTML pages as single files (a template with inline script and styles that fetches nothing), and errors of writing."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from nearkin._common.files import atomic_write
from nearkin._common.version import __version__
from nearkin.errors import RunError, UserError, import_extra
from nearkin.report.tables import percent


@contextmanager
def writing(what: str, target: Path, advice: str = "", error: type[UserError] = RunError) -> Iterator[None]:
    """Report an output that cannot be written as a user error with advice."""
    try:
        yield
    except OSError as reason:
        raise error(f"{target}: cannot write the {what} ({reason.strerror or reason}).{advice}") from None


@cache
def environment() -> Any:
    """Return the templates of this package."""
    jinja2 = import_extra("jinja2", extra="images")
    loader = jinja2.PackageLoader("nearkin.report", "templates")
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters["percent"] = percent
    return made


def render_template(template: str, script: str, styles: Sequence[str], values: Mapping[str, Any]) -> str:
    """Render a template of this package. A content security policy allows its script by hash and no other code."""
    code, *sheets = [environment().loader.get_source(environment(), name)[0] for name in (script, *styles)]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    values = {**values, "version": __version__, "script": code, "script_hash": f"sha256-{digest}"}
    return environment().get_template(template).render(values, style="".join(sheets))  # type: ignore[no-any-return]


def write_html(text: str, out: Path) -> Path:
    with writing("page", out, " Choose another path with --out."):
        out.parent.mkdir(parents=True, exist_ok=True)
        # Class names may come from file names that are not valid Unicode.
        atomic_write(out, text.encode("utf-8", "replace"))
    return out
