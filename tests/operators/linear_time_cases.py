"""Operators that apply in linear time: one row per operator, from which the laws and refusals are tested."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tests.operators.mixing_laws import Expected, expected
from torch import Tensor
from torch.nn.functional import normalize

from rankwise.operators import (
    DiagonalMixing,
    GatedDeltaMixing,
    LinearAttentionMixing,
    MixingOperator,
    SelectiveMixing,
    SemiseparableMixing,
    SumMixing,
    ToeplitzMixing,
)

Make = Callable[[int, int, int, int, int], MixingOperator]


class Case(NamedTuple):
    """A kind of operator."""

    make: Make
    """Operator for a batch, heads, tokens, sources and a width, from the global generator of torch."""
    by_hand: Callable[[MixingOperator], Expected] | None
    """Matrix from the definition, and the rounding of its products; None if another test has it."""
    largest_tensor: Callable[[int, int], int]
    """Numbers per head in the largest tensor of a product with three values, for T tokens and width K."""
    refused: Sequence[tuple[tuple[int, ...] | None, ...]] = ()
    """Shapes of constructor arguments that do not fit."""
    error: str = ""
    """Words of the error for these shapes."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def causal(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool).tril()


def of_features(T: int, K: int) -> int:
    """Numbers in features or values of all tokens, or in a chunk of 64 by 64."""
    return max(T * K, 3 * T, 64 * 64)


def of_states(T: int, K: int) -> int:
    """Numbers in a state of K features by three values of all tokens."""
    return 3 * K * T


# --- linear attention ------------------------------------------------------------------------------------


def linear(is_causal: bool, normalized: bool) -> Make:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        query, key = normal(B, H, T, K), normal(B, H, S, K)
        if normalized:  # such features are positive; none so near zero that bfloat16 shows in a quotient
            query, key = 1 + query.sigmoid(), 1 + key.sigmoid()
        return LinearAttentionMixing(query, key, is_causal, normalized)

    return make


def linear_by_hand(op: LinearAttentionMixing) -> Expected:
    """An entry is a product of F and a sum of S roundings, and the same for the row sum and the division."""

    def matrix(query: Tensor, key: Tensor) -> Tensor:
        rows = torch.zeros(op.shape, dtype=torch.float64)
        for t in range(op.shape[-2]):
            seen = min(t + 1, op.shape[-1]) if op.is_causal else op.shape[-1]
            rows[..., t, :seen] = (query[..., t, None, :] * key[..., :seen, :]).sum(-1)
        return rows / (rows.sum(-1, keepdim=True) + op.eps) if op.normalized else rows

    query, key = op.query_features.double(), op.key_features.double()
    support = causal(*op.shape[-2:]) if op.is_causal else torch.ones(op.shape[-2:], dtype=torch.bool)
    size = matrix(query.abs(), key.abs())
    return expected(op, matrix(query, key), size, 2 * (query.shape[-1] + key.shape[-2]) + 2, support)


# --- diagonal and Toeplitz -------------------------------------------------------------------------------


def diagonal(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
    return DiagonalMixing(normal(B, H, T))


def diagonal_by_hand(op: DiagonalMixing) -> Expected:
    """Entries are exact; a product is one multiplication, rounded once."""
    matrix = torch.zeros(op.shape, dtype=torch.float64)
    for t in range(op.shape[-1]):
        matrix[..., t, t] = op.diagonal[..., t].double()
    support = torch.eye(op.shape[-1], dtype=torch.bool)
    return expected(op, matrix, matrix.abs(), 1, support)._replace(slack=torch.zeros_like(matrix))


def toeplitz(is_causal: bool) -> Make:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        return ToeplitzMixing(normal(B, H, T if is_causal else 2 * T - 1), is_causal)

    return make


def toeplitz_by_hand(op: ToeplitzMixing) -> Expected:
    """Each of three transforms is off by log2(n)·u·‖x‖ (Higham, theorem 24.2, with a constant of about 4).

    A circular product is then off by 3·4·log2(n)·u·‖k‖₂‖v‖₂ in every entry, one unit more for the product;
    the sum of T products on the other side by T·u·‖k‖₂‖v‖₂ at most.
    """
    kernel, tokens = op.kernel.double(), op.shape[-1]
    matrix = torch.zeros(op.shape, dtype=torch.float64)
    for t in range(tokens):
        for s in range(tokens):
            at = t - s if op.is_causal else t - s + tokens - 1
            if at >= 0:
                matrix[..., t, s] = kernel[..., at]
    lags = kernel.shape[-1]
    eps = torch.finfo(torch.float64 if op.dtype == torch.float64 else torch.float32).eps
    size = (12 * math.log2(4 * lags) + 1 + lags) * eps * kernel.norm(dim=-1)[..., None, None]

    def slack(values: Tensor) -> Tensor:
        return size * values.double().norm(dim=-2, keepdim=True).expand(*values.shape)

    support = causal(tokens, tokens) if op.is_causal else torch.ones(tokens, tokens, dtype=torch.bool)
    return Expected(matrix, torch.zeros_like(matrix), (slack, slack), support)


def of_transform(T: int, K: int) -> int:
    """Numbers in three values of all tokens, padded to a power of two of at least 2T − 1."""
    return 3 * 2 ** math.ceil(math.log2(2 * T))


# --- state spaces ----------------------------------------------------------------------------------------


def semiseparable(groups: int, stepped: bool) -> Make:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        c, b, decay = normal(B, H, T, K), normal(B, H, T, K), -normal(B, groups * H, T).abs()
        return SemiseparableMixing(c, b, decay, normal(B, groups * H, T) if stepped else None)

    return make


def recurrent(c: Tensor, b: Tensor, step: Tensor, decay: Callable[[int], Tensor]) -> Tensor:
    """Row by row, with a state for each column: h_t = decay_t h_{t−1} + step_t b_t, entries c_t·h_t."""
    matrix = torch.zeros(*step.shape, step.shape[-1], dtype=torch.float64)
    state = torch.zeros(*matrix.shape[:-1], b.shape[-1], dtype=torch.float64)
    for t in range(step.shape[-1]):
        state = decay(t)[..., None, :] * state
        state[..., t, :] = b[..., t, :] * step[..., t, None]
        matrix[..., t, :] = (c[..., t, None, :] * state).sum(-1)
    return matrix


def undecayed(t: int) -> Tensor:
    return torch.ones(1, dtype=torch.float64)


def semiseparable_by_hand(op: SemiseparableMixing) -> Expected:
    """An entry is N products and a step, T values are summed, a decay is from a sum of T logs.

    The sum of logs L is off by T·u·|L|, its exponential by T·u·|L|·e^L, at most T·u: that is relative to
    products that have not decayed, so sizes are taken without decay.
    """
    c, b, a = op.c.double(), op.b.double(), op.log_decay.double().exp()
    step = torch.ones_like(a) if op.step is None else op.step.double()
    if c.ndim > 2:
        c, b = (x.repeat_interleave(a.shape[-2] // c.shape[-3], -3) for x in (c, b))
    matrix = recurrent(c, b, step, lambda t: a[..., t, None])
    size = recurrent(c.abs(), b.abs(), step.abs(), undecayed)
    tokens, width = c.shape[-2:]
    return expected(op, matrix, size, width + 2 * tokens + 2, causal(tokens, tokens))


def selective(shared: bool) -> Make:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        c, b = (normal(B, 1 if shared else H, T, K) for _ in range(2))
        rate = -normal(H, K).abs() if shared else -normal(B, H, K).abs()
        return SelectiveMixing(c, b, rate, normal(B, H, T).abs())

    return make


def selective_by_hand(op: SelectiveMixing) -> Expected:
    """An entry is N products, T values are summed, a decay is from a sum of T steps.

    A sum of steps L is off by T·u·L, its exponential by T·u·|rate·L|·e^(rate·L), at most T·u: relative to
    products that have not decayed, so sizes are taken without decay. As a product of T factors it is off by
    2T·u.
    """
    c, b, rate, step = (tensor.double() for tensor in (op.c, op.b, op.rate, op.step))
    matrix = recurrent(c, b, step, lambda t: (rate * step[..., t, None]).exp())
    size = recurrent(c.abs(), b.abs(), step, undecayed)
    tokens, width = c.shape[-2:]
    return expected(op, matrix, size, width + 4 * tokens + 4, causal(tokens, tokens))


def gated_delta(decay: str) -> Make:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        key = normalize(normal(B, H, T, K), dim=-1)  # as every such layer does
        axes = {"none": None, "by token": (B, H, T), "by feature": (B, H, T, K)}[decay]
        log_decay = None if axes is None else -normal(*axes).abs()
        return GatedDeltaMixing(normal(B, H, T, K), key, 2 * normal(B, H, T).sigmoid(), log_decay)

    return make


def gated_delta_by_hand(op: GatedDeltaMixing) -> Expected:
    """The state token by token, with the unit vectors as values.

    With ‖k‖ = 1, β in [0, 2] and a ≤ 1 no step makes a state longer, and one source leaves a state of norm at
    most 2: an entry is at most 2 ‖q_t‖, and each of T steps adds an error of (K + 4) u of that, which no
    later step enlarges.
    """
    query, key, beta = op.query.double(), op.key.double(), op.beta.double()
    decay = torch.ones_like(beta) if op.log_decay is None else op.log_decay.double().exp()
    decay = decay[..., None] if decay.ndim == beta.ndim else decay
    tokens, width = query.shape[-2:]
    unit, one = torch.eye(tokens, dtype=torch.float64), torch.eye(width, dtype=torch.float64)
    state, rows = query.new_zeros(*query.shape[:-2], width, tokens), []
    for t in range(tokens):
        k, b = key[..., t, :, None], beta[..., t, None, None]
        state = (one - b * k @ k.mT) @ (decay[..., t, :, None] * state) + b * k * unit[t]
        rows.append((query[..., t, None, :] @ state)[..., 0, :])
    size = 2 * query.norm(dim=-1, keepdim=True).expand(*query.shape[:-1], tokens)
    return expected(op, torch.stack(rows, dim=-2), size, tokens + width + 4, causal(tokens, tokens))


# --- operators made of operators -------------------------------------------------------------------------


def total(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
    return SumMixing(diagonal(B, H, T, S, K), selective(True)(B, H, T, S, K))


# --- the table -------------------------------------------------------------------------------------------

# fmt: off
LINEAR_TIME: dict[str, Case] = {
    "linear": Case(
        linear(False, False), linear_by_hand, of_features,
        [((4, 3), (4, 2)), ((2, 4, 3), (4, 3)), ((2, 4, 3), (1, 4, 3)), ((3,), (3,)), ((0, 3), (4, 3)),
         ((4, 0), (4, 0))],
        "query features (..., H, T, F)",
    ),
    "linear, causal": Case(linear(True, False), linear_by_hand, of_features),
    "linear, normalized": Case(linear(False, True), linear_by_hand, of_features),
    "linear, causal, normalized": Case(linear(True, True), linear_by_hand, of_features),
    "diagonal": Case(
        diagonal, diagonal_by_hand, lambda T, K: 3 * T,
        [((),), ((0,),), ((2, 0),)],
        "one number for each token",
    ),
    "toeplitz, causal": Case(
        toeplitz(True), toeplitz_by_hand, of_transform, [((),), ((2, 0),)], "(..., T) lags"
    ),
    "toeplitz": Case(toeplitz(False), toeplitz_by_hand, of_transform),
    "semiseparable": Case(
        semiseparable(1, False), semiseparable_by_hand, of_features,
        [((2, 4, 3), (2, 4, 2), (2, 4), None), ((2, 4, 3), (2, 5, 3), (2, 4), None),
         ((2, 4, 3), (2, 4, 3), (2, 5), None), ((2, 4, 3), (2, 4, 3), (3, 4), None),
         ((2, 4, 3), (2, 4, 3), (4,), None), ((2, 4, 3), (2, 4, 3), (4, 4), (2, 4)),
         ((1, 2, 4, 3), (1, 2, 4, 3), (2, 2, 4), None), ((0, 3), (0, 3), (0,), None),
         ((0, 4, 3), (0, 4, 3), (2, 4), None), ((3,), (3,), (), None)],
        "c and b (..., G, T, N)",
    ),
    "semiseparable, grouped, stepped": Case(semiseparable(3, True), semiseparable_by_hand, of_features),
    "gated delta": Case(
        gated_delta("by token"), gated_delta_by_hand, of_features,
        [((2, 4, 3), (2, 4, 2), (2, 4), None), ((2, 4, 3), (1, 4, 3), (2, 4), None),
         ((2, 4, 3), (2, 4, 3), (2, 5), None), ((2, 4, 3), (2, 4, 3), (2, 4, 1), None),
         ((2, 4, 3), (2, 4, 3), (2, 4), (2, 5)), ((2, 4, 3), (2, 4, 3), (2, 4), (2, 4, 1)),
         ((0, 3), (0, 3), (0,), None), ((4, 0), (4, 0), (4,), None), ((3,), (3,), (), None)],
        "query and key (..., H, T, K)",
    ),
    "gated delta, by feature": Case(
        gated_delta("by feature"), gated_delta_by_hand, lambda T, K: max(T * K, 3 * T)
    ),
    "delta": Case(gated_delta("none"), gated_delta_by_hand, of_features),
    "sum": Case(total, None, of_states),
    "selective": Case(
        selective(True), selective_by_hand, of_states,
        [((1, 4, 3), (1, 4, 2), (2, 3), (2, 4)), ((1, 4, 3), (1, 5, 3), (2, 3), (2, 4)),
         ((1, 4, 3), (1, 4, 3), (2, 2), (2, 4)), ((1, 4, 3), (1, 4, 3), (3, 3), (2, 4)),
         ((1, 4, 3), (1, 4, 3), (2, 3), (2, 5)), ((3, 4, 3), (3, 4, 3), (2, 3), (2, 4)),
         ((4, 3), (4, 3), (2, 3), (2, 4)), ((2, 1, 4, 3), (2, 1, 4, 3), (2, 3), (3, 2, 4)),
         ((2, 1, 4, 3), (2, 1, 4, 3), (3, 2, 3), (2, 2, 4)), ((1, 0, 3), (1, 0, 3), (2, 3), (2, 0)),
         ((1, 4, 0), (1, 4, 0), (2, 0), (2, 4)), ((3,), (3,), (3,), ())],
        "c and b (..., 1 or D, T, N)",
    ),
    "selective, by channel": Case(selective(False), selective_by_hand, of_states),
}
# fmt: on
