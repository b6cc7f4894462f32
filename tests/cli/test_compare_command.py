"""`rankwise compare`: changes from the first audit to the second, on the console and in a file."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.support.documents import comparison_document
from torch import nn
from typer.testing import CliRunner

import rankwise as rw
from rankwise.auditing import Audit, compare
from rankwise.cli import app
from rankwise.errors import InputError
from rankwise.report import print_document


@pytest.fixture
def audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Audit, Audit]:
    """Return audits of a layer with weak and with strong queries, saved as weak.json and strong.json."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(1, 12, 8)
    for name in ("weak", "strong"):
        rw.audit(layer, [x]).save(f"{name}.json")
        with torch.no_grad():
            layer.self_attn.in_proj_weight[:8] *= 30
    return Audit.load("weak.json"), Audit.load("strong.json")


def test_changes_are_printed_and_written(audits: tuple[Audit, Audit], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "weak.json", "strong.json", "--out", "changes.json"])
    assert result.exit_code == 0, result.output
    before, after = audits
    wanted = compare(before, after)
    assert wanted != compare(after, before)
    assert (tmp_path / "changes.json").read_text() == wanted.model_dump_json(indent=1) + "\n"
    console = Console(file=io.StringIO(), width=120)
    print_document(comparison_document(wanted), console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert result.output == f"{told}comparison: {tmp_path / 'changes.json'}\n"


def test_a_model_that_computes_the_same_has_no_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3).eval(), torch.randn(4, 24, 16)
    rw.audit(model, [x]).save("before.json")
    with torch.no_grad():
        for one in model.layers:  # queries and keys in another basis: equal logits up to rounding
            basis = torch.block_diag(*(torch.linalg.qr(torch.randn(8, 8)).Q for _ in range(2)))
            for start in (0, 16):
                one.self_attn.in_proj_weight[start : start + 16] = (
                    basis @ one.self_attn.in_proj_weight[start : start + 16]
                )
    rw.audit(model, [x]).save("after.json")
    result = CliRunner().invoke(app, ["compare", "before.json", "after.json"])
    assert result.exit_code == 0, result.output
    assert "0 numbers of heads and token states changed" in " ".join(result.output.split())
    assert "differences below rounding are left out" in " ".join(result.output.split())
    assert "Changes by layer" not in result.output
    assert "Largest changes" not in result.output


def test_files_of_an_audit_are_not_overwritten(audits: tuple[Audit, Audit]) -> None:
    Path("other").mkdir()
    audits[0].save("other/audit.json")
    audits[0].to_html("other/index.html")
    for out in ("other/audit.json", "other/index.html", "weak.json"):
        before = Path(out).read_bytes()
        result = CliRunner().invoke(app, ["compare", "weak.json", "strong.json", "--out", out])
        assert isinstance(result.exception, InputError)
        assert "Choose another name" in str(result.exception)
        assert Path(out).read_bytes() == before


def test_audits_of_a_folder_are_in_the_order_of_time_without_failed_runs(
    audits: tuple[Audit, Audit],
) -> None:
    audit, _ = audits
    for at, name in enumerate(("small", "medium", "large", "failed")):
        origin = audit.provenance.model_copy(update={"created": f"2026-01-01T00:00:0{at}"})
        changed = audit.model_copy(update={"provenance": origin, "complete": name != "failed"})
        changed.save(f"run/{name}/audit.json")
    result = CliRunner().invoke(app, ["compare", "run", "--out", "run.csv"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "rankwise: run/failed is left out: it is incomplete\n"
    names = [line.split(",")[1] for line in Path("run.csv").read_text().splitlines()[1:]]
    assert list(dict.fromkeys(names)) == ["small", "medium", "large"]


def test_the_files_of_a_page_of_several_audits_are_not_audits(audits: tuple[Audit, Audit]) -> None:
    """DIR/* of the shell names them too."""
    for name, audit in zip("abc", (*audits, audits[0]), strict=True):
        audit.save(f"run/{name}/audit.json")
    for name in ("history.csv", "index.html"):
        Path("run", name).write_text("a page")
    result = CliRunner().invoke(app, ["compare", *map(str, sorted(Path("run").iterdir()))])
    assert result.exit_code == 0, result.output
