"""What all pages share: templates, the style, plotly.js from `vendor/`, a policy, data without NaN."""

import base64
import hashlib
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rankwise._internals.files import write_file
from rankwise.report.document import Document, column_kinds
from rankwise.report.text import SEVERITIES, pieces

_SCRIPTS = ("theme.js", "save.js", "figures.js")
CHART_FILE = "plotly-cartesian.min.js"
CHART_VERSION = "4.1.1"
CHART_SHA256 = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
"""Of the file as npm's package ``plotly.js-cartesian-dist-min`` of that version holds it."""

_DIGITS = 6
"""Significant digits that the page holds of a number; audit.json has all of them."""


@cache
def chart_script() -> str:
    """Plotly's script, safe within a script element: scatter, bar, heat map and their kin; no maps, no 3D.

    A third of what the Python package plotly puts into a page, and of the same version
    (docs/decisions/009-page-charts.md).

    Returns:
        The script, 1.5 MB.
    """
    path = resources.files("rankwise.report") / "vendor" / CHART_FILE
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script").replace("\r\n", "\n")


def write_page(document: Document, path: Path) -> Path:
    """Write a document as one HTML file that contains its scripts, styles and data.

    A policy in the file forbids the browser to load anything else. An older file is replaced by a complete
    one only.

    Args:
        document: what to write.
        path: the file; for an existing folder, `index.html` in it.

    Returns:
        The file written.

    Raises:
        InputError: if the file cannot be written.
    """
    path = path / "index.html" if path.is_dir() else path
    return write_file(path, page_text(document), "page")


def page_text(document: Document) -> str:
    """Return the HTML of a document; it escapes all but the style and the scripts of this package."""
    figures = [figure for section in document.sections for figure in section.figures]
    scripts = []
    if figures:
        scripts = [chart_script(), "\n".join(map(template_text, _SCRIPTS))]
    drawn = [{"data": figure.data, "layout": figure.layout} for figure in figures]
    data = {"model": document.heading, "figures": drawn, **document.data}
    return (
        _environment()
        .get_template("page.html")
        .render(
            document.context,
            document=document,
            data=without_nan(data),
            column_kinds=column_kinds,
            split_code=pieces,
            severity_words={severity: word for severity, (word, _) in SEVERITIES.items()},
            style=Markup(template_text("report.css")),
            scripts=[Markup(script) for script in scripts],
            hashes=[script_hash(script) for script in scripts],
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("rankwise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def template_text(name: str) -> str:
    """A file among the templates.

    Args:
        name: of the file.
    """
    return (resources.files("rankwise.report") / "templates" / name).read_text(encoding="utf-8")


def script_hash(script: str) -> str:
    """What the policy of a page names a script by.

    Args:
        script: its text, as the page holds it.
    """
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


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


def short(value: float) -> float | None:
    """The number as a page holds it, None for what is not finite.

    Args:
        value: the number.

    Examples:
        >>> short(1 / 3), short(math.inf)
        (0.333333, None)
    """
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
