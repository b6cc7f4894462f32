"""Show audits, comparisons, plans, compressions and certificates: console, page and notebook."""

from typing import TYPE_CHECKING

from rankwise._internals.lazy import lazy_names

if TYPE_CHECKING:
    from rankwise.report.audit_report import console_text, render_console
    from rankwise.report.console import document_text, print_document
    from rankwise.report.notebook import notebook_html, plot_depth, plot_heads
    from rankwise.report.page import write_html
    from rankwise.report.pages import write_page

__all__ = [
    "console_text",
    "document_text",
    "notebook_html",
    "plot_depth",
    "plot_heads",
    "print_document",
    "render_console",
    "write_html",
    "write_page",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "audit_report": ("console_text", "render_console"),
        "console": ("document_text", "print_document"),
        "notebook": ("notebook_html", "plot_depth", "plot_heads"),
        "page": ("write_html",),
        "pages": ("write_page",),
    },
)
