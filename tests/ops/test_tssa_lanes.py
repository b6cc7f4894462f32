"""Lines of channels in compiled loops: the numbers numpy finds, and no number touched beside a row."""

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from rankwise.ops.tssa.cpu.lanes import (
    LINE,
    address,
    at_least,
    fetch,
    lanes,
    load,
    narrower,
    store,
    total,
    zeros,
)
from rankwise.ops.tssa.cpu.rows import add_row, lasting, project_row
from rankwise.ops.tssa.cpu.streaming import settle

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])
GUARD = 123.0


@njit(error_model="numpy", forceinline=True)
def _formula_lines(x, y, low, out, k, count, line):
    while k + lanes(line) <= count:
        a, b = load(x, k, line), load(y, k, line)
        store(out, k, None, 2 * a * b - at_least(b, low) / (a + 3.0) + low)
        k += lanes(line)
    return k


@njit(error_model="numpy")
def _formula(x, y, low, out):
    a, b, end, line = address(x), address(y), address(out), zeros(address(x))
    k = _formula_lines(a, b, low, end, 0, len(x), line)
    k = _formula_lines(a, b, low, end, k, len(x), narrower(line))
    return _formula_lines(a, b, low, end, k, len(x), narrower(narrower(line)))


@njit
def _held(y, low, out):
    at, end, line = address(y), address(out), zeros(address(y))
    for k in range(0, len(y), lanes(line)):
        store(end, k, None, at_least(load(at, k, line), low))


@njit
def _sum(x):
    at, line, k = address(x), zeros(address(x)), 0
    out, rest = line, narrower(narrower(line))
    while k + lanes(line) <= len(x):
        out = out + load(at, k, line)
        k += lanes(line)
    while k < len(x):
        rest = rest + load(at, k, rest)
        k += 1
    return total(out) + total(rest)


@njit
def _copy_past(x, out):
    source, to, line = address(x), address(out), zeros(address(x))
    for k in range(0, len(x), lanes(line)):
        store(to, k, True, load(source, k, line))
    settle()


@njit
def _line_of(x):
    line = zeros(address(x))
    return lanes(line), lanes(narrower(line)), lanes(narrower(narrower(line)))


def numbers(count, dtype, seed=0):
    return np.random.default_rng(seed).uniform(-2, 2, count).astype(dtype)


@DTYPES
@pytest.mark.parametrize("count", [*range(18), 33, 48, 60, 64])
def test_a_row_of_any_width_is_what_numpy_finds_and_nothing_beside_it_is_written(count, dtype):
    x, y = numbers(count, dtype), numbers(count, dtype, 1)
    low = dtype(0.25)
    room = np.full(count + 40, GUARD, dtype)
    assert _formula(x, y, low, room[20 : 20 + count]) == count
    expected = 2 * x * y - np.maximum(y, low) / (x + dtype(3)) + low
    # four operations on numbers of at most 8 and 2, rounded in another order at most
    np.testing.assert_allclose(room[20 : 20 + count], expected, rtol=0, atol=40 * np.finfo(dtype).eps)
    assert (room[:20] == GUARD).all()
    assert (room[20 + count :] == GUARD).all()


@DTYPES
@pytest.mark.parametrize("count", [0, 1, 7, 16, 31, 64])
def test_a_sum_takes_every_number_once(count, dtype):
    assert _sum(np.arange(count, dtype=dtype)) == count * (count - 1) / 2


@njit(error_model="numpy")
def _rows(x, vector, sums, width):
    w, one = address(x), x[0] * 0 + 1
    add_row(w, 0, width, None, address(sums), 0, lasting(one))
    return project_row(w, 0, width, address(vector), 0)


@DTYPES
@pytest.mark.parametrize("width", [*range(1, 24), 63])
def test_what_lies_behind_a_row_is_neither_taken_up_nor_written(dtype, width):
    x, vector = (np.full(100, np.nan, dtype) for _ in range(2))
    x[:width], vector[:width] = numbers(width, dtype), numbers(width, dtype, 1)
    sums = np.full(100, GUARD, dtype)
    sums[:width] = 0
    found = _rows(x, vector, sums, width)
    # at most 63 terms of at most 8, each rounded three times on the way
    rounding = 63 * 8 * (width + 3) * np.finfo(dtype).eps
    assert abs(found - (x[:width] ** 2).astype(float) @ vector[:width].astype(float)) <= rounding
    np.testing.assert_allclose(sums[:width], x[:width] ** 2, rtol=2 * np.finfo(dtype).eps)
    assert (sums[width:] == GUARD).all()


@DTYPES
def test_nan_stays_where_a_lane_is_held_above_a_number(dtype):
    y = np.array([np.nan, np.inf, -np.inf, 0.0, 2.0, 1.0, -1.0, 3.0] * 4, dtype)
    out = np.empty_like(y)
    _held(y, dtype(1), out)
    np.testing.assert_array_equal(out, np.array([np.nan, np.inf, 1.0, 1.0, 2.0, 1.0, 1.0, 3.0] * 4, dtype))


@DTYPES
def test_lines_past_the_cache_arrive_whole(dtype):
    count = LINE // np.dtype(dtype).itemsize
    room = np.zeros(6 * count, dtype)
    skipped = -room.ctypes.data % LINE // room.itemsize
    out, x = room[skipped : skipped + 5 * count], numbers(4 * count, dtype)
    _copy_past(x, out[: 4 * count])
    np.testing.assert_array_equal(out[: 4 * count], x)
    assert not out[4 * count :].any()


def test_a_line_is_sixty_four_bytes_then_a_quarter_then_one_number():
    assert (_line_of(np.zeros(1, np.float32)), _line_of(np.zeros(1))) == ((16, 4, 1), (8, 2, 1))


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
        return total(load(address(x), 0, zeros(address(x))) + load(address(y), 0, zeros(address(y))))

    with pytest.raises(TypingError):
        mixed(np.zeros(16, np.float32), np.zeros(16))
