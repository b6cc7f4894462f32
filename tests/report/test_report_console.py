"""Reports on a console: order, width, escaping and missing numbers."""

import io
import math
import re
from dataclasses import replace

import pytest
from experiments.zoo.transformers import nano_gpt
from rich.console import Console
from tests.support import documents, records
from tests.support.documents import RANK, Table, audit_document
from tests.support.modules import token_ids
from tests.support.records import HEAD_MEASURES, STATE_MEASURES

import rankwise as rw
from rankwise._internals.statistics import mean
from rankwise.auditing import AtInitSettings
from rankwise.auditing.measure_table import share
from rankwise.auditing.records import AtInit
from rankwise.importance import ImportanceSettings
from rankwise.report import document_text, print_document

COLUMNS = [row for row in HEAD_MEASURES if row.console and not row.known_only]


def printed(name: str, *, verbose: bool = True, **options: object) -> str:
    file = io.StringIO()
    console = Console(**({"file": file, "width": 80} | options))
    print_document(audit_document(records.ALL[name]()), console, verbose=verbose)
    return file.getvalue()


@pytest.mark.parametrize("name", records.ALL)
def test_the_console_report_fits_into_80_columns(name: str) -> None:
    text = printed(name, verbose=True) + printed(name, verbose=False)
    wide = [line for line in text.splitlines() if len(line) > 80]
    assert all("→ " in line and "`" in line for line in wide), (
        "only code, which must stay in one piece, may be longer"
    )
    assert "\x1b" not in text


def first_screen(audit: rw.Audit) -> list[str]:
    return document_text(audit_document(audit), 100).splitlines()


def layer_rows(lines: list[str]) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in lines if re.match(r" +\d+ ", line)}


def test_the_first_screen_of_twelve_layers_has_at_most_30_lines() -> None:
    audit = records.sized(12, 12)
    about = {"seconds": 3.0, "notes": []}
    found = records.finding(
        "REMOVABLE", "info", remedy=rw.auditing.Remedy(code="rw.compress(model, batches)")
    )
    heads = [
        head.model_copy(update={"random_rank": 90.0, "importance": records.HeadImportance(estimate=-0.004)})
        for head in audit.heads
    ]
    acts = records.changed(
        audit.model_copy(update={"heads": heads}),
        findings=[found],
        importance=records.importance(),
        origin=about,
    )
    for one, most in ((audit, 30), (acts, 29)):  # `acts` as printed by a command, before the paths of files
        lines = document_text(audit_document(one), 80).splitlines()
        assert [*layer_rows(lines)] == [str(layer) for layer in range(12)]
        assert len(lines) <= most
    assert len(acts.verdict.actions) == 1
    assert len(document_text(audit_document(audit), 100, verbose=True).splitlines()) > 30


def test_the_first_screen_of_twelve_collapsed_layers_has_less_than_30_lines_of_80_characters() -> None:
    about = records.sized(12, 12).provenance
    same = {"row_spread": 0.1, "stable_rank": 1.0, "tokens": 128, "sources": 128}
    many = [records.head(layer=at, site=f"h.{at}", **same) for at in range(12)]
    states = records.token_states(0.9, *[0.01] * 12)
    found = records.audit(many, states=states)
    notes = ["the model ran again on the first batch, 4 sequences, for λ against COLLAPSE"]
    found = records.changed(found, provenance=about.model_copy(update={"notes": notes}))
    lines = document_text(audit_document(found), 80).splitlines()
    assert found.verdict.sentence.startswith(
        "Not healthy: collapse through depth after 1 block; constant heads"
    )
    assert len(lines) <= 28  # and two lines with the paths of the report and the data
    assert "CONSTANT" not in "".join(lines)  # the verdict names it; the list has errors alone


def test_the_first_screen_of_many_layers_has_the_first_and_the_last() -> None:
    lines = first_screen(records.sized(48, 4))
    shown = [*layer_rows(lines)]
    assert len(shown) <= 17
    assert (shown[0], shown[-1]) == ("0", "47")
    assert "every 3 layers" in " ".join(lines)


def test_the_first_screen_has_columns_for_measured_numbers_only() -> None:
    broken = " ".join(first_screen(records.encoder()))
    assert "Not measured" not in broken  # before its errors are fixed, the model is not worth more audits
    audit = records.changed(records.encoder(), findings=[])
    text = " ".join(line.strip() for line in first_screen(audit))
    assert "initialization, `--at-init` (3 more audits)" in text
    assert "costs of removing heads, `--importance`" in text
    assert "costliest" not in text
    start = AtInit(seeds=3, mean={"numerical_rank": 64.0}, seed_std={})
    known = {
        head.id: {"importance": records.HeadImportance(exact=0.01 * head.head), "at_init": start}
        for head in audit.heads
    }
    heads = [head.model_copy(update=known[head.id]) for head in audit.heads]
    initial = records.InitialModels(seeds=[0, 1, 2], built="from its configuration")
    found = {"heads": heads, "importance": records.importance(), "at_init": initial}
    lines = first_screen(audit.model_copy(update=found))
    assert "Not measured" not in " ".join(lines)
    assert "costliest head: cost of removing it, as a share of" in " ".join(" ".join(lines).split())
    row = layer_rows(lines)["0"]
    assert row[:2] == [f"{mean(map(RANK.value, heads[:12])):.2f}", "0.50"]  # at first 64 of 128 tokens
    assert row[-2:] == ["+0.0%", "+5.5%"]  # heads 0 to 11, of a loss of 2
    for width in (56, 60, 79, 80, 84):
        narrow = document_text(audit_document(audit.model_copy(update=found)), width)
        assert max(len(line) for line in narrow.splitlines() if not line.startswith("→")) <= width
        assert narrow.count("+5.5%") == 7  # six layers, and the verdict
        assert narrow.count("cheapest") == 2  # in the table and its explanation


def test_the_first_line_has_the_size_of_the_model_and_of_the_data_and_the_time() -> None:
    audit = records.changed(records.encoder(), origin={"model": "the bundled demo", "seconds": 6.3})
    size = "rankwise audit · bundled demo · 6 layers × 12 heads · 64 sequences of 128 tokens"
    assert document_text(audit_document(audit), 200).startswith(f"{size} · 6 s\n")
    short = records.changed(records.encoder(), origin={"seconds": 0.3})
    assert first_screen(short)[0].endswith("64 sequences of 128 tokens · 1 s")
    origin = {"seconds": math.nan}
    audit = records.changed(audit, {0: {"tokens": 99.0}}, importance=records.importance(), origin=origin)
    size = "rankwise audit · bundled demo · 6 layers × 12 heads · 64 sequences · loss 2 nats per token"
    assert document_text(audit_document(audit), 200).startswith(f"{size}\n")
    assert "6 layers, 71 heads" in first_screen(audit.model_copy(update={"heads": audit.heads[1:]}))[0]


def test_the_stated_prices_are_the_passes_that_are_run() -> None:
    model, batches = nano_gpt(), [token_ids()] * 2
    audit = rw.audit(model, batches)
    [price] = re.findall(
        r"importance=True` \(as long as ≤ (\d+) forward passes per batch\)", audit.summary(1000)
    )
    for settings in (True, ImportanceSettings(exact=False)):
        importance = rw.audit(model, batches, importance=settings).importance
        blocks = len(importance.blocks) * (not importance.backward)
        halves = (len(audit.heads) + blocks) * (not importance.backward)  # passes that restart
        passes = importance.forward - blocks - halves / 2 * len(batches)  # and a check of one block each
        assert passes + importance.backward <= int(price) * len(batches)
    assert f"at_init=True` ({AtInitSettings().seeds} more audits)" in audit.summary(1000)


def test_an_audit_in_python_names_arguments_instead_of_options() -> None:
    audit = records.changed(records.encoder(), findings=[])
    about = audit.provenance.model_copy(update={"command": ""})
    text = " ".join(first_screen(audit.model_copy(update={"provenance": about})))
    assert "at_init=True" in text
    assert "--at-init" not in text


@pytest.mark.parametrize("name", ["only_nan", "encoder", "encoder_decoder"])
def test_a_missing_number_is_a_dash(name: str) -> None:
    numbers = [line.split() for line in printed(name).splitlines() if re.match(r" +\d+ ", line)]
    assert numbers
    assert all(re.fullmatch(r"–|[0-9.e-]+", word) for row in numbers for word in row)
    assert any("–" in row for row in numbers) == (name == "only_nan")


def test_estimates_are_marked_and_bounds_are_a_range() -> None:
    rows = [line.split() for line in printed("estimated").splitlines() if re.match(r" +\d+ +4 ", line)]
    exact, guess, bound = rows
    assert exact[4] == guess[4] == "0.50"  # random share
    assert exact[5] == guess[5] == "3e-05"  # uniform share: 1 of 32,768
    assert not any("≈" in word for word in exact)
    assert guess[2].startswith("≈")
    low, high = map(float, bound[2].split("–"))
    assert 0 < low < high
    assert [word.startswith("≈") for word in bound[6:8]] == [True, True]


def test_findings_are_before_the_tables_and_sorted_by_severity() -> None:
    text = printed("encoder")
    order = [
        text.index(word)
        for word in ("COLLAPSE", "SINK", "IDENTITY", "full mask", "direction spread of 0", "dtype: bfloat16")
    ]
    assert order == sorted(order)


def test_a_finding_has_place_evidence_and_meaning() -> None:
    lines = [line.strip() for line in printed("encoder").splitlines()]
    at = lines.index("error    COLLAPSE  encoder.layer")
    said = [
        "blocks passed 6 · direction spread 0.213 · mean cosine 0.955",
        "After layer 6 all tokens point almost the same way.",
    ]
    assert lines[at + 1 : at + 3] == said
    assert lines.index("→ `rw.skips.recommend(audit, model, batch)`") < at  # an action of the verdict


def test_findings_of_a_kind_share_one_entry_with_a_table() -> None:
    total = len(records.ALL["large"]().findings)
    text = printed("large")
    assert text.count("warning  SINK") == 1
    assert f"SINK  {total} places" in text
    assert f"… and {total - 12} more (see the page)" in text


def test_the_table_of_a_kind_has_the_numbers_that_differ_and_the_page_shows_the_same() -> None:
    audit = records.encoder()
    found = [
        records.finding(
            "INACTIVE_BLOCK", "warning", where=audit.states[layer + 1].id,
            meaning=f"Block {layer} does nothing.",
            evidence={"relative_update": 0.001 * layer, "norm": 300.0},
            remedy=rw.auditing.Remedy(words="nothing" if layer == 4 else "remove this head"),
        )
        for layer in (2, 3, 4)
    ]  # fmt: skip
    audit = records.changed(audit, findings=found)
    [(item, table)] = audit_document(audit).sections[0].lists[0].entries
    assert (item.place, item.facts, item.remedy) == ("3 places", [("‖Y‖", "300")], "")
    assert item.meaning == "encoder.layer layer 2: Block 2 does nothing."
    assert table.columns[0] == "place"
    assert table.columns[-1] == "what to do"
    rows = [[row[0].text, *row[1:]] for row in table.rows]
    assert rows[0] == ["encoder.layer layer 2", "0.002", "remove this head"]
    assert rows[2] == ["encoder.layer layer 4", "0.004", "nothing"]
    [(alone, none)] = audit_document(records.changed(audit, findings=found[:1])).sections[0].lists[0].entries
    assert (alone.place, none) == ("encoder.layer layer 2", None)
    for text in (audit.summary(verbose=True), documents.page(audit)):
        order = [text.index(words) for words in ("Block 2 does", "encoder.layer layer 3", "0.003")]
        assert order == sorted(order)


@pytest.mark.parametrize(
    ("heads", "marked", "said"), [(range(12), 0, True), (range(40), 0, True), (range(6), 6, False)]
)
def test_a_note_marks_cells_only_if_it_distinguishes_them(heads: range, marked: int, said: bool) -> None:
    audit = records.sized(1, 12) if len(heads) == 12 else records.sized(4, 12)
    where = [audit.heads[at].id for at in heads]
    notes = [records.finding("IDENTITY", "info", where=at, evidence={}) for at in where]
    warning = records.finding("SINK", "warning", where=audit.heads[0].id, evidence={})
    found = documents.data(audit.model_copy(update={"findings": [*notes, warning]}))
    signs = {trace["meta"]["severity"]: len(trace["x"]) for grid in found["grids"] for trace in grid["signs"]}
    assert signs == {"warning": 1} | ({"info": marked - 1} if marked else {})
    facts = " ".join(fact for grid in found["grids"] for fact in grid["facts"])
    assert (f"IDENTITY: {len(heads)} of {len(audit.heads)} heads" in facts) == said


def test_a_row_of_the_table_is_the_mean_of_its_heads() -> None:
    heads = [head for head in records.encoder().heads if head.layer == 3]
    expected = [
        "3",
        "12",
        f"{mean(map(RANK.value, heads)):.2f}",
        f"{mean(share(head.one_hot_rank, head) for head in heads):.2f}",
        *(f"{mean(map(row.value, heads)):.{row.digits}f}" for row in COLUMNS if not row.kinds),
    ]
    assert expected in [line.split() for line in printed("encoder").splitlines()]
    assert "full mask, encoder.layer.*.attention.self, 128 tokens" in printed("encoder")


def test_lengths_that_differ_have_a_column() -> None:
    audit = records.encoder()
    heads = [h.model_copy(update={"tokens": 100.0 + h.layer}) for h in audit.heads]
    console = Console(width=80, file=io.StringIO())
    print_document(audit_document(audit.model_copy(update={"heads": heads})), console, verbose=True)
    rows = [
        line.split()[:3] for line in console.file.getvalue().splitlines() if re.match(r" +\d+ +12 ", line)
    ]
    assert rows == [[str(layer), "12", str(100 + layer)] for layer in range(6)]


def test_diagonal_layers_show_memberships_and_the_rate_of_a_layer_and_no_mask() -> None:
    text = printed("memberships")
    assert text.count("R_c^var") == 2
    rows = [row.split() for row in text.splitlines() if row.strip().startswith("0      4")]
    assert len(rows) == 2
    assert all({"0.25", "0.08"} <= set(row) for row in rows)  # a mean over heads, and a sum
    assert "mask" not in text
    assert "R_c^var" not in printed("encoder")


def test_states_have_their_own_table_with_more_columns_on_the_page() -> None:
    state = records.encoder().states[4]
    cells = {row.name: row.formatted(state) for row in STATE_MEASURES}
    shown = [cells[row.name] for row in STATE_MEASURES if row.console]
    assert ["4", "128", *shown] in [line.split() for line in printed("encoder").splitlines()]
    table = audit_document(records.encoder()).sections[-2].tables[-1]
    assert sorted(table.rows[4][2:]) == sorted(cells.values())
    assert {"direction\nspread", "absolute token spread μ"} <= set(table.columns)


def test_masks_that_differ_within_a_panel_get_a_column() -> None:
    rows = [line.split() for line in printed("mixed").splitlines()]
    assert ["1", "6", "causal"] in [row[:3] for row in rows]
    assert ["3", "6", "full"] in [row[:3] for row in rows]


def test_names_are_plain_text_and_a_terminal_gets_colours_and_marks() -> None:
    assert "INCOMPLETE" in printed("encoder_decoder")
    assert "INCOMPLETE" not in printed("encoder")
    assert "[bold]not markup[/bold] �[31m" in printed("nasty", force_terminal=True, width=200)
    assert "\x1b[1;31m" in printed("encoder", force_terminal=True, color_system="standard")


def test_a_console_without_unicode_gets_words() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_document(audit_document(records.encoder()), Console(file=file, width=80), verbose=True)
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "Threshold delta: 0.01" in " ".join(text.split())
    assert "direction spread of 0" in text
    assert "-> `rw.skips.recommend" in text


@pytest.mark.parametrize("kind", documents.DOCUMENTS)
def test_the_verdict_and_at_most_three_actions_come_first(kind: str) -> None:
    document = documents.DOCUMENTS[kind]()
    text = document_text(document, width=4000)
    assert text.startswith(document.command)
    before = text.partition(document.verdict.sentence)[0].splitlines()
    assert len(before) <= 5 + len(document.warnings)
    assert len(document.verdict.actions) <= 3
    for action in document.verdict.actions:
        assert action in text


def test_printed_commands_are_whole_on_a_narrow_console_and_inside_jupyter(monkeypatch) -> None:
    document = audit_document(records.encoder())
    actions = ("`rankwise skip sample --text book.txt --out sample-skips`", f"see `{'long ' * 20}code`")
    document = replace(document, verdict=document.verdict.model_copy(update={"actions": actions}))
    text = document_text(document, width=40)
    assert {f"→ {action}" for action in actions} <= {*text.splitlines()}
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert document_text(document, width=40) == text


def test_lines_of_a_summary_have_up_to_100_characters() -> None:
    audit = records.encoder()
    audit = audit.model_copy(update={"provenance": audit.provenance.model_copy(update={"data": "x" * 300})})
    audit = rw.Audit.model_validate(audit.model_dump())
    assert 90 < max(map(len, audit.summary().splitlines())) <= 100


@pytest.mark.parametrize("width", [24, 60, 80, 200])
def test_columns_that_do_not_fit_continue_in_another_table(width: int) -> None:
    names, cells = ([f"{word}{at:05d}" for at in range(12)] for word in ("n", "0."))
    document = replace(audit_document(records.encoder()), first=[])
    section = replace(document.sections[0], tables=[Table("t", ["site", *names], [["17", *cells]])])
    words = document_text(replace(document, sections=[replace(section, on_console=True)]), width).split()
    assert all(words.count(word) == 1 for word in (*names, *cells))
    assert words.count("17") == words.count("site") > 0
    assert (words.count("17") == 1) == (width == 200)
