"""The reference has every command, option, finding code, measure, field of a record and public name."""

import inspect
import pkgutil
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

import rankwise
from rankwise.auditing import FINDING_RULES, Finding, HeadRecord, StateRecord
from rankwise.cli import app

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
COMMANDS = get_command(app).commands
PACKAGES = [one.name for one in pkgutil.iter_modules(rankwise.__path__) if one.name[0] != "_"]
NOT_API = {"cli"}
"""Modules that are not for Python: the command line has a page of its own."""
MEASURES = {HeadRecord.__bases__[0]: "", StateRecord.__bases__[0]: "states: "}
"""Records with a field per measure, and what precedes its name in a heading of the page of measures."""


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Build the documentation, where a warning is an error, and return the names that it describes."""
    pytest.importorskip("mkdocstrings")
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    return {line.split()[0] for line in content.splitlines()}


def section(page: str, heading: str) -> str:
    """Return a section of a page of the reference, from its heading to the next one of the same level."""
    text, level = (REFERENCE / f"{page}.md").read_text(encoding="utf-8"), heading.partition(" ")[0]
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"{page}.md has no section {heading}"
    return rest.partition(f"\n{level} ")[0]


@pytest.mark.parametrize("name", ["", *sorted({*PACKAGES} - NOT_API)])
def test_every_public_name_is_rendered(name: str, rendered: set[str]) -> None:
    module = import_module(f"rankwise.{name}".rstrip("."))
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    public = {*getattr(module, "__all__", own)} - {"__version__"}
    assert {f"{module.__name__}.{one}" for one in public} - rendered == set()


def test_every_public_function_has_an_example() -> None:
    """An example may be in the docstring of another function, which is then named: "example: `audit`"."""
    modules = [import_module(f"rankwise.{name}".rstrip(".")) for name in ["", *sorted({*PACKAGES} - NOT_API)]]
    public = {name: getattr(one, name) for one in modules for name in getattr(one, "__all__", ())}
    functions = {
        name: inspect.getdoc(value) or "" for name, value in public.items() if inspect.isroutine(value)
    }
    assert len(functions) > 60
    missing = []
    for name, text in functions.items():
        other = re.search(r"xample: `(\w+)`|as in `(\w+)` \(example there\)", text)
        shown = functions.get((other[1] or other[2]) if other else "", "")
        if ">>> " not in text and not re.search(rf">>> .*\b{name}\b|\.\.\. .*\b{name}\b", shown):
            missing.append(name)
    assert missing == []


OTHER_NAMES = re.compile(
    "null share|random winners|(sink|peak) mass|relative (token )?spread|distance from collapse|"
    "collapse distance|fresh weights|width needed|random q and k",
    re.IGNORECASE,
)
"""Earlier names of quantities that are called token spread, one-hot rows, random heads and so on."""


def test_a_quantity_has_one_name_in_sentences_and_headings() -> None:
    folders = [ROOT / "src" / "rankwise", ROOT / "docs", ROOT / "experiments"]
    ending = {".md", ".py", ".js", ".html", ".svg"}
    pages = [path for folder in folders for path in folder.rglob("*") if path.suffix in ending]
    read = {
        path: path.read_text(encoding="utf-8")
        for path in pages
        if not {"vendor", "decisions"} & {*path.parts}
    }
    assert len(read) > 300
    assert {path.name: name[0] for path, text in read.items() if (name := OTHER_NAMES.search(text))} == {}


def records() -> Iterator[type]:
    """Yield the records of the package: everything that it writes as JSON."""
    for path in sorted((ROOT / "src" / "rankwise").rglob("*.py")):
        if re.search(r"\(.*\bRecord\)", path.read_text(encoding="utf-8")):
            import_module(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    found = [Finding.__base__]
    for record in found:
        found += record.__subclasses__()
    yield from found[1:]


def test_every_field_of_a_record_is_rendered(rendered: set[str]) -> None:
    fields = {
        f"{base.__module__}.{base.__qualname__}.{name}"
        for record in records()
        for base in record.__mro__
        if base not in MEASURES and base.__module__.startswith("rankwise.")
        for name in {*vars(base).get("__annotations__", ())} & {*record.model_fields}
    }
    assert len(fields) > 150
    assert fields - rendered == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_on_the_page(name: str) -> None:
    page = section("command-line", f"## rankwise {name}").replace("\\", "")
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*?) \| ", page, re.MULTILINE))
    for one in COMMANDS[name].params:
        names = [*one.opts, *one.secondary_opts] if one.param_type_name == "option" else [one.metavar]
        [help_text] = [text for row, text in rows.items() if set(names) <= set(row.split())]
        assert help_text == one.help.replace("\\", "")


@pytest.mark.parametrize("code", FINDING_RULES)
def test_every_finding_has_a_section_that_says_what_to_do(code: str) -> None:
    page = section("findings", f"## {code}")
    assert page.lstrip().startswith("**Meaning**: ")
    assert "**What to do**: " in page
    rows = re.findall(
        rf"^\| \[{code}\].*$", (REFERENCE / "findings.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == 2  # its meaning, and the judgment of a comparison
    assert rows[0].endswith("| yes |" if code == "COLLAPSE" else "| no |")


@pytest.mark.parametrize(
    "heading", [f"{prefix}{name}" for record, prefix in MEASURES.items() for name in record.model_fields]
)
def test_every_measure_has_a_section(heading: str) -> None:
    page = section("measures", f"### {heading}")
    assert "\n- Formula: " in page
    assert "\n- Cost: " in page
