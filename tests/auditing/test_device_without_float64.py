"""Audits with importance and a baseline, and λ-skips, on a device without float64 equal those on the CPU."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("checks", "names"),
    [
        ("audit", ["states", "next tokens", "divergence", "function", "half-lives"]),
        ("skips", ["post-norm", "averages"]),
    ],
)
def test_a_device_without_float64_measures_what_the_cpu_measures(checks: str, names: list[str]) -> None:
    command = [sys.executable, "-m", "tests.support.no_float64", checks]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[:-1] == names
