"""The CPU kernels against the reference, in float64: outputs, states and every gradient."""

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tssa_cases import Case, errors, outputs, outputs_and_gradients

from rankwise.ops import cpu_chunks, tssa
from rankwise.ops.cpu_chunks import Loop

causalities = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
ROUNDING = 1e-12  # float64's 2.2e-16 times a few thousand additions


@st.composite
def cases(draw):
    causal = draw(st.booleans())
    tokens = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 130]))
    return Case(
        shape=(
            draw(st.integers(1, 3)),
            tokens,
            draw(st.integers(1, 4)),
            draw(st.sampled_from([1, 5, 16, 48])),
        ),
        causal=causal,
        masked=draw(st.booleans()),
        decayed=causal and draw(st.booleans()),
        stated=causal and draw(st.booleans()),
        biased=causal and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_outputs_states_and_gradients_equal_the_reference(case):
    # At a first token the score of a head is K times its temperature, and far from the others a membership p
    # magnifies rounding by 1/p in the gradient of the temperature. These scores differ by a few units.
    case.temperature /= case.shape[-1]
    got, wanted = outputs_and_gradients(case, "cpu"), outputs_and_gradients(case, "reference")
    assert max(errors(got, wanted).values()) < ROUNDING


def with_threads(monkeypatch, count, case):
    """Return outputs and gradients of a case with a number of threads, also if it is small."""
    monkeypatch.setattr(cpu_chunks, "TWO_THREADS_FROM", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return outputs_and_gradients(case, "cpu")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"masked": True},
        {"causal": True, "masked": True},
        {"causal": True, "stated": True, "biased": True},
        {"causal": True, "stated": True, "decayed": True, "masked": True},
    ],
    ids=str,
)
def test_results_equal_the_reference_and_have_equal_bits_with_any_number_of_threads(options, monkeypatch):
    case = Case((3, 700, 3, 5), **options)  # heads and chunks that do not go evenly into threads
    if case.masked:
        case.options["mask"][1] = False  # a row without tokens
    single = with_threads(monkeypatch, 1, case)
    assert max(errors(single, outputs_and_gradients(case, "reference")).values()) < ROUNDING
    for count in (2, 2, 3):
        again = with_threads(monkeypatch, count, case)
        assert all(torch.equal(again[name], x) for name, x in single.items())


@causalities
def test_a_padded_row_has_the_bits_of_the_row_alone(causal):
    case = Case((1, 150, 3, 5), causal=causal, decayed=causal)
    alone = case.run("cpu")
    mask = torch.rand(1, 300, generator=torch.Generator().manual_seed(1)).argsort() < 150
    w = torch.full((1, 300, 3, 5), torch.nan, dtype=torch.float64)
    w[mask] = case.w[0]
    padded = tssa(w, case.temperature, impl="cpu", **(case.options | {"mask": mask}))
    assert torch.equal(padded.output[mask], alone.output[0])
    assert torch.equal(padded.membership[mask], alone.membership[0])
    assert not causal or all(map(torch.equal, padded.state, alone.state))


class Recorded(Loop):
    """Takes the place of a compiled loop: notes the tasks that threads do and who does them."""

    def __init__(self, fail=None):
        self.done, self.by, self.fail = [], set(), fail

    def of(self, *given):
        return self.note

    def note(self, low, high):
        self.by.add(threading.get_ident())
        if self.fail is not None:
            raise self.fail
        self.done.extend(range(low, high))


@pytest.mark.parametrize("failure", [IndexError("within the work"), KeyboardInterrupt()], ids=repr)
def test_a_failure_on_any_thread_reaches_the_caller(failure):
    with pytest.raises(type(failure)):
        Recorded(failure).run((), 8, 2)


def test_threads_that_are_busy_with_another_call_hold_nobody_up():
    """The only helper waits for the end of this test."""
    over, begun = threading.Event(), threading.Event()
    held = cpu_chunks.thread_pool(os.getpid(), 1).submit(lambda: begun.set() or over.wait(60))
    begun.wait(60)
    loop = Recorded()
    loop.run((), 9, 2)
    over.set()
    assert held.result()
    assert sorted(loop.done) == list(range(9))
    assert loop.by == {threading.get_ident()}


@causalities
def test_any_strides(causal):
    case = Case(shape=(2, 20, 3, 8), causal=causal)
    straight = outputs(case.run("cpu"))
    case.w = case.w.transpose(1, 3).contiguous().transpose(1, 3)
    assert not case.w.is_contiguous()
    turned = outputs(case.run("cpu"))
    assert all(torch.equal(turned[name], x) for name, x in straight.items())


@causalities
def test_kernels_write_every_number_they_return(causal, monkeypatch):
    case = Case(shape=(2, 70, 3, 5), causal=causal, masked=True)
    wanted = outputs_and_gradients(case, "cpu")

    def full_of_nan(make):
        def call(*args, **kwargs):
            out = make(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                return out.fill_(torch.nan) if out.is_floating_point() else out
            if np.issubdtype(out.dtype, np.floating):
                out.fill(np.nan)
            return out

        return call

    for module in (torch, np):
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(module, name, full_of_nan(getattr(module, name)))
    got = outputs_and_gradients(case, "cpu")
    assert max(errors(got, wanted).values()) == 0


def test_exponentials_of_the_loops_are_as_exact_as_float64():
    x = -np.linspace(0, 87, 200_001, dtype=np.float32)
    for dtype, ulps in ((np.float32, 2), (np.float64, 1)):
        row = x.astype(dtype)
        wanted = np.exp(x.astype(np.float64))
        cpu_chunks.exponentials(row)
        assert (np.abs(row - wanted) <= ulps * np.finfo(dtype).eps * wanted).all()
        edges = np.array([0, -100, -1e30, -np.inf, np.nan], dtype)
        cpu_chunks.exponentials(edges)
        assert edges[0] == 1
        assert edges[2:4].tolist() == [0, 0]
        assert np.isnan(edges[4])
