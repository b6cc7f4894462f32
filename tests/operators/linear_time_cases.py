"""Makers of the operators that apply in linear time, for the laws of every operator."""

from collections.abc import Callable

import torch
from torch import Tensor

from rankwise.operators import (
    DiagonalMixing,
    GatedDeltaMixing,
    LinearAttentionMixing,
    MixingOperator,
    ProductMixing,
    SelectiveMixing,
    SemiseparableMixing,
    SumMixing,
    ToeplitzMixing,
)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def linear(causal: bool, normalized: bool) -> Callable[..., MixingOperator]:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        query, key = normal(B, H, T, K), normal(B, H, S, K)
        if normalized:  # such features are positive; none so near zero that bfloat16 shows in a quotient
            query, key = 1 + query.sigmoid(), 1 + key.sigmoid()
        return LinearAttentionMixing(query, key, causal, normalized)

    return make


def diagonal(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
    return DiagonalMixing(normal(B, H, T))


def toeplitz(causal: bool) -> Callable[..., MixingOperator]:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        return ToeplitzMixing(normal(B, H, T if causal else 2 * T - 1), causal)

    return make


def semiseparable(groups: int, stepped: bool) -> Callable[..., MixingOperator]:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        c, b, decay = normal(B, H, T, K), normal(B, H, T, K), -normal(B, groups * H, T).abs()
        return SemiseparableMixing(c, b, decay, normal(B, groups * H, T) if stepped else None)

    return make


def selective(shared: bool) -> Callable[..., MixingOperator]:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        c, b = (normal(B, 1 if shared else H, T, K) for _ in range(2))
        rate = -normal(H, K).abs() if shared else -normal(B, H, K).abs()
        return SelectiveMixing(c, b, rate, normal(B, H, T).abs())

    return make


def gated_delta(decay: str) -> Callable[..., MixingOperator]:
    def make(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
        key = torch.nn.functional.normalize(normal(B, H, T, K), dim=-1)  # as every such layer does
        axes = {"none": None, "by token": (B, H, T), "by feature": (B, H, T, K)}[decay]
        log_decay = None if axes is None else -normal(*axes).abs()
        return GatedDeltaMixing(normal(B, H, T, K), key, 2 * normal(B, H, T).sigmoid(), log_decay)

    return make


def product(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
    features = LinearAttentionMixing(normal(B, H, T, K), normal(B, H, S, K))
    return ProductMixing(DiagonalMixing(normal(B, H, T)), features, ToeplitzMixing(normal(B, H, S)))


def total(B: int, H: int, T: int, S: int, K: int) -> MixingOperator:
    return SumMixing(diagonal(B, H, T, S, K), selective(True)(B, H, T, S, K))


LINEAR_TIME: dict[str, Callable[..., MixingOperator]] = {
    "linear": linear(False, False),
    "linear, causal": linear(True, False),
    "linear, normalized": linear(False, True),
    "linear, causal, normalized": linear(True, True),
    "diagonal": diagonal,
    "toeplitz, causal": toeplitz(True),
    "toeplitz": toeplitz(False),
    "semiseparable": semiseparable(1, False),
    "semiseparable, grouped, stepped": semiseparable(3, True),
    "gated delta": gated_delta("by token"),
    "gated delta, by feature": gated_delta("by feature"),
    "delta": gated_delta("none"),
    "product": product,
    "sum": total,
    "selective": selective(True),
    "selective, by channel": selective(False),
}
