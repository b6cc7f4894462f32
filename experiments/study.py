"""A study: one claim that is measured in one go, its report, and the page made of the report."""

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import rankwise
from experiments.render import fill_page
from experiments.results import RESULTS
from rankwise._internals.files import write_file

DOCS = Path(__file__).parents[1] / "docs"
Report = dict[str, Any]


def _none(report: Report) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Study:
    """What is measured, and how its page is filled; `experiments.registry` lists the studies."""

    name: str
    """Of the report, results/NAME.json."""
    measure: Callable[[Path], Report]
    """Data folder → report, plain JSON."""
    page: str = ""
    """Of docs/PAGE.md, from pages/PAGE.md; empty: no page."""
    tables: Callable[[Report], Mapping[str, str]] = _none
    """Mark on the page → Markdown."""
    figures: Callable[[Report], Mapping[str, str]] = _none
    """Name in docs/images → SVG."""

    @property
    def claim(self) -> str:
        """Return the first sentence of the file that defines the study."""
        return (sys.modules[self.measure.__module__].__doc__ or "").partition("\n")[0]

    @property
    def path(self) -> Path:
        """Return the file of the report."""
        return RESULTS / f"{self.name}.json"

    def kept(self) -> Report:
        """Return the report that is kept."""
        report: Report = json.loads(self.path.read_text(encoding="utf-8"))
        return report

    def run(self, data: Path) -> Report:
        """Measure, and keep the report with its origin."""
        begun = time.perf_counter()
        report = {
            "command": self.command,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.measure(data),
            "seconds": round(time.perf_counter() - begun),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "rankwise": rankwise.__version__,
                "machine": f"{platform.machine()} CPU",
            },
        }
        write_file(self.path, json.dumps(report, indent=1, ensure_ascii=False) + "\n", "results")
        return report

    @property
    def command(self) -> str:
        """Return the command that repeats the study."""
        return f"python -m experiments run {self.name}"

    def files(self, report: Report) -> dict[Path, str]:
        """Return the page and its figures, by file."""
        if not self.page:
            return {}
        figures = {DOCS / "images" / name: figure for name, figure in self.figures(report).items()}
        return {DOCS / f"{self.page}.md": fill_page(self.page, self.tables(report)), **figures}


def settings_from(kind: type, report: Report) -> Any:
    """Return the settings of a report as their class has them: tuples in place of lists."""
    settings = report["settings"].items()
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings})
