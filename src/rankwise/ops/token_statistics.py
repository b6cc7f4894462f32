"""Token Statistics Self-Attention (TSSA): the function `tssa`, its output and its decoding state."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankwise.errors import instance_of
from rankwise.ops.arguments import make_call
from rankwise.ops.dispatch import choose, solve


class TSSAState(NamedTuple):
    """Decoding state of causal TSSA: running sums over all tokens so far, of constant size.

    Sums are float32, or float64 if the inputs are float64. Each call rounds them once, so their relative
    error is at most n·2^-24 after n calls, and 1.44·h·2^-24 with a half-life of h tokens. A float32 sum
    stops growing when it is 2^24 times as large as the added number. To decode millions of tokens one by one
    without half-lives, use float64 inputs.

    Attributes:
        energy: Σ_u λ^age w²[u,h,k] over tokens u; age is the number of later tokens, λ the decay or 1.
        assigned: Σ_u λ^age Π[u,h]·w²[u,h,k], where Π are memberships.
        mass: Σ_u λ^age Π[u,h].
        seen: number of real tokens so far, which is the position of the next token in the learned bias.

    Examples:
        >>> state = TSSAState.zeros(1, heads=2, width=3)
        >>> tuple(state.energy.shape), state.seen.tolist()
        ((1, 2, 3), [0])
    """

    energy: Float[Tensor, "N H K"]
    assigned: Float[Tensor, "N H K"]
    mass: Float[Tensor, "N H"]
    seen: Int[Tensor, " N"]

    @classmethod
    def zeros(
        cls,
        sequences: int,
        heads: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "TSSAState":
        """Return the state before the first token: all sums are 0. ``width`` is K, the channels per head."""
        sums = torch.zeros(sequences, heads, width, dtype=dtype, device=device)
        mass = torch.zeros(sequences, heads, dtype=dtype, device=device)
        seen = torch.zeros(sequences, dtype=torch.int64, device=device)
        return cls(sums, sums.clone(), mass, seen)

    def select(self, index: Int[Tensor, " M"]) -> "TSSAState":
        """Return the states of the sequences with these indices, which may repeat (as in beam search)."""
        return TSSAState(*(part.index_select(0, index) for part in self))

    def detach(self) -> "TSSAState":
        """Return the state detached from the autograd graph, to train on a long text segment by segment."""
        return TSSAState(*(part.detach() for part in self))


torch.serialization.add_safe_globals([TSSAState])  # lets torch.load read states, which hold only tensors


class TSSAOutput(NamedTuple):
    """Output, memberships and decoding state of a `tssa` call.

    Attributes:
        output: output for each token, head and channel, in the dtype of w; 0 at masked tokens.
        membership: memberships Π, the weights of the heads at each token, in float32 (float64 if w is
            float64). They sum to 1 over the heads, and are 0 at masked tokens.
        state: sums after the last token, to pass as ``state`` to the next call; None if not causal.
    """

    output: Float[Tensor, "B T H K"]
    membership: Float[Tensor, "B T H"]
    state: TSSAState | None


def tssa(
    w: Float[Tensor, "B T H K"],
    temperature: Float[Tensor, " H"] | None,
    causal: bool = False,
    bias: Float[Tensor, "H P"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    state: TSSAState | None = None,
    impl: str = "auto",
    *,
    membership: str = "softmax",
    half_life: Float[Tensor, " H"] | None = None,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
) -> TSSAOutput:
    """Compute Token Statistics Self-Attention (TSSA), in which tokens interact only through sums over tokens.

    Bidirectional TSSA, with sums over all tokens u, score s, membership Π and moment m::

        s[t,h]     = Σ_k w[t,h,k]² / max(‖w[:,h,k]‖, 1e-12)²
        Π[t,·]     = softmax over heads of temperature[h] · s[t,h]
        m[h,k]     = Σ_u Π[u,h] w[u,h,k]² / (Σ_u Π[u,h] + 1e-8)
        out[t,h,k] = -Π[t,h] w[t,h,k] / (1 + m[h,k])

    Causal TSSA, a different function, has running sums. It adds the learned bias once for each channel k::

        c_t = λ_h c_{t-1} + w_t²;        s[t,h] = Σ_k ( w[t,h,k]² / max(c[t,h,k], 1e-12) + bias[h,t] )
        a_t = λ_h a_{t-1} + Π_t w_t²;    n_t = λ_h n_{t-1} + Π_t;    m_t = a_t / (n_t + 1e-8)

    λ_h is 1, or 2^(-1/half_life[h]) if half-lives are passed. A token that is u tokens old has the weight λ^u
    in all three sums, so m is a weighted mean, and s does not shrink as the text grows.

    A masked token has no effect: it adds nothing, does not decay the sums, and takes no position of the bias.
    Its own output and gradient are 0, even if w is NaN there. Padding may be on the left, on the right or
    between tokens; results at real tokens equal the results without padding.

    Gradients flow through output, memberships and state. NaN in w reaches all outputs that depend on it. It
    reaches the gradients of other tokens only if the loss depends on one of these outputs.

    Range: Π in [0, 1]; |out| ≤ Π |w|. Cost: O(B T H K) time; O(B T H) memory in addition to input and output.
    A CPU also stores the sums at every 64th token: 1/32 of the size of w forward, 1/16 backward. On a CPU,
    half precision adds float32 copies of w and output, and a non-contiguous w adds a contiguous copy.

    Source: Wu et al., "Token Statistics Transformer: Linear-Time Attention via Variational Rate Reduction"
    (2024), and its released modules, whose outputs this function reproduces. Uniform memberships and
    half-lives are additions of this package.

    Args:
        w: projections of tokens to the heads: a linear map of the tokens, split into H heads of K channels.
        temperature: factor of the scores in the softmax, per head; may be None for uniform memberships.
        causal: True if a token reads only itself and earlier tokens.
        bias: learned bias per head and position, only if causal; P is at least the length of the longest
            sequence.
        mask: True for real tokens; by default all tokens are real.
        state: state returned by a call on the previous tokens, only if causal. Calls on successive segments
            equal one call on the whole sequence.
        impl: "auto", "reference", "cpu" or "triton"; `rankwise.ops.dispatch.choose` is the rule for "auto".
            An explicit choice either runs or raises.
        membership: "softmax", or "uniform" for Π = 1/H.
        half_life: half-life of the sums in tokens, per head, only if causal; not learned. See `half_lives`.
        cu_seqlens: boundaries [0, n_1, n_1 + n_2, …, T] of N sequences packed in one row (B = 1). The
            sequences are independent, and the state has one row per sequence.

    Raises:
        ShapeError: if a shape or dtype is wrong, or the bias is shorter than the longest sequence.
        InputError: if options contradict each other, the implementation cannot run here, or the process is
            a fork that lacks threads of torch.

    Examples:
        >>> import torch
        >>> w = torch.ones(1, 4, 2, 3)
        >>> whole = tssa(w, torch.ones(2), causal=True)
        >>> first = tssa(w[:, :3], torch.ones(2), causal=True)
        >>> last = tssa(w[:, 3:], torch.ones(2), causal=True, state=first.state)
        >>> torch.allclose(whole.output[:, 3:], last.output), last.state.seen.tolist()
        (True, [4])
        >>> tssa(w, torch.ones(2)).membership[0, 0].tolist()
        [0.5, 0.5]
    """
    if state is not None:
        instance_of("state", state, TSSAState, "a TSSAState", fix="Make one with TSSAState(*state).")
    call, seen = make_call(w, temperature, causal, bias, mask, state, membership, half_life, cu_seqlens)
    solution = solve(call, choose(impl, w.device))
    last = None if solution.end is None or seen is None else TSSAState(*solution.end, seen)
    return TSSAOutput(solution.output, solution.membership, last)
