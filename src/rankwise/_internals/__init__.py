"""Lazy imports: import names of a package on first use, and `rankwise.report` when a report is shown."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package that imports its names on first use.

    The package imports the names under ``if TYPE_CHECKING:``, where type checkers find them. Python does not
    run this block, so the names are read from the source.
    """
    module: Any = sys.modules[package]
    statements = ast.parse(module.__spec__.loader.get_source(package)).body
    imports: list[Any] = [node for block in statements if isinstance(block, ast.If) for node in block.body]
    homes = {name.name: node.module for node in imports for name in node.names}

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        setattr(module, name, value)
        return value

    return getattr_, lambda: sorted({*homes, *module.__all__})


def report_package() -> Any:
    """Return the package `rankwise.report`, which shows results of lower packages."""
    return import_module("rankwise.report")
