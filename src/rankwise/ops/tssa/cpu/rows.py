"""What loops do with a row of channels, line by line: sums of weighted squares, which may decay.

A row is an address and the index of its first number there. Loops sum in groups of `GROUP` tokens where the
tokens are still in the fastest cache, so that sums are loaded and stored once for all of them.
"""

from typing import no_type_check

from rankwise.ops.tssa.cpu.compiled import CHUNK, inlined
from rankwise.ops.tssa.cpu.lanes import fetch, lanes, load, store, total, zeros

GROUP = 4


@inlined
@no_type_check
def factors(power, decays, age, h):
    """What sums of a head shrink by: None for nothing, otherwise λ, what it lost when rounded, and λ^age."""
    return decays, power[1, h], power[CHUNK + 1, h], power[age, h]


@inlined
@no_type_check
def lasting(one):
    """The factors of sums that do not decay."""
    return None, one, one, one


@no_type_check
def _kept(x, factors):
    """X λ."""
    decays, rounded, lost, _ = factors
    return x if decays is None else x * rounded + x * lost


kept = inlined(_kept, {"contract"})  # nothing reordered: x (λ + lost) would be x λ again


@no_type_check
def _apart(x, y):
    """X + y."""
    return x + y


apart = inlined(_apart, set())  # no product fused into it: sums of w² are the same bits in whatever loop


@inlined
@no_type_check
def older(x, factors):
    """X λ^age."""
    return x if factors[0] is None else x * factors[3]


@inlined
@no_type_check
def add(x, weight, sums, factors):
    """Sums that decay, and weight · x²; a weight of None is one."""
    before = kept(sums, factors)
    return apart(before, x * x) if weight is None else before + weight * (x * x)


@inlined
@no_type_check
def _add_line(w, i, weight, sums, j, left, factors):
    store(sums, j, left, None, add(load(w, i, left), weight, load(sums, j, left), factors))


@inlined
@no_type_check
def add_row(w, i, width, weight, sums, j, factors):
    """Add one token's weight · w² to sums that decay."""
    k = 0
    while k + lanes(w) <= width:
        _add_line(w, i + k, weight, sums, j + k, None, factors)
        k += lanes(w)
    if k < width:
        _add_line(w, i + k, weight, sums, j + k, width - k, factors)


@inlined
@no_type_check
def _add_lines(w, i, step, first, second, third, fourth, sums, j, left, factors):
    added = add(load(w, i, left), first, load(sums, j, left), factors)
    added = add(load(w, i + step, left), second, added, factors)
    added = add(load(w, i + 2 * step, left), third, added, factors)
    added = add(load(w, i + 3 * step, left), fourth, added, factors)
    store(sums, j, left, None, added)


@inlined
@no_type_check
def add_rows(w, i, step, width, first, second, third, fourth, sums, j, factors):
    """The same for a group of tokens, ``step`` numbers apart, each with its weight.

    They lie in the cache, so memory would stand still: half of the next group is asked for meanwhile.
    """
    k = 0
    while k + lanes(w) <= width:
        for token in range(GROUP // 2):
            fetch(w, i + k + (GROUP + token) * step)
        _add_lines(w, i + k, step, first, second, third, fourth, sums, j + k, None, factors)
        k += lanes(w)
    if k < width:
        _add_lines(w, i + k, step, first, second, third, fourth, sums, j + k, width - k, factors)


@inlined
@no_type_check
def _project_line(w, i, vector, j, left):
    x = load(w, i, left)
    return x * x * load(vector, j, left)


@inlined
@no_type_check
def project_row(w, i, width, vector, j):
    """Σ_k vector_k w_k²."""
    out, k = zeros(w), 0
    while k + lanes(w) <= width:
        out = out + _project_line(w, i + k, vector, j + k, None)
        k += lanes(w)
    if k < width:
        out = out + _project_line(w, i + k, vector, j + k, width - k)
    return total(out)
