"""Models wrapped for many devices: watched without a trace, and audited as one process audits them."""

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
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found, by the way the model was wrapped."""
    folder = tmp_path_factory.mktemp("monitored")
    done = subprocess.run(
        [*LAUNCH, str(WORKER), str(folder)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.mark.parametrize("way", WAYS)
def test_a_training_is_the_same_bits_with_and_without_a_monitor(told, way) -> None:
    for process in told:
        assert process[way]["same_bits"]
        # float32 sums of two halves of a batch, two steps at a learning rate of 1
        assert process[way]["from_alone"] < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_a_wrapped_model_is_audited_as_the_model_itself(told, way) -> None:
    alone = told[0]["whole"]
    for process in told:
        found = process[way]
        assert len(found["watched"]) == 3
        for audited, expected in zip(found["watched"], alone["watched"], strict=True):
            # weights of these differ by 1e-5 after training
            assert audited == pytest.approx(expected, rel=1e-4)
        for head, expected in zip(found["audit"], alone["audit"], strict=True):
            assert head[0] == expected[0] == "layers.0"
            assert head[1:] == pytest.approx(expected[1:], rel=1e-4)


def test_fsdp1_is_refused_with_what_to_do_instead(told) -> None:
    for process in told:
        assert "got one wrapped by FSDP1" in process["fsdp1"]["error"]
        assert "Shard it by `torch.distributed.fsdp.fully_shard`" in process["fsdp1"]["error"]


def test_all_processes_stop_where_the_first_does(told) -> None:
    assert [process["stops"] for process in told] == [["NONFINITE", None]] * 2
