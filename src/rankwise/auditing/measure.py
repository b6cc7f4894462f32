"""Measure the heads of one mixer call, or the token states after one block, in every sequence."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankwise import measures, operators
from rankwise._internals.batches import Batch
from rankwise._internals.linalg import as_float64, float64_device
from rankwise._internals.statistics import Floats
from rankwise._internals.threads import map_threads
from rankwise.auditing.examples import TokenNames
from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES, mixer_kind
from rankwise.auditing.provenance import PROBES, SEED, STEPS
from rankwise.auditing.reference_ranks import Mask, masks_of, reference_ranks
from rankwise.auditing.settings import RankMethod
from rankwise.auditing.statistics import (
    ERRORS,
    MAXIMA,
    MEANS,
    POOLED,
    RANKS,
    HeadStatistics,
    StateStatistics,
)
from rankwise.measures.registry import as_operator
from rankwise.measures.row_moments import RowMoments
from rankwise.measures.row_walk import row_blocks
from rankwise.measures.token_states import without_massive
from rankwise.operators import MixingOperator
from rankwise.tracing import CapturedMixer, CapturedState

EXACT_BYTES = 2**29
"""Maximum bytes of a float64 matrix with exact ranks: 512 MiB, T = S = 8,192. Its decomposition takes four
times as much memory. Estimates are faster from about 4,000 tokens, but often bound the numerical rank only by
an interval (docs/decisions/022-kept-rows.md)."""
MATRIX_BYTES = 2**28
"""Bytes of float64 matrices formed at once (256 MiB); a larger matrix is formed alone."""
SPECTRUM_POINTS = 64
"""Maximum number of singular values per head in a record."""
MAP_TOKENS = 1024
"""Maximum number of tokens in a membership map (weights of tokens in a TSSA head)."""
MANY_HEADS = 128
"""If a state-space mixer has more channels than this, only a sample of the channels is measured."""
MAX_CHANNELS = 16
"""Number of channels in the sample; the choice depends on a fixed seed."""
WITHOUT = "effective_rank_without_massive"
"""Measure that equals the effective rank of the states if no token is massive."""
FUNCTIONS = {row.name: row.function for row in HEAD_MEASURES if row.function}


@dataclass
class HeadBatch:
    """Measures of H heads in B sequences (or image windows) of equal length; NaN if unknown or undefined."""

    measures: dict[str, Floats]
    """Values of the fields in `MEANS`, `RANKS` and `MAXIMA`, shape (B, H) each."""
    stderr: dict[str, Floats]
    """Standard errors of the measures in `ERRORS`, shape (B, H) each."""
    estimated: Floats
    """1 if the ranks of a sequence are estimated, else 0; shape (B, H)."""
    distances: Floats
    """Distances between the heads of a sequence, shape (B, H, H)."""
    masks: list[list[Mask]]
    spectra: list[list[list[float]]]
    memberships: list[list[list[float]]]
    """Memberships of tokens by sequence and head, in the order of ``spectra``; empty if there are none."""
    peaks: list[list[int]]
    """Column with the largest mean weight by sequence and head, counted without padding; −1 if none."""


def sampled(site: CapturedMixer) -> tuple[CapturedMixer, list[int]]:
    """Return the site (one mixer call) restricted to the heads to measure, and the indices of these heads.

    The site is moved to the CPU if its device does not have float64.
    """
    home, heads = float64_device(site.operator.device), site.operator.shape[-3]
    if home != site.operator.device:
        moved: dict[str, Any] = {
            name: None if (tensor := getattr(site, name)) is None else tensor.to(home)
            for name in ("operator", "valid_tokens", "valid_sources", "projection")
        }
        site = replace(site, **moved)
    if heads <= MANY_HEADS or not mixer_kind(site.kind).state_space:
        return site, list(range(heads))
    channels = operators.sample_channels(site.operator, MAX_CHANNELS)
    return replace(site, operator=site.operator[:, channels]), channels.tolist()


def measure_heads(
    site: CapturedMixer,
    heads: list[int],
    delta: float,
    method: RankMethod,
    *,
    names: TokenNames | None = None,
    batch: Batch | None = None,
) -> HeadStatistics:
    """Return statistics of the heads of a mixer call; `sampled` returns the site and head indices to pass.

    If ``names`` is passed, the most attended tokens of ``batch`` are named.
    """
    statistics = HeadStatistics.empty(site.address(), site.kind, site.cross, heads)
    measured = list(_batches(site, delta, method))
    matrices = site.operator.shape[0]
    windows = matrices // site.sequences if site.sequences and matrices % site.sequences == 0 else 1
    # The number of tokens is NaN in a window of padding, which does not count.
    real = ~np.isnan(np.concatenate([sequences.measures["tokens"][:, 0] for sequences in measured]))
    real = real.reshape(-1, windows)

    def by_sequence(batches: Iterable[Floats], *, complete: bool = False) -> Floats:
        return _over_windows(np.concatenate([*batches]), real, complete=complete)

    sigma_max = by_sequence((sequences.measures["sigma_max"] for sequences in measured), complete=True)
    nonfinite = np.isnan(sigma_max) & real.any(1, keepdims=True)
    statistics.nonfinite_sequences = nonfinite.sum(0).astype(np.float64)
    norms: dict[str, Floats] = {}
    if isinstance(op := site.operator, operators.SoftmaxMixing):
        norms["query_norm"] = measures.mean_norm(op.query, site.valid_tokens).cpu().numpy()
        keys = measures.mean_norm(op.key, site.valid_sources).cpu().numpy()
        norms["key_norm"] = keys.repeat(op.heads_per_group, axis=-1)
    for name, moments in statistics.measures.items():
        numbers = [norms[name]] if name in norms else [sequences.measures[name] for sequences in measured]
        values = by_sequence(numbers, complete=name in RANKS)
        moments.add(np.where(nonfinite, np.nan, values))
    for name in MAXIMA:
        largest = np.concatenate([sequences.measures[name] for sequences in measured])
        kept = np.where(np.repeat(nonfinite, windows, axis=0), np.nan, largest)
        statistics.maxima[name] = np.fmax.reduce(kept, axis=0)
    for name, moments in statistics.stderr.items():
        moments.add(
            np.where(nonfinite, np.nan, by_sequence(sequences.stderr[name] for sequences in measured))
        )
    estimated = np.where(nonfinite, np.nan, by_sequence(sequences.estimated for sequences in measured))
    statistics.estimated_sequences = np.nansum(estimated, axis=0)
    statistics.distances.add(by_sequence(sequences.distances for sequences in measured))
    vectors: dict[str, Tensor] = {}
    if site.kind == "softmax" and site.values is not None:
        sequences, heads_of_values, sources, _ = site.values.shape
        if (sequences, sources) == (matrices, op.shape[-1]) and op.shape[-3] % heads_of_values == 0:
            vectors["value_effective_rank"] = site.values
    if isinstance(site.operator, operators.SoftmaxMixing):
        sums = measures.logit_moments(site.operator, site.valid_tokens, site.valid_sources).sum_sequences()
        parts = (sums.query, sums.key, sums.rows, sums.columns)
        statistics.logits = measures.LogitMoments(*(part.cpu() for part in parts))
        vectors["key_effective_rank"] = site.operator.key
        statistics.head_dim = site.operator.query.shape[-1]
        statistics.heads_per_group = site.operator.heads_per_group
    for name, rows in vectors.items():
        known = RowMoments.of(rows, site.valid_sources[:, None]).sum_sequences()
        statistics.rows[name] = RowMoments(known.moments.cpu(), known.count.cpu())
    _add_examples(statistics, measured)
    if names is not None:
        peaks = [columns for sequences in measured for columns in sequences.peaks]
        for sequence in names.peaks(site, batch, peaks):
            for example, called in zip(statistics.examples, sequence, strict=True):
                example.named += bool(called)
                example.names.update(called)
    return statistics


def _over_windows(values: Floats, real: NDArray[np.bool_], *, complete: bool) -> Floats:
    """Return means (B, …) of values (B·W, …) over the W windows of each sequence, without NaN values.

    With ``complete``, a mean is NaN unless all windows with tokens have a value. ``real`` (B, W) is True for
    windows with tokens.
    """
    values = values.reshape(*real.shape, *values.shape[1:])
    finite = ~np.isnan(values)
    count = finite.sum(1)
    required = np.maximum(real.sum(1) if complete else 1, 1).reshape(-1, *[1] * (count.ndim - 1))
    mean = np.where(finite, values, 0.0).sum(1) / np.maximum(count, 1)
    return np.where(count < required, np.nan, mean)


def _add_examples(statistics: HeadStatistics, batches: list[HeadBatch]) -> None:
    for batch in batches:
        lengths = batch.measures["tokens"].tolist()
        for index, example in enumerate(statistics.examples):
            for tokens, masks in zip(lengths, batch.masks, strict=False):
                example.see_length(tokens[index], masks[index].name)
            for spectra in batch.spectra:
                example.spectrum = example.spectrum or spectra[index]
            for memberships in batch.memberships:
                example.membership = example.membership or memberships[index]


def _batches(site: CapturedMixer, delta: float, method: RankMethod) -> Iterator[HeadBatch]:
    operator = site.operator
    sequences, heads, tokens, sources = operator.shape
    whole = bool(site.valid_tokens.all()) and bool(site.valid_sources.all())
    if whole and not is_estimated(operator, method):
        at_once = max(1, MATRIX_BYTES // (8 * heads * tokens * sources))
        for start in range(0, sequences, at_once):
            index = slice(start, start + at_once)
            yield _measure(site, index, operator[index], delta, method)
        return
    for number in range(sequences):  # one by one, because lengths without padding differ
        rows, columns = site.valid_tokens[number], site.valid_sources[number]
        if rows.any() and columns.any():
            index = slice(number, number + 1)
            sequence = operator[index] if whole else operators.IndexedMixing(operator[index], rows, columns)
            yield _measure(site, index, sequence, delta, method)
        else:
            yield _without_tokens(heads)


def is_estimated(operator: MixingOperator, method: RankMethod) -> bool:
    """Return True if ranks of these matrices are estimated: on request, or beyond `EXACT_BYTES`."""
    return method == "estimate" or (method == "auto" and _matrix_bytes(operator) > EXACT_BYTES)


def _matrix_bytes(operator: MixingOperator) -> int:
    return 8 * math.prod(operator.shape[-2:])


def _measure(
    site: CapturedMixer, index: slice, operator: MixingOperator, delta: float, method: RankMethod
) -> HeadBatch:
    sequences, heads, tokens, sources = operator.shape
    estimated = is_estimated(operator, method)
    spectra: list[list[list[float]]] = []
    formed = operator
    if estimated:
        spectrum = measures.estimate_spectrum(operator, PROBES, STEPS, SEED)
        estimates = {
            "numerical_rank": spectrum.count(delta),
            "scale_free_rank": spectrum.relative_count(delta),
            "effective_rank": spectrum.effective_rank,
            "stable_rank": spectrum.stable_rank,
            "sigma_max": spectrum.sigma_max,
        }
    else:
        formed, summary = _decomposed(operator, delta)
        estimates = {name: _exactly(getattr(summary, name)) for name in ERRORS}
        sigma = summary.singular_values
        count = sigma.shape[-1]
        kept = torch.linspace(0, count - 1, min(SPECTRUM_POINTS, count), dtype=torch.float32).round().long()
        spectra = _rounded(sigma[:1, :, kept.to(sigma.device)])
    membership, rate, memberships = _memberships(site, index)
    masks = masks_of(operator)
    values = measures.compute_measures({*FUNCTIONS.values(), "head_distance", "max_token_index"}, formed)
    fields: dict[str, Any] = {
        "tokens": tokens, "sources": sources, "full_rank": min(tokens, sources),
        "rank_low": estimates["numerical_rank"].low, "rank_high": estimates["numerical_rank"].high,
        "membership": membership, "variational_rate": rate,
        **{name: estimate.value for name, estimate in estimates.items()},
        **{name: values[function] for name, function in FUNCTIONS.items()},
    }  # fmt: skip
    if mixer_kind(site.kind).rows_are_means:
        fields |= reference_ranks(operator, masks, delta)

    def full(value: Tensor | float | int) -> Floats:
        if isinstance(value, Tensor):
            return value.double().cpu().numpy()
        return np.full((sequences, heads), float(value))

    return HeadBatch(
        measures={name: full(fields.get(name, math.nan)) for name in (*MEANS, *RANKS, *MAXIMA)},
        stderr={name: full(estimate.stderr) for name, estimate in estimates.items()},
        estimated=full(estimated),
        distances=values["head_distance"].cpu().numpy(),
        masks=masks,
        spectra=spectra,
        memberships=memberships,
        peaks=values["max_token_index"].tolist(),
    )


def _exactly(value: Tensor) -> measures.Estimate:
    return measures.Estimate(
        value, value.new_zeros(value.shape).masked_fill(value.isnan(), math.nan), value, value
    )


def _decomposed(operator: MixingOperator, delta: float) -> tuple[MixingOperator, measures.RankSummary]:
    """Return the operator and its ranks. The operator is made dense if all matrices fit in `MATRIX_BYTES`."""
    together = MATRIX_BYTES // _matrix_bytes(operator)
    if together >= math.prod(operator.shape[:2]):
        operator, together = _formed(operator), operator.shape[1]
    parts = [
        measures.rank_summary(operator[:, start : start + max(1, together)], delta)
        for start in range(0, operator.shape[1], max(1, together))
    ]
    return operator, measures.RankSummary(
        *(torch.cat(numbers, dim=1) for numbers in zip(*parts, strict=True))
    )


def _formed(operator: MixingOperator) -> operators.DenseMixing:
    """Return the operator as dense float64 matrices (B, H, T, S), formed in blocks of rows that fit a cache.

    On a CPU, a thread forms each sequence.
    """
    matrices = torch.empty(operator.shape, dtype=torch.float64, device=operator.device)
    largest = torch.empty_like(matrices[..., :1])

    def form(index: slice) -> None:
        for start, rows, logits in row_blocks(as_operator(operator[index], "matrices")):
            block = (index, slice(None), slice(start, start + rows.shape[-2]))
            matrices[block], largest[block] = rows, logits.amax(-1, keepdim=True)

    step = 1 if operator.device.type == "cpu" else operator.shape[0]
    map_threads(form, [slice(start, start + step) for start in range(0, operator.shape[0], step)])
    return operators.DenseMixing(matrices, largest_logits=largest)


def _memberships(
    site: CapturedMixer, index: slice
) -> tuple[Tensor | float, Tensor | float, list[list[list[float]]]]:
    """Return mean membership and coding rate per head, and memberships of tokens in the first sequence.

    For mixers without membership, return NaN, NaN and an empty list.
    """
    operator = site.operator[index]
    if not isinstance(operator, operators.DiagonalMixing):
        return math.nan, math.nan, []
    rows, shares = site.valid_tokens[index], operator.diagonal.double()
    real = rows[:, None].to(shares.device)
    mean = shares.masked_fill(~real, 0).sum(-1) / real.sum(-1)
    rate: Tensor | float = math.nan
    if site.projection is not None:
        rate = measures.variational_rate(site.projection[index], operator.diagonal, rows)
    shown = rows[0].to(shares.device) & ~shares[0, 0].isnan()
    return mean, rate, _rounded(shares[:1, :, shown][..., :MAP_TOKENS])


def _rounded(numbers: Tensor) -> list[list[list[float]]]:
    return [[[float(f"{x:.6g}") for x in head] for head in sequence] for sequence in numbers.tolist()]


def _without_tokens(heads: int) -> HeadBatch:
    unknown = np.full((1, heads), np.nan)
    return HeadBatch(
        measures=dict.fromkeys((*MEANS, *RANKS, *MAXIMA), unknown), stderr=dict.fromkeys(ERRORS, unknown),
        estimated=unknown, distances=np.full((1, heads, heads), np.nan),
        masks=[], spectra=[], memberships=[], peaks=[[-1] * heads],
    )  # fmt: skip


def measure_states(
    state: CapturedState, before: CapturedState | None, *, ranks: bool = True
) -> StateStatistics:
    """Return statistics of token states.

    ``before`` are the states that the block read, or None if unknown. Effective ranks, which require an
    SVD, are NaN unless ``ranks``.
    """
    tokens = as_float64(state.tokens)  # once for all measures
    mask = None if state.mask is None else state.mask.to(tokens.device)
    real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask
    values: dict[str, Tensor] = {
        row.name: measures.MEASURES[row.function].function(tokens, mask)
        for row in STATE_MEASURES
        if row.function and (ranks or not row.name.startswith("effective_rank"))
        if row.name != WITHOUT
    }
    if ranks:  # the second SVD is needed only if a token is massive
        needed, known = bool((values["massive_tokens"] > 0).any()), values["effective_rank"]
        values[WITHOUT] = measures.effective_rank_without_massive(tokens, mask) if needed else known
    values["tokens"] = real.sum(-1).double()
    values["relative_update"] = torch.full(tokens.shape[:1], torch.nan, dtype=torch.float64)
    if before is not None:
        values["relative_update"] = measures.relative_update(before.tokens.to(tokens.device), tokens, mask)
    unknown = values["norm"].isnan().cpu()
    statistics = StateStatistics(state.stack, state.name, state.layer, tokens.shape[-1])
    # a sequence of nothing but padding does not count as non-finite
    statistics.nonfinite_sequences = int((unknown & real.any(-1).cpu()).sum())
    norms = tokens.norm(dim=-1).masked_fill(~real, -1)
    places = (real.cumsum(1) - 1).gather(1, norms.argmax(1, keepdim=True))[:, 0].cpu()
    statistics.largest_at.update(places[~unknown].tolist())
    if ranks:
        for name, kept in zip(POOLED, (real, without_massive(tokens, mask)), strict=True):
            means = tokens.masked_fill(~kept[..., None], 0.0).sum(1) / kept.sum(1, keepdim=True)
            statistics.pooled[name] = means.cpu()[~unknown].numpy()
    for name in values:
        statistics.measures[name].add(values[name].cpu().masked_fill(unknown, torch.nan)[:, None].numpy())
    return statistics
