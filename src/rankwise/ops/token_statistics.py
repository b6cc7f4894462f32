"""What causal TSSA remembers of the tokens it has seen: two numbers a channel, one a head."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankwise.errors import instance_of
from rankwise.ops import custom_ops, reference
from rankwise.ops.arguments import (
    Problem,
    Solution,
    Sums,
    check_options,
    check_packing,
    check_process,
    check_state,
    check_tensors,
    exact,
    in_dtype,
    lengths,
    offsets,
)
from rankwise.ops.decay import rates
from rankwise.ops.dispatch import choose


class TSSAState(NamedTuple):
    """The running statistics after a token, for each of N sequences.

    Its size is the same after one token and after a million. With a half-life every sum decays by λ a token.
    Sums are float32, or float64 for float64 inputs. Every call rounds them once, so n calls put them off by
    n·2^-24 of themselves at worst, with a half-life of h tokens by 1.44·h·2^-24 however many; a sum of 2^24
    times what a call adds stands still. That matters token by token over millions of tokens without
    half-lives: float64 inputs then carry float64 sums.

    Attributes:
        energy: Σ_u w²[u,h,k], (N, H, K).
        assigned: Σ_u Π[u,h]·w²[u,h,k], (N, H, K).
        mass: Σ_u Π[u,h], (N, H).
        seen: real tokens so far, (N,); the position at which a learned bias is read next.

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
        """The state before the first token.

        Args:
            sequences: N.
            heads: H.
            width: K.
            dtype: of the sums.
            device: where they lie.

        Returns:
            A state of zeros.
        """
        sums = torch.zeros(sequences, heads, width, dtype=dtype, device=device)
        mass = torch.zeros(sequences, heads, dtype=dtype, device=device)
        seen = torch.zeros(sequences, dtype=torch.int64, device=device)
        return cls(sums, sums.clone(), mass, seen)

    def select(self, index: Int[Tensor, " M"]) -> "TSSAState":
        """The states of some of the sequences, in a new order, as beam search needs them.

        Args:
            index: which sequences; one may come twice.

        Returns:
            Their states.
        """
        return TSSAState(*(part.index_select(0, index) for part in self))

    def detach(self) -> "TSSAState":
        """The same numbers, cut from the graph: for training on long texts piece by piece."""
        return TSSAState(*(part.detach() for part in self))


torch.serialization.add_safe_globals([TSSAState])  # tensors, no code: torch.load may make one


class TSSAOutput(NamedTuple):
    """What `tssa` gives.

    Attributes:
        output: in the dtype of w, (B, T, H, K); zero where a token is masked.
        membership: Π, float32 (float64 for float64 inputs), (B, T, H); over the heads it sums to 1, for a
            masked token to 0.
        state: the statistics after the last token, to go on from; None if bidirectional.
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
    """Attend by token statistics: no pair of tokens is compared, time and memory are linear in T.

    Bidirectional, sums over all tokens u::

        s[t,h]     = Σ_k w[t,h,k]² / max(‖w[:,h,k]‖, 1e-12)²
        Π[t,·]     = softmax over heads of temperature[h] · s[t,h]
        m[h,k]     = Σ_u Π[u,h] w[u,h,k]² / (Σ_u Π[u,h] + 1e-8)
        out[t,h,k] = -Π[t,h] w[t,h,k] / (1 + m[h,k])

    Causal, another function, with running sums and a learned bias by position, which counts K times::

        c_t = λ_h c_{t-1} + w_t²;        s[t,h] = Σ_k ( w[t,h,k]² / max(c[t,h,k], 1e-12) + bias[h,t] )
        a_t = λ_h a_{t-1} + Π_t w_t²;    n_t = λ_h n_{t-1} + Π_t;    m_t = a_t / (n_t + 1e-8)

    with λ_h = 1, or 2^(-1/half_life[h]) where half-lives are given. Decay weighs a token u tokens back by
    λ^u in all three sums alike, so m stays a weighted mean and s does not shrink as the text grows.

    A masked token is as if it were not there: it adds nothing, lets no sum decay, takes no position of the
    bias, gives zeros and gets no gradient, whatever its w holds. A padded row equals the row alone, be the
    padding left, right or within.

    Range: Π in [0, 1]; |out| ≤ Π |w|. Cost: O(B T H K) time; beyond input and output, memory
    O(B T H); on a CPU half precision takes float32 copies of both, and w out of order one in order.

    Source: Wu et al., "Token Statistics Transformer: Linear-Time Attention via Variational Rate Reduction"
    (2024), and its released modules, whose outputs this reproduces; uniform memberships and half-lives are
    additions of this package.

    Args:
        w: tokens in the subspaces of the heads: a linear map of them, split into heads.
        temperature: of the softmax, one a head; uniform memberships read none, and None will do.
        causal: whether a token sees only itself and those before.
        bias: learned, by head and position; at least as many positions as the longest text. Causal only.
        mask: True for real tokens.
        state: what a causal call on the tokens before these gave; calls on pieces equal one on the whole.
        impl: "auto", "reference", "cpu" or "triton"; `rankwise.ops.dispatch.choose` is the
            rule of "auto". An explicit choice runs or raises.
        membership: "softmax", or "uniform": Π = 1/H.
        half_life: of the causal sums, in tokens, one a head; `half_lives` makes a ladder. Not learned.
        cu_seqlens: boundaries [0, n_1, n_1 + n_2, …, T] of sequences packed in one row (B = 1); each
            is by itself, and the state has one row for each.

    Returns:
        Output, memberships and state; gradients flow through all three.

    Raises:
        ShapeError: if shapes or dtypes do not fit, or the bias ends before the text.
        InputError: if options contradict each other, the implementation cannot run here, or a forked process
            counts on threads that torch has lost.

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
    check_tensors(w, temperature, bias, mask, half_life)
    check_process(w)
    check_options(causal, temperature, bias, state, membership, half_life)
    if cu_seqlens is not None:
        check_packing(cu_seqlens, w.shape[0], w.shape[1])
    if state is not None:
        fix = "Make one with TSSAState(*state)."
        instance_of("state", state, TSSAState, "a TSSAState", fix=fix)
    chosen = choose(impl, w.device)
    bounds = None if cu_seqlens is None else cu_seqlens.to(w.device, torch.int64)
    tau = None if membership == "uniform" or temperature is None else in_dtype(temperature, exact(w.dtype))
    problem = Problem(w, tau, None, mask, None, None, bounds, causal)
    if not causal:
        solution = _solve(problem, chosen)
        return TSSAOutput(solution.output, solution.membership, None)
    problem, count = _in_order(problem, bias, state, half_life)
    solution = _solve(problem, chosen)
    assert solution.end is not None
    return TSSAOutput(solution.output, solution.membership, TSSAState(*solution.end, count))


def _in_order(
    problem: Problem, bias: Tensor | None, state: TSSAState | None, half_life: Tensor | None
) -> tuple[Problem, Tensor]:
    """What a causal call knows besides: the sums before it, the decay, the bias at each position."""
    w, dtype, start, seen = problem.w, exact(problem.w.dtype), None, lengths(problem)
    if state is not None:
        check_state(state, w, problem.sequences)
        start, seen = Sums(*(in_dtype(part, dtype) for part in state[:3])), seen + state.seen
    offset = None
    if bias is not None:
        offset = offsets(bias.to(dtype), problem, None if state is None else state.seen)
    rate = None if half_life is None else rates(half_life, w.device)
    return problem._replace(offset=offset, start=start, rate=rate), seen


def _solve(problem: Problem, impl: str) -> Solution:
    return reference.solve(problem) if impl == "reference" else custom_ops.solve(problem, impl)
