"""What all pages share: templates, the style, plotly.js from `vendor/`, a policy, data without NaN."""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

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


def render_page(template: str, context: Mapping[str, Any], scripts: Sequence[str] = ()) -> str:
    """Fill a template; everything in it is escaped but the style and the scripts of this package.

    Args:
        template: its name.
        context: what it prints; ``data`` becomes JSON without NaN.
        scripts: of this package; the page runs no other.

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
    return environment.get_template(template).render(
        dict(context) | {"data": without_nan(context.get("data", {}))},
        style=Markup(template_text("compared.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=[script_hash(script) for script in scripts],
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
