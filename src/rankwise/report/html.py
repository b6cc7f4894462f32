"""The report as one HTML file that needs nothing else."""

import base64
import hashlib
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rankwise.audit.records import AuditRecord
from rankwise.files import write_whole
from rankwise.report.page import page_context, page_data

_SCRIPTS = ("theme.js", "heatmap.js", "curves.js", "memberships.js", "page.js")


def write_html(audit: AuditRecord, path: Path) -> Path:
    """Write an audit as one self-contained HTML file.

    The file holds its scripts, styles and data; it asks the network for nothing, and a policy in it forbids
    the browser to. It is written beside its place under another name and then renamed, so that a reader never
    meets half a report.

    Args:
        audit: the audit.
        path: the file to write; for an existing folder, ``index.html`` in it.

    Returns:
        The file written.

    Raises:
        InputError: where the file cannot be written.

    Examples:
        >>> import tempfile
        >>> from rankwise.audit.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> audit = AuditRecord(provenance=about, heads=[], layers=[], findings=[])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_html(audit, Path(folder)).name
        'index.html'
    """
    path = path / "index.html" if path.is_dir() else path
    return write_whole(path, render_html(audit), "report")


def render_html(audit: AuditRecord) -> str:
    """Render the page that `write_html` writes.

    Args:
        audit: the audit.

    Returns:
        The HTML text.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("rankwise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plotly, script = _plotly_source(), "\n".join(_template_text(name) for name in _SCRIPTS)
    return environment.get_template("report.html").render(
        page_context(audit),
        data=without_nan(page_data(audit)),
        style=Markup(_template_text("report.css")),
        plotly=Markup(plotly),
        script=Markup(script),
        hashes=[_hash(plotly), _hash(script)],
    )


def without_nan(value: Any) -> Any:
    """Replace what JSON cannot say, NaN and infinities, by None, however deep it lies.

    Examples:
        >>> without_nan({"a": [1.0, float("nan")]})
        {'a': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def _hash(script: str) -> str:
    """Name a script to the browser's content security policy, which then runs no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _template_text(name: str) -> str:
    return (resources.files("rankwise.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _plotly_source() -> str:
    """Plotly's script, safe within a script element."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script").replace("\r\n", "\n")
