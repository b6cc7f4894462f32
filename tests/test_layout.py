"""Packages import only the packages that they may import, and `import rankwise` loads no large library."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import rankwise

PACKAGE = Path(rankwise.__file__).parent
GROUND = {"errors", "shapes", "operators", "_internals"}
"""Packages that every package may import."""
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "shapes": set(),
    "_internals": {"errors", "shapes"},
    "operators": {"errors", "shapes", "_internals"},
    "measures": set(),
    "theory": set(),
    "ops": set(),
    "tracing": set(),
    "importance": {"tracing"},
    "auditing": {"tracing", "measures", "theory", "importance"},
    "claims": {"auditing", "importance", "tracing", "measures"},
    "report": {"auditing", "compression", "importance", "plan", "skips"},
    "monitor": {"auditing"},
    "plan": {"theory"},
    "models": {"ops", "skips"},
    "skips": {"auditing", "importance", "tracing", "measures", "theory"},
    "compression": {"importance", "tracing", "measures", "auditing"},
    "__main__": {"cli"},
    "cli": {
        "auditing",
        "claims",
        "compression",
        "importance",
        "measures",
        "models",
        "ops",
        "plan",
        "report",
        "skips",
        "tracing",
    },
}
"""Packages that a package may import in addition to `GROUND`."""
KNOWN_CLASHES: list[str] = []
LAZY = {
    ("compression", "models"): "load_compressed finds the classes of ToST",
}


def imports(path: Path) -> set[tuple[str, bool]]:
    """Return the packages that a file imports, each with True if the import is inside a function."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rankwise"):
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            out |= {(name, id(node) in inside) for name in names}
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("rankwise.")]
            out |= {(name, id(node) in inside) for name in names}
    return out


def files() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part != "__init__":
            found.append((part, path))
    return found


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for part, path in files():
        assert part in ALLOWED, f"{part} has no place in the layout: add its arrows here"
        allowed = ALLOWED[part] if part in GROUND else ALLOWED[part] | GROUND
        for name, lazily in imports(path):
            if name not in {*allowed, part, "__version__"} and not (lazily and (part, name) in LAZY):
                wrong.append(f"{path.name} in {part} imports {name}")
    assert wrong == []


def test_only_recommendations_of_skips_read_audits_and_none_runs_one() -> None:
    found = {
        path.name: re.findall(
            r"^\s*(?:from|import) rankwise\.auditing(\.\w+)?", path.read_text(), re.MULTILINE
        )
        for path in (PACKAGE / "skips").glob("*.py")
    }
    assert [name for name, parts in found.items() if {*parts} - {".error_hints"}] == ["recommendation.py"]
    assert ".run" not in found["recommendation.py"]


def test_the_search_for_internal_names_accepts_the_module_that_a_test_is_named_after(tmp_path: Path) -> None:
    test = tmp_path / "compression" / "test_kv.py"
    test.parent.mkdir()
    lines = ["kv_find import found, _own", "qk_find import other", "evaluate import measure"]
    lines = [f"from rankwise.compression.{line}" for line in lines]
    lines += ["from rankwise.compression import compress, kv_find, run"]
    lines += ["from experiments.training.models import MODELS, _count", "from rankwise.errors import X"]
    test.write_text("\n".join(lines))
    assert internal_names(test) == ["_own", "other", "measure", "run", "_count"]


INTERNAL_NAMES = {
    "auditing": 22, "claims": 2, "cli": 16, "compression": 17, "experiments": 8, "importance": 4,
    "internals": 3, "measures": 14, "models": 5, "monitor": 1, "operators": 3, "ops": 3, "report": 22,
    "skips": 17, "support": 22, "test_private_names.py": 1, "theory": 1, "tracing": 4,
}  # fmt: skip
"""By folder of tests, the largest number of internal names that its files import; only smaller numbers are
allowed in place of these."""
DOCUMENTED = {"demo_model", "demo_text", "demo_tost_model"}
"""Names outside the packages' lists that how-tos import."""


def is_own(test: Path, module: list[str]) -> bool:
    """Return True if a test file is named after a module; test_kv.py is named after kv_find and kv_solve."""
    folder, name = test.parent.name, test.stem.removeprefix("test_")
    short = name.removeprefix(f"{folder}_")
    same_package = module[1:2] == [folder] and module[-1].split("_")[0] == short.split("_")[0]
    return same_package or bool({name, short} & set(module))


def internal_names(path: Path) -> list[str]:
    """Return names imported from rankwise that no package exports, and names that begin with an underscore.

    A test may also import from the module that it is named after, and from `rankwise.errors`.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        module, names = node.module.split("."), [alias.name for alias in node.names]
        if module[0] in ("experiments", "benchmarks"):
            found += [name for name in names if re.match(r"_[A-Za-z]", name)]
        elif module[0] == "rankwise" and module != ["rankwise", "errors"]:
            package = PACKAGE.joinpath(*module[1:])
            public = getattr(importlib.import_module(node.module), "__all__", ()) if package.is_dir() else ()
            own = [name for name in names if is_own(path, [*module, name])] if package.is_dir() else []
            if package.is_dir() or not is_own(path, module):
                found += [name for name in names if name not in {*public, *own, *DOCUMENTED}]
            else:
                found += [name for name in names if re.match(r"_[A-Za-z]", name)]
    return found


def test_tests_import_few_internal_names() -> None:
    tests = Path(__file__).parent
    found = {path.relative_to(tests): internal_names(path) for path in tests.rglob("*.py")}
    counts = Counter(path.parts[0] for path, names in found.items() for _ in names)
    more = {folder for folder, count in counts.items() if count > INTERNAL_NAMES.get(folder, 0)}
    assert not more, {str(path): names for path, names in found.items() if names and path.parts[0] in more}


def test_no_test_asserts_a_time() -> None:
    """A test may read a clock for the deadline of a wait only."""
    clocks = {"perf_counter", "perf_counter_ns", "process_time", "monotonic", "thread_time"}
    tests = Path(__file__).parent
    found = {
        str(path.relative_to(tests))
        for path in tests.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id) in clocks
    }
    assert found == {"experiments/test_training.py"}  # waits for a checkpoint


def in_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    heavy = [
        "torch",
        "numpy",
        "pydantic",
        "typer",
        "transformers",
        "triton",
        "plotly",
        "pandas",
        "datasets",
        "PIL",
        "jinja2",
        "numba",
    ]
    loaded = in_fresh_process(
        f"import rankwise, sys; print([name for name in {heavy} if name in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_a_plain_model_is_measured_without_transformers() -> None:
    code = """
import sys
for name in ("transformers", "triton", "plotly"):
    sys.modules[name] = None
import torch, rankwise as rw
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
audit = rw.audit(layer, [torch.randn(2, 9, 8)])
print(len(audit.heads))
"""
    assert in_fresh_process(code).strip() == "2"


def test_a_model_loads_no_tracing() -> None:
    """From `skips`, whose other modules load it, models read one module, which reads `GROUND` alone."""
    read = [
        name
        for path in (PACKAGE / "models").rglob("*.py")
        for name in re.findall(r"^\s*(?:from|import) (rankwise\.skips\S*)", path.read_text(), re.MULTILINE)
    ]
    assert {*read} == {"rankwise.skips.lambda_skip"}
    assert {name for name, _ in imports(PACKAGE / "skips" / "lambda_skip.py")} <= GROUND


def test_every_public_name_exists_and_they_are_few() -> None:
    assert len(rankwise.__all__) <= 16
    for name in dir(rankwise):
        assert getattr(rankwise, name) is not None
    with pytest.raises(AttributeError, match="'rankwise' has no attribute 'nothing'"):
        rankwise.nothing  # noqa: B018


@pytest.mark.parametrize("package", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_listed_names_of_a_package_can_be_imported(package: str) -> None:
    module = importlib.import_module(f"rankwise.{package}")
    assert all(getattr(module, name) is not None for name in getattr(module, "__all__", ()))


def test_only_public_names_are_listed() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if not path.stem.startswith("_")}
    assert {*rankwise.__all__, "__version__"} <= set(dir(rankwise))
    assert set(dir(rankwise)) <= {*rankwise.__all__, "__version__", *parts}


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing such a module would replace the function."""
    clashes = [
        f"{package.name}.{name}"
        for package in [PACKAGE, *(path.parent for path in PACKAGE.glob("*/__init__.py"))]
        for name in listed_names(package / "__init__.py")
        if (package / f"{name}.py").exists() or (package / name / "__init__.py").exists()
    ]
    assert clashes == KNOWN_CLASHES


def listed_names(file: Path) -> list[str]:
    """Names of a literal `__all__`."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value)) if isinstance(node.value, ast.List) else []
    return []


def test_files_of_tests_have_unique_names() -> None:
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    assert [name for name, times in names.items() if times > 1 and name != "__init__.py"] == []
