"""Audits with importance and a baseline, and λ-skips, on a device without float64 equal those on the CPU."""

import subprocess
import sys


def test_a_device_without_float64_measures_what_the_cpu_measures() -> None:
    command = [sys.executable, "-m", "tests.support.no_float64", "audit", "skips"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    audits, skips = (
        ["states", "next tokens", "divergence", "function", "half-lives"],
        ["post-norm", "averages"],
    )
    assert done.stdout.split("\n")[:-1] == audits + skips
