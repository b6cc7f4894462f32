"""Ctrl-C ends a command in one line with status 130, at whatever moment and however often it is pressed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankwise.auditing import Audit

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


@pytest.mark.parametrize(
    "gaps", [[0.05, 0.02], [0.05, *[0.005] * 4]], ids=["process and group", "five times"]
)
def test_ctrl_c_while_the_model_runs_writes_the_finished_batches(gaps: list[float], tmp_path: Path) -> None:
    """Signals within 0.25 s are one press, so that no press cuts the writing short."""
    (tmp_path / "slow.py").write_text(SLOW)
    status, out, errors = pressed(started(tmp_path, "audit", "slow.py:build"), gaps)
    assert (status, errors) == (130, LINE)
    assert "INCOMPLETE" in out
    audit = Audit.load(tmp_path / "rankwise-audit")
    assert (audit.complete, audit.provenance.batches) == (False, 1)


def test_a_command_that_ignores_the_signal_continues(tmp_path: Path) -> None:
    process = started(tmp_path, "--version", mark="rankwise.cli", ignored=True)
    status, out, errors = pressed(process, [0.0])
    assert (status, errors) == (0, "")
    assert out == "0.1.0.dev0\n"


def test_python_m_rankwise_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rankwise"]
    done = subprocess.run([*command, "audit", "nowhere.py:f"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("rankwise: model nowhere.py:f: expected a Python file")
    assert subprocess.run([*command, "no"], capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize(("own", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")])
def test_threads_of_the_command_do_not_spin_unless_the_user_says_so(own: dict[str, str], policy: str) -> None:
    around = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    done = subprocess.run(
        [sys.executable, "-m", "rankwise", "plan", "--tokens", "8", "--width", "16"],
        env=around | {"OMP_DISPLAY_ENV": "true"} | own, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.findall(r"OMP_WAIT_POLICY\s*=\s*'(\w+)'", done.stderr) == [policy], done.stderr
