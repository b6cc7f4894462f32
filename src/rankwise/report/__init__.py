"""Audits as people read them: on the console and as one HTML file. No torch inside."""

from rankwise.report.comparison import render_comparison
from rankwise.report.comparison_page import write_comparison
from rankwise.report.console import console_text, render_console
from rankwise.report.figures import plot_depth, plot_heads
from rankwise.report.history import render_history
from rankwise.report.history_page import write_history
from rankwise.report.notebook import notebook_html
from rankwise.report.page import write_html

__all__ = [
    "console_text",
    "notebook_html",
    "plot_depth",
    "plot_heads",
    "render_comparison",
    "render_console",
    "render_history",
    "write_comparison",
    "write_history",
    "write_html",
]
