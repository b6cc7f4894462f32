"""Several audits in order: steps, curves, tables, files; models of different structure side by side."""

import csv
import math
from pathlib import Path

import pytest
import torch
from experiments.families import nano_gpt
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import records
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.auditing import Comparison, History, in_order
from rankwise.auditing.comparison import layer_means, paired_stacks
from rankwise.auditing.history import folder_name, steps_of
from rankwise.auditing.records import BaselineRecord
from rankwise.errors import InputError, RecordError
from rankwise.importance.records import HeadImportance, ImportanceRecord
from rankwise.report.comparison_report import history_document


def of(name: str) -> rw.Audit:
    return rw.Audit.model_validate(records.ALL[name]().model_dump())


def moved(step: int, **fields: object) -> rw.Audit:
    audit = of("encoder")
    heads = [head.model_copy(update={"first_token_mass": step / 10_000} | fields) for head in audit.heads]
    return audit.model_copy(update={"heads": heads})


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=8, unique=True))
@settings(max_examples=30, deadline=None)
def test_steps_are_read_from_names_and_order_them(numbers: list[int]) -> None:
    names = [f"run-7/checkpoint-{number}" for number in numbers]
    assert steps_of(names) == numbers
    assert in_order(names) == [f"run-7/checkpoint-{number}" for number in sorted(numbers)]


@pytest.mark.parametrize(
    "names", [["gpt2", "bert"], ["a-1-2", "a-2-1"], ["a-1", "a-1"], ["a-01", "a-1"], ["run", "run"]]
)
def test_names_without_steps_keep_their_order(names: list[str]) -> None:
    assert steps_of(names) is None
    assert in_order(names) == names


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
    with pytest.raises(InputError, match="step 1: expected one audit per step, got a second audit"):
        history.add(1, moved(2))
    with pytest.raises(InputError, match="Known: 1"):
        history[2]
    with pytest.raises(InputError, match="expected two audits to compare, got 1"):
        history.comparison  # noqa: B018
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
    audit = of("encoder")
    for others in (("run/audit.json",), (Path("run"), audit), (audit, {"heads": []})):
        with unchecked(), pytest.raises(InputError, match=r"audit [23] of `compare`: .*rw\.Audit\.load"):
            rw.compare(audit, *others)


def test_models_named_by_steps_are_ordered_by_them() -> None:
    audits = []
    for step in (1000, 50, 200):
        audit = moved(step)
        about = audit.provenance.model_copy(update={"model": f"run/checkpoint-{step}"})
        audits.append(audit.model_copy(update={"provenance": about}))
    history = rw.compare(*audits)
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
    short = moved(1).model_copy(update={"heads": moved(1).heads[:12]})
    curves = History([(0, moved(0)), (1, short)]).curves()
    last = next(points for key, points in curves.items() if key.of == "heads" and key.layer == 5)
    assert math.isfinite(last[0][0])
    assert math.isnan(last[1][0])


def importance_by(loss: str) -> rw.Audit:
    """The encoder, with a cost of removal of each head in the unit of a loss."""
    audit = moved(0, importance=HeadImportance(exact=0.01), removal_cost=0.01)
    record = ImportanceRecord(
        loss=loss, unit="nats", value=3.2, sequences=4, counted=9, ablation="zero", probes=0, seed=0
    )
    return audit.model_copy(update={"importance": record})


def test_no_curve_leads_from_the_costs_of_one_loss_to_those_of_another() -> None:
    causal, masked = importance_by("next tokens, causal"), importance_by("masked tokens")
    history = History([(step, causal if step < 2 else masked) for step in range(4)])
    curves = {key: pairs for key, pairs in history.curves().items() if key.measure.startswith("removal_cost")}
    for key, pairs in curves.items():
        known = [math.isfinite(value) for value, _ in pairs]
        assert known == (
            [True, True, False, False] if "causal" in key.measure else [False, False, True, True]
        )
    assert {key.measure for key in curves} == {
        "removal_cost of next tokens, causal (nats), exact, zero in a head's place",
        "removal_cost of masked tokens (nats), exact, zero in a head's place",
    }
    document = history_document(history)
    drawn = [figure for figure in document.sections[0].figures if figure.title == "Cost of removal"]
    captions = [figure.caption.split(" · ")[1].split(" (")[0] for figure in drawn]
    assert captions == ["next tokens, causal", "masked tokens"]
    (said,) = history.warnings
    assert "2 quantities" in said
    assert said in document.warnings
    alike = History([(0, causal), (1, causal)])
    assert alike.warnings == []
    assert {key.measure for key in alike.curves()} >= {"removal_cost"}


def test_a_baseline_of_one_audit_alone_is_said_and_is_no_change() -> None:
    bare = of("encoder")
    fresh = {"init_numerical_rank": 20.0, "init_effective_rank": 8.0}
    with_baseline = moved(0, **fresh).model_copy(
        update={"baseline": BaselineRecord(seeds=[0, 1, 2], built="from its configuration")}
    )
    for before, after, alone in ((bare, with_baseline, "after"), (with_baseline, bare, "before")):
        found = rw.compare(before, after)
        assert not any(change.measure.startswith("init_") for change in [*found.changes, *found.by_layer])
        assert any(said.startswith(f"Only the audit {alone} has a baseline") for said in found.warnings)
    moved_on = moved(0, init_numerical_rank=30.0, init_effective_rank=8.0)
    moved_on = moved_on.model_copy(update={"baseline": with_baseline.baseline})
    both = rw.compare(with_baseline, moved_on)
    assert {change.measure for change in both.changes} == {"init_numerical_rank"}
    history = History([(0, bare), (1, with_baseline), (2, bare)])
    assert history.warnings == ["Only in step-1: a baseline."]


def test_a_layer_is_the_mean_of_its_heads_and_of_their_spreads() -> None:
    audit = rw.audit(nano_gpt(), [{"input_ids": torch.randint(0, 60, (3, 10))}])
    numbers = layer_means(audit)
    for key, (value, spread) in numbers.items():
        if key.of == "heads" and key.measure == "stable_rank":
            heads = [head for head in audit.heads if head.layer == key.layer]
            assert value == pytest.approx(sum(head.stable_rank for head in heads) / len(heads))
            around = [head.std["stable_rank"] for head in heads]
            assert spread == pytest.approx(sum(around) / len(around))


def test_changes_by_layer_are_those_of_the_means_with_their_sign() -> None:
    there, back = rw.compare(moved(1000), moved(3000)), rw.compare(moved(3000), moved(1000))
    mine = [change for change in there.by_layer if change.measure == "first_token_mass"]
    assert [change.change for change in mine] == pytest.approx([0.2] * 6)
    assert [change.change for change in back.by_layer] == [-change.change for change in there.by_layer]
    assert [repr(c.std) for c in back.by_layer] == [repr(c.std) for c in there.by_layer]
    for change in mine:
        assert change.ratio == pytest.approx(0.2 / change.std)


def test_a_frame_and_a_csv_have_a_row_for_each_head_of_each_step(tmp_path: Path) -> None:
    history = History([(step, moved(step)) for step in (0, 500)])
    with history.to_csv(tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (tmp_path / "history.csv").exists()
    assert [int(row["step"]) for row in rows] == [0] * 72 + [500] * 72
    assert {float(row["first_token_mass"]) for row in rows[72:]} == {0.05}
    pytest.importorskip("pandas")
    assert list(history.to_frame().columns) == list(rows[0])
    assert len(History().to_frame()) == 0


def test_saved_audits_are_loaded_in_the_same_order(tmp_path: Path) -> None:
    history = History([(step, moved(step)) for step in (900, 1000, 90)])
    history.save(tmp_path / "run")
    assert (tmp_path / "run" / "index.html").exists()
    again = History.load(tmp_path / "run")
    assert (again.steps, again.names) == (history.steps, history.names)
    for one, other in zip(history.audits, again.audits, strict=True):
        assert one.model_dump_json() == other.model_dump_json()


def test_audits_of_one_name_keep_folders_of_their_own(tmp_path: Path) -> None:
    history = rw.compare(moved(1), moved(2), moved(3))
    assert isinstance(history, History)
    history.save(tmp_path)
    assert len(list(tmp_path.glob("*/audit.json"))) == 3
    assert [audit.heads[0].first_token_mass for audit in History.load(tmp_path).audits] == [1e-4, 2e-4, 3e-4]


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a\nb", records.NASTY, "", "..", "x" * 500, "C:\\x"]
)
def test_a_name_is_never_a_way_out_of_the_folder(name: str, tmp_path: Path) -> None:
    assert folder_name(name).isprintable()
    History([(1, moved(1))], [name]).save(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len(list((tmp_path / "run").glob("*/audit.json"))) == 1


def test_a_folder_without_audits_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a folder that holds folders with an audit.json"):
        History.load(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "audit.json").write_text("{}")
    with pytest.raises(RecordError):
        History.load(tmp_path)


def test_softmax_against_diagonal_is_said_and_states_are_compared() -> None:
    softmax = of("encoder")
    heads = [head.model_copy(update={"kind": "diagonal", "mask": "other"}) for head in softmax.heads[:48]]
    diagonal = softmax.model_copy(update={"heads": heads})
    comparison = rw.compare(softmax, diagonal)
    text = " ".join(comparison.structure)
    assert "Layers that mix in 'encoder.layer': 6 before, 4 after." in text
    assert "Mixing in 'encoder.layer': softmax before, diagonal after (all layers)." in text
    assert {change.of for change in comparison.by_layer} == {"states"}
    heads_total = next(total for total in comparison.totals if total.name == "heads")
    assert (heads_total.before, heads_total.after) == (72, 48)


def test_one_layer_of_another_kind_is_named_alone() -> None:
    softmax = of("encoder")
    heads = [
        head.model_copy(update={"kind": "linear"}) if head.layer in (2, 3) else head for head in softmax.heads
    ]
    comparison = rw.compare(softmax, softmax.model_copy(update={"heads": heads}))
    assert "softmax before, linear after (2 layers)." in comparison.structure[0]
    layers = {change.layer for change in comparison.by_layer if change.of == "heads"}
    assert layers == {0, 1, 4, 5}


def test_the_same_model_in_another_is_matched_by_numbers() -> None:
    audit = of("encoder")
    inside = audit.model_copy(
        update={
            "heads": [
                head.model_copy(update={"stack": f"bert.{head.stack}", "site": f"bert.{head.site}"})
                for head in audit.heads
            ],
            "layers": [one.model_copy(update={"stack": f"bert.{one.stack}"}) for one in audit.layers],
        }
    )
    comparison = rw.compare(audit, inside)
    assert paired_stacks(audit, inside) == {"encoder.layer": "bert.encoder.layer"}
    assert (comparison.heads, comparison.layers, comparison.changes) == (72, 7, [])
    assert comparison.structure == ["The stack 'encoder.layer' is compared with 'bert.encoder.layer'."]
    assert not any(change.change for change in comparison.by_layer)


@pytest.mark.parametrize("name", [name for name in records.ALL if name != "large"])
def test_an_audit_has_no_structure_of_its_own_to_differ_in(name: str) -> None:
    assert rw.compare(of(name), of(name)).structure == []


def test_a_real_model_against_one_of_fewer_heads() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(8, heads, 16, batch_first=True).eval() for heads in (2, 4)]
    one, other = (rw.audit(layer, [torch.randn(2, 12, 8)]) for layer in layers)
    comparison = rw.compare(one, other)
    assert any("2 before, 4 after" in sentence for sentence in comparison.structure)
    assert any(change.of == "heads" for change in comparison.by_layer)
