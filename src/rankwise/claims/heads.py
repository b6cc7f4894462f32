"""Claims about attention heads: logits, keys, ranks of attention matrices, heads with small outputs."""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise import measures
from rankwise._internals.records import Address, grouped
from rankwise.auditing.reference_ranks import masks_of, one_hot_rank
from rankwise.claims.evidence import Evidence, Heads, NotMeasurableError, Run, claim
from rankwise.errors import RankwiseError
from rankwise.importance import ImportanceSettings, ablation_cost
from rankwise.importance.loss_choice import model_loss
from rankwise.operators import SoftmaxMixing

COMPONENTS = 11
"""Largest number of components with 90 % of the energy of logits, in arXiv 2604.04384."""
MOST_HEADS = 0.75
"""Share of heads that have to agree with a claim without a number."""
INACTIVE = 0.12
"""Share of heads that arXiv 2504.03889 removes."""
RANK_PAPER = "“On the Limitation and Redundancy of Transformers: A Rank Perspective”, abstract"


def components(sigma: Float64[Tensor, "*batch N"]) -> Float64[Tensor, "*batch"]:
    """Return the least number of largest singular values whose squares add up to 90 % of all."""
    energy = sigma.square()
    return 1 + (energy.cumsum(-1) < 0.9 * energy.sum(-1, keepdim=True)).sum(-1).double()


def _logit_components(query: Tensor, key: Tensor, *, centered: bool) -> Float64[Tensor, " H"]:
    """Return the components of Q Kᵀ, whose singular values are those of R_q R_kᵀ of two QR decompositions."""
    key = key - key.mean(-2, keepdim=True) if centered else key
    left, right = (torch.linalg.qr(tensor, mode="r").R for tensor in (query, key))
    return components(torch.linalg.svdvals(left @ right.mT))


def _check_logits(run: Run, *, centered: bool) -> tuple[str, bool]:
    counts, sizes = [], []
    for heads in run.attention(queries=True):
        query, key = heads.real("query"), _for_each_head(heads, "key")
        counts.append(_logit_components(query, key, centered=centered))
        sizes.append((key.shape[-1], len(query[0]), len(key[0])))
    every, (width, *lengths) = torch.cat(counts), min(sizes)
    generator = torch.Generator().manual_seed(0)
    random = [torch.randn(1, length, width, generator=generator).double() for length in lengths]
    expected = int(_logit_components(*random, centered=centered))
    ours = f"{every.min():.0f} to {every.max():.0f}, median {every.median():.0f}"
    if expected <= COMPONENTS:
        raise NotMeasurableError(f"random queries and keys of width {width} need only {expected}", ours)
    return ours, bool(every.max() <= COMPONENTS)


def _for_each_head(heads: Heads, name: str) -> Float64[Tensor, "H S K"]:
    """Return keys or values, repeated for the query heads that share them."""
    tensor = heads.real(name)
    return tensor.repeat_interleave(heads.mixer.operator.shape[1] // len(tensor), 0)


@claim("Few components hold the energy of the logits", "arXiv 2604.04384v2, abstract", "90 % in 2 to 11")
def logit_energy(evidence: Evidence) -> tuple[str, bool]:
    """Least number of components of Q Kᵀ whose σ² add up to 90 % of all, for each query head and sequence.

    Queries and keys as attention multiplies them (rotated, normed), all pairs of tokens, without a mask.
    Holds if no head needs more than 11. Not measured if random queries and keys need no more either.
    """
    return _check_logits(evidence.trained, centered=False)


@claim("… of the part of the logits that softmax sees", "as above, with keys centered", "90 % in 2 to 11")
def centered_logit_energy(evidence: Evidence) -> tuple[str, bool]:
    """As above, with the mean key subtracted from all keys, which adds a constant to all logits of a row.

    Softmax ignores this constant. The abstract does not say if the paper subtracts it.
    """
    return _check_logits(evidence.trained, centered=True)


@claim("Selection (keys) takes fewer dimensions than values", "arXiv 2603.04427v1, abstract", "no number")
def keys_against_values(evidence: Evidence) -> tuple[str, bool]:
    """Least number of components with 90 % of the energy of the keys of a head, against that of its values.

    Keys as attention multiplies them, for each query head and sequence. Holds if keys need fewer in three
    quarters of the heads or more. The paper trains models with narrow keys and truncates key weights.
    """
    pairs = []
    for heads in evidence.trained.attention(queries=True):
        if heads.real("values") is not None:
            tensors = _for_each_head(heads, "key"), _for_each_head(heads, "values")
            pairs.append(torch.stack([components(torch.linalg.svdvals(tensor)) for tensor in tensors]))
    if not pairs:
        raise NotMeasurableError("the model does not show its values")
    keys, values = torch.cat(pairs, -1)
    share = float((keys < values).double().mean())
    ours = f"fewer in {share:.0%} of heads; median {keys.median():.0f} against {values.median():.0f}"
    return ours, share >= MOST_HEADS


@claim("Heads with small outputs can be removed", "arXiv 2504.03889v4, abstract", "12 % of heads within 1 %")
def dormant_heads(evidence: Evidence) -> tuple[str, bool]:
    """Rise of the loss on these data if the 12 % of heads with the least scores are removed together.

    Score: mean norm of a head's output M V, divided by the mean over the heads of its layer (HonorHeads in the
    paper's code). Holds if the loss rises by at most 1 %. The paper measures accuracy on MMLU, and chooses the
    heads anew for each input.
    """
    scores: dict[Address, float] = {}
    for calls in grouped(evidence.trained.attention(), lambda heads: heads.mixer.address()).values():
        outputs = [output for call in calls if (output := call.real("output")) is not None]
        norm = (
            torch.cat([output.norm(dim=-1) for output in outputs], -1).mean(-1) if outputs else torch.empty(0)
        )
        for head, score in enumerate((norm / norm.mean()).tolist()):
            scores[calls[0].mixer.address(head)] = score
    if len(scores) * INACTIVE < 1:
        raise NotMeasurableError(f"{len(scores)} heads with known outputs, of which 12 % is no head")
    chosen = sorted(scores, key=lambda head: scores[head])[: math.ceil(len(scores) * INACTIVE)]
    try:
        loss = model_loss(evidence.model, evidence.batches)
        removed = ablation_cost(evidence.model, evidence.batches, chosen, ImportanceSettings())
    except RankwiseError as error:
        raise NotMeasurableError(str(error)) from None
    ours = f"{len(chosen)} of {len(scores)} heads: loss {removed.relative:+.1%}"
    if loss.compares_outputs:
        raise NotMeasurableError("the model has no loss on these data")
    if removed.loss - removed.cost >= loss.chance:
        raise NotMeasurableError("the whole model predicts no better than chance", ours)
    return ours, removed.relative <= 0.01


def _check_barrier(run: Run) -> tuple[str, bool]:
    ranks, barriers, lengths = [], [], []
    for heads in run.attention():
        matrices = heads.matrices()
        ranks.append(measures.numerical_rank(matrices)[0])
        barriers.append(one_hot_rank(matrices)[0])
        lengths.append(torch.full_like(ranks[-1], matrices.shape[-2]))
    rank, barrier, length = torch.cat(ranks), torch.cat(barriers), torch.cat(lengths)
    above, worst = rank > barrier + length.sqrt(), (rank / length).argmax()
    ours = (
        f"up to {rank[worst] / length[worst]:.2f} n at a barrier of {barrier[worst] / length[worst]:.2f} n; "
    )
    return f"{ours}{above.sum()} of {len(above)} above", not bool(above.any())


@claim("Attention at initialization stays below a rank barrier", RANK_PAPER, "rank at most 0.63 n")
def barrier_at_initialization(evidence: Evidence) -> tuple[str, bool]:
    """Numerical rank (σ ≥ 0.01) of each attention matrix of a copy at initialization.

    The barrier is the expected rank of random one-hot rows under the same mask: 0.63 n without a mask, as in
    the paper; (n + 1)/2 with a causal mask. Holds if no matrix is more than √n above it, three standard
    deviations of the rank of such rows.
    """
    return _check_barrier(evidence.initial)


@claim("… and so does trained attention", RANK_PAPER, "rank at most 0.63 n")
def barrier_after_training(evidence: Evidence) -> tuple[str, bool]:
    """As above, on the model as it is. The theorem is about random weights; the abstract does not say so."""
    return _check_barrier(evidence.trained)


@claim("Wider heads gain no rank above a width near log n", RANK_PAPER, "gain around or below 0.01 n")
def rank_saturates(evidence: Evidence) -> tuple[str, bool]:
    """Numerical rank (σ ≥ 0.01) at initialization, less the rank if heads keep every second channel.

    Logits keep their size. Holds if the mean gain is at most 0.01 n, the tolerance in the paper's Table 2. Not
    measured if half of the head width is below log n.
    """
    gains = []
    for heads in evidence.initial.attention(queries=True):
        softmax, matrices = heads.mixer.operator, heads.matrices()
        width, tokens = softmax.query.shape[-1], matrices.shape[-2]
        if width / 2 < math.log(tokens):
            raise NotMeasurableError(f"half of the head width {width} is below log n")
        query, key = softmax.query[..., ::2], softmax.key[..., ::2]
        scale = softmax.scale * math.sqrt(width / query.shape[-1])
        narrow = SoftmaxMixing(query, key, softmax.mask, softmax.is_causal, scale)
        ranks = [measures.numerical_rank(matrix)[0] for matrix in (matrices, heads.matrices(narrow))]
        gains.append((ranks[0] - ranks[1]) / tokens)
    gain = float(torch.cat(gains).mean())
    return f"{gain:+.3f} n from {query.shape[-1]} to {width} channels", gain <= 0.01


@claim("One singular value stands out at initialization", "arXiv 2410.07799v3, abstract", "a gap, no number")
def spectral_gap(evidence: Evidence) -> tuple[str, bool]:
    """σ₁/σ₂ of the heads of the first block of a copy at initialization; the paper models no deeper block.

    Holds if σ₁ is at least twice σ₂ in the median head: neighbors within a bulk are nearly equal. The paper's
    random matrices have no mask, so heads with a mask are shown and not judged.
    """
    first = [heads.matrices() for heads in evidence.initial.attention() if heads.mixer.layer == 0]
    sigma = torch.cat([measures.singular_values(matrices)[0, :, :2] for matrices in first])
    gap = (sigma[:, 0] / sigma[:, 1]).median()
    masks = {mask.name for matrices in first for mask in masks_of(matrices)[0]} - {"full"}
    if masks:
        words = f"attention is masked ({', '.join(sorted(masks))}), unlike the paper's matrices"
        raise NotMeasurableError(words, f"σ₁/σ₂ = {gap:.3g}")
    return f"σ₁/σ₂ = {gap:.3g}", bool(gap >= 2)
