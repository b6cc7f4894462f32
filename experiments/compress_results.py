"""What the recipes of compression write: results with provenance, and a page with tables in its places."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import transformers

import rankwise as rw
from rankwise._internals.files import write_file


def spread(numbers: Sequence[float], digits: int = 4) -> str:
    """Mean ± standard deviation."""
    around = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{digits}f}{around}"


def filled(text: Path, tables: Mapping[str, str]) -> str:
    """A page with its tables, each in the place ``<!-- NAME -->``."""
    page = text.read_text(encoding="utf-8")
    for name, words in tables.items():
        page = page.replace(f"<!-- {name} -->", words)
    return page


def write_results(
    path: Path, name: str, recipe: Any, unit: str, splits: list[dict[str, Any]], argv: Sequence[str] | None
) -> None:
    """Write the JSON of a run, with what made it."""
    content = provenance(name, recipe, unit, argv)
    versions = content.pop("versions")
    content |= {"splits": splits, "versions": versions}
    print(f"wrote {write_file(path, json.dumps(content, indent=1) + chr(10), 'results')}")


def provenance(name: str, recipe: Any, unit: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """What made the results of a recipe; of paths the last part alone."""
    words = [Path(word).name if "/" in word else word for word in (sys.argv[1:] if argv is None else argv)]
    return {
        "recipe": name,
        "command": " ".join(["python", "-m", f"recipes.{name}", *words]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(recipe),
        "unit": unit,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rankwise": rw.__version__,
            "threads": torch.get_num_threads(),
        },
    }
