"""Arguments that reference ranks and bounds refuse."""

import math

import pytest
import torch
from tests.unchecked import unchecked

from rankwise.errors import RankwiseError
from rankwise.theory import (
    min_lambda_for_spread,
    min_lambda_paper,
    random_head_rank,
    rank_barrier,
    skip_bound,
    uniform_rank,
)

ROWS, BOOLEAN = torch.ones(3, 2), torch.ones(4, 4).bool()


def refused(match, call):
    with unchecked(), pytest.raises(RankwiseError, match=match):
        call()


def simulated(tokens=8, **options):
    random_head_rank(tokens, 4, **options)


def interpolated(tokens=8, **options):
    random_head_rank(tokens, 4, **options, interpolate=True)


def barrier(tokens=8, **options):
    rank_barrier(tokens, **options)


def uniform(tokens=8, **options):
    uniform_rank(tokens, **options)


EVERY = (simulated, interpolated, uniform)
RANDOM = (simulated, interpolated)
MASKED = "as many as tokens, under the causal mask"


@pytest.mark.parametrize(
    ("functions", "options", "match"),
    [
        *(
            (functions, {name: size}, f"`{name}`: expected a whole number of at least 1, got {size}")
            for name, functions in (("tokens", (*EVERY, barrier)), ("sources", EVERY), ("trials", RANDOM))
            for size in (0, -1, True)
        ),
        (EVERY, {"window": 0, "mask": "causal"}, "`window`: expected a whole number of at least 1"),
        *(
            (RANDOM, {"temperature": wrong}, "`temperature`: expected a number in")
            for wrong in (-1.0, math.nan)
        ),
        *(
            ((*RANDOM, uniform), {"delta": wrong}, "`delta`: expected a number in")
            for wrong in (0.0, -1.0, math.inf, math.nan)
        ),
        ((*EVERY, barrier), {"mask": "casual"}, r"`mask`: expected .* got 'casual'\. Did you mean causal\?"),
        (EVERY, {"mask": "causal", "sources": 9}, f"`sources`: expected 8, {MASKED}"),
        (RANDOM, {"window": 3, "sources": 9}, f"`sources`: expected 8, {MASKED} or"),
        *(
            ((barrier,), {"tokens": 4, "mask": mask}, "`mask`: expected torch.bool of shape")
            for mask in (torch.zeros(4, 4), BOOLEAN[:3], BOOLEAN[0])
        ),
        ((simulated,), {"tokens": 4097}, r"`tokens`: expected at most [\d,]+ entries .* rank_barrier"),
        ((simulated,), {"tokens": 16385, "temperature": 0.0}, r"`tokens`: expected at most [\d,]+ entries"),
    ],
    ids=lambda value: " ".join(f.__name__ for f in value) if isinstance(value, tuple) else str(value),
)
def test_reference_ranks_refuse_arguments_without_meaning(functions, options, match):
    for function in functions:
        refused(match, lambda function=function: function(**options))


@pytest.mark.parametrize("width", [0, -1, True])
def test_random_heads_have_a_width(width):
    refused("`head_dim`: expected a whole number of at least 1", lambda: random_head_rank(8, width))


@pytest.mark.parametrize(
    ("rows", "mask", "match"),
    [
        (torch.ones(3), None, r"rows: expected floating-point numbers of shape \(…, T, D\), got \(3,\)"),
        (ROWS.long(), None, "got .*int64.*float"),
        ([[1.0]], None, "got list"),
        (ROWS, torch.ones(3), r"mask of rows: expected torch\.bool of shape \(3,\)"),
        (ROWS, torch.ones(2, dtype=torch.bool), r"of shape \(2,\)"),
    ],
)
def test_bounds_refuse_tensors_that_are_not_rows(rows, mask, match):
    for norm in ("none", "layer", "rms"):
        refused(match, lambda norm=norm: skip_bound(rows, rows, 1.0, mask, norm))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan])
def test_shares_outside_the_open_interval_are_refused(share):
    for call in (
        lambda: min_lambda_paper(ROWS, torch.eye(3), torch.eye(2), share),
        lambda: min_lambda_for_spread(ROWS, ROWS, share),
        lambda: min_lambda_for_spread(ROWS, ROWS, share, norm="layer"),
    ):
        refused(r"`keep_spread`: expected a number in \(0, 1\)", call)


def test_a_share_of_the_norm_and_an_unknown_norm_are_refused():
    refused(
        "`relative`: expected no norm",
        lambda: min_lambda_for_spread(ROWS, ROWS, 0.5, norm="layer", relative=True),
    )
    refused("`norm`: expected one of none, layer, rms", lambda: skip_bound(ROWS, ROWS, 1.0, norm="batch"))
    refused(
        "`norm`: expected one of none, layer, rms",
        lambda: min_lambda_for_spread(ROWS, ROWS, 0.5, norm="batch"),
    )
