"""Every measure at sizes of number from 2⁻⁹⁰⁰ to 2⁹⁰⁰.

Matrices are small whole numbers times powers of two, which float64 holds exactly.
Results for numbers of one size must equal those for size 1; results for mixed sizes are compared with
decimals of 1,400 digits.
"""

import math
from collections.abc import Callable
from decimal import Context, Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measures.measure_cases import FUNCTIONS, close

import rankwise.measures as rm
from rankwise.measures import MEASURES

EXACT = Context(prec=1400, Emin=-(10**6), Emax=10**6)  # squares of sums have 1,100 digits
SHORT = Context(prec=40, Emin=-(10**6), Emax=10**6)
RTOL = 1e-12  # a few hundred roundings of 1e-16 in matrices of at most 3×3


def first_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that measures one matrix or sequence, by its largest singular value if several."""
    return lambda x: FUNCTIONS[name](x[None]).flatten()[0]


OF_DEGREE = {
    degree: [
        first_of(name)
        for name, measure in MEASURES.items()
        if measure.degree == degree and measure.of != "heads"
    ]
    for degree in (0, 1)
}
"""Measures by what they say of themselves."""
SCALELESS = (
    *OF_DEGREE[0],
    lambda x: rm.rank_summary(x).effective_rank,
    lambda x: rm.rank_summary(x, exact=True).stable_rank,
    lambda x: rm.head_distance(torch.stack([x, x.flip(0), x.flip(1)])),
    lambda x: rm.relative_update(x[None], x.flip(0)[None]),
    lambda x: rm.estimate_spectrum(x, probes=8, steps=4).effective_rank.value,
    lambda x: rm.estimate_spectrum(x, probes=8, steps=4).stable_rank.value,
)
SCALED = (
    *OF_DEGREE[1],
    lambda x: rm.rank_summary(x).sigma_max,
    lambda x: rm.absolute_spread(x[None])[0],
    lambda x: rm.mean_norm(x[:1]),
    lambda x: rm.estimate_spectrum(x, probes=8, steps=4).sigma_max.value,
)
ELSEWHERE = {
    "compute_measures": "test_rows_and_tokens_of_many_sizes",
    "variational_rate": "eps has a size: test_the_rate_of_groups_at_any_size",
    "required_head_dim": "the tolerance has a size: test_required_width.py",
    "logit_moments": "no measure",
}
"""Functions of `rankwise.measures` in neither list, with the reason."""
whole_matrices = st.lists(
    st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=2, max_size=3
).filter(lambda rows: any(map(any, rows)))
exponents = st.one_of(st.sampled_from([-890, -600, -540, 500, 540, 890]), st.integers(-890, 890))


@given(rows=whole_matrices, power=exponents)
def test_one_size_of_number_is_as_good_as_another(rows, power):
    base = torch.tensor(rows, dtype=torch.float64)
    x = torch.ldexp(torch.ldexp(base, torch.tensor(power // 2)), torch.tensor(power - power // 2))
    for measure in SCALELESS:
        close(measure(x), measure(base), rtol=RTOL, atol=RTOL)
    for measure in SCALED:
        wanted = SHORT.multiply(Decimal(measure(base).item()), SHORT.power(2, power))
        # the answer is rounded to the grid of float64, 5e-324, and may leave it above
        close(measure(x), float(wanted), rtol=RTOL, atol=5e-324)


def test_the_lists_above_miss_no_function():
    """The code of a lambda names the functions that it calls."""
    here = {name for f in (*SCALELESS, *SCALED) for name in f.__code__.co_names}
    lost = set(FUNCTIONS) - set(MEASURES) - here - set(ELSEWHERE)
    assert not lost, f"{sorted(lost)}: mark a measure by `@measure`, enter any other function above"
    assert set(ELSEWHERE) <= set(FUNCTIONS) - set(MEASURES)
    assert {measure.degree for measure in MEASURES.values()} == {0, 1, None}


@pytest.mark.parametrize("name", [name for name, measure in MEASURES.items() if measure.degree is None])
def test_a_measure_of_no_degree_has_a_size_of_its_own(name):
    """So that None is no way past the law: its numbers change with the unit, by no power of it."""
    x = torch.tensor([[3.0, 1.0, 0.0], [1.0, 0.02, 0.0], [0.0, 0.0, 0.5]], dtype=torch.float64)
    small, one, large = (float(first_of(name)(x * size)) for size in (1e-2, 1.0, 1e2))
    assert len({small, one, large}) > 1
    assert not math.isclose(small * large, one * one, rel_tol=1e-9)


def matrix(signs: list[list[int]], powers: list[list[int]]) -> torch.Tensor:
    return torch.tensor(
        [[math.ldexp(s, p) for s, p in zip(*pair, strict=True)] for pair in zip(signs, powers, strict=True)],
        dtype=torch.float64,
    )


@st.composite
def mixed_matrices(draw: st.DrawFn) -> torch.Tensor:
    """Powers of each entry, each row or each column of their own."""
    signs = draw(whole_matrices)
    low = draw(st.integers(-890, 890))
    power = st.integers(low, draw(st.integers(low, 890)))
    kind = draw(st.sampled_from(("entries", "rows", "columns")))
    if kind == "entries":
        return matrix(signs, [[draw(power) for _ in row] for row in signs])
    if kind == "rows":
        return matrix(signs, [[draw(power)] * 3 for _ in signs])
    return matrix(signs, [[draw(power) for _ in range(3)]] * len(signs))


def decimals(x: torch.Tensor) -> list[list[Decimal]]:
    return [[Decimal(v) for v in row] for row in x.tolist()]


def norm(rows: list[list[Decimal]]) -> Decimal:
    return SHORT.sqrt(sum((v * v for row in rows for v in row), Decimal(0)))


def centred(rows: list[list[Decimal]]) -> list[list[Decimal]]:
    """Rows times their number, less their sum: no division is rounded."""
    total = [sum(column) for column in zip(*rows, strict=True)]
    return [[len(rows) * v - t for v, t in zip(row, total, strict=True)] for row in rows]


def over(part: Decimal, whole: Decimal) -> float:
    return float(SHORT.divide(part, whole)) if whole else 0.0


def shares(row: list[Decimal]) -> list[Decimal]:
    return [SHORT.divide(abs(v), sum(map(abs, row))) for v in row]


@settings(max_examples=20)
@given(x=mixed_matrices())
def test_rows_and_tokens_of_many_sizes(x):
    with localcontext(EXACT):
        m = decimals(x)
        count, size, live = len(m), norm(m), [shares(row) for row in m if any(row)]
        entropy = [-sum(p * SHORT.ln(p) for p in row if p) for row in live]
        mass = [sum(column) / len(live) for column in zip(*live, strict=True)]
        apart = norm(centred(m)) / count
        units = [[SHORT.divide(v, norm([row])) for v in row] for row in m if any(row)]
        pairs = len(units) * (len(units) - 1)
        alike = sum((sum(column) ** 2 for column in zip(*units, strict=True)), Decimal(-len(units)))
        wanted = {
            "row_entropy": sum(map(float, entropy)) / len(live),
            "first_token_mass": float(mass[0]),
            "max_token_mass": float(max(mass)),
            "row_spread": over(apart, size),
        }
        if count == 3:
            off = norm([[v - (i == j) for j, v in enumerate(row)] for i, row in enumerate(m)])
            wanted["identity_distance"] = over(off, SHORT.sqrt(size * size + 3))
        together = rm.compute_measures(wanted, x[None])
        for name, number in wanted.items():
            # an entropy and a cosine are sums that cancel: right to roundings of 1, not of the sum
            atol = RTOL if name == "row_entropy" else 5e-324
            close(getattr(rm, name)(x), number, rtol=RTOL, atol=atol)
            close(together[name][0], number, rtol=RTOL, atol=atol)
        close(rm.token_norm(x[None])[0], float(size), rtol=RTOL, atol=5e-324)
        close(rm.absolute_spread(x[None])[0], float(apart), rtol=RTOL, atol=5e-324)
        close(rm.spread(x[None])[0], over(apart, size), rtol=RTOL, atol=5e-324)
        if pairs:
            close(rm.mean_cosine(x[None])[0], float(alike / pairs), rtol=0, atol=RTOL)


@pytest.mark.parametrize("power", [-540, -300, 300, 520, 1000])
def test_the_rate_of_groups_at_any_size(power):
    """Equal tokens w of one head: m = w², exactly, so K/2·log(1 + w²)."""
    w, share = torch.full((1, 1, 4, 3), 2.0**power, dtype=torch.float64), torch.ones(1, 1, 4).double()
    squared = SHORT.power(4, power)
    wanted = float(3 * SHORT.ln(1 + squared) / 2) if power > 0 else float(3 * squared / 2)
    close(rm.variational_rate(w, share)[0, 0], wanted, rtol=RTOL, atol=5e-324)
