"""An audit with importance and a baseline on a device without float64 equals an audit on the CPU."""

import subprocess
import sys


def test_a_device_without_float64_measures_what_the_cpu_measures() -> None:
    command = [sys.executable, "-m", "tests.support.no_float64", "audit"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[:-1] == ["states", "next tokens", "divergence", "function", "half-lives"]
