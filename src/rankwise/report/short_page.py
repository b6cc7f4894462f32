"""The page of a plan or a compression: a headline, figures and tables, without a script."""

from collections.abc import Mapping
from typing import Any

from rankwise.report.pages import template_text


def render_short_page(body: str, drawings: Mapping[str, str], **context: Any) -> str:
    """Fill the layout that these pages share; everything in it is escaped but drawings and the style.

    Args:
        body: a template that extends ``short.html`` with its block ``main``, and may use ``table(words)`` and
            ``figure(drawing, caption)``.
        drawings: figures that the body names, as SVG of this package; they alone are not escaped.
        context: what it prints: ``title``, ``command``, ``heading``, ``setting``, ``headline``, the
            ``record`` with its notes, and what the body names.

    Returns:
        The HTML text.
    """
    from jinja2 import DictLoader, Environment, StrictUndefined
    from markupsafe import Markup

    loader = DictLoader({"short.html": template_text("short.html"), "body": body})
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    trusted = {name: Markup(drawing) for name, drawing in drawings.items()}
    style = Markup(template_text("report.css"))
    return environment.get_template("body").render(context, **trusted, style=style)
