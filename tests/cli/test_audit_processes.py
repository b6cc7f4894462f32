"""`rankwise audit` in two processes equals one process; an error in one process ends both with one line."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.auditing.same_audits import OF_THE_FIRST, compared
from typer.testing import CliRunner

from rankwise.auditing import Audit
from rankwise.cli import app

WORKER = Path(__file__).with_name("process_worker.py")
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 40
DATA = ["--text", "text.txt", "--tokens", "16", "--batch-size", "2", "--matrices", "flagged"]
ENDLESS = """
import os, signal, time, torch
from torch import nn

rank, ready = int(os.environ["RANK"]), os.environ["READY"]

def build():
    def batches():
        for number in range(400):
            if number == 6 + rank:
                open(ready + str(rank), "w").close()
                while not os.path.exists(ready + str(1 - rank)):
                    time.sleep(0.05)
                if rank == 0:
                    os.write(1, b"here" + bytes([10]))
                    open(ready, "w").close()
                elif os.environ["DIES"]:
                    while not os.path.exists(ready):
                        time.sleep(0.05)
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1 if number > 6 else 0)
            yield torch.randn(1, 9, 8)
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), batches()
"""
WAYS = {
    "shared": ["tiny", *DATA, "--sequences", "5"],
    "single": ["tiny", *DATA, "--sequences", "1"],
    "split": [f"{WORKER}:split", "--text", "text.txt"],
    "replicated": [f"{WORKER}:replicated", "--text", "text.txt"],
    "sharded": [f"{WORKER}:sharded", "--text", "text.txt"],
    "failing": [f"{WORKER}:failing"],
    "drawn": [f"{WORKER}:drawn"],
    "baseline": ["tiny", *DATA, "--sequences", "5", "--baseline-seeds", "2"],
    "compiled": [f"{WORKER}:compiled"],
    "several": ["tiny", "tiny", *DATA],
    "spread": ["tiny", *DATA, "--device-map", "auto"],
    "no_gpu": ["tiny", *DATA, "--device", "cuda"],
}


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal language model over bytes, a text and a factory."""
    path = tmp_path_factory.mktemp("processes")
    (path / "tiny").symlink_to(tiny)
    (path / "text.txt").write_text(TEXT, encoding="utf-8")
    (path / "endless.py").write_text(ENDLESS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, dict]]:
    """Return status, output and errors of each command, by process."""
    commands = {name: ["audit", *words, "--out", name] for name, words in WAYS.items()}
    (folder / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*LAUNCH, str(WORKER), str(folder)],
        capture_output=True, text=True, cwd=folder, env=environment, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


def alone(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Audit:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["audit", *WAYS[name], "--out", f"{name}-alone"])
    assert done.exit_code == 0, done.output
    return Audit.load(folder / f"{name}-alone")


def test_two_processes_find_the_same_as_one(told, folder, monkeypatch) -> None:
    whole, shared = alone(folder, "shared", monkeypatch), Audit.load(folder / "shared")
    assert compared(whole, shared, of_all=set()) == []
    assert not any(math.isnan(head.required_head_dim) for head in shared.heads)
    assert not any("required width" in note for note in shared.provenance.notes)
    assert (shared.provenance.audits, shared.provenance.sequences) == (2, 5)
    assert any(head.attention_map for head in whole.heads), "a head is to be flagged"
    for one, other in zip(whole.heads, shared.heads, strict=True):
        assert [getattr(one, name) for name in OF_THE_FIRST] == [
            getattr(other, name) for name in OF_THE_FIRST
        ]
    assert "sequences shared by 2 processes" in shared.provenance.notes
    assert "report: " in told[0]["shared"]["out"]
    assert told[1]["shared"] == {"status": 0, "out": "", "errors": ""}


def test_the_baseline_of_two_processes_equals_the_baseline_of_one(told, folder, monkeypatch) -> None:
    assert told[0]["baseline"]["status"] == 0, told[0]["baseline"]
    shared = Audit.load(folder / "baseline")
    assert compared(alone(folder, "baseline", monkeypatch), shared, of_all=set()) == []
    assert shared.baseline.seeds == [0, 1]
    assert shared.heads[0].baseline.band[2].pairs == 2 * 5


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_is_audited_uncompiled_in_two_processes(told, folder, monkeypatch) -> None:
    assert told[0]["compiled"]["status"] == 0, told[0]["compiled"]
    shared = Audit.load(folder / "compiled")
    assert compared(alone(folder, "compiled", monkeypatch), shared, of_all=set()) == []
    assert any("uncompiled" in note for note in shared.provenance.notes)


def test_a_process_without_sequences_adds_nothing(told, folder, monkeypatch) -> None:
    assert told[0]["single"]["status"] == 0, told[0]["single"]
    assert compared(alone(folder, "single", monkeypatch), Audit.load(folder / "single")) == []


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("split", "tensor or pipeline parallel plan: layers.0.self_attn.q_proj"),
        ("replicated", "got a DistributedDataParallel, which waits for all of them"),
        ("sharded", "got a FSDPModule, which waits for all of them"),
        ("failing", "process 1 of 2: batch 2: expected a batch, got OSError: no such shard"),
        ("drawn", "expected the same weights in all processes, got others in process 1"),
        ("several", "2 processes: expected an audit without several models"),
        ("spread", "2 processes: expected an audit without --device-map"),
        ("no_gpu", "rankwise: --device cuda:0: expected a device that torch sees, got only cpu"),
    ],
)
def test_an_error_is_printed_once_and_ends_both_processes(told, way, says) -> None:
    assert says in str(told[0][way]["status"])
    assert told[1][way] == {"status": told[1][way]["status"], "out": "", "errors": ""}
    assert told[1][way]["status"] in (0, 1)


def test_batches_before_a_failure_are_written(told, folder) -> None:
    kept = Audit.load(folder / "failing")
    assert not kept.complete
    assert kept.heads[0].sequences == 3  # 2 of the first process, 1 of the second


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.parametrize("ends", ["killed", "SIGINT", "SIGTERM"])
def test_a_process_that_is_killed_and_signals_lose_nothing(folder, ends, tmp_path) -> None:
    dies = "1" if ends == "killed" else ""
    running = subprocess.Popen(
        [*LAUNCH, "-m", "rankwise", "audit", str(folder / "endless.py") + ":build", "--out", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DIES": dies, "READY": str(tmp_path / "ready")},
    )  # fmt: skip
    try:
        while (line := running.stdout.readline()) != "here\n":
            assert line, "the processes have ended"
        if not dies:
            running.send_signal(signal.Signals[ends])
        out, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode != 0
    path = tmp_path / ("process-0.json" if dies else "audit.json")
    kept = Audit.load(path)
    assert not kept.complete
    assert kept.heads[0].sequences > 0
    assert (
        "process 0 of 2: expected all of them to the end" in out if dies else "rankwise: interrupted" in out
    )
