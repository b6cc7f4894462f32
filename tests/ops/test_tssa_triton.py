"""The Triton kernels: in Triton's interpreter on a CPU, for real with --device cuda."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("triton_suite.py")


def test_triton_suite(device):
    pytest.importorskip("triton")  # there are systems it is not made for
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if device.type != "cuda":
        environment["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(SUITE),
        f"--device={device}",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_every_kernel_compiles_for_a_gpu_that_is_not_there():
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SUITE.with_name("triton_compile.py")), "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled ") == 15
