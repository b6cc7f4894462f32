"""Write a document as HTML: as one self-contained file, or without scripts for a notebook."""

from base64 import b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rankwise._internals.files import write_file
from rankwise.auditing.records import SEVERITIES
from rankwise.errors import strip_control
from rankwise.report.audit_report import audit_document
from rankwise.report.comparison_report import comparison_document, history_document
from rankwise.report.compression_report import compression_document
from rankwise.report.document import Document, column_kinds
from rankwise.report.figures import without_nan
from rankwise.report.format import split_code
from rankwise.report.plan_report import plan_document
from rankwise.report.skip_report import certificate_document

DOCUMENTS: dict[str, Callable[[Any], Document]] = {
    "Audit": audit_document,
    "Comparison": comparison_document,
    "Compression": compression_document,
    "HeadDimPlan": plan_document,
    "History": history_document,
    "SkipCertificate": certificate_document,
}
"""Functions that build the report on a result, by the name of its class."""

CHART_FILE = "plotly-cartesian.min.js"
"""File of the npm package `plotly.js-cartesian-dist-min`. Tests check its version and digest."""
_SCRIPTS = ("theme.js", "save.js", "figures.js", "page.js")
_INTERACTIVE = ("theme.js", "save.js", "figures.js", "heads.js", "tables.js", "page.js")
"""Scripts of pages with interactive parts, in loading order: later scripts use constants of earlier ones."""


def document_of(result: Any) -> Document:
    """Return the report on an audit, comparison, compression, plan, history or certificate.

    Examples:
        >>> from rankwise.auditing import Audit, Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> document_of(Audit(provenance=about, heads=[], states=[], findings=[])).heading
        'm'
    """
    return DOCUMENTS[type(result).__name__](result)


def write_page(document: Document, path: Path) -> Path:
    """Write a document as one HTML file, and return the path. In a folder, the file is `index.html`.

    The file contains its scripts, styles and data. Its security policy forbids loading anything else.
    Example: `document_text` makes a document.

    Raises:
        InputError: if the file cannot be written.
    """
    return write_file(path, page_text(document), "page", "index.html")


def notebook_html(document: Document) -> str:
    """Return a report as HTML without scripts: verdict, actions, and the tables of the first screen.

    Examples:
        >>> from rankwise.auditing import Audit, Provenance
        >>> audit = Audit(provenance=Provenance(model="<b>", delta=0.01), heads=[], states=[], findings=[])
        >>> notebook_html(document_of(audit)).removeprefix("<div><strong>rankwise audit</strong> ")[:27]
        '&lt;b&gt; · 0 sequences<br>'
    """
    verdict = document.verdict
    lines = [verdict.sentence, *verdict.actions, verdict.no_action]
    return strip_control(environment().get_template("notebook.html").render(document=document, lines=lines))


def page_text(document: Document) -> str:
    """Return the HTML of a document. All text is escaped, except this package's style and scripts."""
    figures = [figure for section in document.sections for figure in section.figures]
    names = _INTERACTIVE if any(section.include for section in document.sections) else _SCRIPTS
    scripts = (
        [chart_script(), "\n".join(map(template_text, names))] if figures or names is _INTERACTIVE else []
    )
    drawn = [{"name": x.name, "data": x.data, "layout": x.layout} for x in figures]
    return (
        environment()
        .get_template("page.html")
        .render(
            document=document,
            data=without_nan({"title": document.heading, "figures": drawn, **document.data}),
            column_kinds=column_kinds,
            split_code=split_code,
            severity_words=SEVERITIES,
            style=Markup(template_text("report.css")),
            scripts=[Markup(script) for script in scripts],
            # the security policy allows exactly the text between the script tags
            hashes=[b64encode(sha256(script.encode()).digest()).decode() for script in scripts],
        )
    )


@cache
def environment() -> Environment:
    """Return the templates of this package, which escape all text that is not marked as safe."""
    return Environment(
        loader=PackageLoader("rankwise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def chart_script() -> str:
    """Return the script of Plotly (1.5 MB) with `</script` escaped, so that it can be embedded in HTML.

    The script draws scatter plots, bars and heat maps only. It has a third of the size of the script in the
    Python package plotly, in the same version (docs/decisions/009-page-charts.md).
    """
    path = resources.files("rankwise.report") / "vendor" / CHART_FILE
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script").replace("\r\n", "\n")


def template_text(name: str) -> str:
    """Return the text of a file in the folder `templates`."""
    return (resources.files("rankwise.report") / "templates" / name).read_text(encoding="utf-8")
