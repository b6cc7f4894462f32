"""The HTML that a notebook shows, and figures for it."""

import json
import math
import re
from html import escape
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from tests.support import records
from tests.support.records import DRAWN, HEAD_MEASURES, STATE_MEASURES
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.auditing import History
from rankwise.errors import InputError
from rankwise.operators import DenseMixing
from rankwise.report import document_of
from rankwise.report.format import model_name
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
    tags = Tags(audit._repr_html_())
    assert set(tags.met) <= ALLOWED
    assert tags.attributes <= {"style"}
    document = document_of(audit)
    cells = [escape(str(cell)) for table in document.first for row in table.rows for cell in row]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", audit._repr_html_()) == cells
    assert ("incomplete" in audit._repr_html_()) != audit.complete


def hostile_texts() -> dict[str, str]:
    """What objects say of themselves if every name in them moves the cursor, rings and turns the text."""
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


def test_a_map_holds_every_head_at_its_place() -> None:
    audit = of("encoder")
    for row in HEAD_MEASURES:
        trace = audit.plot(row.name).data[0]
        for head in audit.heads:
            drawn = trace.z[head.layer][head.head]
            value = row.value(head)
            assert drawn == value if math.isfinite(value) else drawn is None, row.name


@pytest.mark.parametrize("name", ["encoder", "encoder_decoder"])
def test_the_title_of_a_map_is_at_its_axis_and_not_on_its_numbers(name: str) -> None:
    audit = of(name)
    figure = audit.plot()
    assert not figure.layout.annotations
    titles = [axis.title.text for axis in figure.select_xaxes()]
    assert titles == [f"{stack}, head" for stack in dict.fromkeys(titles_of(audit))]
    assert all(axis.side == "top" for axis in figure.select_xaxes())
    assert len({one.text for one in audit.plot_depth().layout.annotations}) == len(DRAWN)


def titles_of(audit: rw.Audit) -> list[str]:
    return [f"{head.stack}, cross" if head.cross else head.stack for head in audit.heads]


def test_values_beyond_the_scale_are_counted_in_the_title() -> None:
    audit = of("encoder")
    audit.heads[0] = audit.heads[0].model_copy(update={"sigma_max": 1e6})
    assert "(1 beyond the scale, up to 1e+06)" in audit.plot("sigma_max").layout.title.text
    assert "beyond" not in audit.plot("numerical_rank").layout.title.text


@pytest.mark.parametrize("name", ["encoder_decoder", "nasty", "only_nan", "memberships", "mixed"])
def test_figures_of_every_audit_escape_names(name: str) -> None:
    audit = of(name)
    maps, depth = audit.plot(), audit.plot_depth()
    grids = [[list(line) for line in trace.z] for trace in maps.data if trace.type == "heatmap"]
    assert sum(len(line) - line.count(None) for grid in grids for line in grid) <= len(audit.heads)
    for figure in (maps, depth):
        assert "<img" not in figure.to_json().replace("\\u003c", "<")
        assert escape(model_name(audit.provenance.model)) in figure.layout.title.text


@pytest.mark.parametrize("measure", [None, *(measure.name for measure in STATE_MEASURES)])
def test_depth_has_a_line_for_each_stack(measure: str | None) -> None:
    audit = of("encoder_decoder")
    figure = audit.plot_depth(measure)
    lines = [trace for trace in figure.data if trace.name]
    assert [trace.name for trace in lines] == ["encoder.block", "decoder.block"] * (len(lines) // 2)
    assert len(figure.data) == 3 * len(lines)
    mine = [layer for layer in audit.states if layer.stack == "encoder.block"]
    if measure:
        known = [getattr(layer, measure) for layer in mine]
        assert list(lines[0].y) == [value if math.isfinite(value) else None for value in known]


def test_figures_that_cannot_be_drawn_are_refused() -> None:
    for plot, measure, said in (
        (of("encoder").plot, "efective_rank", "Did you mean effective_rank"),
        (of("encoder").plot_depth, "mean_cosin", "Did you mean mean_cosine"),
        (of("no_heads").plot, "numerical_rank", "expected heads to draw, got none"),
        (of("no_states").plot_depth, None, "expected token states to draw, got none"),
    ):
        with pytest.raises(InputError, match=said):
            plot(measure)
