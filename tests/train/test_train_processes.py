"""Two processes that share each batch end where one process ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.train.tiny import pairs, tiny

from rankwise.train import train

pytest.importorskip("accelerate")
GIVEN = {"model": "softmax", "batch": 4, "steps": 3, "monitor": True, "monitor_every": 3}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    one = train(tiny(tmp_path, **GIVEN), tmp_path / "one")
    command = ["train", "language", *pairs(tmp_path, **GIVEN), "--out", str(tmp_path / "two")]
    port = str(20_000 + os.getpid() % 20_000)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "rankwise", *command],
            env=os.environ
            | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in "01"
    ]
    told = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "wrote" in told[0]
    assert told[1] == ""
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert two["provenance"]["hardware"]["processes"] == 2
    assert [row[0] for row in two["evaluations"]] == [3]
    # float32 sums in another order, over three steps of a learning rate of 3e-3
    assert two["scores"]["loss"] == pytest.approx(one["scores"]["loss"], abs=1e-4)
    assert list(two["rank"]) == ["0", "3"]
    for step, numbers in one["rank"].items():
        # weights that differ by 1e-6 after three steps; numbers are written with five digits
        assert two["rank"][step] == pytest.approx(numbers, abs=1e-3)
