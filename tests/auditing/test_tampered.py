"""A changed audit file is shown with the change, or refused by an error that names the field."""

import copy
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support import records
from tests.support.documents import audit_document, comparison_document, page_text

from rankwise.auditing import Audit, compare
from rankwise.errors import RecordError
from rankwise.report import document_text, print_document

Content = dict[str, Any]
NAN, INFINITY = math.nan, math.inf


def small(audit: Any) -> Content:
    """Return an audit with a few heads, as its file stores it."""
    content = json.loads(audit.model_dump_json())
    return content | {"heads": [*content["heads"][:4], *content["heads"][-4:]]}


ORIGINALS = {name: small(records.ALL[name]()) for name in ("encoder", "memberships", "estimated", "mixed")}


@pytest.fixture(autouse=True)
def _without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out four megabytes that do not depend on the audit."""
    monkeypatch.setattr("rankwise.report.page.chart_script", lambda: "")


def loaded(content: Content, folder: Path) -> Audit:
    (folder / "audit.json").write_text(json.dumps(content))
    return Audit.load(folder)


def shown_everywhere(audit: Audit, original: Audit, folder: Path) -> str:
    """Return page and console text, after comparison, saving and loading."""
    out = io.StringIO()
    console = Console(file=out, width=100)
    print_document(audit_document(audit), console)
    text = page_text(audit_document(audit))
    data = text.split('id="report-data">')[1].split("</script>")[0]
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} in the data of the page"))
    for before, after in ((audit, original), (original, audit)):
        comparison = compare(before, after)
        print_document(comparison_document(comparison), console)
        comparison.model_dump_json()
    assert compare(audit, audit).is_empty
    again = Audit.load(audit.save(folder / "again.json"))
    assert again.model_dump_json() == audit.model_dump_json()
    return text.split("<body")[1].split('id="report-data"')[0] + out.getvalue()


REFUSED: list[tuple[str, str, Content, str]] = [
    ("encoder", "heads", {"sources": 0}, r"heads\.0\.sources"),
    ("encoder", "heads", {"tokens": -4}, r"heads\.0\.tokens"),
    ("encoder", "heads", {"head": -1}, r"heads\.0\.head"),
    ("encoder", "heads", {"head": 10**30}, r"heads\.0\.head"),
    ("encoder", "heads", {"sequences": 10**400}, r"heads\.0\.sequences"),
    ("encoder", "heads", {"x" * 9000: 1}, r"heads\.0\.x+ …"),
    ("encoder", "provenance", {"delta": NAN}, r"provenance\.delta"),
    ("encoder", "provenance", {"delta": 0}, r"provenance\.delta"),
    ("encoder", "where", {"layer": -1}, r"where\.layer"),
]


def part_of(content: Content, part: str) -> list[Content]:
    """Return the records of a kind, as they are in the content."""
    if part == "where":
        return [finding.get("where") for finding in content["findings"]]
    found = content[part] if part else content
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize(("name", "part", "fields", "message"), REFUSED)
def test_impossible_fields_are_refused(name, part, fields, message, tmp_path: Path) -> None:
    content = copy.deepcopy(ORIGINALS[name])
    part_of(content, part)[0].update(fields)
    with pytest.raises(RecordError, match=message) as refused:
        loaded(content, tmp_path)
    assert len(str(refused.value)) < 1000


def test_a_head_with_a_large_number_is_one_column(tmp_path: Path) -> None:
    content = copy.deepcopy(ORIGINALS["encoder"])
    content["heads"][0]["head"] = 10**9
    audit = loaded(content, tmp_path)
    shown_everywhere(audit, audit, tmp_path)
    assert '"11", "1000000000"]' in page_text(audit_document(audit))  # the columns of the map


def test_unknown_memberships_and_coding_rates_are_left_out(tmp_path: Path) -> None:
    content = copy.deepcopy(ORIGINALS["memberships"])
    for record in content["heads"]:
        record["membership_map"][0] = record["variational_rate"] = None
    audit = loaded(content, tmp_path)
    shown = shown_everywhere(audit, audit, tmp_path)
    assert re.search(r"the scale ends at 0\.\d\d<", shown)
    rows = [line.split() for line in document_text(audit_document(audit), verbose=True).splitlines()]
    assert {row[-1] for row in rows if row[1:2] == ["4"] and row[0].isdigit()} == {"–"}


def test_maps_of_different_tokens_are_not_drawn_together(tmp_path: Path) -> None:
    content = copy.deepcopy(ORIGINALS["memberships"])
    whole = loaded(content, tmp_path)
    content["heads"][0]["membership_map"].append(0.5)
    changed = loaded(content, tmp_path)
    texts = [shown_everywhere(one, one, tmp_path) for one in (whole, changed)]
    before, after = (len(re.findall('data-png="memberships-', text)) for text in texts)
    assert 0 <= after == before - 1
