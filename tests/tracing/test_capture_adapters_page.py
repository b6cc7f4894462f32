"""The page on adapters: what its examples print is what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/how-to/adapters.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("at", range(2))
def test_an_example_prints_what_the_page_says(at):
    code, wanted = EXAMPLES[at]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "adapters.md", "exec"), {"__name__": "example"})
    assert printed.getvalue() == wanted


def test_the_page_has_no_other_example_than_these():
    assert len(EXAMPLES) == PAGE.count("```python") == 2
