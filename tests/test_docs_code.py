"""Python in the documentation uses names and arguments that exist, and prints the output on the page."""

import ast
import contextlib
import importlib
import inspect
import io
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "```python" in page.read_text(encoding="utf-8"))
CONTEXT = {"rw": rw}
"""Names that a block may use without an import."""
PRINTED = {
    "README.md": 1,
    "docs/index.md": 1,
    "docs/how-to/audit.md": 1,
    "docs/how-to/compress.md": 1,
    "docs/how-to/plan.md": 1,
    "docs/how-to/scale.md": 1,
    "docs/how-to/skip.md": 1,
    "docs/how-to/capture.md": 3,
    "docs/how-to/compare.md": 2,
    "docs/how-to/importance.md": 1,
    "docs/how-to/readers.md": 2,
    "docs/how-to/monitor.md": 1,
    "docs/how-to/tost.md": 3,
    "docs/reference/models.md": 1,
    "docs/explanation/reference-ranks.md": 1,
}
"""Pages with Python that is followed by its output, and how many such blocks they have."""


def blocks(page: Path) -> Iterator[str]:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        yield re.sub(r"^>>> |^\.\.\. ", "", block, flags=re.MULTILINE)


def imported(tree: ast.Module) -> dict[str, Any]:
    """Return the names that a block imports from the package, with their objects."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "rankwise":
                    found[one.asname or one.name] = importlib.import_module(one.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rankwise":
            module = importlib.import_module(node.module or "")
            for one in node.names:
                if not hasattr(module, one.name):
                    importlib.import_module(f"{node.module}.{one.name}")
                found[one.asname or one.name] = getattr(module, one.name)
    return found


def dotted(node: ast.expr) -> list[str]:
    """Return ``rw.audit`` as its two names; an empty list for other expressions."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before and isinstance(node, ast.Attribute) else []


def check(code: str, known: dict[str, Any]) -> int:
    """Resolve the names of the package in a block, bind its calls to signatures, and count the calls."""
    tree = ast.parse(code)
    known.update(imported(tree))
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not reads(node)}
    calls = 0
    for node in ast.walk(tree):
        names = dotted(node) if isinstance(node, ast.Attribute) else []
        if names and names[0] in known and names[0] not in assigned and inspect.ismodule(known[names[0]]):
            resolved(names, known)
        if isinstance(node, ast.Call) and (names := dotted(node.func)):
            if names[0] not in known or names[0] in assigned:
                continue
            called = resolved(names, known)
            starred = any(isinstance(value, ast.Starred) for value in node.args)
            if called is None or starred or any(one.arg is None for one in node.keywords):
                continue
            given = {one.arg: None for one in node.keywords if one.arg}
            inspect.signature(called).bind(*node.args, **given)
            calls += 1
    return calls


def reads(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def resolved(names: list[str], known: dict[str, Any]) -> Any:
    """Return the module, function or class of a name; None if only a run can tell, as for methods."""
    thing = known[names[0]]
    for name in names[1:]:
        if not inspect.ismodule(thing):
            return None
        thing = getattr(thing, name)
    return thing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_documentation_calls_functions_that_exist_with_valid_arguments(page: Path) -> None:
    known = dict(CONTEXT)
    for code in blocks(page):
        check(code, known)


def test_many_calls_are_compared_with_signatures() -> None:
    assert sum(check(code, dict(CONTEXT)) for page in PAGES for code in blocks(page)) > 30


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("rw.odit(model)", AttributeError),
        ("rw.audit(model, batches, no_such=1)", TypeError),
        ("from rankwise import theory\ntheory.none", AttributeError),
        ("from rankwise.theory import none", ModuleNotFoundError),
    ],
)
def test_wrong_names_and_arguments_are_found(code: str, error: type[Exception]) -> None:
    assert (
        check("rw.audit(model, batches)\nfrom rankwise import theory\ntheory.uniform_rank(4)", dict(CONTEXT))
        == 2
    )
    with pytest.raises(error):
        check(code, dict(CONTEXT))


@pytest.mark.parametrize("page", PRINTED)
def test_code_prints_the_output_on_the_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8")
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(pairs) == PRINTED[page]
    namespace: dict[str, object] = {"__name__": "example"}
    for code, shown in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), namespace)
        assert printed.getvalue() == shown


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_extras_in_code_and_docs_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    pages = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    named = re.findall(r'need_package\([^()]*"(\w+)"\)', code)
    assert len(named) == code.count("need_package(") - 1, "a call that this pattern does not read"
    named += ",".join(re.findall(r"rankwise\[([\w,]+)\]", code + pages)).split(",")
    assert set(named) <= set(project["optional-dependencies"])
