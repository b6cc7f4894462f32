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
from rankwise.auditing.reference_ranks import masks_of
from rankwise.claims.evidence import MIN_TOKENS, Evidence, NotMeasurableError, claim

MASSIVE = 10
"""A token is massive if its norm is at least this multiple of the median norm."""
COLLAPSED = 0.1
"""Direction spread of collapsed states: the middle token is within 6° of the mean direction."""
MARGIN = 0.05
"""Change of a mean cosine that counts: random directions in 384 dimensions differ by as much from 90°."""


@claim(
    "A massive token makes a compression valley and sinks",
    "arXiv 2510.06477v2, abstract",
    "in the same layers",
)
def compression_valley(evidence: Evidence) -> tuple[str, bool]:
    """Entropy of the states that a layer reads, and mean attention of its heads on the token of largest norm.

    Layers in which this token has at least ten times the median norm are compared with the others, by medians.
    Entropy: of σ²/Σσ², as a share of log min(T, D). Holds if the entropy is at most half as large, and the
    attention at least twice as large. Decoders only: the paper is about the first token of language models.
    """
    run, layers = evidence.trained, dict[bool, list[tuple[float, float, float]]]()
    by_layer = grouped(run.attention(), lambda heads: (heads.mixer.stack, heads.mixer.layer, heads.sequence))
    if any(mask.name == "full" for heads in run.heads[:1] for mask in masks_of(heads.matrices())[0]):
        raise NotMeasurableError("the model is not a decoder: tokens attend to later tokens")
    for state in run.states:
        norms = state.tokens.norm(dim=-1)
        peak = int(norms.argmax())
        sinks = [
            float(heads.matrices().dense()[0, :, peak:, peak].double().mean())
            for heads in by_layer.get((state.stack, state.blocks, state.sequence), [])
        ]
        if sinks:
            others = torch.cat([state.tokens[:peak], state.tokens[peak + 1 :]])
            numbers = entropy_share(state.tokens), fmean(sinks), entropy_share(others)
            layers.setdefault(bool(norms[peak] >= MASSIVE * norms.median()), []).append(numbers)
    if len(layers) < 2:
        words = "every layer reads" if True in layers else "no layer reads"
        raise NotMeasurableError(f"{words} a token of ten times the median norm")
    (entropy, sink, without), (usual, usual_sink, _) = (
        [median(column) for column in zip(*layers[massive], strict=True)] for massive in (True, False)
    )
    ours = f"entropy {entropy:.2f} against {usual:.2f}, attention {sink:.2f} against {usual_sink:.2f}; "
    ours += f"entropy {without:.2f} without the token"
    return ours, entropy <= usual / 2 and sink >= 2 * usual_sink


def entropy_share(tokens: Float64[Tensor, "T D"]) -> float:
    """Return the entropy of σ²/Σσ² as a share of its maximum, log min(T, D)."""
    energy = torch.linalg.svdvals(tokens).square()
    return float(torch.special.entr(energy / energy.sum()).sum()) / math.log(min(tokens.shape))


@claim(
    "Skip connections keep tokens from collapsing",
    "“Lambda-Skip Connections”, title",
    "collapse only at λ = 0",
)
def no_collapse_with_depth(evidence: Evidence) -> tuple[str, bool]:
    """Direction spread of token states: the sine of the middle angle between a token and the mean direction.

    0 if most tokens have one direction, near 1 if they are random. Holds if it is at least 0.1 (6°) after each
    block of the longest stack, in the mean over sequences. The paper measures the distance to the mean token,
    which one token of large norm can decide alone.
    """
    curve = evidence.trained.depth_curve(measures.direction_spread, 2)
    ours = f"{curve[0]:.2f} before, {min(curve[1:]):.2f} least, {curve[-1]:.2f} after {len(curve) - 1} blocks"
    return ours, min(curve[1:]) >= COLLAPSED


@claim("LayerNorm keeps the affine rank exactly", "arXiv 2604.23681v1, abstract", "equal before and after")
def layer_norm_keeps_affine_rank(evidence: Evidence) -> tuple[str, bool]:
    """Rank of the tokens less their mean, before and after each LayerNorm, for each sequence of a batch.

    In float64, from the numbers that the LayerNorm read: singular values above max(T, D)·2⁻⁵²·σ₁ count. Holds
    if ranks are equal in every call. RMSNorm is no LayerNorm.
    """
    pairs = []
    for norm, given in evidence.trained.layer_norms:
        if given.dim() == 3 and given.shape[1] >= MIN_TOKENS and bool(given.isfinite().all()):
            tokens = as_float64(given)
            weights = [None if part is None else as_float64(part) for part in (norm.weight, norm.bias)]
            after = F.layer_norm(tokens, norm.normalized_shape, *weights, norm.eps)
            ranks = [torch.linalg.matrix_rank(rows - rows.mean(1, keepdim=True)) for rows in (tokens, after)]
            pairs.append(torch.stack(ranks, -1))
    if not pairs:
        raise NotMeasurableError("no LayerNorm reads sequences of finite token states")
    changed = (every := torch.cat(pairs)).diff(dim=-1)[:, 0] != 0
    example = every[changed.int().argmax()].tolist()
    ours = f"changed in {changed.sum()} of {len(every)}, such as {example[0]} to {example[1]}"
    return ours, not bool(changed.any())


@claim(
    "Transformers make tokens alike early, state-space models late",
    "arXiv 2510.06640v2, abstract",
    "no number",
)
def alike_early_or_late(evidence: Evidence) -> tuple[str, bool]:
    """Mean cosine of pairs of tokens before and after each block of the longest stack (three or more).

    For transformers, holds if it is higher, by more than 0.05, in the middle third of the blocks than before
    the first and after the last block: tokens become alike, and distinct again in later layers. For
    state-space models, holds if it is higher in the last third than in the first.
    """
    run = evidence.trained
    late_kind = {mixer_kind(kind).state_space for kind in run.kinds}
    if len(late_kind) > 1 or run.kinds & {"linear", "diagonal"}:
        raise NotMeasurableError(f"the mixers are {', '.join(sorted(run.kinds))}")
    first, *curve = run.depth_curve(measures.mean_cosine, 3)
    bounds = [len(curve) * part // 3 for part in range(4)]
    early, middle, late = (fmean(curve[low:high]) for low, high in zip(bounds, bounds[1:], strict=False))
    ours = f"{first:.2f} before; thirds {early:.2f}, {middle:.2f}, {late:.2f}; {curve[-1]:.2f} last"
    return ours, late > early + MARGIN if late_kind.pop() else middle > max(first, curve[-1]) + MARGIN
