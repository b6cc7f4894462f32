"""Ctrl-C ends a command in one line with status 130, at whatever moment and however often it is pressed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankwise.__main__ import main
from rankwise.auditing import Audit
from rankwise.cli import main as run_command

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals")

MARKER = """
import os, sys
class Marker:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["MARK"]:
            os.write(1, b"here" + bytes([10]))
sys.meta_path.insert(0, Marker())
"""
"""A ``sitecustomize`` that tells when the import of a module begins."""
WAYS = {
    "module": ["-m", "rankwise"],
    "script": ["-c", "import re, sys; from rankwise.__main__ import main; sys.exit(main())"],
}
SLOW = """
import os, time, torch
from torch import nn

def build():
    def batches():
        yield torch.randn(1, 9, 8)
        os.write(1, b"here" + bytes([10]))
        for _ in range(600):
            time.sleep(0.1)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), batches()
"""
LINE = "rankwise: interrupted\n"
SPIN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def started(
    folder: Path, *arguments: str, way: str = "module", mark: str = "", ignored: bool = False
) -> subprocess.Popen[str]:
    """A command whose standard output says "here" where a signal is due."""
    (folder / "sitecustomize.py").write_text(MARKER)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, *WAYS[way], *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, bufsize=1,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "MARK": mark},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )  # fmt: skip


def pressed(process: subprocess.Popen[str], gaps: list[float]) -> tuple[int, str, str]:
    """Press Ctrl-C after "here" and each gap in seconds; return status, output and errors."""
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    for gap in gaps:
        time.sleep(gap)
        process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


@pytest.mark.parametrize(
    ("mark", "gaps", "way"),
    [
        ("rankwise.cli", [0.0], "script"),
        ("torch", [0.001] * 5, "module"),
        ("transformers", [0.1] * 5, "module"),
    ],
)
def test_ctrl_c_during_imports_ends_in_one_line(
    mark: str, gaps: list[float], way: str, tmp_path: Path
) -> None:
    status, _, errors = pressed(started(tmp_path, "audit", way=way, mark=mark), gaps)
    assert (status, errors) == (130, LINE)
    assert not (tmp_path / "rankwise-audit" / "audit.json").exists()


def test_ctrl_c_while_a_file_of_the_model_is_imported_leaves_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text('import os, time\nos.write(1, b"here" + bytes([10]))\ntime.sleep(60)\n')
    (tmp_path / "slow.py").write_text("def build():\n    import late\n")
    process = started(tmp_path, "audit", "slow.py:build", "--out", "new/folder")
    assert pressed(process, [0.05])[::2] == (130, LINE)
    assert not (tmp_path / "new").exists()


def test_ctrl_c_while_the_model_runs_writes_the_finished_batches(tmp_path: Path) -> None:
    """Signals within 0.25 s count as one press, so that no press cuts the writing short."""
    (tmp_path / "slow.py").write_text(SLOW)
    status, out, errors = pressed(started(tmp_path, "audit", "slow.py:build"), [0.05, 0.02, *[0.005] * 3])
    assert (status, errors) == (130, LINE)
    assert "INCOMPLETE" in out
    audit = Audit.load(tmp_path / "rankwise-audit")
    assert (audit.complete, audit.provenance.batches) == (False, 1)


def test_a_command_that_ignores_the_signal_continues(tmp_path: Path) -> None:
    process = started(tmp_path, "--version", mark="rankwise.cli", ignored=True)
    status, out, errors = pressed(process, [0.0])
    assert (status, errors) == (0, "")
    assert out == "0.1.0.dev0\n"


def test_the_demo_is_audited_and_threads_do_not_spin(tmp_path: Path) -> None:
    around = {name: value for name, value in os.environ.items() if name not in SPIN}
    done = subprocess.run(
        [sys.executable, "-m", "rankwise", "audit", "--sequences", "1", "--tokens", "64"],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=around | {"OMP_DISPLAY_ENV": "true"},
    )  # fmt: skip
    policies, _, errors = done.stderr.rpartition("OPENMP DISPLAY ENVIRONMENT END\n")
    assert {*re.findall(r"OMP_WAIT_POLICY\s*=\s*'(\w+)'", policies)} == {"PASSIVE"}
    assert errors.strip() == ""
    audit = Audit.load(tmp_path / "rankwise-audit")
    assert (len(audit.heads), len(audit.states), audit.complete) == (16, 5, True)
    assert audit.provenance.command.startswith("rankwise audit")


def test_an_error_for_users_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rankwise", "audit", "nowhere.py:f"])
    with pytest.raises(SystemExit, match=r"^rankwise: model nowhere\.py:f: expected a factory without.*$"):
        run_command()


@pytest.mark.parametrize("name", SPIN)
def test_a_policy_of_the_user_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in SPIN:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "active")
    monkeypatch.setattr("rankwise.cli.main", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    main()
    assert {variable: os.environ[variable] for variable in SPIN if variable in os.environ} == {name: "active"}
