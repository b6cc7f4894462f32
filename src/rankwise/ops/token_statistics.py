"""Token Statistics Self-Attention (TSSA): the function `tssa`, its output, its decoding state, half-lives."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from rankwise.errors import InputError, instance_of
from rankwise.ops.arguments import make_call
from rankwise.ops.dispatch import choose, solve


class TSSAState(NamedTuple):
    """Decoding state of causal TSSA: running sums over all tokens so far, of constant size.

    Sums are float32, or float64 if the inputs are float64. Each call rounds float32 sums once. So a sum has
    a relative error of at most n·2^-24 after n calls, or 1.44·h·2^-24 with a half-life of h tokens.
    A float32 sum stops growing when it is 2^24 times as large as the added number. To decode millions of
    tokens one at a time without half-lives, use float64 inputs.

    Attributes:
        energy: Σ_u λ^age w²[u,h,k] over tokens u; age is the number of tokens after u, and λ the decay or 1.
        assigned: Σ_u λ^age Π[u,h]·w²[u,h,k], where Π are memberships.
        mass: Σ_u λ^age Π[u,h].
        seen: number of real tokens so far, which is the position of the next token in the learned bias.
    """

    energy: Float[Tensor, "B H K"]
    assigned: Float[Tensor, "B H K"]
    mass: Float[Tensor, "B H"]
    seen: Int[Tensor, " B"]


class TSSAOutput(NamedTuple):
    """Output, memberships and decoding state of a `tssa` call.

    Attributes:
        output: output for each token, head and channel, in the dtype of w; 0 at masked tokens.
        membership: memberships Π, the weights of the heads at each token, in float32 (float64 if w is
            float64). They sum to 1 over the heads, and are 0 at masked tokens.
        state: sums after the last token, the argument ``state`` of the next call; None if not causal.
    """

    output: Float[Tensor, "B T H K"]
    membership: Float[Tensor, "B T H"]
    state: TSSAState | None


def tssa(
    w: Float[Tensor, "B T H K"],
    temperature: Float[Tensor, " H"],
    causal: bool = False,
    bias: Float[Tensor, "H P"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    state: TSSAState | None = None,
    impl: str = "auto",
    *,
    half_life: Float[Tensor, " H"] | None = None,
) -> TSSAOutput:
    """Compute Token Statistics Self-Attention (TSSA), in which tokens interact only through sums over tokens.

    Bidirectional TSSA, with sums over all tokens u, score s, membership Π and moment m::

        s[t,h]     = Σ_k w[t,h,k]² / max(‖w[:,h,k]‖, 1e-12)²
        Π[t,·]     = softmax over heads of temperature[h] · s[t,h]
        m[h,k]     = Σ_u Π[u,h] w[u,h,k]² / (Σ_u Π[u,h] + 1e-8)
        out[t,h,k] = -Π[t,h] w[t,h,k] / (1 + m[h,k])

    Causal TSSA, a different function, has running sums of w² (c), Π w² (a) and Π (n). The score adds the
    learned bias once for each channel k::

        c_t = λ_h c_{t-1} + w_t²;        s[t,h] = Σ_k ( w[t,h,k]² / max(c[t,h,k], 1e-12) + bias[h,t] )
        a_t = λ_h a_{t-1} + Π_t w_t²;    n_t = λ_h n_{t-1} + Π_t;    m_t = a_t / (n_t + 1e-8)

    λ_h is 1, or 2^(-1/half_life[h]) if half-lives are passed. A token that is u tokens old has the weight λ^u
    in all three sums, so m is a weighted mean, and s does not shrink as the text grows.

    A masked token has no effect: it adds nothing, does not decay the sums, and takes no position of the bias.
    Its own output and gradient are 0, even if w is NaN there. Padding may be on the left, on the right or
    between tokens; results at real tokens equal the results without padding.

    Gradients flow through output, memberships and state. NaN in w reaches all outputs that depend on it. NaN
    reaches the gradients of other tokens only if the loss depends on one of these outputs.

    Range: Π in [0, 1]; |out| ≤ Π |w|. Cost: O(B T H K) time; O(B T H) memory in addition to input and output.
    A CPU also stores the sums at every 64th token: 1/32 of the size of w forward, 1/16 backward. On a CPU,
    half precision adds float32 copies of w and output, a mask adds copies of w and output without padding,
    and a non-contiguous w adds a contiguous copy.

    Source: Wu et al., "Token Statistics Transformer: Linear-Time Attention via Variational Rate Reduction"
    (2024), and its released modules, whose outputs this function reproduces. Half-lives are
    an addition of this package.

    Args:
        w: projections of tokens to the heads: a linear map of the tokens, split into H heads of K channels.
        temperature: factor of the scores in the softmax, per head.
        causal: True if a token reads only itself and earlier tokens.
        bias: learned bias per head and position, only if causal; P is at least the number of real
            tokens of the longest row, including earlier calls.
        mask: True for real tokens; by default all tokens are real.
        state: state returned by a call on the previous tokens, only if causal. Calls on successive segments
            equal one call on the whole sequence.
        impl: "auto", "reference", "cpu" or "triton"; `rankwise.ops.dispatch.choose` is the rule for "auto".
            A named implementation either runs or raises.
        half_life: half-life of the sums in tokens, per head, only if causal; not learned. See `half_lives`.

    Raises:
        ShapeError: if a shape or dtype is wrong, or the bias is shorter than the longest row.
        InputError: if options contradict each other, the implementation cannot run on the device of w, or
            the process is a fork that lacks threads of torch.

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
        instance_of("state", state, TSSAState, "a TSSAState", fix="Pass the state of an earlier call.")
    call, seen = make_call(w, temperature, causal, bias, mask, state, half_life)
    solution = solve(call, choose(impl, w.device))
    last = None if solution.end is None or seen is None else TSSAState(*solution.end, seen)
    return TSSAOutput(solution.output, solution.membership, last)


def half_lives(heads: int, shortest: float | int = 4, longest: float | int = 1024) -> Float64[Tensor, " H"]:
    """Return one half-life per head in tokens, on the CPU, for the argument ``half_life`` of `tssa`.

    Formula: ``h_i = shortest · (longest/shortest)^(i/(heads−1))``. With half-life h, a token that is u tokens
    old has the weight 2^(−u/h) in a sum, so a sum effectively covers 1.44·h tokens.

    Raises:
        InputError: if ``heads`` is below 1, or not 0 < shortest ≤ longest < ∞.

    Examples:
        >>> half_lives(4, shortest=2, longest=16).round(decimals=6).tolist()
        [2.0, 4.0, 8.0, 16.0]
    """
    if heads < 1 or not 0 < shortest <= longest < math.inf:
        raise InputError(
            "`half_lives`",
            expected="heads ≥ 1 and 0 < shortest ≤ longest < ∞",
            got=f"heads={heads}, shortest={shortest}, longest={longest}",
            fix="Pass half-lives in tokens, the shortest first.",
        )
    # The device is explicit, because a model that is built on the meta device needs values of half-lives.
    steps = torch.arange(heads, dtype=torch.float64, device="cpu") / max(heads - 1, 1)
    return shortest * (longest / shortest) ** steps
