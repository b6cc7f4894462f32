"""Reading an audit, and writing a page, needs neither torch nor the Python package plotly."""

import subprocess
import sys
from pathlib import Path

import pytest


def loaded(program: str) -> set[str]:
    command = [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("module", ["rankwise.report", "rankwise.auditing.comparison"])
def test_the_report_itself_needs_no_torch(module: str) -> None:
    assert {"torch", "transformers", "plotly", "jinja2"}.isdisjoint(loaded(f"import {module}"))


def test_audits_are_loaded_merged_compared_and_shown_without_torch(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["torch"] = None
import rankwise as rw
from rankwise.auditing import History
from rankwise.auditing.records import Provenance
audit = rw.Audit(provenance=Provenance(model="m", delta=0.01), heads=[], states=[], findings=[])
assert rw.compare(audit, rw.Audit.load(audit.save({str(tmp_path / "audit.json")!r}))).is_empty
history = History([(step, rw.Audit.merge([audit])) for step in (1, 2)])
assert History.load(history.save({str(tmp_path / "history")!r})).steps == [1, 2]
history.comparison.to_html({str(tmp_path / "comparison.html")!r})
audit.to_html({str(tmp_path / "report.html")!r})
"""
    assert {"transformers", "plotly"}.isdisjoint(loaded(program))
    assert (tmp_path / "comparison.html").exists()
    assert (tmp_path / "report.html").exists()


def test_importing_the_report_does_not_import_plotly() -> None:
    program = "import sys, torch\nbefore = {*sys.modules} - {'sys'}\nimport rankwise.report\n"
    found = loaded(f"{program}for name in before:\n    del sys.modules[name]")
    assert "rankwise" in found
    assert {"plotly", "jinja2"}.isdisjoint(found)
