"""Results that go past the cache: which do, and that they hold the same numbers."""

import numpy as np
import pytest
import torch
from numba import njit

from rankwise.ops import tssa
from rankwise.ops.tssa.cpu import bidirectional_back_loops, bidirectional_loops, causal_loops
from rankwise.ops.tssa.cpu.arrays import new
from rankwise.ops.tssa.cpu.streaming import LARGE, LINE, settle, stream, streams

HEADS, WIDTH = 4, 64
LONG = LARGE // (4 * HEADS * WIDTH) + 3  # tokens of a float32 result that is just large enough


@njit
def _streams(out):
    return streams(out)


@njit
def _copy(source, out):
    for t in range(len(out)):
        stream(source[t], out, t)
    settle()


def room(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> np.ndarray:
    return new(shape, dtype).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_new_tensors_begin_with_a_line_and_are_of_the_shape(dtype):
    for tokens in (1, 3, 1000, LONG):
        tensor = new((1, tokens, 2, 5), dtype)
        assert tensor.data_ptr() % LINE == 0
        assert (tensor.shape, tensor.dtype) == ((1, tokens, 2, 5), dtype)
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0


def test_only_large_results_whose_rows_fill_lines_go_past_the_cache():
    assert _streams(room((LONG, HEADS, WIDTH)))
    assert not _streams(room((LONG - 4, HEADS, WIDTH)))
    assert _streams(room((LONG // 2, HEADS, WIDTH), torch.float64))
    assert not _streams(room((LONG * 20, 3, 5)))  # rows of 60 bytes
    assert not _streams(room((LONG + 1, HEADS, WIDTH)).reshape(-1)[4:-252].reshape(LONG, HEADS, WIDTH))


@pytest.mark.parametrize(
    "loop",
    [causal_loops.output, bidirectional_loops.outputs, bidirectional_back_loops.tokens_back],
    ids=["causal", "bidirectional", "gradient"],
)
def test_loops_store_past_the_cache_and_then_settle(loop):
    """No result tells: a plain store holds the same numbers, and threads that are joined see them all."""
    w = torch.ones(1, 3, HEADS, WIDTH, requires_grad=True)
    for causal in (False, True):
        tssa(w, torch.ones(HEADS), causal).output.sum().backward()
    afresh = njit(loop.signatures[0], nogil=True)(loop.py_func)  # one from the cache does not show its code
    (code,) = afresh.inspect_llvm().values()
    assert "!nontemporal" in code
    assert "fence seq_cst" in code


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_arrive_whole(dtype):
    source = np.random.default_rng(0).standard_normal((5, 3, 16)).astype(dtype)
    out = room((7, 3, 16), torch.from_numpy(source).dtype)
    out[:] = 0
    _copy(source, out[:5])
    np.testing.assert_array_equal(out[:5], source)
    assert not out[5:].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_large_calls_agree_with_the_reference(causal, masked):
    g = torch.Generator().manual_seed(1)
    w = torch.randn(1, LONG, HEADS, WIDTH, generator=g, dtype=torch.float64, requires_grad=True)
    given = torch.randn(w.shape, generator=g, dtype=torch.float64)
    mask = torch.rand(1, LONG, generator=g) > 0.1 if masked else None
    found = []
    for impl in ("cpu", "reference"):
        output = tssa(w, torch.ones(HEADS, dtype=w.dtype), causal, mask=mask, impl=impl).output
        found += [output.detach(), *torch.autograd.grad(output, w, given)]
    for ours, theirs in zip(found[:2], found[2:], strict=True):  # 8,000 roundings of 1e-16, and cancellation
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11 * theirs.abs().max().item())


def test_a_result_past_the_cache_is_the_one_that_is_not():
    """Bit by bit: the first rows of a large call are those of the same tokens in a small one."""
    w = torch.randn(1, LONG, HEADS, WIDTH, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pieces are cut alike then
    try:
        large = tssa(w, torch.ones(HEADS), causal=True).output
        small = tssa(w[:, : LONG // 2], torch.ones(HEADS), causal=True).output
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(large[:, : LONG // 2], small)
