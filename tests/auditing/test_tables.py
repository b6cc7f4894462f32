"""Frames, CSV, lookup of a head, the summary and one-line reprs of an audit."""

import csv
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from experiments.zoo.transformers import nano_gpt
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import records
from tests.support.modules import token_ids
from tests.support.records import HEAD_MEASURES, changed
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.auditing.tables import csv_text, table
from rankwise.errors import InputError

SMALL = [name for name in records.ALL if name != "large"]
KINDS = ("heads", "states", "findings", "uncaptured")

ENCODER = records.encoder()


@pytest.fixture(scope="module")
def audit() -> rw.Audit:
    return rw.audit(nano_gpt(), [token_ids()], importance=True, at_init=2)


def cells(path: Path) -> tuple[list[str], list[list[str]]]:
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return head, rows


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", KINDS)
def test_a_csv_contains_the_table_in_full_and_a_frame_has_its_columns(
    name: str, kind: Any, tmp_path: Path
) -> None:
    audit = records.ALL[name]()
    head, rows = cells(audit.to_csv(tmp_path / "deep" / "a.csv", kind))
    _, flat = table(kind, getattr(audit, kind))
    assert len(rows) == len(flat)
    for row, known in zip(rows, flat, strict=True):
        for column, cell in zip(head, row, strict=True):
            value = known[column]
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert cell == "" if math.isnan(value) else type(value)(cell) == value
    pytest.importorskip("pandas")
    frame = audit.to_frame(kind)
    assert list(frame) == head
    assert len(set(frame.columns)) == len(frame.columns)
    found = {type(value) for column in frame for value in frame[column].tolist()}
    assert found <= {float, int, str, bool, type(None)}


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53))
@settings(max_examples=50, deadline=None)
def test_a_number_is_written_in_full(value: float) -> None:
    text = csv_text(["a"], [{"a": value}]).splitlines()[1]
    assert type(value)(text) == value


@pytest.mark.parametrize("name", ["\t=1", "\r=1", 'a,"b"\nc', records.NASTY, ""])
def test_a_text_is_written_unchanged(name: str, tmp_path: Path) -> None:
    head, rows = cells(changed(ENCODER, every={"site": name}).to_csv(tmp_path))
    assert {row[head.index("site")] for row in rows} == {name}
    assert (tmp_path / "heads.csv").exists()


def test_columns_follow_the_table_of_measures_each_with_its_spread(audit: rw.Audit) -> None:
    columns, _ = table("heads", audit.heads)
    measures = [measure.name for measure in HEAD_MEASURES if measure.name != "removal_cost"]
    assert "removal_cost" not in columns  # its only column is importance_…
    assert [name for name in columns if name in measures] == measures
    for name in audit.heads[0].std:
        assert columns[columns.index(name) + 1] == f"{name}_std"
    assert columns[:4] == ["stack", "site", "layer", "head"]
    assert table("heads", audit.heads[::-1])[0] == table("heads", audit.heads[:1])[0] == columns


def test_numbers_of_a_frame_equal_the_records(audit: rw.Audit) -> None:
    pytest.importorskip("pandas")
    frame = audit.to_frame()
    for at, head in enumerate(audit.heads):
        assert frame["numerical_rank"][at] == head.numerical_rank
        assert frame["stable_rank_std"][at] == head.std["stable_rank"]
        assert frame["at_init_stable_rank"][at] == head.at_init.mean["stable_rank"]
        assert frame["at_init_stable_rank_seed_std"][at] == head.at_init.seed_std["stable_rank"]
        assert frame["importance_exact"][at] == head.importance.exact
    assert list(audit.to_frame("states")["blocks"]) == [0, 1, 2, 3]
    assert len(changed(audit, findings=[]).to_frame("findings")) == 0


def test_other_records_are_refused(audit: rw.Audit, tmp_path: Path) -> None:
    for call in (audit.to_frame, lambda kind: audit.to_csv(tmp_path / "a.csv", kind)):
        with unchecked(), pytest.raises(InputError, match="Did you mean heads"):
            call("head")


def test_a_csv_needs_no_pandas(audit: rw.Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert len(cells(audit.to_csv(tmp_path))[1]) == len(audit.heads)
    with pytest.raises(InputError, match=r"`to_frame`: .*frames"):
        audit.to_frame()


@pytest.mark.parametrize("name", ["encoder", "large", "memberships"])
def test_a_head_is_found_by_its_numbers(name: str) -> None:
    audit = records.ALL[name]()
    for head in audit.heads[:: max(1, len(audit.heads) // 20)]:
        assert audit.head(head.layer, head.head, stack=head.stack) == head


@pytest.mark.parametrize(
    ("name", "layer", "where", "message"),
    [
        ("encoder", 99, {}, "layer 99, head 0: expected one head of the audit, got 0"),
        (
            "encoder_decoder",
            0,
            {"stack": "h"},
            "got 0. The audit has such heads in stack='encoder.block', site",
        ),
        ("encoder_decoder", 0, {}, "got 3. The audit has such heads in stack='encoder.block', site"),
        ("encoder_decoder", 0, {"stack": "decoder.block"}, "got 2"),
        ("no_heads", 0, {}, "No mixing operator was captured"),
    ],
)
def test_numbers_of_no_or_several_heads_are_refused(
    name: str, layer: int, where: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        records.ALL[name]().head(layer, 0, **where)


def test_a_summary_is_plain_text_of_the_given_width(audit: rw.Audit) -> None:
    audit = changed(audit, findings=[])  # lines of commands are not broken
    text = audit.summary()
    assert text.startswith("rankwise audit · NanoGPT · ")
    assert "\x1b" not in text
    assert max(map(len, audit.summary(width=60).splitlines())) <= max(60, len(audit.provenance.model_class))


@pytest.mark.parametrize("name", ["encoder", "nasty", "only_nan", "estimated"])
def test_a_record_is_shown_on_one_line(name: str) -> None:
    audit = changed(records.ALL[name](), {0: {"site": "a\nb", "kind": "c\r\nd"}})
    broken = records.finding(code="A\nB", meaning="one\ntwo")
    for record in [*audit.heads, *audit.states, *audit.findings, *audit.uncaptured, audit, broken]:
        for text in (repr(record), str(record)):
            assert text.startswith(type(record).__name__) or not text.startswith(("HeadRecord", "Finding"))
            assert len(text.splitlines()) == 1
            assert len(text) < 1000
            assert text.isprintable()


def test_sites_of_a_trace_are_shown_on_one_line() -> None:
    model = nano_gpt()
    with rw.capture(model) as trace:
        model(**token_ids())
    heads = trace.mixers[0].operator.shape[1]
    assert repr(trace.mixers[0]).endswith(f"layer 0, softmax, operator (2, {heads}, 12, 12))")
    assert repr(trace.states[0]).startswith(
        f"CapturedState({trace.states[0].name!r}, layer 0, tokens (2, 12, "
    )
    assert len(repr(trace).splitlines()) == 1
