"""Only `torch_private.py` and two files of tests use names of other libraries that begin with an underscore.

The test reads the source of the package, of `experiments`, of `benchmarks` and of the tests. It finds private
names

- of torch: as attributes, imports, arguments, patterns and whole strings (`module._modules`, `"_modules"`,
  `"torch._dynamo"`);
- of torch, in a class that inherits the name: also as `self._modules`, `def _apply` or `_apply = None`;
- of any other library: as attributes, imports and arguments.

Private names of torch are read from the installed torch. Any other name is allowed if a class of this
repository has it, or if it is Python's (`_replace` of tuples).

Not found: names that are composed at run time (`"_" + "modules"`) or inside longer strings, and names of a
library other than torch that a class of this repository has, too.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.utils.data
from torch import nn

from rankwise._internals import torch_private as torch_private

ROOT = Path(__file__).parents[1]
FENCE = Path(torch_private.__file__)
TESTS = ROOT / "tests"
FENCES = {
    FENCE,
    TESTS / "internals" / "test_torch_private.py",
    TESTS / "support" / "torch_names.py",
    Path(__file__),
}
"""Files that may use private names of torch."""
FILES = [
    path
    for folder in (FENCE.parents[1], ROOT / "experiments", ROOT / "benchmarks", TESTS)
    for path in sorted(folder.rglob("*.py"))
    if path not in FENCES
]
PYTHON = {"_asdict", "_fields", "_make", "_replace"}
"""Documented names of named tuples."""
ALLOWED = {
    # documented, of os:
    "src/rankwise/__main__.py": {"_exit"},
    "experiments/experiment.py": {"_exit"},
    "tests/internals/test_threads.py": {"_exit"},
    "tests/monitor/monitor_worker.py": {"_exit"},
    # of torch, to register a device that is written in Python, to save as older versions do, and to override
    "tests/support/no_float64.py": {
        "_DummyBackendModule",
        "_make_wrapper_subclass",
        "_setup_privateuseone_for_python_backend",
        "_to_copy",
    },
    "tests/tracing/test_torch_layers.py": {"_sa_block"},
    # of torchmetrics, which moves the state of a metric by the first and keeps its result in the second:
    "src/rankwise/measures/embedding_rank.py": {"_apply"},
    "tests/measures/test_embedding_rank.py": {"_computed"},
    # of torch, by which the Trainer of transformers decides whether labels are shifted:
    "src/rankwise/models/language.py": {"_get_name"},
    # private names of transformers without a public equivalent:
    "src/rankwise/compression/save.py": {"_is_quantized"},
    "src/rankwise/cli/compress.py": {"_raise_exceptions_for_missing_entries"},
    "experiments/training/train.py": {"_n_gpu"},
    "experiments/coverage/architectures.py": {"_from_config"},
    "experiments/zoo/transformers.py": {"_attn_implementation", "_experts_implementation"},
    "tests/compression/test_blocks.py": {"_attn_implementation"},
    "tests/compression/test_width.py": {"_attn_implementation"},
    "tests/tracing/test_sharded.py": {"_hf_device_mesh", "_hf_tp_plan"},
}


def is_private(name: str) -> bool:
    return name[:1] == "_" and re.fullmatch(r"_[A-Za-z]\w*", name) is not None


# --- names of torch ----------------------------------------------------------------------------------------


@cache
def written_in(module: str) -> set[str]:
    """Return attributes that methods in a module use; ``dir`` of a class does not list all of them."""
    with suppress(TypeError, OSError, KeyError):  # not written in Python
        return set(re.findall(r"self\.(_\w+)", inspect.getsource(sys.modules[module])))
    return set()


@cache
def names_of(kind: type) -> set[str]:
    """Return the private names of a class and its bases."""
    names = set(dir(kind)).union(*(written_in(base.__module__) for base in kind.__mro__))
    return set(filter(is_private, names))


@cache
def classes_of_torch() -> dict[str, type]:
    """Return by name the classes of torch that our classes may derive from."""
    modules = (torch.overrides, torch.utils.data, torch.autograd, torch.optim, torch, nn)
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if kind.__module__.startswith("torch") and not issubclass(kind, tuple)]
    return {kind.__name__: kind for kind in kinds}


@cache
def of_torch() -> set[str]:
    """Return the private names of torch: of its modules and classes, and those in `torch_private.py`."""
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "torch"]
    names = {name for module in modules for name in dir(module)}
    names |= {name for kind in classes_of_torch().values() for name in names_of(kind)}
    names |= set(re.findall(r"\b_\w+", FENCE.read_text(encoding="utf-8")))
    return set(filter(is_private, names)) - PYTHON - {"_internals"}  # a package of Rankwise


# --- names of our own --------------------------------------------------------------------------------------


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_in(tree: ast.AST) -> list[ast.AST]:
    """Return the classes, and the nodes that can hold a private name."""
    kinds = ast.ClassDef | ast.Attribute | ast.keyword | ast.MatchClass | ast.Import | ast.ImportFrom
    return [node for node in ast.walk(tree) if isinstance(node, kinds | ast.Constant)]


def classes_in(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in nodes_in(tree) if isinstance(node, ast.ClassDef)]


def defined_in(node: ast.ClassDef) -> set[str]:
    """Return the methods and attributes that the body of a class defines."""
    names = set()
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(part.name)
        for target in getattr(part, "targets", [getattr(part, "target", None)]):
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names


def is_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


@cache
def own_attributes(node: ast.ClassDef) -> set[str]:
    return defined_in(node) | {part.attr for part in ast.walk(node) if is_self(part)}


def bases_of(node: ast.ClassDef) -> list[str]:
    """Return the names of base classes: Module, Generic for ``class A(nn.Module, Generic[T])``."""
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]


@cache
def our_classes() -> list[ast.ClassDef]:
    return [node for path in FILES for node in classes_in(parsed(path))]


@cache
def ours() -> set[str]:
    """Return the names that one of our classes has."""
    return {name for node in our_classes() for name in own_attributes(node)} | PYTHON


@cache
def bases_of_ours() -> dict[str, set[str]]:
    """Return the bases of our classes by name; classes with the same name are merged."""
    bases: dict[str, set[str]] = {}
    for node in our_classes():
        bases.setdefault(node.name, set()).update(bases_of(node))
    return bases


@cache
def inherited(base: str) -> set[str]:
    """Return the private names of torch that a class inherits from one of its bases.

    A base that is neither ours nor torch's may be a module, as models of transformers are.
    """
    ancestors, added = set(), {base}
    while added:
        ancestors |= added
        added = {further for one in added for further in bases_of_ours().get(one, ())} - ancestors
    theirs = ancestors - set(bases_of_ours())
    return {name for one in theirs for name in names_of(classes_of_torch().get(one, nn.Module))}


# --- the search --------------------------------------------------------------------------------------------


def private_names(path: Path) -> list[str]:
    """Return the private names of other libraries in a file, each with its line."""
    tree = parsed(path)
    found = {(node.lineno, name) for node in nodes_in(tree) for name in written(node) if is_private(name)}
    for kind in classes_in(tree):
        theirs = {name for base in bases_of(kind) for name in inherited(base)}
        found |= {(kind.lineno, name) for name in own_attributes(kind) & theirs}
    return [f"{path.name}:{line} {name}" for line, name in sorted(found)]


def written(node: ast.AST) -> Iterator[str]:
    """Return the private names of other libraries in one node, without the nodes inside it."""
    names: list[str] = []  # reported unless they are ours
    texts: list[str] = []  # reported if they are torch's
    if isinstance(node, ast.Attribute) and not is_self(node):
        names = [node.attr]
    elif isinstance(node, ast.keyword) and node.arg:
        names = [node.arg]
    elif isinstance(node, ast.MatchClass):
        names = node.kwd_attrs
    elif isinstance(node, ast.Import | ast.ImportFrom):
        parts = [*(alias.name for alias in node.names), getattr(node, "module", None) or ""]
        imported = [name for part in parts for name in part.split(".")]
        if "rankwise" in imported:
            texts = imported  # private modules of our own may be imported
        else:
            yield from imported
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        texts = node.value.split(".") if re.fullmatch(r"[\w.]+", node.value) else []
        if texts[:1] == ["torch"]:
            yield from texts
    yield from (name for name in names if name in of_torch() or name not in ours())
    yield from (name for name in texts if name in of_torch())


def test_no_other_file_uses_private_names() -> None:
    assert len(FILES) > 450
    found = {str(path.relative_to(ROOT)): private_names(path) for path in FILES}
    used = {file: {line.split()[-1] for line in lines} for file, lines in found.items() if lines}
    assert used == ALLOWED, found


@pytest.mark.parametrize(
    "line",
    [
        "from torch.overrides import _modules",
        "from torch._modules import x",
        "import torch._modules as x",
        "from rankwise._internals.torch_private import _modules",
        "torch._modules.f()",
        "self.module._modules",
        "super()._modules",
        "module._modules = {}",
        "f(_modules=1)",
        "case nn.Module(_modules=x): pass",
        "getattr(module, '_modules', None)",
        "inspect.getattr_static(module, '_modules')",
        "NAME = '_modules'",
        "importlib.import_module('torch._modules')",
        "d = module.__dict__; d['_modules']",
        "module.__getattribute__('_modules')",
        "attrgetter('layer._modules')(module)",
    ],
)
def test_the_search_finds_a_name_of_torch(line: str, tmp_path: Path) -> None:
    assert found_in(f"match x:\n    {line}" if line.startswith("case") else line, tmp_path) == {"_modules"}


def test_the_search_accepts_our_own_names(tmp_path: Path) -> None:
    ours = [
        "class A(nn.Module):\n    def __init__(self): self._fine = self.__class__",
        "operator._multiply(f)",
        "pair._replace(x=1)",
        "from rankwise.theory import barrier",
        "'_fine', '__dict__', 'a text of _modules', '_'",
    ]
    assert found_in("\n".join(ours), tmp_path) == set()


def found_in(text: str, folder: Path) -> set[str]:
    file = folder / f"file{len(list(folder.iterdir()))}.py"  # files are read once
    file.write_text(text)
    return {said.split()[-1] for said in private_names(file)}
