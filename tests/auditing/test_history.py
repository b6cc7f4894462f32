"""Several audits in order of steps: curves, tables, files; comparisons of models of different structure."""

import csv
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import nano_gpt
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import records
from tests.support.documents import history_document
from tests.support.modules import token_ids
from tests.support.records import HeadImportance, changed
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.auditing import Comparison, History, sort_by_step
from rankwise.auditing.comparison import layer_means, paired_stacks
from rankwise.auditing.history import folder_name, steps_of
from rankwise.errors import InputError, RecordError

ENCODER = records.encoder()


def moved(step: int, **fields: object) -> rw.Audit:
    """Return the encoder with a number that grows by step."""
    return changed(ENCODER, every={"first_token_mass": step / 10_000} | fields)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=8, unique=True))
@settings(max_examples=30, deadline=None)
def test_steps_are_read_from_names_and_order_them(numbers: list[int]) -> None:
    names = [f"run-7/checkpoint-{number}" for number in numbers]
    assert steps_of(names) == numbers
    assert sort_by_step(names) == [f"run-7/checkpoint-{number}" for number in sorted(numbers)]


@pytest.mark.parametrize(
    "names", [["gpt2", "bert"], ["a-1-2", "a-2-1"], ["a-1", "a-1"], ["a-01", "a-1"], ["run", "run"]]
)
def test_names_without_steps_keep_their_order(names: list[str]) -> None:
    assert steps_of(names) is None
    assert sort_by_step(names) == names


@given(st.permutations(range(5)))
@settings(max_examples=5, deadline=None)
def test_a_history_is_in_the_order_of_its_steps_however_it_grew(order: list[int]) -> None:
    audits = [moved(step) for step in range(5)]
    history = History()
    for step in order:
        history.add(step * 100, audits[step])
    assert history.steps == [0, 100, 200, 300, 400]
    assert [audit for _, audit in history] == audits
    assert history[300] == audits[3]
    assert len(history) == 5


def test_a_second_audit_of_a_step_and_a_missing_step_are_refused() -> None:
    history = History([(1, moved(1))])
    for call, message in (
        (lambda: history.add(1, moved(2)), "step 1: expected one audit per step, got a second audit"),
        (lambda: history[2], "Known: 1"),
        (lambda: history.comparison, "expected two audits to compare, got 1"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    assert History().curves() == {}
    assert "no audits" in repr(History())


def test_two_audits_are_a_comparison_and_more_a_history() -> None:
    one, two, three = (moved(step) for step in (1, 2, 3))
    assert isinstance(rw.compare(one, two), Comparison)
    history = rw.compare(one, two, three)
    assert isinstance(history, History)
    assert (history.steps, history.counted) == ([0, 1, 2], True)
    assert history.comparison.model_dump_json() == rw.compare(one, three).model_dump_json()


def test_only_audits_are_compared() -> None:
    for others in (("run/audit.json",), (Path("run"), ENCODER), (ENCODER, {"heads": []})):
        with unchecked(), pytest.raises(InputError, match=r"audit [23] of `compare`: .*rw\.Audit\.load"):
            rw.compare(ENCODER, *others)


def test_steps_in_names_of_models_order_their_audits() -> None:
    steps = (1000, 50, 200)
    history = rw.compare(*(changed(moved(n), origin={"model": f"run/checkpoint-{n}"}) for n in steps))
    assert isinstance(history, History)
    assert (history.steps, history.counted) == ([50, 200, 1000], False)
    assert [audit.heads[0].first_token_mass for audit in history.audits] == [0.005, 0.02, 0.1]


def test_a_curve_holds_the_mean_of_each_layer_at_each_step() -> None:
    history = History([(step, moved(step)) for step in (0, 500, 2000)])
    curves = history.curves()
    mine = {key: points for key, points in curves.items() if key.measure == "first_token_mass"}
    assert len(mine) == 6
    for points in mine.values():
        assert [value for value, _ in points] == pytest.approx([0.0, 0.05, 0.2])
    for key, points in curves.items():
        assert points[1] == layer_means(history[500]).get(key, points[1])


def test_a_layer_that_an_audit_lacks_is_a_gap() -> None:
    short = ENCODER.model_copy(update={"heads": ENCODER.heads[:12]})
    curves = History([(0, ENCODER), (1, short)]).curves()
    last = next(points for key, points in curves.items() if key.of == "heads" and key.layer == 5)
    assert math.isfinite(last[0][0])
    assert math.isnan(last[1][0])


def test_costs_of_two_losses_are_left_out() -> None:
    causal, masked = (
        changed(
            ENCODER,
            every={"importance": HeadImportance(exact=0.01), "removal_cost": 0.01},
            importance=records.importance(loss=loss, unit="nats"),
        )
        for loss in ("next tokens, causal", "masked tokens")
    )
    history = History([(0, causal), (1, masked), (2, ENCODER)])
    assert "removal_cost" not in {key.measure for key in history.curves()}
    warning = history.warnings[0]
    assert "next tokens, causal (nats), exact; masked tokens" in warning
    assert "not measured" in warning
    assert warning in history_document(history).warnings
    alike = History([(0, causal), (1, causal)])
    assert alike.warnings == []
    assert {key.measure for key in alike.curves()} >= {"removal_cost"}


@pytest.mark.parametrize(
    ("last", "origin", "said"),
    [
        ({}, {}, "step-1 has the lowest loss, 1.5 nats per token; first 2, last 1.75. Last audit: "),
        ({"loss": "masked tokens"}, {}, "Last audit: "),
        ({}, {"data_digests": ["other"]}, "Last audit: "),
        ({"value": math.nan}, {}, "step-1 has the lowest loss, 1.5 nats per token; first 2. Last audit: "),
    ],
)
def test_a_history_names_the_audit_with_the_lowest_loss_on_equal_data(
    last: dict[str, Any], origin: dict[str, Any], said: str
) -> None:
    losses = [records.importance(value=value) for value in (2.0, 1.5)]
    losses.append(records.importance(**{"value": 1.75} | last))
    audits = [changed(moved(step), importance=loss) for step, loss in enumerate(losses)]
    audits[-1] = changed(audits[-1], origin=origin)
    history = History(enumerate(audits))
    document = history_document(history)
    assert document.verdict.sentence.startswith(said)
    assert any("Losses" in one for one in history.warnings) == (said == "Last audit: ")
    table = next(one for section in document.sections for one in section.tables if one.title == "Audits")
    assert [row[table.columns.index("loss")] for row in table.rows][:2] == ["2", "1.5"]
    assert ("history-loss" in [figure.name for figure in document.sections[0].figures]) == ("lowest" in said)


def test_a_number_of_a_layer_is_the_mean_of_its_heads_and_of_their_spreads() -> None:
    audit = rw.audit(nano_gpt(), [token_ids()])
    numbers = layer_means(audit)
    for key, (value, spread) in numbers.items():
        if key.of == "heads" and key.measure == "stable_rank":
            heads = [head for head in audit.heads if head.layer == key.layer]
            assert value == pytest.approx(sum(head.stable_rank for head in heads) / len(heads))
            around = [head.std["stable_rank"] for head in heads]
            assert spread == pytest.approx(sum(around) / len(around))


def test_changes_by_layer_are_signed_differences_of_means() -> None:
    there, back = rw.compare(moved(1000), moved(3000)), rw.compare(moved(3000), moved(1000))
    mine = [change for change in there.by_layer if change.measure == "first_token_mass"]
    assert [change.change for change in mine] == pytest.approx([0.2] * 6)
    assert [change.change for change in back.by_layer] == [-change.change for change in there.by_layer]
    assert [repr(c.std) for c in back.by_layer] == [repr(c.std) for c in there.by_layer]
    for change in mine:
        assert change.ratio == pytest.approx(0.2 / change.std)


def test_a_csv_has_a_row_per_head_and_step(tmp_path: Path) -> None:
    history = History([(step, moved(step)) for step in (0, 500)])
    with history.to_csv(tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (tmp_path / "history.csv").exists()
    assert [int(row["step"]) for row in rows] == [0] * 72 + [500] * 72
    assert {float(row["first_token_mass"]) for row in rows[72:]} == {0.05}


def test_saved_audits_are_loaded_in_the_same_order(tmp_path: Path) -> None:
    history = History([(step, moved(step)) for step in (900, 1000, 90)])
    history.save(tmp_path / "run")
    assert (tmp_path / "run" / "index.html").exists()
    again = History.load(tmp_path / "run")
    assert (again.steps, again.names) == (history.steps, history.names)
    for one, other in zip(history.audits, again.audits, strict=True):
        assert one.model_dump_json() == other.model_dump_json()


def test_audits_with_equal_names_are_saved_in_separate_folders(tmp_path: Path) -> None:
    history = rw.compare(moved(1), moved(2), moved(3))
    assert isinstance(history, History)
    history.save(tmp_path)
    assert len(list(tmp_path.glob("*/audit.json"))) == 3
    assert [audit.heads[0].first_token_mass for audit in History.load(tmp_path).audits] == [1e-4, 2e-4, 3e-4]


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a\nb", records.NASTY, "", "..", "x" * 500, "C:\\x"]
)
def test_a_name_does_not_leave_the_folder(name: str, tmp_path: Path) -> None:
    assert folder_name(name).isprintable()
    History([(1, moved(1))], [name]).save(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len(list((tmp_path / "run").glob("*/audit.json"))) == 1


def test_incomplete_audits_are_left_out_with_a_warning(tmp_path: Path) -> None:
    cut = moved(2).model_copy(update={"complete": False})
    History([(1, moved(1)), (2, cut)]).save(tmp_path)
    with pytest.warns(UserWarning, match="left out: step-2"):
        assert History.load(tmp_path).steps == [1]
    shutil.rmtree(tmp_path / "step-1")
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(InputError, match="complete audit"),
    ):
        History.load(tmp_path)


def test_a_folder_without_audits_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a folder that holds folders with a complete audit.json"):
        History.load(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "audit.json").write_text("{}")
    with pytest.raises(RecordError):
        History.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "of_layers", "sentences", "compared"),
    [
        (
            "diagonal",
            range(4),
            ["Mixers of 4 layers: softmax before, diagonal after."],
            set(),
        ),
        ("linear", (2, 3), ["Mixers of 2 layers: softmax before, linear after."], {0, 1, 4, 5}),
    ],
)
def test_layers_of_another_kind_are_named_and_not_compared(
    kind: str, of_layers: Any, sentences: list[str], compared: set[int]
) -> None:
    heads = [
        head.model_copy(update={"kind": kind} if head.layer in of_layers else {})
        for head in ENCODER.heads
        if kind == "linear" or head.layer in of_layers
    ]
    comparison = rw.compare(ENCODER, ENCODER.model_copy(update={"heads": heads}))
    assert all(sentence in " ".join(comparison.structure) for sentence in sentences)
    assert {change.layer for change in comparison.by_layer if change.of == "heads"} == compared
    assert {change.of for change in comparison.by_layer} >= {"states"}
    total = next(total for total in comparison.totals if total.name == "heads")
    assert (total.before, total.after) == (72, len(heads))


def test_a_stack_inside_another_model_is_matched_by_its_numbers() -> None:
    inside = changed(
        ENCODER,
        {
            at: {"stack": f"bert.{one.stack}", "site": f"bert.{one.site}"}
            for at, one in enumerate(ENCODER.heads)
        },
        states=[one.model_copy(update={"stack": f"bert.{one.stack}"}) for one in ENCODER.states],
    )
    comparison = rw.compare(ENCODER, inside)
    assert paired_stacks(ENCODER, inside) == {"encoder.layer": "bert.encoder.layer"}
    assert (comparison.heads, comparison.states, comparison.changes) == (72, 7, [])
    assert comparison.structure == ["The stack 'encoder.layer' is compared with 'bert.encoder.layer'."]
    assert not any(change.change for change in comparison.by_layer)


def test_models_with_other_numbers_of_heads_are_compared() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(8, heads, 16, batch_first=True).eval() for heads in (2, 4)]
    one, other = (rw.audit(layer, [torch.randn(2, 12, 8)]) for layer in layers)
    comparison = rw.compare(one, other)
    [total] = [total for total in comparison.totals if total.name == "heads"]
    assert (total.before, total.after) == (2, 4)
    assert any(change.of == "heads" for change in comparison.by_layer)
