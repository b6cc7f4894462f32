"""The package keeps its arrows, and `import rankwise` stays light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise

PACKAGE = Path(rankwise.__file__).parent
BASE = {"errors", "shapes", "operators", "files", "torch_internals"}
ALLOWED = {
    "errors": set(),
    "files": {"errors"},
    "shapes": set(),
    "torch_internals": set(),
    "linalg": set(),
    "rotary": {"errors"},
    "parallel": {"torch_internals"},
    "operators": {"errors", "shapes"},
    "measures": {"errors", "shapes", "linalg", "parallel", "operators"},
    "theory": {"errors", "shapes", "linalg", "parallel"},
    "capture": {"errors", "shapes", "operators", "torch_internals"},
    "running": {"errors"},
    "rank_correlation": set(),
    "worth": {"running", "errors", "shapes", "operators", "capture", "rank_correlation"},
    "audit": {
        "running",
        "parallel",
        "torch_internals",
        "errors",
        "shapes",
        "operators",
        "files",
        "capture",
        "measures",
        "theory",
        "worth",
        "rank_correlation",
    },
    "report": {"errors", "files", "rank_correlation", "audit"},
    "monitor": {"torch_internals", "audit", "errors", "files", "running"},
    "plan": {
        "errors",
        "files",
        "rotary",
        "running",
        "operators",
        "capture",
        "measures",
        "theory",
        "audit",
        "report",
        "data",
        "subjects",
        "subject_inputs",
    },
    "ops": {"errors", "shapes", "torch_internals"},
    "models": {"errors", "shapes", "files", "operators", "ops", "rotary", "surgery", "torch_internals"},
    "surgery": {
        "running",
        "audit",
        "errors",
        "shapes",
        "files",
        "operators",
        "capture",
        "measures",
        "theory",
        "torch_internals",
    },
    "compression": {
        "torch_internals",
        "worth",
        "errors",
        "files",
        "shapes",
        "running",
        "operators",
        "capture",
        "measures",
        "audit",
        "report",
    },
    "data": {"errors", "shapes", "files"},
    "train": {
        "audit",
        "device_maps",
        "errors",
        "files",
        "data",
        "models",
        "monitor",
        "ops",
        "processes",
        "rotary",
    },
    "assets": {"errors"},
    "device_maps": {"errors", "files"},
    "processes": {"errors"},
    "subjects": {"errors", "data", "models", "compression", "device_maps"},
    "sources": set(),
    "sweep": {"audit", "errors", "files", "sources", "sweep_names", "tasks"},
    "sweep_names": {"audit", "errors", "files"},
    "sweep_ray": {"errors", "sweep"},
    "tasks": {"sources", "assets", "audit", "data", "subject_inputs", "subjects", "surgery", "worth"},
    "subject_inputs": {"errors", "data", "subjects"},
    "__main__": {"cli"},
    "cli": {
        "errors",
        "files",
        "audit",
        "report",
        "plan",
        "data",
        "assets",
        "subjects",
        "processes",
        "tasks",
        "sweep",
        "sweep_ray",
        "subject_inputs",
        "measures",
        "ops",
        "models",
        "surgery",
        "worth",
        "compression",
        "train",
    },
}
LAZY = {
    ("audit", "report"): "Audit.to_html is the contract; imported when it is called",
    (
        "surgery",
        "models",
    ): "mixers that replace attention are built when they are asked for; models read λ-skips",
    ("audit", "data"): "texts become batches where they are given instead of batches",
}


def imports(path: Path) -> set[tuple[str, bool]]:
    """Parts of the package a file imports, and whether inside a function."""
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


@pytest.mark.parametrize(("part", "path"), files(), ids=lambda value: str(value).removeprefix(str(PACKAGE)))
def test_imports_follow_the_arrows(part: str, path: Path) -> None:
    assert part in ALLOWED, f"{part} has no place in the layout: add its arrows here"
    for name, lazily in imports(path):
        if name in (part, "__version__") or (lazily and (part, name) in LAZY):
            continue
        assert name in ALLOWED[part], f"{path.name} in {part} imports {name}"


def test_surgery_reads_what_an_audit_says_and_runs_one_for_a_remedy_alone() -> None:
    found = {
        path.name: re.findall(r"^\s*(?:from|import) rankwise\.audit(\.\w+)?", path.read_text(), re.MULTILINE)
        for path in (PACKAGE / "surgery").glob("*.py")
    }
    assert {part for parts in found.values() for part in parts} == {
        ".records",
        ".findings",
        ".batches",
        ".cures",
        ".run",
    }
    assert [name for name, parts in found.items() if ".run" in parts] == ["remedy.py"]


def test_the_arrow_test_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from rankwise.capture import capture\ndef f():\n    import rankwise.report\n")
    assert imports(wrong) == {("capture", False), ("report", True)}


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


def test_every_public_name_is_there_and_few() -> None:
    assert len(rankwise.__all__) < 30
    for name in dir(rankwise):
        assert getattr(rankwise, name) is not None
    with pytest.raises(AttributeError, match="'rankwise' has no attribute 'nothing'"):
        rankwise.nothing  # noqa: B018


def test_only_public_names_are_listed() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if not path.stem.startswith("_")}
    assert {*rankwise.__all__, "__version__"} <= set(dir(rankwise))
    assert set(dir(rankwise)) <= {*rankwise.__all__, "__version__", *parts}


def test_a_function_is_never_replaced_by_the_package_it_comes_from() -> None:
    code = """
import rankwise.capture.block_candidates, rankwise.audit.records, rankwise as rw
from rankwise import audit
import rankwise.audit as again
print(callable(rw.capture), callable(rw.audit), audit is again is rw.audit)
"""
    assert in_fresh_process(code).split() == ["True"] * 3
