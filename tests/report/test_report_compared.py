"""Pages of comparisons and histories: whatever the names, whole, small, in the order of the numbers."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from tests.report import samples

import rankwise as rw
from rankwise.auditing import History
from rankwise.auditing.history import steps_of
from rankwise.auditing.result import Audit
from rankwise.report import comparison_page, render_history
from rankwise.report.comparison_page import comparison_context, difference_maps
from rankwise.report.history_page import finding_rows, history_context

HOSTILE = ["nasty", "long_names", "only_nan", "no_heads", "no_states", "no_layers", "encoder_decoder"]


class Page(HTMLParser):
    """Tags, what scripts there are, and the words of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def changed(audit: Audit, by: float) -> Audit:
    heads = [head.model_copy(update={"first_token_mass": head.first_token_mass * by}) for head in audit.heads]
    return audit.model_copy(update={"heads": heads, "findings": audit.findings[: round(by * 8)]})


@pytest.mark.parametrize("name", ["encoder", *HOSTILE])
def test_a_page_of_a_comparison_runs_nothing_whatever_the_names(name: str, tmp_path: Path) -> None:
    path = rw.compare(samples.encoder(), samples.ALL[name]()).to_html(tmp_path)
    assert path.name == "comparison.html"
    page = Page(path.read_text())
    assert page.handlers == []
    assert not {"script", "img", "iframe", "link"} & set(page.tags)
    assert path.stat().st_size < 500_000


def test_a_map_has_a_cell_for_each_head_coloured_by_the_way_it_went(tmp_path: Path) -> None:
    before, after = samples.encoder(), changed(samples.encoder(), 0.5)
    comparison = rw.compare(before, after)
    [one], left_out = difference_maps(comparison)
    cells = [cell for _, _, cells in one["rows"] for cell in cells]
    assert (len(cells), left_out) == (72, [])
    assert {cell["kind"] for cell in cells} == {"less"}
    back = difference_maps(rw.compare(after, before))[0][0]
    assert {cell["kind"] for _, _, cells in back["rows"] for cell in cells} == {"more"}
    assert comparison.to_html(tmp_path / "a.html").read_text().count('class="less"') == 72


def test_a_larger_change_is_a_deeper_colour() -> None:
    audit = samples.encoder()
    steps = [0.0, 0.01, 0.1, 0.5]
    heads = [head.model_copy(update={"first_token_mass": 0.1}) for head in audit.heads[:4]]
    later = [
        head.model_copy(update={"first_token_mass": 0.1 + step})
        for head, step in zip(heads, steps, strict=True)
    ]
    comparison = rw.compare(
        audit.model_copy(update={"heads": heads}), audit.model_copy(update={"heads": later})
    )
    [one], _ = difference_maps(comparison)
    [(_, _, cells)] = one["rows"]
    depths = [int(re.sub(r"\D", "", cell["style"]) or 0) for cell in cells]
    assert depths == sorted(set(depths))
    assert cells[0]["kind"] == "same"


def test_maps_that_would_make_the_page_too_large_are_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison_page, "MOST_CELLS", 250)
    before, after = samples.encoder(), samples.encoder()
    heads = [
        head.model_copy(
            update={
                name: getattr(head, name) * 0.5
                for name in ("first_token_mass", "stable_rank", "max_token_mass")
            }
            | {"row_distance": 0.0, "identity_distance": 0.0, "row_entropy": 0.0, "sigma_max": 0.1}
            | {"numerical_rank": 1.0, "effective_rank": 1.0, "nearest_distance": 0.0}
        )
        for head in after.heads
    ]
    maps, left_out = difference_maps(rw.compare(before, after.model_copy(update={"heads": heads})))
    assert len(maps) == 250 // 72
    assert len(left_out) == 10 - len(maps)


def test_every_outcome_stands_on_the_page_with_its_count() -> None:
    before = samples.encoder()
    worse = before.findings[2].model_copy(update={"severity": "error"})
    new = samples.finding("DUPLICATE_HEADS", "info", where=before.findings[2].where, heads=[7, 8])
    after = before.model_copy(update={"findings": [before.findings[0], worse, new]})
    outcomes = comparison_context(rw.compare(before, after))["outcomes"]
    assert [(outcome, len(rows)) for outcome, _, rows in outcomes] == [
        ("new", 1), ("worse", 1), ("unchanged", 1), ("resolved", 7),
    ]  # fmt: skip


def history_of(number: int) -> History:
    return History([(at * 100, changed(samples.encoder(), (at + 1) / number)) for at in range(number)])


@pytest.mark.parametrize("number", [0, 1, 2, 50])
def test_a_page_of_a_history_holds_every_audit(number: int, tmp_path: Path) -> None:
    path = history_of(number).to_html(tmp_path)
    text = path.read_text()
    assert path.name == "index.html"
    assert path.stat().st_size < 2_000_000
    assert text.count("<td>72</td>") == number
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert data["steps"] == [at * 100 for at in range(number)]
    for chart in data["charts"]:
        assert len(chart["lines"]) in (6, 7)
        assert all(len(line["values"]) == number for line in chart["lines"])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_page_of_a_history_runs_its_own_scripts_only(name: str, tmp_path: Path) -> None:
    history = rw.compare(samples.encoder(), samples.ALL[name](), samples.nasty())
    assert isinstance(history, History)
    page = Page(history.to_html(tmp_path).read_text())
    assert page.handlers == []
    assert not {"img", "iframe", "link"} & set(page.tags)
    assert page.tags.count("script") == 3


def test_links_to_single_audits_stand_where_they_are_known() -> None:
    context = history_context(history_of(2), {"step-100": "step-100/index.html"})
    assert [(name, link) for name, link, *_ in context["rows"]] == [
        ("step-0", ""), ("step-100", "step-100/index.html"),
    ]  # fmt: skip


def test_findings_that_come_or_go_stand_before_those_that_stay() -> None:
    stays = samples.finding("SINK", "warning")
    comes = samples.finding("DUPLICATE_HEADS", "info")
    rows = finding_rows([[stays], [stays, comes], [stays, comes]])
    assert [(name.split()[0], marks) for name, marks in rows] == [
        ("DUPLICATE_HEADS", ["", "note", "note"]),
        ("SINK", ["warning"] * 3),
    ]


def test_two_heads_of_a_layer_are_one_mark_and_the_gravest_is_shown() -> None:
    found = [samples.finding("SINK", "warning"), samples.finding("SINK", "error")]
    assert [marks for _, marks in finding_rows([found])] == [["error"]]


@pytest.mark.parametrize("width", [80, 120])
def test_fifty_audits_are_fifty_rows_on_the_console(width: int) -> None:
    file = io.StringIO()
    render_history(history_of(50), Console(file=file, width=width))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    steps = [int(first) for line in lines if line.strip() and (first := line.split()[0]).isdigit()]
    assert steps == history_of(50).steps
    assert len(lines) < 60


@pytest.mark.parametrize("names", [["checkpoint-500", "checkpoint-100000"], ["a-model", "another"]])
def test_rows_of_a_history_are_whole_on_eighty_columns(names: list[str]) -> None:
    file = io.StringIO()
    render_history(History.of([samples.encoder()] * 2, names), Console(file=file, width=80))
    header, *rows = file.getvalue().split("\n")[3:][:-1]
    assert header.split()[-1] == "findings"
    steps = steps_of(names)
    firsts = [name if steps is None else str(steps[at]) for at, name in enumerate(names)]
    assert [row.split()[0] for row in rows if row.strip("─ ")] == firsts
