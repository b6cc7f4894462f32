"""What loops do with a row of channels, line by line: sums of weighted squares, which may decay.

A row is an address and the index of its first number there. Loops sum in groups of `GROUP` tokens where the
tokens are still in the fastest cache, so that sums are loaded and stored once for all of them.
"""

from typing import no_type_check

from rankwise.ops.tssa.cpu.compiled import CHUNK, inlined
from rankwise.ops.tssa.cpu.lanes import fetch, lanes, load, narrower, store, total, zeros

GROUP = 4
AHEAD = 48
"""Lines to the one asked for, 3 KB (parts of lines: less): processors look ahead, but not past a page."""


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


apart = inlined(_apart, set())  # no product fused into it, or sums of w² differ in bits from loop to loop


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
def stream(w, i, line):
    """The line at w[i], of tokens that mostly come from memory one after the other."""
    if lanes(line) > 1:  # to ask for every number would take longer than to wait
        fetch(w, i + AHEAD * lanes(line))
    return load(w, i, line)


@inlined
@no_type_check
def _add_lines(w, i, k, width, weight, sums, j, factors, line):
    while k + lanes(line) <= width:
        before = load(sums, j + k, line)
        store(sums, j + k, None, add(stream(w, i + k, line), weight, before, factors))
        k += lanes(line)
    return k


@inlined
@no_type_check
def add_row(w, i, width, weight, sums, j, factors):
    """Add one token's weight · w² to sums that decay."""
    line = zeros(w)
    k = _add_lines(w, i, 0, width, weight, sums, j, factors, line)
    if k < width:
        k = _add_lines(w, i, k, width, weight, sums, j, factors, narrower(line))
        _add_lines(w, i, k, width, weight, sums, j, factors, narrower(narrower(line)))


@inlined
@no_type_check
def _add_group(w, i, step, k, width, first, second, third, fourth, sums, j, factors, line):
    while k + lanes(line) <= width:
        for token in range(GROUP // 2):
            fetch(w, i + k + (GROUP + token) * step)
        added = add(load(w, i + k, line), first, load(sums, j + k, line), factors)
        added = add(load(w, i + k + step, line), second, added, factors)
        added = add(load(w, i + k + 2 * step, line), third, added, factors)
        added = add(load(w, i + k + 3 * step, line), fourth, added, factors)
        store(sums, j + k, None, added)
        k += lanes(line)
    return k


@inlined
@no_type_check
def add_rows(w, i, step, width, first, second, third, fourth, sums, j, factors):
    """The same for a group of tokens, ``step`` numbers apart, each with its weight.

    They lie in the cache, so memory would stand still: half of the next group is asked for meanwhile.
    """
    line = zeros(w)
    k = _add_group(w, i, step, 0, width, first, second, third, fourth, sums, j, factors, line)
    if k < width:
        part, one = narrower(line), narrower(narrower(line))
        k = _add_group(w, i, step, k, width, first, second, third, fourth, sums, j, factors, part)
        _add_group(w, i, step, k, width, first, second, third, fourth, sums, j, factors, one)


@inlined
@no_type_check
def _project_lines(w, i, k, width, vector, j, line):
    out = line
    while k + lanes(line) <= width:
        x = stream(w, i + k, line)
        out = out + x * x * load(vector, j + k, line)
        k += lanes(line)
    return k, total(out)


@inlined
@no_type_check
def project_row(w, i, width, vector, j):
    """Σ_k vector_k w_k²."""
    line = zeros(w)
    k, out = _project_lines(w, i, 0, width, vector, j, line)
    if k < width:
        k, part = _project_lines(w, i, k, width, vector, j, narrower(line))
        k, rest = _project_lines(w, i, k, width, vector, j, narrower(narrower(line)))
        out += part + rest
    return out
