"""Several processes: caches that they share, and forks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 3
LOOP = """
import sys
import numba, numpy as np
from rankwise.ops.cpu_chunks import Loop

def twice(x, out):
    for i in range(len(x)):
        out[i] = FACTOR * x[i] + len(x)

def fresh():
    return Loop(twice)

def right(loop, dtype):
    x, out = np.arange(1, 8, dtype=dtype), np.zeros(7, dtype)
    loop.of(x, out)(x, out)
    return bool((out == FACTOR * x + 7).all())
"""
RACER = """
import random, time
from numba.core.caching import IndexDataCacheFile
from loop import *

def late(step):
    def call(*given):
        time.sleep(0.05 * random.random())
        return step(*given)
    return call

for name in ("_save_index", "_save_data"):
    setattr(IndexDataCacheFile, name, late(getattr(IndexDataCacheFile, name)))
dtypes = [np.float32, np.float64][:: int(sys.argv[1])]
for line in sys.stdin:
    folder, dtypes_now = line.split()
    numba.config.CACHE_DIR = folder
    chosen = dtypes[:1] if dtypes_now == "own" else dtypes
    print(all([right(fresh(), dtype) for dtype in chosen]), flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "loop.py").write_text("FACTOR = 2\n" + LOOP)
    return tmp_path


def start(folder: Path, code: str, *given: str) -> subprocess.Popen:
    (folder / "run.py").write_text(code)
    command = [sys.executable, str(folder / "run.py"), *given]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_that_compile_different_signatures_at_once_hand_each_other_no_wrong_code(folder):
    """Each saves a little late, so that nearly every round is one where they overlap."""
    racers = [start(folder, RACER, step) for step in ("1", "-1")]
    for turn in range(ROUNDS):
        for stage in ("own", "both"):
            for racer in racers:
                racer.stdin.write(f"{folder / str(turn)} {stage}\n")
                racer.stdin.flush()
            assert [racer.stdout.readline() for racer in racers] == ["True\n"] * 2, (turn, stage)
    for racer in racers:
        racer.communicate(timeout=60)


FORKED = """
import os, signal, sys, torch
from rankwise.errors import InputError
from rankwise.ops import tssa

def results(w, bias):
    x = w.detach().requires_grad_()
    y = tssa(x, torch.ones(4), True, bias=bias).output
    return [y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))]

torch.set_num_threads(2)
ws = [torch.randn(1, 9000, 4, 16, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
bias = torch.zeros(4, 9000)
wanted = [results(w, bias) for w in ws]
child = os.fork()
if child == 0:
    signal.alarm(100)
    for w in ws:
        try:
            results(w, bias)
        except InputError as error:
            print(error, flush=True)
    torch.set_num_threads(1)
    for w, own in zip(ws, wanted):
        torch.testing.assert_close(results(w, bias), own)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

class Calls(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return [torch.equal(*pair) for pair in zip(results(ws[i % 2], bias), wanted[i % 2])]
torch.set_num_threads(1)  # as workers have: sums of other pieces are rounded otherwise
wanted = [results(w, bias) for w in ws]
torch.set_num_threads(2)
results(ws[0], bias)  # so that there are threads again that a fork does not have
options = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 100}
print(list(torch.utils.data.DataLoader(Calls(), None, **options)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' torch has another OpenMP")
def test_a_process_forked_after_a_gradient_is_right_or_refuses(folder, monkeypatch):
    """Threads of torch's OpenMP are not in the fork, and what needs them would wait for ever.

    First a fork by hand, then the workers of a DataLoader, which have one thread each.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    done = start(folder, FORKED).communicate(timeout=300)[0]
    *refused, status, loaded = done.splitlines()
    assert loaded == f"{[[True, True]] * 4}"
    assert status == "7"
    assert len(refused) == 2
    assert all("forked process" in line and "torch.set_num_threads(1)" in line for line in refused)
