"""Comparisons and histories as documents."""

import math

import pytest
from tests.support import records
from tests.support.documents import Cell, Document, Figure, Section, Table

import rankwise as rw
from rankwise.auditing import Audit, Comparison, HeadRecord, History
from rankwise.auditing.history import steps_of
from rankwise.report import comparison_report, document_text
from rankwise.report.comparison_report import comparison_document, finding_marks, history_document


def compare(before: Audit, after: Audit) -> Comparison:
    found = rw.compare(before, after)
    assert isinstance(found, Comparison)
    return found


def with_heads(audit: Audit, changed: dict[int, dict[str, float]]) -> Audit:
    heads = [head.model_copy(update=changed.get(at, {})) for at, head in enumerate(audit.heads)]
    return audit.model_copy(update={"heads": heads})


def scaled(audit: Audit, by: float) -> Audit:
    heads = [head.model_copy(update={"first_token_mass": head.first_token_mass * by}) for head in audit.heads]
    return audit.model_copy(update={"heads": heads, "findings": audit.findings[: round(by * 8)]})


def section(document: Document, name: str) -> Section:
    (found,) = [section for section in document.sections if section.name == name]
    return found


def maps(before: Audit, after: Audit) -> list[Figure]:
    return list(section(comparison_document(compare(before, after)), "maps").figures)


def values(figure: Figure) -> list[float | None]:
    return [value for row in figure.data[0]["z"] for value in row]


def test_a_map_has_a_cell_for_each_head_with_the_sign_of_its_change() -> None:
    before, after = records.encoder(), scaled(records.encoder(), 0.5)
    [there], [back] = maps(before, after), maps(after, before)
    assert len(values(there)) == 72
    assert all(value is not None and value < 0 for value in values(there))
    assert values(back) == [-value for value in values(there) if value is not None]


def test_a_larger_change_is_a_deeper_color() -> None:
    heads = [head.model_copy(update={"first_token_mass": 0.1}) for head in records.encoder().heads[:4]]
    audit = records.encoder().model_copy(update={"heads": heads})
    [figure] = maps(audit, with_heads(audit, {1: {"first_token_mass": 0.11}, 2: {"first_token_mass": 0.2},
                                              3: {"first_token_mass": 0.6}}))  # fmt: skip
    assert values(figure)[0] == 0
    assert values(figure) == sorted(set(values(figure)))  # type: ignore[type-var]


def test_a_number_missing_in_one_audit_has_a_sign_and_no_color() -> None:
    audit = records.encoder()
    [figure] = maps(audit, with_heads(audit, {5: {"first_token_mass": math.nan}}))
    heat, signs = figure.data
    assert (signs["x"], signs["y"], signs["text"]) == ([5], [0], ["╱"])
    assert heat["z"][0][5] is None


def test_a_module_that_runs_twice_has_a_row_for_each_call() -> None:
    def called(head: HeadRecord, call: int) -> HeadRecord:
        return head.model_copy(update={"call": call, "first_token_mass": 0.1})

    heads = [called(head, call) for call in (0, 1) for head in records.grid(1, 3)]
    audit = records.encoder().model_copy(update={"heads": heads})
    [figure] = maps(audit, with_heads(audit, {4: {"first_token_mass": 0.6}}))
    signs = [[value != 0 for value in row] for row in figure.data[0]["z"]]
    assert signs == [[False, False, False], [False, True, False]]


def test_maps_beyond_the_limit_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_report, "MOST_CELLS", 250)
    names = ("stable_rank", "max_token_mass", "row_spread", "row_entropy", "sigma_max")
    after = with_heads(records.encoder(), dict.fromkeys(range(72), dict.fromkeys(names, 0.0)))
    found = section(comparison_document(compare(records.encoder(), after)), "maps")
    assert len(found.figures) == 250 // 72
    assert found.intro.count(",", found.intro.index("Not drawn")) == 5 - 250 // 72


def test_every_outcome_is_listed_with_its_findings() -> None:
    before = records.encoder()
    changed = before.findings[2].model_copy(update={"severity": "error"})
    new = records.finding("OVERSIZED_HEADS", "info", where=before.findings[2].where, heads=[7, 8])
    after = before.model_copy(update={"findings": [before.findings[0], changed, new]})
    document = comparison_document(compare(before, after))
    listed = section(document, "findings").lists
    assert [(one.title, len(one.items), one.folded) for one in listed] == [
        ("New", 1, False), ("Changed", 1, False), ("Unchanged", 1, True), ("Resolved", 6, False),
    ]  # fmt: skip
    assert ("severity", "warning → error") in listed[1].items[0].facts
    assert document.verdict.sentence.startswith("Findings: 1 new, 1 changed, 1 unchanged, 6 resolved.")


def test_equal_audits_have_no_difference() -> None:
    text = document_text(comparison_document(compare(records.encoder(), records.encoder())), 80)
    assert "No difference." in text
    assert "72 heads and 7 token states in both" in " ".join(text.split())


def test_the_console_shows_warnings_findings_and_the_largest_changes_in_this_order() -> None:
    audit = records.encoder()
    after = with_heads(
        audit,
        {0: {"first_token_mass": 1.0}, 1: {"first_token_mass": audit.heads[1].first_token_mass + 0.001}},
    )
    about = audit.provenance.model_copy(update={"delta": 0.1})
    after = after.model_copy(update={"findings": audit.findings[:7], "provenance": about})
    text = document_text(comparison_document(compare(audit, after)), 80)
    order = [
        text.index(words)
        for words in ("δ differs", "Resolved: 1 note", "NOT_CAPTURED", "layer 0 head 0", "layer 0 head 1")
    ]
    assert order == sorted(order)
    assert "New:" not in text
    assert "No difference." not in text


def test_changes_beyond_the_table_are_counted() -> None:
    after = with_heads(records.encoder(), {at: {"first_token_mass": 1.0} for at in range(60)})
    text = document_text(comparison_document(compare(records.encoder(), after)))
    assert text[text.index("Largest changes") :].count("first token mass") == 20
    assert "… and 30 more" in text
    assert "10 smaller changes are not listed" in " ".join(text.split())


def history_of(number: int) -> History:
    return History([(at * 100, scaled(records.encoder(), (at + 1) / number)) for at in range(number)])


def cells(table: Table, column: int) -> list[str]:
    return [cell.text if isinstance(cell := row[column], Cell) else cell for row in table.rows]


@pytest.mark.parametrize("number", [1, 2, 50])
def test_a_history_has_a_row_per_audit_and_a_line_per_layer(number: int) -> None:
    document = history_document(history_of(number))
    [table] = section(document, "audits").tables
    assert cells(table, 0) == [str(at * 100) for at in range(number)]
    assert cells(table, 1) == ["72"] * number
    for name, lines in (("heads", 6), ("states", 7)):
        for figure in section(document, name).figures:
            assert len(figure.data) == lines
            assert all(line["x"] == [at * 100 for at in range(number)] for line in figure.data)
            assert all(len(line["y"]) == number for line in figure.data)


def test_a_history_without_audits_is_a_document() -> None:
    assert history_document(History([])).verdict.sentence == "No audits."


def test_links_to_single_audits_are_in_their_rows() -> None:
    document = history_document(history_of(2), {"step-100": "step-100/index.html"})
    rows = section(document, "audits").tables[0].rows
    assert [row[0].link for row in rows if isinstance(row[0], Cell)] == ["", "step-100/index.html"]


def test_a_history_counts_findings_by_code_with_the_sign_of_the_most_severe() -> None:
    note, warning, error = (records.finding("SINK", severity) for severity in ("info", "warning", "error"))
    other = records.finding("OVERSIZED_HEADS", "info")
    marks = finding_marks([[note], [note, warning, other], [error, warning, note]])
    assert marks == {"SINK": ["● 1", "▲ 2", "◆ 3"], "OVERSIZED_HEADS": ["", "● 1", ""]}


def test_fifty_audits_are_fifty_rows_on_the_console() -> None:
    history = history_of(50)
    document = history_document(history)
    for width in (80, 120):
        lines = document_text(document, width).splitlines()
        assert max(map(len, lines)) <= width
        table = lines[next(at for at, line in enumerate(lines) if line.startswith("─")) :]
        steps = [int(first) for line in table if line.strip() and (first := line.split()[0]).isdigit()]
        assert steps == history.steps
        assert len(lines) < 65


@pytest.mark.parametrize("names", [["checkpoint-500", "checkpoint-100000"], ["a-model", "another"]])
def test_rows_of_a_history_are_whole_on_eighty_columns(names: list[str]) -> None:
    history = History.of([records.encoder()] * 2, names)
    text = document_text(history_document(history), 80)
    header, *rows = [line for line in text[text.index("\nAudits") :].splitlines()[3:] if line.strip("─ ")]
    assert header.split()[-1] == "findings"
    steps = steps_of(names)
    assert [row.split()[0] for row in rows] == (names if steps is None else list(map(str, steps)))
