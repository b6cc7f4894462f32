"""What the pages of comparisons and histories share: the template, the style, a policy, data without NaN."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from rankwise.report.page import without_nan


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
        hashes=[_hash(script) for script in scripts],
    )


def template_text(name: str) -> str:
    """A file among the templates.

    Args:
        name: of the file.
    """
    return (resources.files("rankwise.report") / "templates" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
