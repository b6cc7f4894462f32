"""Records, reports and addresses are imported without torch, transformers and the Python package plotly."""

import subprocess
import sys

PROGRAM = """
import sys
from rankwise import report
from rankwise.auditing import comparison
from rankwise.compression import Compression, HeadWidth
from rankwise.report.compression_report import compression_document
from rankwise.tracing import Address
Address()
print(*sys.modules)
"""


def test_records_and_reports_are_imported_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"torch", "transformers", "plotly", "jinja2"}.isdisjoint(loaded)
