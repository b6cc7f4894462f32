"""Show results (audits, comparisons, plans, compressions, certificates) on console, page and in notebooks."""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise.report.arrays import head_tensor, plot_measure
    from rankwise.report.console import document_text, print_document
    from rankwise.report.page import document_of, notebook_html, write_page

__all__ = [
    "document_of",
    "document_text",
    "head_tensor",
    "notebook_html",
    "plot_measure",
    "print_document",
    "write_page",
]

__getattr__, __dir__ = lazy_names(__name__)
