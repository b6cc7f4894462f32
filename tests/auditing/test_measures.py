"""The table of measures agrees with records, pages and docs; a measure is a function and a row."""

import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tests.support import records
from tests.support.modules import GivenOperator, sites_of
from tests.support.records import HEAD_MEASURES, STATE_MEASURES
from torch import Tensor, nn

import rankwise as rw
from rankwise.auditing import HeadRecord, StateRecord
from rankwise.auditing.measure_table import REFERENCES
from rankwise.operators import DenseMixing

UNBOUNDED = {row.name for row in (*HEAD_MEASURES, *STATE_MEASURES) if "∞" in row.range.text} | {
    "absolute_spread",
    "value_effective_rank",
}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("rows", "record"), [(HEAD_MEASURES, HeadRecord), (STATE_MEASURES, StateRecord)], ids=["heads", "layers"]
)
def test_every_row_is_a_field_with_a_complete_description(rows, record) -> None:
    names = [measure.name for measure in rows]
    assert names == [name for name in record.model_fields if name in names]
    for measure in rows:
        for text in ("title", "meaning", "formula", "low", "high", "cost"):
            assert getattr(measure, text).strip() == getattr(measure, text) != "", (measure.name, text)
        assert measure.range.text
        assert not measure.drawn or measure.range.high == measure.range.high or measure.name in UNBOUNDED
        assert set(measure.references) <= set(REFERENCES) <= set(HeadRecord.model_fields)
    assert len({measure.title for measure in rows}) == len(rows)


def test_values_of_an_audit_are_within_the_ranges_of_the_table() -> None:
    layer = nn.TransformerEncoderLayer(24, 3, 16, batch_first=True).eval()
    audit = rw.audit(nn.TransformerEncoder(layer, 2), [torch.randn(2, 12, 24), torch.randn(1, 7, 24)])
    for rows, measured in ((HEAD_MEASURES, audit.heads), (STATE_MEASURES, audit.states)):
        for measure in rows:
            for record in measured:
                low, high = measure.ends(record)
                value = measure.value(record)
                known = [number for number in (low, value, high) if math.isfinite(number)]
                assert known == sorted(known), measure.name
                assert math.isfinite(measure.span(record)) == (measure.name not in UNBOUNDED)


@pytest.mark.parametrize("kind", ["softmax", "linear", "dense", "diagonal", "selective", "toeplitz"])
def test_measures_of_rows_apply_to_mixers_that_mix_tokens(kind: str) -> None:
    """The one row of a diagonal matrix that is not its own token is empty; its singular values are known."""
    applied = {measure.name for measure in HEAD_MEASURES if measure.applies_to(records.head(kind=kind))}
    left_out = {measure.name for measure in HEAD_MEASURES} - applied
    assert ("row_spread" in left_out) == (kind == "diagonal")
    assert "sigma_max" in applied
    assert kind == "diagonal" or not left_out


def test_a_share_of_rank_uses_the_smaller_side_of_each_sequence() -> None:
    """The mean lengths 68 and 68 would make it 8 of 68."""

    def full_rank(x: Tensor) -> DenseMixing:
        return DenseMixing(torch.eye(x.shape[1], 136 - x.shape[1])[None, None])

    batches = [torch.ones(1, 8, 4), torch.ones(1, 128, 4)]
    [head] = rw.audit(GivenOperator(), batches, sites=sites_of(full_rank)).heads
    assert (head.tokens, head.sources, head.full_rank) == (68, 68, 8)
    assert HEAD_MEASURES[0].value(head) == 1


def blocks() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Add a measure")[2].partition("\n## ")[0]
    return [textwrap.dedent(code) for code in re.findall(r" *```python\n(.*?) *```", section, re.DOTALL)]


AUDITED = """
import io, math, torch, rankwise as rw
from pathlib import Path
from rich.console import Console
from rankwise.measures import attention_distance
from rankwise.report import print_document
from rankwise.report.audit_report import audit_document
from rankwise.report.comparison_report import comparison_document

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(24, 3, 16, batch_first=True).eval()
batch = torch.randn(2, 12, 24)
with rw.capture(layer) as trace:
    layer(batch)
audit = rw.audit(layer, [batch])
wanted = attention_distance(trace.mixers[0].operator).mean(0).tolist()
got = [head.attention_distance for head in audit.heads]
assert all(abs(a - b) < 1e-12 for a, b in zip(got, wanted, strict=True)), (got, wanted)
assert all(head.std["attention_distance"] > 0 for head in audit.heads)

from hypothesis import HealthCheck, settings
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # other programs may run on the machine
from tests.measures import test_every_measure
from experiments.reference import pages
assert attention_distance in test_every_measure.OF_MATRICES  # the laws of all measures include it
test_every_measure.test_matrices_of_a_batch_are_measured_alone(attention_distance)
assert "python.md#rankwise.measures.attention_distance" in pages()["measures"]

again = rw.Audit.load(audit.save(Path("audit.json")))
assert [head.attention_distance for head in again.heads] == got

other = rw.audit(layer, [torch.randn(2, 12, 24)])
changes = rw.compare(audit, other).changes
assert any(change.measure == "attention_distance" for change in changes)
out = Console(file=io.StringIO(), width=100)
print_document(audit_document(audit), out, verbose=True)
comparison = rw.compare(audit, other)
few = [change for change in comparison.changes if change.measure == "attention_distance"]
print_document(comparison_document(comparison.model_copy(update={"changes": few})), out)
assert "distance" in out.file.getvalue()
assert "attention distance" in out.file.getvalue()
assert "Attention distance" in audit.to_html(Path("page.html")).read_text(encoding="utf-8")
"""


def test_a_measure_is_a_function_and_a_row_as_contributing_says(tmp_path: Path) -> None:
    statistic, function, row, test = blocks()
    package = tmp_path / "rankwise"
    shutil.copytree(Path(rw.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))

    def edit(path: str, old: str, new: str, appended: str = "") -> None:
        source = (package / path).read_text(encoding="utf-8")
        assert old in source
        (package / path).write_text(source.replace(old, new, 1) + appended, encoding="utf-8")

    edit("measures/row_walk.py", "", "", f"\n\n{statistic}")
    edit("measures/rows.py", "__all__ = [", '__all__ = [\n    "attention_distance",', f"\n\n{function}")
    edit("measures/rows.py", "row_walk import (\n", "row_walk import (\n    Distance,\n")
    end = "\n\nclass StateMeasures"
    edit("auditing/measure_table.py", end, f"\n{textwrap.indent(row, '    ')}\n{end}")
    call = f"import pytest\n{test}\ntest_the_attention_distance_of_a_shift_is_the_shift()\nprint('added')"
    done = subprocess.run(
        [sys.executable, "-c", f"{AUDITED}\n{call}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "added\n"
