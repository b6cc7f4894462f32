"""A study: one claim that is measured in one go, and the page made of its report."""

import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.provenance import commit, provenance
from experiments.render import DOCS, fill_page
from experiments.results import RESULTS, Run, append_run, read_runs
from rankwise.errors import RecordError

Report = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A measurement and its page; `experiments.registry` lists the studies."""

    name: str
    """Name of the report, the one line of results/NAME.jsonl."""
    measure: Callable[[Path], Report]
    """Data folder → report, plain JSON; its `settings` are everything that decides the run."""
    page: str = ""
    """Name of docs/PAGE.md, made from pages/PAGE.md; empty: no page."""
    tables: Callable[[Report], Mapping[str, str]] = lambda report: {}
    """Mark on the page → Markdown."""
    figures: Callable[[Report], Mapping[str, str]] = lambda report: {}
    """Name in docs/images → SVG."""
    template: str = ""
    """Name of pages/TEMPLATE.md, if it is not the name of the page."""

    @property
    def claim(self) -> str:
        """Return the first sentence of the file that defines the study."""
        return (sys.modules[self.measure.__module__].__doc__ or "").partition("\n")[0]

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.jsonl"

    @property
    def command(self) -> str:
        return f"python -m experiments run {self.name}"

    def kept(self) -> Report:
        """Return the report that is kept, with its settings and origin; raise `RecordError` before a run."""
        runs = read_runs(self.path, dict)
        if not runs:
            raise RecordError(
                str(self.path), expected="a report", got="none", fix=f"Run it first: `{self.command}`."
            )
        return {**runs[0]["values"], "settings": runs[0]["settings"], **runs[0]["provenance"]}

    def run(self, data: Path) -> Report:
        """Measure, and keep the report with its origin."""
        begun, source = time.perf_counter(), commit()
        values = dict(self.measure(data))
        seconds, origin = round(time.perf_counter() - begun), provenance(self.command, source)
        kept: Run = {
            "row": self.name,
            "seed": 0,
            "settings": values.pop("settings", {}),
            "values": values,
            "provenance": {
                "command": origin.pop("command"),
                "created": origin.pop("created"),
                "seconds": seconds,
                "versions": {**origin, "machine": f"{platform.machine()} CPU"},
            },
        }
        append_run(self.path, kept)
        return self.kept()

    def files(self, report: Report) -> dict[Path, str]:
        if not self.page:
            return {}
        figures = {DOCS / "images" / name: figure for name, figure in self.figures(report).items()}
        origin = {
            "command": self.command,
            "seconds": str(report.get("seconds")),
            **report.get("versions", {}),
        }
        text = fill_page(self.template or self.page, self.tables(report), origin)
        return {DOCS / f"{self.page}.md": text, **figures}
