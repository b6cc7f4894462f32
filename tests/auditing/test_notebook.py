"""What a notebook does with an audit: one head, a summary, frames, CSV, one-line reprs."""

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import nano_gpt
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import records
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.auditing.frames import COPIES, csv_text, table
from rankwise.auditing.measure_table import HEAD_MEASURES
from rankwise.errors import InputError

SMALL = [name for name in records.ALL if name != "large"]
KINDS = ("heads", "layers", "findings", "uncaptured")
HOSTILE = ('=HYPERLINK("http://x")', "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", 'a,"b"\nc', records.NASTY, "")


def of(name: str) -> rw.Audit:
    return rw.Audit.model_validate(records.ALL[name]().model_dump())


@pytest.fixture(scope="module")
def audit() -> rw.Audit:
    return rw.audit(nano_gpt(), [{"input_ids": torch.randint(0, 60, (2, 10))}])


def cells(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return head, rows


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", KINDS)
def test_a_csv_reads_back_equal(name: str, kind: Any, tmp_path: Path) -> None:
    audit = of(name)
    head, rows = cells(audit.to_csv(tmp_path / "deep" / "a.csv", kind))
    _, flat = table(kind, getattr(audit, kind))
    assert len(rows) == len(flat)
    for row, known in zip(rows, flat, strict=True):
        for column, cell in zip(head, row, strict=True):
            value = known[column]
            if isinstance(value, bool) or value is None or isinstance(value, str):
                continue
            assert (cell == "") == math.isnan(value)
            assert cell == "" or type(value)(cell) == value


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53))
@settings(max_examples=50, deadline=None)
def test_every_number_is_written_in_full(value: float) -> None:
    text = csv_text(["a"], [{"a": value}]).splitlines()[1]
    assert type(value)(text) == value


@pytest.mark.parametrize("name", HOSTILE)
def test_no_cell_begins_as_a_formula_does(name: str, tmp_path: Path) -> None:
    audit = of("encoder")
    heads = [head.model_copy(update={"site": name, "std": {name: 0.5}}) for head in audit.heads]
    head, rows = cells(audit.model_copy(update={"heads": heads}).to_csv(tmp_path / "a.csv"))
    texts = [*head, *(row[head.index(column)] for row in rows for column in ("site", "stack", "kind"))]
    assert not [text for text in texts if text.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert {row[head.index("site")].removeprefix("'") for row in rows} == {name}


def test_a_negative_number_is_no_formula(tmp_path: Path) -> None:
    audit = of("encoder")
    layers = [layer.model_copy(update={"mean_cosine": -0.25}) for layer in audit.layers]
    head, rows = cells(audit.model_copy(update={"layers": layers}).to_csv(tmp_path, "layers"))
    assert {row[head.index("mean_cosine")] for row in rows} == {"-0.25"}
    assert (tmp_path / "layers.csv").exists()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_holds_one_value_a_cell_in_the_columns_of_the_csv(
    name: str, kind: Any, tmp_path: Path
) -> None:
    pytest.importorskip("pandas")
    audit = of(name)
    frame = audit.to_frame(kind)
    assert list(frame) == cells(audit.to_csv(tmp_path / "a.csv", kind))[0]
    assert len(set(frame.columns)) == len(frame.columns)
    found = {type(value) for column in frame for value in frame[column].tolist()}
    assert found <= {float, int, str, bool, type(None)}


def test_columns_follow_the_table_of_measures_each_with_its_spread(audit: rw.Audit) -> None:
    columns, _ = table("heads", audit.heads)
    measures = [measure.name for measure in HEAD_MEASURES if measure.name not in COPIES]
    assert not set(columns) & set(COPIES)  # they stand there once, as worth_… and baseline_…
    assert [name for name in columns if name in measures] == measures
    for name in audit.heads[0].std:
        assert columns[columns.index(name) + 1] == f"{name}_std"
    assert columns[:4] == ["stack", "site", "layer", "head"]


def test_columns_do_not_depend_on_the_order_or_the_number_of_records(audit: rw.Audit) -> None:
    whole, _ = table("heads", audit.heads)
    assert table("heads", audit.heads[::-1])[0] == whole
    assert table("heads", audit.heads[:1])[0] == whole


def test_numbers_of_a_frame_are_those_of_the_records(audit: rw.Audit) -> None:
    pytest.importorskip("pandas")
    frame = audit.to_frame()
    for at, head in enumerate(audit.heads):
        assert frame["numerical_rank"][at] == head.numerical_rank
        assert frame["stable_rank_std"][at] == head.std["stable_rank"]


def test_other_records_are_refused(audit: rw.Audit, tmp_path: Path) -> None:
    for call in (audit.to_frame, lambda kind: audit.to_csv(tmp_path / "a.csv", kind)):
        with unchecked(), pytest.raises(InputError, match="Did you mean heads"):
            call("head")


def test_a_csv_needs_no_pandas(audit: rw.Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert len(cells(audit.to_csv(tmp_path))[1]) == len(audit.heads)
    with pytest.raises(InputError, match=r"`to_frame`: .*frames"):
        audit.to_frame()


def test_every_head_is_found_by_its_numbers() -> None:
    for name in ("encoder", "large", "memberships"):
        audit = of(name)
        for head in audit.heads[:: max(1, len(audit.heads) // 20)]:
            assert audit.head(head.layer, head.head, stack=head.stack) == head


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda audit: audit.head(99, 0), "got no layer 99. Known: 0, 1, 2, 3, 4, 5"),
        (lambda audit: audit.head(0, 99), "no head 99. It has 12 of them, 0 to 11"),
        (lambda audit: audit.head(-1, 0), "no layer -1"),
        (lambda audit: audit.head(0, 0, stack="h"), "no stack 'h'. Known: 'encoder.block', 'decoder.block'"),
        (lambda audit: audit.head(0, 0), "got 3. Say which: stack='encoder.block', stack='decoder.block'"),
        (lambda audit: audit.head(0, 0, stack="decoder.block"), "Say which: site='decoder.block.0.layer.0"),
    ],
)
def test_a_head_that_is_not_one_is_refused(asked: Callable[[rw.Audit], Any], says: str) -> None:
    audit = of("encoder") if "99" in says or "-1" in says else of("encoder_decoder")
    with pytest.raises(InputError) as caught:
        asked(audit)
    assert says in str(caught.value)


def test_of_an_audit_without_heads_none_is_found() -> None:
    with pytest.raises(InputError, match="no mixing operator was captured"):
        of("no_heads").head(0, 0)


def test_a_summary_is_what_the_command_prints(audit: rw.Audit) -> None:
    text = audit.summary()
    assert text.startswith("Rankwise audit  NanoGPT")
    assert "\x1b" not in text
    assert max(map(len, audit.summary(width=60).splitlines())) <= max(60, len(audit.provenance.model_class))


@pytest.mark.parametrize("name", ["encoder", "nasty", "only_nan", "estimated"])
def test_records_are_shown_on_one_line(name: str) -> None:
    audit = of(name)
    for record in [*audit.heads, *audit.layers, *audit.findings, *audit.uncaptured, audit]:
        for text in (repr(record), str(record)):
            assert text.startswith(type(record).__name__) or not text.startswith(("HeadRecord", "Finding"))
            assert len(text.splitlines()) == 1
            assert len(text) < 1000
            assert text.isprintable()


def test_a_name_with_a_line_break_stays_on_one_line() -> None:
    head = of("encoder").heads[0].model_copy(update={"site": "a\nb", "kind": "c\r\nd"})
    finding = of("encoder").findings[0].model_copy(update={"code": "A\nB", "meaning": "one\ntwo"})
    assert repr(head).isprintable()
    assert repr(finding).isprintable()


def test_sites_of_a_trace_are_shown_on_one_line() -> None:
    model = nano_gpt()
    with rw.capture(model) as trace:
        model(torch.randint(0, 60, (2, 10)))
    heads = trace.mixers[0].operator.shape[1]
    said = f"layer 0, softmax, operator (2, {heads}, 10, 10))"
    assert repr(trace.mixers[0]).endswith(said)
    assert repr(trace.states[0]).startswith(f"StateSite({trace.states[0].name!r}, layer 0, tokens (2, 10, ")
    assert len(repr(trace).splitlines()) == 1


def test_importance_and_baseline_are_columns_under_the_names_of_the_measures() -> None:
    pytest.importorskip("pandas")
    batches = [{"input_ids": torch.randint(0, 60, (2, 10))}]
    audit = rw.audit(nano_gpt(), batches, importance=True, baseline=2)
    frame, head = audit.to_frame(), audit.heads[0]
    assert head.baseline is not None
    assert frame["baseline_stable_rank"][0] == head.baseline.mean["stable_rank"]
    assert frame["baseline_stable_rank_std"][0] == head.baseline.std["stable_rank"]
    assert frame["baseline_stable_rank_seed_std"][0] == head.baseline.seed_std["stable_rank"]
    assert head.importance is not None
    assert frame["importance_gradient"][0] == head.importance.gradient
    assert len(set(frame.columns)) == len(frame.columns)
    assert rw.compare(audit, audit).is_empty
