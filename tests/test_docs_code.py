"""Python in the documentation names what is there, and calls it with arguments it takes."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "```python" in page.read_text(encoding="utf-8"))
CONTEXT = {"rw": rw}
"""What a block may use that an earlier page imported."""


def blocks(page: Path) -> Iterator[str]:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        yield re.sub(r"^>>> |^\.\.\. ", "", block, flags=re.MULTILINE)


def imported(tree: ast.Module) -> dict[str, Any]:
    """Names that a block takes from the package, with what they stand for."""
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
    """``rw.audit`` as its two names; empty for what is no name."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before and isinstance(node, ast.Attribute) else []


def check(code: str, known: dict[str, Any]) -> int:
    """Resolve what a block uses of the package and hold its calls against their signatures; how many."""
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
    """The module, function or class of that name; None for what only a run can tell, such as a method."""
    thing = known[names[0]]
    for name in names[1:]:
        if not inspect.ismodule(thing):
            return None
        thing = getattr(thing, name)
    return thing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_calls_in_the_documentation_are_calls_of_what_is_there(page: Path) -> None:
    known = dict(CONTEXT)
    for code in blocks(page):
        check(code, known)


def test_many_calls_are_held_against_signatures() -> None:
    assert sum(check(code, dict(CONTEXT)) for page in PAGES for code in blocks(page)) > 30


def test_wrong_names_and_arguments_are_found() -> None:
    assert check("rw.audit(model, batches)", dict(CONTEXT)) == 1
    assert check("from rankwise import theory\ntheory.uniform_rank(4)", {}) == 1
    with pytest.raises(AttributeError):
        check("rw.odit(model)", dict(CONTEXT))
    with pytest.raises(TypeError, match="unexpected keyword"):
        check("rw.audit(model, batches, no_such=1)", dict(CONTEXT))
    with pytest.raises(AttributeError):
        check("from rankwise import theory\ntheory.none", {})
    with pytest.raises(ModuleNotFoundError):
        check("from rankwise.theory import none", {})
