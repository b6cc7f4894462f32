"""The table of measures: its page is what it says, and a measure is a function and a row."""

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
from experiments.measures import END, PAGE, START, tables
from tests.support import records
from torch import Tensor, nn

import rankwise as rw
from rankwise import measures, report
from rankwise.auditing import audit as run_audit
from rankwise.auditing.measure_table import DRAWN, HEAD_MEASURES, LAYER_MEASURES, NULLS, PICTURED
from rankwise.auditing.records import HeadRecord, LayerRecord
from rankwise.report.head_columns import color_limits

UNBOUNDED = {"sigma_max", "coding_rate", "removal_cost", "norm", "token_spread"}
ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_table() -> None:
    """Otherwise: `python -m experiments.measures`."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        assert f"{START.format(name)}\n{table}{END.format(name)}\n" in page


@pytest.mark.parametrize(
    ("rows", "record"), [(HEAD_MEASURES, HeadRecord), (LAYER_MEASURES, LayerRecord)], ids=["heads", "layers"]
)
def test_every_row_is_a_field_and_says_what_it_is(rows, record) -> None:
    assert [measure.name for measure in rows] == [
        name for name in record.model_fields if name in {measure.name for measure in rows}
    ]
    for measure in rows:
        for said in (
            measure.title,
            measure.formula,
            measure.range.text,
            measure.low,
            measure.high,
            measure.cost,
        ):
            assert said == said.strip() != ""
        assert not measure.meaning or measure.range.high == measure.range.high or measure.name in UNBOUNDED
        assert set(measure.nulls) <= set(NULLS) <= set(HeadRecord.model_fields)
    assert len({measure.title for measure in rows}) == len(rows)


def test_values_of_an_audit_lie_within_the_ranges_of_the_table() -> None:
    layer = nn.TransformerEncoderLayer(24, 3, 16, batch_first=True).eval()
    audit = rw.audit(nn.TransformerEncoder(layer, 2), [torch.randn(2, 12, 24), torch.randn(1, 7, 24)])
    for rows, measured in ((HEAD_MEASURES, audit.heads), (LAYER_MEASURES, audit.layers)):
        for measure in rows:
            for record in measured:
                low, high = measure.ends(record)
                value = measure.value(record)
                known = [number for number in (low, value, high) if math.isfinite(number)]
                assert known == sorted(known), measure.name
                assert math.isfinite(measure.span(record)) == (measure.name not in UNBOUNDED)


def test_scales_hold_all_values() -> None:
    heads = records.encoder().heads
    for measure in (*PICTURED,):
        low, high = color_limits(measure, heads)
        assert low < high
        assert all(low <= value <= high for head in heads if math.isfinite(value := measure.value(head)))
    assert [measure.name for measure in DRAWN] == ["relative_spread", "mean_cosine", "effective_rank"]


def test_a_share_is_of_the_smaller_side_of_each_sequence() -> None:
    """Of the means it would be 8 of 68: no pair of lengths has a smaller side of 68."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x)

    def full_rank(module, args, kwargs, output) -> rw.operators.DenseMixing:
        tokens = args[0].shape[1]
        return rw.operators.DenseMixing(torch.eye(tokens, 136 - tokens)[None, None])

    [head] = rw.audit(Kept(), [torch.ones(1, 8, 4), torch.ones(1, 128, 4)], sites={"mix": full_rank}).heads
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
settings.load_profile("busy")  # whatever else runs on the machine
from tests.measures import test_every_measure, test_scales
from experiments.measures import tables
assert attention_distance in test_every_measure.OF_MATRICES  # held by the laws of all measures
test_scales.test_one_size_of_number_is_as_good_as_another()
test_every_measure.test_matrices_of_a_batch_are_measured_alone(attention_distance)
assert "::: rankwise.measures.attention_distance" in tables()["functions"]

from rankwise.operators import SoftmaxMixing
from tests.operators.mixing_laws import largest_tensor
long = SoftmaxMixing(torch.randn(1, 1, 1500, 4), torch.randn(1, 1, 1500, 4))
assert largest_tensor(lambda: attention_distance(long)) < 1500 * 1500 / 2  # its matrix is not formed

rows = torch.tensor([[0.0, 3.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
for size in (1e-310, 1.0, 5e307):  # the zero row is left out: (3·1 + 1·2)/4
    assert abs(attention_distance(rows * size).item() - 1.25) < 1e-12, size

again = rw.Audit.load(audit.save(Path("audit.json")))
assert [head.attention_distance for head in again.heads] == got

other = rw.audit(layer, [torch.randn(2, 12, 24)])
changes = rw.compare(audit, other).changes
assert any(change.measure == "attention_distance" for change in changes)
out = Console(file=io.StringIO(), width=100)
print_document(audit_document(audit), out)
print_document(comparison_document(rw.compare(audit, other)), out)
assert "looks" in out.file.getvalue()
assert "attention distance" in out.file.getvalue()
assert "Attention distance" in audit.to_html(Path("page.html")).read_text(encoding="utf-8")
"""


def test_a_measure_is_a_function_and_a_row_as_contributing_says(tmp_path: Path) -> None:
    statistic, function, row, test = blocks()
    package = tmp_path / "rankwise"
    shutil.copytree(Path(rw.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    row_walk = package / "measures" / "row_walk.py"
    row_walk.write_text(f"{row_walk.read_text(encoding='utf-8')}\n\n{statistic}", encoding="utf-8")
    rows = package / "measures" / "rows.py"
    source = rows.read_text(encoding="utf-8").replace(
        "__all__ = [", '__all__ = [\n    "attention_distance",', 1
    )
    source = source.replace("row_walk import (\n", "row_walk import (\n    Away,\n", 1)
    rows.write_text(f"{source}\n\n{function}", encoding="utf-8")
    table = package / "auditing" / "measure_table.py"
    source = table.read_text(encoding="utf-8")
    end = "\n\nclass LayerMeasures"
    assert source.count(end) == 1
    source = source.replace(end, f"\n{textwrap.indent(row, '    ')}\n{end}")
    table.write_text(source, encoding="utf-8")
    program = (
        f"{AUDITED}\nimport pytest\n{test}\ntest_a_shift_looks_as_far_away_as_it_shifts()\nprint('added')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "added\n"


def test_the_way_of_a_number_is_the_one_of_its_page() -> None:
    """Each module but the first is imported by another on the way, by the name that takes the number on."""
    page = (ROOT / "docs" / "decisions" / "008-one-number.md").read_text(encoding="utf-8")
    way = re.findall(r"^ +\d+  (\S+\.py) ", page, re.MULTILINE)
    assert re.findall(r"^\| `(\S+\.py)`", page, re.MULTILINE) == way
    assert len(way) <= 9
    links = {
        ("auditing/run.py", "auditing/measure.py"): "measure_heads",
        ("measures/rank.py", "measures/dense_spectrum.py"): "gram_or_svd",
        ("auditing/measure.py", "auditing/statistics.py"): "HeadStatistics",
        ("auditing/statistics.py", "auditing/records.py"): "HeadRecord",
        ("auditing/records.py", "auditing/measure_table.py"): "HeadMeasures",
        ("auditing/run.py", "auditing/result.py"): "Audit",
        ("report/head_columns.py", "auditing/measure_table.py"): "HEAD_MEASURES",
    }
    # besides these, `measure` calls functions of `measures` and `result` those of `report`, by package:
    # `audit_report` asks for the columns
    packages = {("auditing/measure.py", "measures/rank.py"), ("auditing/result.py", "report/head_columns.py")}
    assert {module for link in (*links, *packages) for module in link} == set(way)
    package = Path(rw.__file__).parent
    for (reader, read), name in (
        links | {("report/audit_report.py", "report/head_columns.py"): "head_columns"}
    ).items():
        module = "rankwise." + read.removesuffix(".py").replace("/", ".")
        source = (package / reader).read_text(encoding="utf-8")
        assert re.search(rf"from {re.escape(module)} import \(?[^)]*?\b{name}\b", source), (
            f"{reader} reads no {name} of {read}"
        )
    assert run_audit.__module__ == "rankwise.auditing.run"
    assert measures.effective_rank.__module__ == "rankwise.measures.rank"
    assert report.write_page.__module__ == "rankwise.report.page"
