"""Cases for the tests of the estimators: heads of many kinds, and an operator that counts its products."""

from collections.abc import Callable

import torch
from tests.measures.measure_cases import generator
from torch import Tensor

from rankwise.operators import DenseMixing, MixingOperator, SoftmaxMixing
from rankwise.operators.base import Index

KINDS = (
    "nearly uniform",
    "plain",
    "plain causal",
    "sharp",
    "sharp causal",
    "nearly hardmax",
    "window",
    "sink",
    "token before",
    "itself",
    "low rank",
    "decay",
)

FEW_KINDS = ("plain causal", "sharp", "nearly hardmax", "window", "sink", "itself")
"""For what is repeated over many seeds."""


def head(kind: str, tokens: int, seed: int = 0) -> MixingOperator:
    """One head of shape (T, T), from float32 queries and keys of width 16."""
    q, k = torch.randn(2, tokens, 16, generator=generator(seed))
    position = torch.arange(tokens, dtype=torch.float32)
    distance = position[:, None] - position
    sink = torch.zeros(tokens, tokens)
    sink[:, 0] = 8
    made = {
        "nearly uniform": lambda: SoftmaxMixing(q / 5, k),
        "plain": lambda: SoftmaxMixing(q, k),
        "plain causal": lambda: SoftmaxMixing(q, k, is_causal=True),
        "sharp": lambda: SoftmaxMixing(4 * q, k),
        "sharp causal": lambda: SoftmaxMixing(4 * q, k, is_causal=True),
        "nearly hardmax": lambda: SoftmaxMixing(32 * q, k),
        "window": lambda: SoftmaxMixing(q, k, mask=-((distance / 4) ** 2), is_causal=True),
        "sink": lambda: SoftmaxMixing(q, k, mask=sink, is_causal=True),
        "token before": lambda: SoftmaxMixing(q, k, mask=10.0 * (distance == 1), is_causal=True),
        "itself": lambda: SoftmaxMixing(q, k, mask=8.0 * (distance == 0)),
        "low rank": lambda: SoftmaxMixing(3 * q[:, :2], k[:, :2]),
        "decay": lambda: DenseMixing(torch.where(distance >= 0, 0.9**distance, 0.0)),
    }
    return made[kind]()


class OnlyProducts(MixingOperator):
    """A matrix of another kind: applied by its own products, its rows read for ‖M‖_F alone; counts both."""

    kind = "other"
    held = ("matrix",)

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix.to(torch.float64)
        self.columns_applied = self.rows_read = 0

    shape = property(lambda self: self.matrix.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        self.rows_read += stop - start
        return self.matrix[start:stop]

    def __matmul__(self, values: Tensor) -> Tensor:
        self.columns_applied += values.shape[-1]
        return self.matrix @ values

    def apply_transposed(self, values: Tensor) -> Tensor:
        self.columns_applied += values.shape[-1]
        return self.matrix.mT @ values

    def support_rows(self, start: int, stop: int) -> Tensor:
        return self.matrix[start:stop] != 0

    def __getitem__(self, index: Index) -> "OnlyProducts":
        return self

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "OnlyProducts":
        return self
