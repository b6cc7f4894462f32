"""Models wrapped for several devices train the same bits with a monitor and have the same audits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
WORKER = Path(__file__).with_name("monitor_worker.py")
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WAYS = ["ddp", "fsdp2", "device_map"]


def test_wrapped_models_train_the_same_bits_with_a_monitor_and_have_the_same_audits(tmp_path: Path) -> None:
    """In two processes, by each way to wrap the model."""
    done = subprocess.run(
        [*LAUNCH, str(WORKER), str(tmp_path)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    alone = results[0]["whole"]
    for process in results:
        for way in WAYS:
            found = process[way]
            assert found["same_bits"], way
            # float32 sums of two halves of a batch, two steps at a learning rate of 1
            assert found["from_alone"] < 1e-5, way
            assert len(found["watched"]) == 3
            for audited, expected in zip(found["watched"], alone["watched"], strict=True):
                # weights differ by 1e-5 after training
                assert audited == pytest.approx(expected, rel=1e-4)
            for head, expected in zip(found["audit"], alone["audit"], strict=True):
                assert head[0] == expected[0] == "layers.0"
                assert head[1:] == pytest.approx(expected[1:], rel=1e-4)
        assert "wrapped by FSDP1" in process["fsdp1"]["error"]
        assert "Shard it by `torch.distributed.fsdp.fully_shard`" in process["fsdp1"]["error"]
        # the first process decides to stop
        assert process["stops"] == ["NONFINITE", None]
        assert process["limits"] == ["LARGEST_LOGIT", None]
