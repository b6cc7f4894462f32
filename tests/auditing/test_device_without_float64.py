"""Audits with importance and a baseline, λ-skips and compressions equal those on the CPU without float64."""

import subprocess
import sys


def test_a_device_without_float64_measures_what_the_cpu_measures() -> None:
    command = [sys.executable, "-m", "tests.support.no_float64"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    audits = ["states", "next tokens", "divergence", "function", "half-lives"]
    skips, compressions = ["post-norm", "averages"], ["heads", "width kv", "width kv"]
    assert done.stdout.split("\n")[:-1] == audits + skips + compressions
