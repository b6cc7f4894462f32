"""The CPU kernels against the reference, in float64: outputs, states and every gradient."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tssa_cases import Case, errors, outputs, outputs_and_gradients

from rankwise.ops.tssa.cpu import arrays, head_loops, threads

ROUNDING = 1e-12  # float64's 2.2e-16 times a few thousand additions


@st.composite
def cases(draw):
    causal = draw(st.booleans())
    tokens = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 130]))
    membership = draw(st.sampled_from(["softmax", "uniform"]))
    packed = draw(st.booleans())
    batch = 1 if packed else draw(st.integers(1, 3))
    cuts = (
        tuple(sorted([0, draw(st.integers(0, tokens)), draw(st.integers(0, tokens)), tokens]))
        if packed
        else None
    )
    return Case(
        shape=(batch, tokens, draw(st.integers(1, 4)), draw(st.sampled_from([1, 5, 16, 48]))),
        causal=causal,
        masked=draw(st.booleans()),
        decayed=causal and draw(st.booleans()),
        stated=causal and draw(st.booleans()),
        biased=causal and membership == "softmax" and draw(st.booleans()),
        cuts=cuts,
        membership=membership,
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_outputs_states_and_gradients_are_those_of_the_reference(case):
    got, wanted = outputs_and_gradients(case, "cpu"), outputs_and_gradients(case, "reference")
    assert max(errors(got, wanted).values()) < ROUNDING


@pytest.fixture(params=[2, 3], ids=["two threads", "three threads"])
def small_pieces(monkeypatch, request):
    """Sequences cut into pieces of two or three chunks, for two threads and for more; gives how many."""
    monkeypatch.setattr(arrays, "PIECE", 96)
    monkeypatch.setattr(arrays, "CACHED", 160 * 3 * 5)
    monkeypatch.setattr(threads, "SMALL", 0)
    arrays._even_runs.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
    arrays._even_runs.cache_clear()


@pytest.mark.parametrize("cuts", [None, (0, 0, 30, 330, 700)], ids=["rows", "packed"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("decayed", [False, True], ids=["plain", "decayed"])
@pytest.mark.parametrize("stated", [False, True], ids=["fresh", "stated"])
def test_pieces_of_a_sequence_meet_as_if_they_were_one(small_pieces, stated, decayed, masked, cuts):
    shape = (5 - small_pieces if cuts is None else 1, 700, 3, 5)  # rows that do not go evenly into threads
    case = Case(
        shape=shape, causal=True, masked=masked, decayed=decayed, stated=stated, biased=stated, cuts=cuts
    )
    assert (
        max(errors(outputs_and_gradients(case, "cpu"), outputs_and_gradients(case, "reference")).values())
        < ROUNDING
    )
    if not (stated or decayed):
        case.options["causal"] = False
        got, wanted = outputs_and_gradients(case, "cpu"), outputs_and_gradients(case, "reference")
        assert max(errors(got, wanted).values()) < ROUNDING


def test_a_failure_on_another_thread_reaches_the_caller_on_either_pool(monkeypatch):
    def fail(low: int, high: int) -> None:
        raise IndexError("within the work")

    for forked in (False, True):
        monkeypatch.setattr(threads, "_forked", forked)
        with pytest.raises(IndexError, match="within the work"):
            threads.spread(fail, 8, 2)
        assert not threads._jobs  # they would keep all arrays of the call


@pytest.mark.parametrize("forked", [False, True], ids=["torch's threads", "our own"])
def test_every_task_is_done_once(monkeypatch, forked):
    monkeypatch.setattr(threads, "_forked", forked)
    done = []
    threads.spread(lambda low, high: done.extend(range(low, high)), 37, 3)
    assert sorted(done) == list(range(37))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' torch has other OpenMP runtimes")
def test_torch_lends_its_threads():
    assert threads._torch_threads() is not None


WIDTHS = [1, 5, 23, 48, 60, 63, 128, 256]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_every_head_width(width, causal):
    case = Case(shape=(1, 70, 2, width), causal=causal, seed=width)
    got, wanted = outputs_and_gradients(case, "cpu"), outputs_and_gradients(case, "reference")
    assert max(errors(got, wanted).values()) < ROUNDING


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_threads_change_nothing_but_the_order_of_sums(causal):
    case = Case(shape=(1, 5000, 5, 24), causal=causal, decayed=causal)
    assert case.w.numel() >= threads.SMALL
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = outputs_and_gradients(case, "cpu")
        torch.set_num_threads(3)
        three = outputs_and_gradients(case, "cpu")
    finally:
        torch.set_num_threads(before)
    assert max(errors(three, one).values()) < ROUNDING


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_any_strides(causal):
    case = Case(shape=(2, 20, 3, 8), causal=causal)
    straight = outputs(case.run("cpu"))
    case.w = case.w.transpose(1, 3).contiguous().transpose(1, 3)
    assert not case.w.is_contiguous()
    turned = outputs(case.run("cpu"))
    assert all(torch.equal(turned[name], x) for name, x in straight.items())


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_kernels_write_every_number_they_return(causal, monkeypatch):
    case = Case(shape=(2, 70, 3, 5), causal=causal, masked=True)
    wanted = outputs_and_gradients(case, "cpu")
    real = torch.empty, torch.empty_like

    def poisoned(make):
        def call(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(torch.nan) if out.is_floating_point() else out

        return call

    monkeypatch.setattr(torch, "empty", poisoned(real[0]))
    monkeypatch.setattr(torch, "empty_like", poisoned(real[1]))

    def full_of_nan(make):
        def call(*args, **kwargs):
            out = make(*args, **kwargs)
            if np.issubdtype(out.dtype, np.floating):
                out.fill(np.nan)
            return out

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(np, name, full_of_nan(getattr(np, name)))
    got = outputs_and_gradients(case, "cpu")
    assert max(errors(got, wanted).values()) == 0


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_forked_process_has_threads_of_its_own(causal):
    case = Case(shape=(1, 5000, 5, 24), causal=causal)
    assert case.w.numel() >= threads.SMALL
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wanted = case.run("cpu").output
        context = torch.multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=lambda: queue.put(case.run("cpu").output.numpy()))
        child.start()
        got = queue.get(timeout=120)
        child.join(20)
    finally:
        child.kill()
        torch.set_num_threads(torch_threads)
    assert child.exitcode == 0
    assert torch.equal(torch.from_numpy(got), wanted)


FORKED = """
import os, signal, torch
from rankwise.ops import tssa
from rankwise.ops.tssa.cpu import threads

torch.set_num_threads(2)
torch.randn(2000, 2000).exp()  # torch's threads begin, and have no part in what the child does
w, temperature = torch.ones(1, 5000, 5, 24), torch.ones(5)
assert w.numel() >= threads.SMALL
child = os.fork()
if child == 0:
    signal.alarm(120)
    tssa(w, temperature, causal=True)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' torch has other OpenMP runtimes")
def test_so_has_one_forked_before_the_first_call():
    """In a process of its own, which has not called before; a child waiting for lost threads is ended."""
    command = [sys.executable, "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "7", done.stderr


def test_exponentials_of_the_loops_are_those_of_float64():
    x = -np.linspace(0, 87, 200_001, dtype=np.float32)
    for dtype, ulps in ((np.float32, 2), (np.float64, 1)):
        row = x.astype(dtype)
        wanted = np.exp(x.astype(np.float64))
        head_loops.exponentials(row)
        assert (np.abs(row - wanted) <= ulps * np.finfo(dtype).eps * wanted).all()
        edges = np.array([0, -100, -1e30, -np.inf, np.nan], dtype)
        head_loops.exponentials(edges)
        assert edges[0] == 1
        assert edges[2:4].tolist() == [0, 0]
        assert np.isnan(edges[4])
