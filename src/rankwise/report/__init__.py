"""Show audits, comparisons, plans, compressions and certificates: console, page and notebook."""

from typing import TYPE_CHECKING

from rankwise._internals.lazy import lazy_names

if TYPE_CHECKING:
    from rankwise.report.audit_report import console_text, render_console
    from rankwise.report.comparison import render_comparison
    from rankwise.report.comparison_page import write_comparison
    from rankwise.report.console import document_text, print_document
    from rankwise.report.figures import plot_depth, plot_heads
    from rankwise.report.history import render_history
    from rankwise.report.history_page import write_history
    from rankwise.report.notebook import notebook_html
    from rankwise.report.page import write_html
    from rankwise.report.pages import write_page

__all__ = [
    "console_text",
    "document_text",
    "notebook_html",
    "plot_depth",
    "plot_heads",
    "print_document",
    "render_comparison",
    "render_console",
    "render_history",
    "write_comparison",
    "write_history",
    "write_html",
    "write_page",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "audit_report": ("console_text", "render_console"),
        "comparison": ("render_comparison",),
        "comparison_page": ("write_comparison",),
        "console": ("document_text", "print_document"),
        "figures": ("plot_depth", "plot_heads"),
        "history": ("render_history",),
        "history_page": ("write_history",),
        "notebook": ("notebook_html",),
        "page": ("write_html",),
        "pages": ("write_page",),
    },
)
