"""Lines of channels in compiled loops: the numbers numpy finds, and no number touched beside a row."""

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from rankwise.ops.tssa.cpu.lanes import LINE, address, at_least, fetch, lanes, load, store, total, zeros
from rankwise.ops.tssa.cpu.streaming import settle

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])
GUARD = 123.0


@njit(error_model="numpy")
def _formula(x, y, low, out):
    to, at, end = address(x), address(y), address(out)
    k = 0
    while k + lanes(to) <= len(x):
        a, b = load(to, k, None), load(at, k, None)
        store(end, k, None, None, 2 * a * b - at_least(b, low) / (a + 3.0) + low)
        k += lanes(to)
    if k < len(x):
        left = len(x) - k
        a, b = load(to, k, left), load(at, k, left)
        store(end, k, left, None, 2 * a * b - at_least(b, low) / (a + 3.0) + low)


@njit
def _held(y, low, out):
    at, end = address(y), address(out)
    for k in range(0, len(y), lanes(at)):
        store(end, k, len(y) - k, None, at_least(load(at, k, len(y) - k), low))


@njit
def _sum(x):
    at, out, k = address(x), zeros(address(x)), 0
    while k + lanes(at) <= len(x):
        out = out + load(at, k, None)
        k += lanes(at)
    return total(out + load(at, k, len(x) - k)) if k < len(x) else total(out)


@njit
def _copy_past(x, out):
    source, to = address(x), address(out)
    for k in range(0, len(x), lanes(source)):
        store(to, k, None, True, load(source, k, None))
    settle()


@njit
def _line_of(x):
    return lanes(address(x))


def numbers(count, dtype, seed=0):
    return np.random.default_rng(seed).uniform(-2, 2, count).astype(dtype)


@DTYPES
@pytest.mark.parametrize("count", [*range(18), 33, 48, 60, 64])
def test_a_row_of_any_width_is_what_numpy_finds_and_nothing_beside_it_is_written(count, dtype):
    x, y = numbers(count, dtype), numbers(count, dtype, 1)
    low = dtype(0.25)
    room = np.full(count + 40, GUARD, dtype)
    _formula(x, y, low, room[20 : 20 + count])
    expected = 2 * x * y - np.maximum(y, low) / (x + dtype(3)) + low
    # four operations on numbers of at most 8 and 2, rounded in another order at most
    np.testing.assert_allclose(room[20 : 20 + count], expected, rtol=0, atol=40 * np.finfo(dtype).eps)
    assert (room[:20] == GUARD).all()
    assert (room[20 + count :] == GUARD).all()


@DTYPES
@pytest.mark.parametrize("count", [0, 1, 7, 16, 31, 64])
def test_a_sum_takes_every_number_once(count, dtype):
    assert _sum(np.arange(count, dtype=dtype)) == count * (count - 1) / 2


@DTYPES
def test_the_end_of_a_row_is_not_read_past(dtype):
    """What lies behind may be NaN; a masked load gives zeros for it."""
    room = np.full(64, np.nan, dtype)
    room[:5] = 1
    assert _sum(room[:5]) == 5


@DTYPES
def test_nan_stays_where_a_lane_is_held_above_a_number(dtype):
    y = np.array([np.nan, np.inf, -np.inf, 0.0, 2.0] * 4, dtype)
    out = np.empty_like(y)
    _held(y, dtype(1), out)
    np.testing.assert_array_equal(out, np.array([np.nan, np.inf, 1.0, 1.0, 2.0] * 4, dtype))


@DTYPES
def test_lines_past_the_cache_arrive_whole(dtype):
    count = LINE // np.dtype(dtype).itemsize
    room = np.zeros(6 * count, dtype)
    skipped = -room.ctypes.data % LINE // room.itemsize
    out, x = room[skipped : skipped + 5 * count], numbers(4 * count, dtype)
    _copy_past(x, out[: 4 * count])
    np.testing.assert_array_equal(out[: 4 * count], x)
    assert not out[4 * count :].any()


def test_a_line_is_sixty_four_bytes():
    assert (_line_of(np.zeros(1, np.float32)), _line_of(np.zeros(1))) == (16, 8)


def test_asking_for_a_line_outside_an_array_is_harmless():
    @njit
    def ask(x):
        for far in (0, len(x), 1 << 40, -(1 << 40)):
            fetch(address(x), far)

    ask(np.zeros(16))
    (code,) = ask.inspect_llvm().values()
    assert "llvm.prefetch" in code


def test_an_array_out_of_order_has_no_address():
    with pytest.raises(TypingError, match="in order"):
        _line_of(np.zeros((4, 4)).T[:2])


def test_lines_of_two_kinds_do_not_mix():
    """Float32 and float64 lines have other numbers of lanes."""

    @njit
    def mixed(x, y):
        return total(load(address(x), 0, None) + load(address(y), 0, None))

    with pytest.raises(TypingError):
        mixed(np.zeros(16, np.float32), np.zeros(16))
