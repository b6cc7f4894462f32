"""What the README shows is what its code prints."""

import contextlib
import io
import re
import tomllib
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def test_code_prints_what_is_shown() -> None:
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    assert len(blocks) == 3
    namespace: dict[str, object] = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        assert printed.getvalue() == shown


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README.read_text(encoding="utf-8"))
    assert links
    missing = [link for link in links if not (README.parent / link).exists()]
    assert missing == []


def test_extras_that_code_and_docs_name_exist() -> None:
    root = README.parent
    known = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (root / "src").rglob("*.py"))
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (root / "docs").rglob("*.md"))
    named = re.findall(r'need_package\([^()]*"(\w+)"\)', code)
    assert len(named) == code.count("need_package(") - 1, "a call that this pattern does not read"
    named += ",".join(re.findall(r"rankwise\[([\w,]+)\]", code + pages)).split(",")
    assert set(named) <= set(known)
