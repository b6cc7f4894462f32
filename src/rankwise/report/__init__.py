"""Audits as people read them: on the console and as one HTML file. No torch inside."""

from rankwise.report.comparison import render_comparison
from rankwise.report.console import render_console
from rankwise.report.page import write_html

__all__ = ["render_comparison", "render_console", "write_html"]
