"""The table of claims: a function per claim, whose docstring is the definition that readers see."""

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from inspect import getdoc
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from rankwise import measures
from rankwise._internals.batches import Batch, each_batch
from rankwise._internals.forward import Progress, eval_mode
from rankwise._internals.linalg import as_float64
from rankwise._internals.records import Address, grouped
from rankwise._internals.threads import exclusive
from rankwise.auditing import reinitialized
from rankwise.auditing.findings import COLLAPSE_FALL, COLLAPSE_INPUT, COLLAPSE_SPREAD
from rankwise.auditing.measure_table import mixer_kind
from rankwise.auditing.reference_ranks import masks_of, one_hot_rank
from rankwise.claims.evidence import MIN_TOKENS, NotMeasurableError, Run, run_batches
from rankwise.claims.records import CheckedClaim
from rankwise.errors import RankwiseError
from rankwise.importance import ablation_cost
from rankwise.importance.loss_choice import model_loss
from rankwise.operators import SoftmaxMixing

Check = Callable[[Run], tuple[str, bool]]
"""Function that returns the number of the model as text, and True if the claim holds."""
CLAIMS: list[tuple[Check, CheckedClaim, bool]] = []
"""Checks, claims before they are checked, and True for claims about the model at initialization."""
RANK_PAPER = "“On the Limitation and Redundancy of Transformers: A Rank Perspective”, abstract"
SKIP_PAPER = "“Lambda-Skip Connections: the architectural component that prevents Rank Collapse”, replies"


@exclusive
def check(
    model: nn.Module, batches: Iterable[Batch], *, on_progress: Progress = lambda step, done: None
) -> list[CheckedClaim]:
    """Check claims of papers about ranks and attention on a model, and say which hold.

    A claim that the model or the data cannot show, such as one about queries of a state-space model, has the
    outcome "cannot be measured here" and a reason. Sequences of fewer than 8 tokens, and sequences with NaN,
    are left out. The model (any module) runs in evaluation mode and is not changed. ``on_progress`` is called
    with each claim and the finished share of the claims. After Ctrl-C, the checked claims are returned.

    Cost: three forward passes of each of the ``batches`` (as for `rankwise.audit`), one pass of a copy at
    initialization, and decompositions of each attention matrix, O(T³). Heads and states stay in memory.

    Raises:
        CaptureError: if no mixer is found in the model.
        InputError: if there are no batches, or the model does not run on one.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> outcomes = {claim.code: claim.outcome for claim in check(model, [torch.randn(2, 12, 8)])}
        >>> outcomes["affine_rank"], outcomes["dormant_heads"]
        ('does not hold', 'cannot be measured here')
    """
    every, checked = [*each_batch(batches)], list[CheckedClaim]()
    runs = {False: run_batches(model, every)}
    for measure, claim, at_init in CLAIMS:
        try:
            on_progress(claim.statement, len(checked) / len(CLAIMS))
            if at_init not in runs:
                runs[at_init] = run_batches(reinitialized(model), every)
            yours, holds = measure(runs[at_init])
            result = {"yours": yours, "outcome": "holds" if holds else "does not hold"}
        except KeyboardInterrupt:
            break
        except NotMeasurableError as error:
            result = dict(zip(("reason", "yours"), error.args, strict=True))
        except RankwiseError as error:
            result = {"reason": str(error)}
        checked.append(claim.model_copy(update=result))
    return checked


def claim(statement: str, source: str, theirs: str, *, at_init: bool = False) -> Callable[[Check], Check]:
    """Register the decorated function as the check of a claim, and its docstring as the definition."""

    def register(check: Check) -> Check:
        about: dict[str, Any] = {"statement": statement, "source": source, "theirs": theirs}
        definition = " ".join(str(getdoc(check)).split())
        CLAIMS.append((check, CheckedClaim(code=check.__name__, definition=definition, **about), at_init))
        return check

    return register


def components(sigma: Float64[Tensor, "*batch N"]) -> Float64[Tensor, "*batch"]:
    """Return the least number of largest singular values whose squares add up to 90 % of all."""
    energy = sigma.square()
    return 1 + (energy.cumsum(-1) < 0.9 * energy.sum(-1, keepdim=True)).sum(-1).double()


def _logits(run: Run, *, centered: bool) -> tuple[str, bool]:
    counts = []
    for heads in run.attention(queries=True):
        query, key = heads.real("query"), heads.real("key")
        if key.shape[-1] >= 32 and min(query.shape[1], key.shape[1]) >= 64:
            key = key - key.mean(-2, keepdim=True) if centered else key
            # Q Kᵀ has the singular values of R_q R_kᵀ, where R are factors of QR decompositions.
            left, right = (torch.linalg.qr(tensor, mode="r").R for tensor in (query, key))
            counts.append(components(torch.linalg.svdvals(left @ right.mT)))
    if not counts:
        raise NotMeasurableError("no head has 32 channels and 64 tokens")
    least, middle, most = torch.cat(counts).quantile(torch.tensor([0.0, 0.5, 1.0]).double()).tolist()
    return f"{least:.0f} to {most:.0f}, median {middle:.0f}", most <= 11


@claim("Few components hold the energy of the logits", "arXiv 2604.04384v2, abstract", "90 % in 2 to 11")
def logit_energy(run: Run) -> tuple[str, bool]:
    """Least number of components of Q Kᵀ whose σ² add up to 90 % of all, for each query head and sequence.

    Queries and keys as attention multiplies them (rotated, normed), all pairs of tokens, without a mask.
    Holds if no head needs more than 11. Not measured in heads below 32 channels or 64 tokens, because random
    queries and keys need hardly more there.
    """
    return _logits(run, centered=False)


@claim("… of the part of the logits that softmax sees", "as above, keys centered here", "90 % in 2 to 11")
def centered_logit_energy(run: Run) -> tuple[str, bool]:
    """Like the claim on the energy of logits, after the mean key is subtracted from all keys.

    The mean key adds a constant to the logits of a row, which softmax ignores. The abstract does not say if
    the paper subtracts it.
    """
    return _logits(run, centered=True)


@claim("Heads with small outputs can be removed", "arXiv 2504.03889v4, abstract", "12 % of heads within 1 %")
def dormant_heads(run: Run) -> tuple[str, bool]:
    """Rise of the loss on these data if the 12 % of heads with the least scores are removed together.

    Score: mean norm of a head's output M V, divided by the mean over the heads of its layer (HonorHeads in
    the paper's code). Holds if the loss rises by at most 1 %. The paper measures accuracy on MMLU, and
    chooses the heads anew for each input.
    """
    scores: dict[Address, float] = {}
    for calls in grouped(run.attention(), lambda heads: heads.mixer.address()).values():
        outputs = [output for call in calls if (output := call.real("output")) is not None]
        norm = torch.cat(outputs, 1).norm(dim=-1).mean(-1) if outputs else torch.ones(0)
        scores |= {calls[0].mixer.address(head): float(x) for head, x in enumerate(norm / norm.mean())}
    if 0.12 * len(scores) < 1:
        raise NotMeasurableError(f"12 % of {len(scores)} heads with known outputs is less than one")
    chosen = sorted(scores, key=lambda head: scores[head])[: int(0.12 * len(scores))]
    loss = model_loss(run.model, run.batches)
    if loss.compares_outputs:
        raise NotMeasurableError("the model has no loss on these data")
    with eval_mode(run.model):
        removed = ablation_cost(run.model, run.batches, chosen)
    yours = f"{len(chosen)} of {len(scores)} heads: loss {removed.relative:+.1%}"
    if math.isnan(removed.relative):
        raise NotMeasurableError("the loss is 0")
    if removed.loss - removed.cost >= loss.chance:
        raise NotMeasurableError("the whole model predicts no better than chance", yours)
    return yours, removed.relative <= 0.01


def _barrier(run: Run) -> tuple[str, bool]:
    rows = []
    for matrices in (heads.matrices() for heads in run.attention()):
        rank = measures.numerical_rank(matrices)[0]
        rows.append(torch.stack([rank, one_hot_rank(matrices)[0], torch.full_like(rank, matrices.shape[-2])]))
    rank, barrier, tokens = torch.cat(rows, -1)
    above, worst = rank > barrier + tokens.sqrt(), (rank / tokens).argmax()
    shares = f"up to {rank[worst] / tokens[worst]:.2f} n, barrier {barrier[worst] / tokens[worst]:.2f} n"
    return f"{shares}; {above.sum()} of {len(above)} above", not bool(above.any())


@claim("Untrained attention has a rank barrier", RANK_PAPER, "rank at most 0.63 n", at_init=True)
def barrier_at_initialization(run: Run) -> tuple[str, bool]:
    """Numerical rank (σ ≥ 0.01) of each attention matrix of a copy at initialization.

    The barrier is the expected rank of random one-hot rows under the same mask: 0.63 n without a mask, as in
    the paper, and (n + 1)/2 with a causal mask. Holds if no matrix is more than √n above it, three standard
    deviations of the rank of such rows.
    """
    return _barrier(run)


@claim("… and trained attention has it too", RANK_PAPER, "rank at most 0.63 n")
def barrier_after_training(run: Run) -> tuple[str, bool]:
    """Like the barrier at initialization, on the model as it is.

    The theorem is about random weights; the abstract does not say so.
    """
    return _barrier(run)


@claim("Rank saturates at head widths near log n", RANK_PAPER, "gain below about 0.01 n", at_init=True)
def rank_saturates(run: Run) -> tuple[str, bool]:
    """Numerical rank (σ ≥ 0.01) at initialization, minus the rank if heads keep every second channel.

    Logits keep their size. Holds if the mean gain is at most 0.01 n, as in the caption of the paper's
    Table 2. Not measured if half of the head width is below log n.
    """
    gains = []
    for heads in run.attention(queries=True):
        whole: Any = heads.mixer.operator
        matrices = heads.matrices()
        width, tokens = whole.query.shape[-1], matrices.shape[-2]
        if width / 2 < math.log(tokens):
            raise NotMeasurableError(f"half of the head width {width} is below log n")
        query, key = whole.query[..., ::2], whole.key[..., ::2]
        scale = whole.scale * math.sqrt(width / query.shape[-1])
        narrow = heads.matrices(SoftmaxMixing(query, key, whole.mask, whole.is_causal, scale))
        gains.append((measures.numerical_rank(matrices) - measures.numerical_rank(narrow))[0] / tokens)
    gain = float(torch.cat(gains).mean())
    return f"{gain:+.3f} n from {query.shape[-1]} to {width} channels", gain <= 0.01


@claim("One σ of untrained attention stands out", "arXiv 2410.07799v3, abstract", "no number", at_init=True)
def spectral_gap(run: Run) -> tuple[str, bool]:
    """σ₁/σ₂ of the heads of the first block of a copy at initialization; the paper models no deeper block.

    Holds if σ₁ is at least twice σ₂ in the median head: neighbors within a bulk are nearly equal. The
    paper's random matrices have no mask, so heads with a mask are shown and not judged.
    """
    least = min(heads.mixer.layer for heads in run.attention())
    first = [heads.matrices() for heads in run.heads if heads.mixer.layer == least]
    sigma = torch.cat([measures.singular_values(matrices)[0, :, :2] for matrices in first])
    gap = (sigma[:, 0] / sigma[:, 1]).median()
    masks = {mask.name for matrices in first for mask in masks_of(matrices)[0]} - {"full"}
    if masks:
        words = f"attention is masked ({', '.join(sorted(masks))}), unlike the paper's matrices"
        raise NotMeasurableError(words, f"σ₁/σ₂ = {gap:.3g}")
    return f"σ₁/σ₂ = {gap:.3g}", bool(gap >= 2)


@claim("A massive token compresses states and makes sinks", "arXiv 2510.06477v2, abstract", "no number")
def compression_valley(run: Run) -> tuple[str, bool]:
    """Entropy of the states that a layer reads, and mean attention on the token of largest norm.

    Largest over all layers, as a multiple of the median norm. Layers with a multiple of at least ten are
    compared with the others, by medians. Entropy of σ²/Σσ², as a share of log min(T, D). Holds if the entropy
    is at most half as large and the attention at least twice as large: the abstract has no number. Decoders
    only, as in the paper.
    """
    layers: dict[bool, list[tuple[float, ...]]] = {}
    mixers = grouped(run.attention(), lambda heads: (heads.mixer.stack, heads.mixer.layer))
    if any(mask.name == "full" for mask in masks_of(run.heads[0].matrices())[0]):
        raise NotMeasurableError("the model is not a decoder: tokens attend to later tokens")
    for stack in grouped(run.states, lambda state: (state.stack, state.sequence)).values():
        norms = torch.stack([state.tokens.norm(dim=-1) for state in stack])
        multiples = norms / norms.median(-1, keepdim=True).values
        peak = int(multiples.amax(0).argmax())
        for state, multiple in zip(stack, multiples[:, peak], strict=True):
            calls = mixers.get((state.stack, state.blocks), [])
            seen = [call.matrices().dense()[0, :, peak:, peak] for call in calls
                    if (call.mixer.forward_pass, call.row) == state.sequence]  # fmt: skip
            if seen:
                others = torch.cat([state.tokens[:peak], state.tokens[peak + 1 :]])
                numbers = _entropy(state.tokens), fmean(float(x.mean()) for x in seen), _entropy(others)
                layers.setdefault(bool(multiple >= 10), []).append(numbers)
    if len(layers) < 2:
        layer = "every layer" if True in layers else "no layer"
        raise NotMeasurableError(f"{layer} reads a token of ten times the median norm")
    (entropy, sink, without), (usual, usual_sink, _) = (
        [median(column) for column in zip(*layers[massive], strict=True)] for massive in (True, False)
    )
    yours = f"entropy {entropy:.2f} ({without:.2f} without the token) against {usual:.2f}, "
    yours += f"attention {sink:.2f} against {usual_sink:.2f}"
    return yours, entropy <= usual / 2 and sink >= 2 * usual_sink


def _entropy(tokens: Float64[Tensor, "T D"]) -> float:
    energy = torch.linalg.svdvals(tokens).square()
    return float(torch.special.entr(energy / energy.sum()).sum()) / math.log(min(tokens.shape))


@claim("Tokens stay apart through depth", SKIP_PAPER, "with skips; not at λ = 0")
def no_collapse_with_depth(run: Run) -> tuple[str, bool]:
    """Direction spread of token states: the sine of the middle angle of a token to most tokens.

    0 if most tokens have one direction, near 1 if they are random. Holds if it is nowhere below 0.04 and half
    of the input's, in the mean over sequences, which an audit reports as COLLAPSE. The paper measures the
    distance to the mean token, which one token of large norm can decide alone.
    """
    first, *curve = run.by_depth(measures.direction_spread, 2)
    if first < COLLAPSE_INPUT:
        raise NotMeasurableError("most tokens are parallel at the input")
    yours = f"{first:.2f} before, {min(curve):.2f} least, {curve[-1]:.2f} after {len(curve)} blocks"
    return yours, min(curve) >= min(COLLAPSE_SPREAD, COLLAPSE_FALL * first)


@claim("LayerNorm keeps the affine rank exactly", "arXiv 2604.23681v1, abstract", "equal before and after")
def affine_rank(run: Run) -> tuple[str, bool]:
    """Rank of the tokens minus their mean, before and after each LayerNorm, for each sequence of a batch.

    In float64, from the numbers that the LayerNorm read: singular values above 1e-10·σ₁ count, which is far
    above rounding. Holds if ranks are equal in every call. RMSNorm is not a LayerNorm. Padding counts as
    tokens.
    """
    pairs = []
    for norm, given in run.layer_norms:
        if given.dim() == 3 and given.shape[1] >= MIN_TOKENS:
            before = as_float64(given[given.isfinite().all(-1).all(-1)])
            both = before, deepcopy(norm).to(before.device, before.dtype)(before)
            ranks = [torch.linalg.matrix_rank(x - x.mean(1, keepdim=True), rtol=1e-10) for x in both]
            pairs.append(torch.stack(ranks, -1))
    if not pairs:
        raise NotMeasurableError("no LayerNorm reads sequences of finite token states")
    changed = (every := torch.cat(pairs)).diff(dim=-1)[:, 0] != 0
    first, last = every[changed.int().argmax()].tolist()
    return f"changed in {changed.sum()} of {len(every)}, such as {first} to {last}", not bool(changed.any())


@claim("Transformers make tokens alike early, SSMs late", "arXiv 2510.06640v2, abstract", "no number")
def alike_early_or_late(run: Run) -> tuple[str, bool]:
    """Mean cosine of pairs of tokens before and after each block of the longest stack, of three or more.

    For transformers, holds if it is higher in the middle third of the blocks than before the first and after
    the last block: tokens become alike, and distinct again in later layers. For state-space models, holds if
    it is higher in the last third than in the first. Higher: by more than 0.05, the cosine of random
    directions in 400 dimensions.
    """
    kinds = {mixer_kind(kind).state_space for kind in run.kinds}
    if len(kinds) > 1 or run.kinds & {"linear", "diagonal"}:
        raise NotMeasurableError(f"the mixers are {', '.join(sorted(run.kinds))}")
    first, *curve = run.by_depth(measures.mean_cosine, 3)
    bounds = [len(curve) * part // 3 for part in range(4)]
    early, middle, late = (fmean(curve[low:high]) for low, high in pairwise(bounds))
    yours = f"{first:.2f} before; thirds {early:.2f}, {middle:.2f}, {late:.2f}; {curve[-1]:.2f} last"
    return yours, late > early + 0.05 if kinds.pop() else middle > max(first, curve[-1]) + 0.05
