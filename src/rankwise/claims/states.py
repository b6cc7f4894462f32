"""Claims about token states: massive tokens, collapse with depth, LayerNorm, similarity by depth."""

import math
from statistics import fmean, median

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional as F

from rankwise import measures
from rankwise._internals.linalg import as_float64
from rankwise._internals.records import grouped
from rankwise.auditing.measure_table import mixer_kind
from rankwise.claims.evidence import MIN_TOKENS, Evidence, NotMeasurableError, States
from rankwise.claims.registry import claim

MASSIVE = 10
"""A token is massive if its norm is at least this multiple of the median norm."""
COLLAPSED = 0.1
"""Direction spread below which token states count as collapsed: the middle angle to the mean is 6°."""
COSINE_MARGIN = 0.05
"""Change of the mean cosine that counts; random directions in 384 dimensions differ from 0 by as much."""


def entropy_share(tokens: Float64[Tensor, "T D"]) -> float:
    """Return the entropy of σ²/Σσ², divided by its maximum log min(T, D)."""
    energy = torch.linalg.svdvals(tokens).square()
    share = energy / energy.sum()
    return float(torch.special.entr(share).sum()) / math.log(min(tokens.shape))


@claim(
    "A massive token makes a compression valley and attention sinks, in the same layers",
    source="arXiv 2510.06477 v2, abstract", theirs="both emerge together, no number",
    definition="Layers whose input has a token of at least ten times the median norm, against the other "
    "layers: entropy of σ²/Σσ² of the states that the layer reads (share of its maximum), and mean attention "
    "on the token with the largest norm. Holds if the median entropy is at most half as large and the median "
    "attention at least twice as large. Decoders only; the paper is about the first token of LLMs.",
)  # fmt: skip
def compression_valley(evidence: Evidence) -> tuple[str, bool]:
    """Check entropy of states and attention on the largest token, in layers with and without a massive one."""
    run = evidence.trained
    mixers = grouped(run.attention(), lambda heads: (heads.mixer.stack, heads.mixer.layer, heads.sequence))
    if any(heads.masks & {"full"} for heads in run.heads):
        raise NotMeasurableError("the model is no decoder: tokens see later tokens")
    layers: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    for state in run.states:
        norms = state.tokens.norm(dim=-1)
        peak = int(norms.argmax())
        sink = []
        for heads in mixers.get((state.stack, state.blocks, state.sequence), []):
            column = torch.zeros(heads.operator.shape[-1], 1, dtype=torch.float64)
            column[peak] = 1
            weights = heads.operator @ column.to(heads.operator.device, heads.operator.dtype)
            sink.append(float(weights[0, :, peak:, 0].double().mean()))
        if sink:
            others = torch.cat([state.tokens[:peak], state.tokens[peak + 1 :]])
            entropies = entropy_share(state.tokens), entropy_share(others)
            layers[bool(norms[peak] >= MASSIVE * norms.median())].append((*entropies, fmean(sink)))
    (valley, without, sinks), (elsewhere, _, other_sinks) = (
        tuple(map(median, zip(*layers[massive], strict=True))) if layers[massive] else (math.nan,) * 3
        for massive in (True, False)
    )
    ours = (
        f"entropy {valley:.2f} against {elsewhere:.2f} ({without:.2f} without the token), attention "
        f"{sinks:.2f} against {other_sinks:.2f}"
    )
    if not layers[True]:
        raise NotMeasurableError("no layer reads a token of ten times the median norm")
    if not layers[False]:
        raise NotMeasurableError("every layer reads a massive token, so there is nothing to compare with")
    return ours, valley <= elsewhere / 2 and sinks >= 2 * other_sinks


@claim(
    "With skip connections, token states do not collapse with depth",
    source="ICLR 2025, λ-skip connections, title and reviews", theirs="collapse at λ = 0 only",
    definition="Direction spread of the states: sine of the middle angle to the mean direction, 0 if most "
    f"tokens are equal, 1 if they differ at random. Holds if it is at least {COLLAPSED} after every block, in "
    "the mean over sequences. The paper measures μ, which one token of large norm can hide.",
)  # fmt: skip
def no_collapse_with_depth(evidence: Evidence) -> tuple[str, bool]:
    """Check the direction spread after each block."""
    curves = [[_mean(measures.direction_spread, states) for states in stack] for stack in evidence.trained.stacks(2)]
    curve = min(curves, key=lambda spreads: min(spreads[1:]))
    ours = f"{curve[0]:.2f} before, {curve[-1]:.2f} after {len(curve) - 1} blocks, least {min(curve[1:]):.2f}"
    return ours, min(curve[1:]) >= COLLAPSED


def _mean(measure: "type[measures.direction_spread]", states: list[States]) -> float:
    return fmean(float(measure(state.tokens[None])) for state in states)


@claim(
    "LayerNorm keeps the affine rank of the tokens exactly",
    source="arXiv 2604.23681 v1, abstract", theirs="equal before and after",
    definition="Rank of the tokens minus their mean, before and after each LayerNorm, in float64 from the "
    "numbers that the model has: singular values above max(T, D)·2⁻⁵²·σ₁. Holds if the ranks are equal in every "
    "call and sequence. RMSNorm is not LayerNorm.",
)  # fmt: skip
def layer_norm_keeps_affine_rank(evidence: Evidence) -> tuple[str, bool]:
    """Check the affine rank before and after each LayerNorm."""
    changes = []
    for norm, given in evidence.trained.layer_norms:
        if given.dim() == 3 and given.shape[1] >= MIN_TOKENS and bool(given.isfinite().all()):
            tokens = as_float64(given)
            weight, bias = (None if part is None else as_float64(part) for part in (norm.weight, norm.bias))
            after = F.layer_norm(tokens, norm.normalized_shape, weight, bias, norm.eps)
            changes.append(torch.stack([_affine_rank(tokens), _affine_rank(after)], -1))
    if not changes:
        raise NotMeasurableError("no LayerNorm reads token states")
    before, after = torch.cat(changes).unbind(-1)
    changed = before != after
    example = changed.int().argmax()
    ours = f"equal in {(~changed).sum()} of {len(before)}; {before[example]} → {after[example]}"
    return ours, not bool(changed.any())


def _affine_rank(tokens: Float64[Tensor, "B T D"]) -> Tensor:
    return torch.linalg.matrix_rank(tokens - tokens.mean(1, keepdim=True))


@claim(
    "Transformers make tokens alike early and distinct again late; state-space models the reverse",
    source="arXiv 2510.06640 v2, abstract", theirs="no number",
    definition="Mean cosine of pairs of tokens after each block. A transformer holds if it is higher, by more "
    f"than {COSINE_MARGIN}, in the middle third of the blocks than before the first and after the last block; a "
    "state-space model if it is higher in the last third than in the first. Three blocks or more.",
)  # fmt: skip
def alike_early_or_late(evidence: Evidence) -> tuple[str, bool]:
    """Check where in depth tokens become alike."""
    run = evidence.trained
    state_space = {mixer_kind(kind).state_space for kind in run.kinds}
    if len(state_space) > 1 or not run.kinds <= {"softmax", "dense"} | run.kinds * state_space.pop():
        raise NotMeasurableError(f"mixers are {', '.join(sorted(run.kinds))}")
    curve = [_mean(measures.mean_cosine, states) for states in max(run.stacks(3), key=len)]
    blocks = len(curve) - 1
    early, middle, late = (
        fmean(curve[1 + blocks * part // 3 : 1 + blocks * (part + 1) // 3]) for part in range(3)
    )
    ours = f"cosine {curve[0]:.2f} before, {early:.2f}, {middle:.2f}, {late:.2f} in thirds, {curve[-1]:.2f} last"
    if mixer_kind(next(iter(run.kinds))).state_space:
        return ours, late > early + COSINE_MARGIN
    return ours, middle > max(curve[0], curve[-1]) + COSINE_MARGIN
