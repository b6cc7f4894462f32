"""Models wrapped for several devices train the same bits with a monitor and have the same audits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
WORKER = Path(__file__).with_name("monitor_worker.py")
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WAYS = ["ddp", "fsdp2", "device_map"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of two processes, by the way the model was wrapped."""
    folder = tmp_path_factory.mktemp("monitored")
    done = subprocess.run(
        [*LAUNCH, str(WORKER), str(folder)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.mark.parametrize("way", WAYS)
def test_training_is_bit_identical_with_a_monitor(results, way) -> None:
    for process in results:
        assert process[way]["same_bits"]
        # float32 sums of two halves of a batch, two steps at a learning rate of 1
        assert process[way]["from_alone"] < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_wrapping_does_not_change_the_audit(results, way) -> None:
    alone = results[0]["whole"]
    for process in results:
        found = process[way]
        assert len(found["watched"]) == 3
        for audited, expected in zip(found["watched"], alone["watched"], strict=True):
            # weights differ by 1e-5 after training
            assert audited == pytest.approx(expected, rel=1e-4)
        for head, expected in zip(found["audit"], alone["audit"], strict=True):
            assert head[0] == expected[0] == "layers.0"
            assert head[1:] == pytest.approx(expected[1:], rel=1e-4)


def test_fsdp1_is_refused_with_a_fix(results) -> None:
    for process in results:
        assert "wrapped by FSDP1" in process["fsdp1"]["error"]
        assert "Shard it by `torch.distributed.fsdp.fully_shard`" in process["fsdp1"]["error"]


def test_the_first_process_decides_to_stop(results) -> None:
    assert [process["stops"] for process in results] == [["NONFINITE", None]] * 2
