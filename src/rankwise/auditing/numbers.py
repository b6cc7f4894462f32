"""From a captured mixer to numbers: exact where the matrix is small, matrix-free where it is not."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankwise import measures
from rankwise._internals.threads import map_threads
from rankwise.auditing.masks import Pattern, barrier_of, patterns_of
from rankwise.auditing.measures import HEAD_MEASURES, NULLS
from rankwise.auditing.mixer_kinds import mixer_kind
from rankwise.auditing.nulls import BAND, random_rank, thresholds, uniform_null
from rankwise.auditing.records import HeadRecord
from rankwise.errors import InputError, did_you_mean
from rankwise.operators import DenseMixing, DiagonalMixing, IndexedMixing, MixingOperator, SoftmaxMixing
from rankwise.tracing import MixerSite

Floats = NDArray[np.float64]

Method = Literal["auto", "exact", "estimate"]
"""How ranks are taken; "auto" is exact while one float64 matrix takes at most `EXACT_BYTES`."""

EXACT_BYTES = 2**29
"""Of one float64 matrix: T = S = 8,192. Decomposing it takes four times as much, 2 GiB, which a machine of
8 GB has beside a model; for twice the tokens it would not. Memory is the limit, not speed: exact ranks are
the faster ones here (docs/how-to/long-contexts.md).
"""
PROBES, STEPS, SEED = 16, 64, 0
"""Of every estimate."""
MATRIX_BYTES = 2**28
"""Float64 matrices formed at once, or one where that takes more: small heads and sequences go together."""
SPECTRUM_POINTS = 64
"""Singular values kept of a head, for its picture."""

FUNCTIONS = {measure.name: measure.function for measure in HEAD_MEASURES if measure.function}
AVERAGED = (
    *("tokens", "sources", "full_rank", "rank_low", "rank_high", *NULLS),
    *(measure.name for measure in HEAD_MEASURES if not measure.late),
)
"""Fields of a record that are means over sequences."""
ERRORS = ("numerical_rank", "relative_rank", "effective_rank", "stable_rank", "sigma_max")
"""Ranks, which have a standard error if they are estimated, in the order of `RankEstimates`."""
WAYS = ("estimated", "fallback")
"""1 where the ranks of a head were estimated; where the exact count was too close and the SVD decided."""
MAP_TOKENS = 1024
"""Tokens of a membership map."""
RANKS_AT = ("numerical_rank", "rank_low", "rank_high", "random_rank", "uniform_rank")
"""Fields that have a value at each threshold of the band."""


def column_at(name: str, step: int) -> str:
    """Name the column that holds a field at one threshold of the band; at δ itself, that of the field.

    Args:
        name: of the field.
        step: of the threshold.
    """
    return name if BAND[step] == 1 else f"{name} at threshold {step}"


COLUMNS = (
    *AVERAGED,
    *(f"stderr of {name}" for name in ERRORS),
    *(column_at(name, step) for step, factor in enumerate(BAND) if factor != 1 for name in RANKS_AT),
    *WAYS,
)
"""Of the numbers of a head on one sequence."""
Columns = dict[str, Tensor | float]
"""(B, H), or one number for all, by name."""


class Measured(NamedTuple):
    """The heads of one mixer on one sequence or window."""

    values: Floats
    """(H, columns)."""
    distances: Floats
    """(H, H)."""
    patterns: list[Pattern]
    """Of each head."""
    spectra: list[list[float]]
    """Empty where they were not computed."""
    maps: list[list[float]]
    """Memberships of the tokens in each head, where the mixer has such."""
    peaks: list[int]
    """The column with the largest mean share of a row of each head, padding not counted; −1 for none."""


def check_method(method: str) -> Method:
    """Refuse a method there is not.

    Args:
        method: its name.

    Raises:
        InputError: naming the methods there are.
    """
    known = get_args(Method)
    if method not in known:
        raise InputError(
            "`method`",
            expected=" or ".join(repr(name) for name in known),
            got=repr(method),
            fix=did_you_mean(str(method), known),
        )
    return method  # type: ignore[return-value]


def method_of(heads: Sequence[HeadRecord]) -> str:
    """Say in words how the ranks of an audit were taken."""
    all_of = sum(head.sequences for head in heads)
    estimated = sum(head.estimated for head in heads)
    if not estimated:
        return "exact"
    how = f"estimated with {PROBES} probes, {STEPS} steps, seed {SEED}"
    return how if estimated == all_of else f"{all_of - estimated} of {all_of} spectra exact, the others {how}"


def measured(site: MixerSite, delta: float, method: Method) -> Iterator[Measured]:
    """For each sequence (or window) of a mixer: numbers, distances, mask and spectra of its heads."""
    operator = site.operator
    batch, heads, tokens, sources = operator.shape
    whole = bool(site.valid_tokens.all()) and bool(site.valid_sources.all())
    if whole and not estimates(operator, method):
        at_once = max(1, MATRIX_BYTES // (8 * heads * tokens * sources))
        for start in range(0, batch, at_once):
            index = slice(start, start + at_once)
            yield from _of_one_length(site, index, operator[index], delta, method)
        return
    for at in range(batch):  # sequences of their own lengths
        rows, columns = site.valid_tokens[at], site.valid_sources[at]
        if not (rows.any() and columns.any()):
            yield _nothing(heads)
            continue
        sequence = operator[at : at + 1]
        sequence = sequence if whole else IndexedMixing(sequence, rows, columns)
        yield from _of_one_length(site, slice(at, at + 1), sequence, delta, method)


def estimates(operator: MixingOperator, method: Method) -> bool:
    """Whether the ranks of matrices of this size are estimated."""
    return method == "estimate" or (method == "auto" and _matrix_bytes(operator) > EXACT_BYTES)


def _matrix_bytes(operator: MixingOperator) -> int:
    return 8 * math.prod(operator.shape[-2:])


def _of_one_length(
    site: MixerSite, index: slice, operator: MixingOperator, delta: float, method: Method
) -> Iterator[Measured]:
    batch, heads, tokens, sources = operator.shape
    take = _estimated if estimates(operator, method) else _exact
    rows_of, ranks, spectra = take(operator, delta)
    mean, rate, memberships = _memberships(site, index)
    found = measures.evaluate({*FUNCTIONS.values(), "head_distance", "max_token_index"}, rows_of)
    patterns = patterns_of(operator)
    columns: Columns = {"tokens": float(tokens), "sources": float(sources)}
    columns |= ranks | {"full_rank": float(min(tokens, sources)), "membership": mean, "coding_rate": rate}
    columns |= {name: found[function] for name, function in FUNCTIONS.items()}
    if mixer_kind(site.kind).rows_are_means:
        columns |= _nulls(operator, patterns, delta)
    values = np.stack([_numbers(columns.get(name, math.nan), (batch, heads)) for name in COLUMNS], axis=-1)
    distances = found["head_distance"].cpu().numpy()
    peaks = found["max_token_index"].tolist()
    for at in range(batch):
        shown = [] if spectra is None else _rounded(spectra[at])
        yield Measured(values[at], distances[at], patterns[at], shown, _map(memberships, at), peaks[at])


def _memberships(site: MixerSite, index: slice) -> tuple[Tensor | float, Tensor | float, Tensor | None]:
    """Their mean, their rate, and those of each token."""
    heads = site.operator[index]
    if not isinstance(heads, DiagonalMixing):
        return math.nan, math.nan, None
    rows, share = site.valid_tokens[index], heads.diagonal.double()
    real = rows[:, None].to(share.device)
    mean = share.masked_fill(~real, 0).sum(-1) / real.sum(-1)
    rate: Tensor | float = math.nan
    if site.projection is not None:
        rate = measures.variational_rate(site.projection[index], heads.diagonal, rows)
    return mean, rate, share.masked_fill(~real, math.nan)


def _exact(operator: MixingOperator, delta: float) -> tuple[MixingOperator, Columns, Tensor | None]:
    together = MATRIX_BYTES // _matrix_bytes(operator)
    whole = together >= math.prod(operator.shape[:2])
    rows_of = DenseMixing(_formed(operator)) if whole else operator
    ranks = _ranks(rows_of, delta, operator.shape[1] if whole else max(1, together))
    sigma = ranks.singular_values
    kept = torch.linspace(0, sigma.shape[-1] - 1, min(SPECTRUM_POINTS, sigma.shape[-1])).round().long()
    columns = _rank_columns(ranks.estimates((delta, *thresholds(delta)))) | {"fallback": ranks.used_svd}
    return rows_of, columns, sigma[..., kept.to(sigma.device)].cpu()


def _formed(operator: MixingOperator) -> Tensor:
    """The matrices, on a CPU those of several sequences beside each other."""
    if operator.device.type != "cpu" or operator.shape[0] < 2:
        return operator.dense(torch.float64)
    matrices = torch.empty(operator.shape, dtype=torch.float64)

    def form(at: int) -> None:
        matrices[at : at + 1] = operator[at : at + 1].dense(torch.float64)

    map_threads(form, range(operator.shape[0]))
    return matrices


def _ranks(operator: MixingOperator, delta: float, together: int) -> measures.RankSummary:
    """Ranks of all heads, so many heads at once."""
    parts = [
        measures.rank_summary(
            operator[:, start : start + together], delta, also_at=thresholds(delta), relative=True
        )
        for start in range(0, operator.shape[1], together)
    ]
    return measures.RankSummary(*(torch.cat(numbers, dim=1) for numbers in zip(*parts, strict=True)))


def _estimated(operator: MixingOperator, delta: float) -> tuple[MixingOperator, Columns, Tensor | None]:
    found = measures.estimate_spectrum(operator, PROBES, STEPS, SEED)
    columns = _rank_columns(found.estimates((delta, *thresholds(delta)))) | {"estimated": 1.0}
    return operator, columns, None


def _rank_columns(ranks: measures.RankEstimates) -> Columns:
    """Return the columns of all ranks, which are at δ first and then at each threshold of the band."""
    numerical, *band = ranks.numerical
    named = dict(zip(ERRORS, (numerical, *ranks[1:]), strict=True))
    columns: Columns = {name: estimate.value for name, estimate in named.items()}
    columns |= {f"stderr of {name}": estimate.stderr for name, estimate in named.items()}
    columns |= {"estimated": 0.0, "fallback": 0.0}
    for step, count in enumerate(band):
        bounds = {"numerical_rank": count.value, "rank_low": count.low, "rank_high": count.high}
        columns |= {column_at(name, step): number for name, number in bounds.items()}
    return columns


def _nulls(operator: MixingOperator, patterns: list[list[Pattern]], delta: float) -> Columns:
    """Ranks of random winners, random queries and keys, and equal weights, the last two at each threshold."""
    tokens, sources = operator.shape[-2:]
    made = operator.operator if isinstance(operator, IndexedMixing) else operator
    width, scale = (made.query.shape[-1], made.scale) if isinstance(made, SoftmaxMixing) else (None, None)
    columns: Columns = {"hardmax_rank": barrier_of(operator) if delta <= 1 else math.nan}
    for step, threshold in enumerate(thresholds(delta)):
        nulls = {
            seen: (
                random_rank(tokens, sources, seen, width, scale, threshold),
                uniform_null(tokens, sources, seen, threshold),
            )
            for seen in {seen for heads in patterns for seen in heads}
        }
        for at, name in enumerate(("random_rank", "uniform_rank")):
            ranks = [[nulls[seen][at] for seen in heads] for heads in patterns]
            columns[column_at(name, step)] = torch.tensor(ranks, dtype=torch.float64)
    return columns


def _numbers(given: Tensor | float, shape: tuple[int, int]) -> Floats:
    return given.cpu().numpy() if isinstance(given, Tensor) else np.full(shape, float(given))


def _map(share: Tensor | None, at: int) -> list[list[float]]:
    if share is None:
        return []
    real = share[at][:, ~share[at, 0].isnan()]
    return _rounded(real[:, :MAP_TOKENS].cpu())


def _nothing(heads: int) -> Measured:
    unknown = np.full((heads, len(COLUMNS)), math.nan)
    return Measured(
        unknown, np.full((heads, heads), math.nan), [Pattern("full")] * heads, [], [], [-1] * heads
    )


def _rounded(spectra: Tensor) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in head] for head in spectra.tolist()]
