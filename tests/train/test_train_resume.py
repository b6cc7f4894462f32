"""A run that is killed and goes on ends with the bits of a run in one piece."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.train.tiny import pairs, tiny

from rankwise.train import train
from rankwise.train.checkpoints import whole_checkpoints

pytest.importorskip("accelerate")
LONG = {"steps": 60, "evaluation.every": 10, "model": "tost", "evaluation.metric": "accuracy"}
LONG |= {"monitor": True, "monitor_every": 10, "log_every": 7}
LONG |= {"model.options.dropout": 0.1}  # what is dropped depends on the random state that goes on


def test_killed_in_the_middle_and_resumed_is_the_same_to_the_bit(tmp_path: Path) -> None:
    out, command = tmp_path / "killed", [sys.executable, "-m", "rankwise", "train", "language"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        [*command, *pairs(tmp_path, **LONG), "--out", str(out)], env=environment, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 600
    while not (out / "checkpoint-20").exists():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < until, "no checkpoint in ten minutes"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)  # while checkpoint 20 is being written, mostly
    assert process.wait() == -signal.SIGKILL
    step = int(whole_checkpoints(out)[-1].name.split("-")[1])
    assert 10 <= step < 60
    recipe = tiny(tmp_path, **LONG)
    resumed = train(recipe, out, resume=True)
    straight = train(recipe, tmp_path / "straight")
    assert resumed["evaluations"] == straight["evaluations"]
    assert [row for row in resumed["curve"] if row[0] > step] == [r for r in straight["curve"] if r[0] > step]
    assert resumed["rank"] == straight["rank"], "audits before the kill as well"
    assert len(resumed["rank"]) == 7
    weights, others = (
        load_file(folder / "model" / "model.safetensors") for folder in (out, tmp_path / "straight")
    )
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
