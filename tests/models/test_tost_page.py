"""What the page on ToST models shows is what its code prints."""

import contextlib
import io
import re
from pathlib import Path

from test_tost_config import PARAMETERS

from rankwise.models import PRESETS

PAGE = (Path(__file__).parents[2] / "docs/how-to/tost.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def test_code_prints_what_is_shown() -> None:
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) == PAGE.count("```python") == 3
    namespace: dict[str, object] = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        assert printed.getvalue() == shown


def test_the_table_of_sizes_is_the_tested_one() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| `tost-")]
    numbers = [int(n.replace(",", "")) for row in rows for n in re.findall(r"\d{1,3}(?:,\d{3})+", row)]
    assert numbers == [PARAMETERS[name] for name in PRESETS]
