"""Claims about attention heads: logits, keys, ranks of attention matrices, heads that do little."""

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rankwise import measures
from rankwise._internals.records import Address, grouped
from rankwise.auditing.reference_ranks import one_hot_rank
from rankwise.claims.evidence import Evidence, Heads, NotMeasurableError, Run
from rankwise.claims.registry import claim
from rankwise.errors import RankwiseError
from rankwise.importance import ImportanceSettings, ablation_cost
from rankwise.importance.loss_choice import model_loss
from rankwise.operators import SoftmaxMixing

ENERGY = 0.9
MOST_COMPONENTS = 11
"""Largest number of components that reach 90 % of the energy of logits, in arXiv 2604.04384."""
MOST_HEADS = 0.75
"""Share of heads that must agree if a paper compares heads without a number: three quarters."""
INACTIVE = 0.12
"""Share of heads that arXiv 2504.03889 removes within 1 % of the score of the model."""
BARRIER = "ICLR 2025 submission GoK1PfVgXU (a rank perspective), abstract"
LOGITS = (
    "Components: least k whose largest σ² of Q Kᵀ add up to 90 % of all, for each query head and sequence. "
    "Queries and keys as attention multiplies them (rotated, normed), all pairs of tokens, no mask. Holds if "
    f"the largest k is at most {MOST_COMPONENTS}. Not measured if random queries and keys need no more."
)


def components(sigma: Float64[Tensor, "*batch N"]) -> Float64[Tensor, "*batch"]:
    """Return the least number of the largest singular values whose squares add up to 90 % of all."""
    energy = sigma.square()
    reached = energy.cumsum(-1) >= ENERGY * energy.sum(-1, keepdim=True)
    return 1.0 + reached.shape[-1] - reached.sum(-1).double()


def spread_words(values: Tensor) -> str:
    """Return the least and the largest value and the median in words."""
    return f"{values.min():.0f} to {values.max():.0f}, median {values.quantile(0.5):.0f}"


def _logit_components(query: Float[Tensor, "H T K"], key: Float[Tensor, "H S K"]) -> Float64[Tensor, " H"]:
    """Return the components of Q Kᵀ, whose singular values are those of R_q R_kᵀ of two QR decompositions."""
    left, right = (torch.linalg.qr(tensor, mode="r").R for tensor in (query, key))
    return components(torch.linalg.svdvals(left @ right.mT))


def _check_logits(run: Run, *, centered: bool) -> tuple[str, bool]:
    counts, widths = [], set()
    for heads in run.with_queries():
        query, key = _query_and_key(heads)
        key = key - key.mean(-2, keepdim=True) if centered else key
        counts.append(_logit_components(query, key))
        widths.add((query.shape[-2], key.shape[-2], key.shape[-1]))
    every = torch.cat(counts)
    generator = torch.Generator().manual_seed(0)
    for rows, columns, width in sorted(widths, key=lambda sizes: sizes[::-1])[:1]:
        query, key = (torch.randn(1, n, width, generator=generator).double() for n in (rows, columns))
        random = float(_logit_components(query, key))
        if random <= MOST_COMPONENTS:
            reason = f"random queries and keys of width {width} need no more than {random:.0f}"
            raise NotMeasurableError(reason, spread_words(every))
    return spread_words(every), bool(every.max() <= MOST_COMPONENTS)


def _query_and_key(heads: Heads) -> tuple[Float64[Tensor, "H T K"], Float64[Tensor, "H S K"]]:
    """Return queries, and the key head of each query head."""
    assert heads.query is not None and heads.key is not None
    return heads.query, heads.key.repeat_interleave(len(heads.query) // len(heads.key), 0)


@claim(
    "Few components hold the energy of the logits of every head",
    source="arXiv 2604.04384 v2, abstract", theirs=f"90 % in 2 to {MOST_COMPONENTS}", definition=LOGITS,
)  # fmt: skip
def logit_energy(evidence: Evidence) -> tuple[str, bool]:
    """Check the number of components of Q Kᵀ."""
    return _check_logits(evidence.trained, centered=False)


@claim(
    "The same for what softmax sees of the logits",
    source="same number, measured differently here", theirs=f"90 % in 2 to {MOST_COMPONENTS}",
    definition=f"{LOGITS} Keys minus their mean: the mean key adds a constant to all logits of a row, which "
    "softmax ignores. The paper's abstract does not say if it does so.",
)  # fmt: skip
def centered_logit_energy(evidence: Evidence) -> tuple[str, bool]:
    """Check the number of components of Q Kᵀ with keys centered."""
    return _check_logits(evidence.trained, centered=True)


def _compare_keys(run: Run, other: str) -> tuple[str, bool]:
    """Compare the components of keys with those of queries or values, head by head."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for heads in run.with_queries():
        if (tensor := getattr(heads, other)) is not None:
            query, key = _query_and_key(heads)
            wide = query if other == "query" else tensor.repeat_interleave(len(key) // len(tensor), 0)
            pairs.append(tuple(components(torch.linalg.svdvals(x)) for x in (key, wide)))
    if not pairs:
        raise NotMeasurableError("the model does not show its values")
    keys, others = (torch.cat(counts) for counts in zip(*pairs, strict=True))
    share = float((keys < others).double().mean())
    ours = f"fewer in {share:.0%} of heads, median {keys.quantile(0.5):.0f} against {others.quantile(0.5):.0f}"
    return ours, share >= MOST_HEADS


KEYS = (
    "Least number of components with 90 % of the energy of the keys of a head (rotated, as attention "
    f"multiplies them), against that of its {{}}. Holds if keys need fewer in {MOST_HEADS:.0%} of heads or more. {{}}"
)


@claim(
    "Keys are far more compressible than queries",
    source="arXiv 2603.04427 v1, abstract", theirs="no number (SVD of GPT-2)",
    definition=KEYS.format("queries", "The paper truncates weights, not activations."),
)  # fmt: skip
def keys_against_queries(evidence: Evidence) -> tuple[str, bool]:
    """Check that keys fill fewer dimensions than queries."""
    return _compare_keys(evidence.trained, "query")


@claim(
    "Selection by keys takes fewer dimensions than the values that it selects",
    source="arXiv 2603.04427 v1, abstract", theirs="O(log N) dimensions, no number",
    definition=KEYS.format("values", "The paper trains models with narrow keys."),
)  # fmt: skip
def keys_against_values(evidence: Evidence) -> tuple[str, bool]:
    """Check that keys fill fewer dimensions than values."""
    return _compare_keys(evidence.trained, "value")


@claim(
    "Heads with the smallest outputs can be removed",
    source="arXiv 2504.03889 v4, abstract; score HonorHeads of github.com/psandovalsegura/inactive-heads",
    theirs=f"over {INACTIVE:.0%} of heads, MMLU within 1 %",
    definition="Score of a head: norm of its output M V, mean over tokens and sequences, divided by the mean "
    f"over the heads of its layer. The {INACTIVE:.0%} of heads with the least scores (rounded up) are removed "
    "together. Holds if the loss on these data rises by at most 1 %. The paper measures accuracy on MMLU, and "
    "chooses heads anew for each input.",
)  # fmt: skip
def dormant_heads(evidence: Evidence) -> tuple[str, bool]:
    """Check the loss without the heads whose outputs have the least norm."""
    scores: dict[Address, float] = {}
    by_mixer = grouped(evidence.trained.attention(), lambda heads: heads.mixer)
    for mixer, calls in by_mixer.items():
        norms = [call.output.norm(dim=-1).mean(-1) for call in calls if call.output is not None]
        if norms and len(norms[0]) > 1:
            norm = torch.stack(norms).mean(0)
            scores |= {mixer.at(head): float(score) for head, score in enumerate(norm / norm.mean())}
    if INACTIVE * len(scores) < 1:
        least = math.ceil(1 / INACTIVE)
        raise NotMeasurableError(f"{len(scores)} heads with known outputs; {least} or more are needed")
    chosen = sorted(scores, key=lambda head: scores[head])[: math.ceil(INACTIVE * len(scores))]
    settings = ImportanceSettings()
    try:
        loss = model_loss(evidence.model, evidence.batches, settings)
        if loss.compares_outputs:
            raise NotMeasurableError("the model has no loss on these data")
        removed = ablation_cost(evidence.model, evidence.batches, chosen, settings)
    except RankwiseError as error:
        raise NotMeasurableError(str(error)) from None
    ours = f"{len(chosen)} of {len(scores)} heads: loss {removed.relative:+.2%}"
    if removed.loss - removed.cost >= loss.chance:
        raise NotMeasurableError("the loss of the whole model is no better than chance", ours)
    return ours, removed.relative <= 0.01


def _check_barrier(run: Run) -> tuple[str, bool]:
    """Compare the numerical rank of each head with the barrier of its mask."""
    shares, over, count = [], 0, 0
    for heads in run.attention():
        tokens = heads.operator.shape[-2]
        rank, barrier = measures.numerical_rank(heads.operator)[0], one_hot_rank(heads.operator)[0]
        shares.append(torch.stack([rank, barrier]) / tokens)
        over += int((rank > barrier + math.sqrt(tokens)).sum())
        count += len(rank)
    rank, barrier = torch.cat(shares, -1)
    ours = f"largest {rank.max():.2f} n, barrier {barrier[rank.argmax()]:.2f} n; {over} of {count} above"
    return ours, over == 0


BARRIER_RULE = (
    "Numerical rank (σ ≥ 0.01) of each attention matrix, against the expected rank of random one-hot rows "
    "under the same mask: 0.63 n without a mask, as in the paper, and 0.5 n with a causal mask. Holds if no "
    "matrix is more than √n above, three standard deviations of the rank of one-hot rows."
)


@claim(
    "The rank of attention stays below a barrier: at initialization",
    source=BARRIER, theirs="at most 0.63 n", definition=BARRIER_RULE + " One copy at initialization.",
)  # fmt: skip
def rank_barrier_at_initialization(evidence: Evidence) -> tuple[str, bool]:
    """Check the ranks of a copy of the model at initialization."""
    return _check_barrier(evidence.initial)


@claim(
    "The same for trained heads",
    source=BARRIER, theirs="at most 0.63 n",
    definition=BARRIER_RULE + " The theorem is about random weights; the abstract does not say so.",
)  # fmt: skip
def rank_barrier_trained(evidence: Evidence) -> tuple[str, bool]:
    """Check the ranks of the model as it is."""
    return _check_barrier(evidence.trained)


@claim(
    "Wider heads gain no rank: it saturates at widths near log n",
    source=f"{BARRIER}; tolerance: caption of Table 2", theirs="gain around or below 0.01 n",
    definition="Numerical rank (σ ≥ 0.01) of the heads of a copy at initialization, minus the rank of the same "
    "heads with every second channel of queries and keys and logits of the same size. Holds if the mean gain is "
    "at most 0.01 n. Not measured if half the width is below log n.",
)  # fmt: skip
def rank_saturates(evidence: Evidence) -> tuple[str, bool]:
    """Check how much rank heads at initialization lose at half their width."""
    gains = []
    for heads in evidence.initial.with_queries():
        whole, width = heads.whole, heads.query.shape[-1]
        if width // 2 < math.log(heads.operator.shape[-1]):
            raise NotMeasurableError(f"half of the head width {width} is below log n")
        key = whole.key.repeat_interleave(whole.heads_per_group, -3)
        scale = whole.scale * math.sqrt(width / len(range(0, width, 2)))
        narrow = SoftmaxMixing(whole.query[..., ::2], key[..., ::2], whole.mask, whole.is_causal, scale)
        ranks = [measures.numerical_rank(matrix) for matrix in (heads.operator, heads.cut(narrow))]
        gains.append((ranks[0] - ranks[1])[0] / heads.operator.shape[-2])
    gain = float(torch.cat(gains).mean())
    return f"{gain:+.3f} n from width {width // 2} to {width}", gain <= 0.01


@claim(
    "Attention matrices at initialization have one outlying singular value",
    source="arXiv 2410.07799 v3, abstract (ICML 2025)", theirs="a gap between σ₁ and σ₂, no number",
    definition="σ₁/σ₂ of each head of the first block of a copy at initialization (deeper blocks leave the "
    "paper's model). Holds if σ₁ is at least twice σ₂ in the median head; neighbors within a bulk are nearly "
    "equal. The paper's random matrices have no mask, so masked heads are shown but not judged.",
)  # fmt: skip
def spectral_gap(evidence: Evidence) -> tuple[str, bool]:
    """Check the ratio of the two largest singular values in the first block."""
    every = evidence.initial.attention()
    first: Sequence[Heads] = [heads for heads in every if not heads.mixer.layer]
    sigma = torch.cat([measures.singular_values(heads.operator)[0, :, :2] for heads in first])
    gap = float((sigma[:, 0] / sigma[:, 1]).quantile(0.5))
    ours = f"σ₁/σ₂ {gap:.3g} (median of {len(sigma)})"
    masks: Iterable[str] = set().union(*(heads.masks for heads in first)) - {"full"}
    if masks:
        raise NotMeasurableError(f"the mask is {', '.join(sorted(masks))}; the paper's matrices have none", ours)
    return ours, gap >= 2
