"""The HTML that a notebook shows, and texts of objects."""

import json
import re
from html import escape
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from tests.support import records
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.auditing import History
from rankwise.operators import DenseMixing
from rankwise.report import document_of
from rankwise.skips import Skips
from rankwise.tracing import Address, CapturedMixer, CapturedState


def of(name: str) -> rw.Audit:
    return rw.Audit.model_validate(records.ALL[name]().model_dump())


class Tags(HTMLParser):
    """Collects the tags, checks that they close, and the words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.met: list[str] = []
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.met.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


ALLOWED = {"div", "strong", "br", "table", "caption", "thead", "tbody", "tr", "th", "td"}


@pytest.mark.parametrize("name", records.ALL)
def test_notebooks_get_the_first_screen_as_html_without_scripts(name: str) -> None:
    audit = of(name)
    shown = audit._repr_html_()
    tags = Tags(shown)
    assert set(tags.met) <= ALLOWED
    assert tags.attributes <= {"style"}
    document = document_of(audit)
    cells = [escape(str(cell)) for table in document.first for row in table.rows for cell in row]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", shown) == cells
    assert ("incomplete" in shown) != audit.complete


def hostile_texts() -> dict[str, str]:
    """Return texts of objects in which every name moves the cursor, rings and turns the text."""
    name = "\x1b[31m\x07\u202e\n"
    code = json.dumps(name)[1:-1]
    audit = rw.Audit.model_validate_json(records.encoder().model_dump_json().replace("encoder", code))
    audit = rw.Audit.model_validate(audit.model_dump() | {"at_init": {"seeds": [0], "built": name}})
    where = Address(name, 0, name, head=1)
    model = torch.nn.Module()
    model.add_module(name, torch.nn.Linear(1, 1))
    site = SimpleNamespace(name=name, module=name, parameter="weight")
    with unchecked():
        skips = Skips(model, [site])
        mixer = CapturedMixer(name, 0, name, DenseMixing(torch.eye(2)), torch.ones(1), torch.ones(1))
        state = CapturedState(name, 0, torch.zeros(1))
    known = [
        audit, audit.heads[0], audit.states[0], audit.findings[0], audit.provenance, audit.verdict, where,
        Address(site=name), rw.compare(audit, audit), History.of([audit], [name]), skips, mixer, state,
        audit.at_init,
    ]  # fmt: skip
    texts = {f"{say.__name__} of {type(one).__name__}": say(one) for one in known for say in (repr, str)}
    return texts | {"HTML": audit._repr_html_()}


def test_names_with_control_characters_stay_on_the_line() -> None:
    texts = hostile_texts()
    assert [kind for kind, text in texts.items() if re.search(r"[\x00-\x1f\x7f\u202e]", text)] == []
