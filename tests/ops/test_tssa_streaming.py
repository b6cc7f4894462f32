"""Results that go past the cache: which do, and that they hold the same numbers."""

import numpy as np
import pytest
import torch
from numba import njit

from rankwise.ops import tssa
from rankwise.ops.tssa.cpu import bidirectional_back_loops, bidirectional_loops, causal_loops
from rankwise.ops.tssa.cpu.arrays import new, powers
from rankwise.ops.tssa.cpu.lanes import LINE
from rankwise.ops.tssa.cpu.streaming import LARGE, streams

HEADS, WIDTH = 4, 64
LONG = LARGE // (4 * HEADS * WIDTH) + 3  # tokens of a float32 result that is just large enough


@njit
def _streams(out):
    return streams(out)


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
    assert not _streams(room((LONG * 20, 16, 15)))  # a head's 60 bytes, though a token's are whole lines
    assert not _streams(room((LONG + 1, HEADS, WIDTH)).reshape(-1)[4:-252].reshape(LONG, HEADS, WIDTH))


ROWS, TOKENS, SUMS = (np.ones(shape, np.float32) for shape in ((3, HEADS, WIDTH), (3, HEADS), (HEADS, WIDTH)))
MASK, PIECE = np.zeros(0, bool), (np.array([0]), np.array([3]), 0)
LOOPS = {
    "causal": (
        causal_loops.output,
        (ROWS, TOKENS, MASK, *powers(None, HEADS, torch.float32), 0, 3, 1e-8),
        (np.zeros((HEADS, WIDTH)), np.zeros((HEADS, 1))),
    ),
    "bidirectional": (bidirectional_loops.outputs, (ROWS, TOKENS, SUMS, MASK, *PIECE), ()),
    "gradient": (
        bidirectional_back_loops.tokens_back,
        (ROWS, ROWS, TOKENS, TOKENS, SUMS, SUMS, SUMS, SUMS, MASK, *PIECE),
        (),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_store_past_the_cache_and_then_settle(name):
    """No result tells: a plain store holds the same numbers, and threads that are joined see them all."""
    loop, read, sums = LOOPS[name]
    afresh = njit(nogil=True)(loop.py_func)  # one from numba's cache does not show its code
    afresh(*read, *sums, np.empty_like(ROWS))
    (code,) = afresh.inspect_llvm().values()
    assert "!nontemporal" in code
    assert "fence seq_cst" in code


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
