"""The library that draws on our pages: plotly.js with its cartesian traces alone, kept in `vendor/`."""

from functools import cache
from importlib import resources

CHART_FILE = "plotly-cartesian.min.js"
CHART_VERSION = "4.1.1"
CHART_SHA256 = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
"""Of the file as npm's package ``plotly.js-cartesian-dist-min`` of that version holds it."""


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
