"""Audits with importance and a baseline, λ-skips and compressions equal those on the CPU without float64."""

import subprocess
import sys

import pytest
import torch

from rankwise._internals.linalg import float64_device
from rankwise.errors import InputError


def test_a_device_without_float64_measures_the_same_numbers_as_the_cpu() -> None:
    command = [sys.executable, "-m", "tests.support.no_float64"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    audits = ["states", "next tokens", "divergence", "function", "half-lives"]
    skips, compressions = ["post-norm", "averages"], ["heads width kv", "width kv"]
    assert done.stdout.split("\n")[:-1] == audits + skips + compressions


def test_float64_stays_on_a_device_that_has_it_unless_the_cpu_is_requested(monkeypatch) -> None:
    """The device "meta" has float64."""
    meta, cpu = torch.device("meta"), torch.device("cpu")
    for wanted, device in (("auto", meta), ("cpu", cpu)):
        monkeypatch.setenv("RANKWISE_FLOAT64", wanted)
        assert (float64_device(meta), float64_device(cpu)) == (device, cpu)
    monkeypatch.setenv("RANKWISE_FLOAT64", "gpu")
    with pytest.raises(InputError, match="RANKWISE_FLOAT64: expected one of auto, cpu, got 'gpu'"):
        float64_device(meta)
