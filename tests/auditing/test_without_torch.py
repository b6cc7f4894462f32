"""Records and reports are imported, and audits loaded, merged, compared and shown, where torch is missing."""

import subprocess
import sys
from pathlib import Path

import torch

import rankwise as rw

CODE = """
import sys
sys.modules["torch"] = None  # every import of it fails
import rankwise as rw
from rankwise import report
from rankwise.auditing import comparison
from rankwise.compression import Compression, HeadWidth
from rankwise.report.compression_report import compression_document
from rankwise.tracing import Address
Address()
assert "jinja2" not in sys.modules
first, second = (rw.Audit.load(path) for path in sys.argv[1:3])
merged = rw.Audit.merge([first, second])
print(merged.verdict.sentence)
print(type(rw.compare(first, second)).__name__, type(rw.compare(first, second, merged)).__name__)
history = rw.auditing.History([(step, audit) for step, audit in enumerate((first, second))])
assert rw.auditing.History.load(history.save(sys.argv[3] + ".history")).steps == [0, 1]
history.comparison.to_html(sys.argv[3] + ".comparison.html")
merged.to_html(sys.argv[3])
merged.to_csv(sys.argv[3] + ".csv")
print(len(merged.summary()) > 0)
assert not {"transformers", "plotly"} & {*sys.modules}
"""


def test_records_comparisons_and_pages_need_no_torch(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    audits = [rw.audit(layer, [torch.randn(1, 12, 8)]) for _ in range(2)]
    paths = [audit.save(tmp_path / f"{number}.json") for number, audit in enumerate(audits)]
    command = [sys.executable, "-c", CODE, *map(str, paths), str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["Comparison History", "True"]
    assert (tmp_path / "page.html").stat().st_size > 100_000
