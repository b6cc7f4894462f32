"""`EffectiveRank`, a metric of torchmetrics: the effective rank of all embeddings of a data set."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torchmetrics import Metric

from rankwise._internals.linalg import float64_device
from rankwise.errors import InputError, ShapeError, described, whole_number
from rankwise.measures.row_moments import RowMoments


class EffectiveRank(Metric):
    """Effective rank of all embeddings of a data set: a smooth count of the directions that they fill.

    Formula: exp(−Σ p_i log p_i) with p = σ/Σσ, where σ are the singular values of the N×D matrix of all
    embeddings. This is RankMe without its constant 10⁻⁷ in p, so that p sums to 1.
    Range: [1, min(N, D)]; 1 if all embeddings are multiples of one vector, 0 if all are zero. Independent of
    the scale and of a rotation of the embeddings, of their order and of the batches.
    Cost: O(N D²) time and 8·D² bytes; N does not add memory. `compute` takes O(D³) time.
    Numerics: float64 sums of second moments if the device has float64, else float32. They are added over
    processes (DDP). Singular values below √(D·ε)·σ_1 (4e-7·σ_1 for D = 640) count as 0.
    Source: Garrido et al., "RankMe: Assessing the Downstream Performance of Pretrained Self-Supervised
    Representations by Their Rank", arXiv 2210.02885.

    Args:
        num_features: number of channels D of an embedding.
        kwargs: options of `torchmetrics.Metric`.

    Raises:
        InputError: if torchmetrics is not installed, ``num_features`` is not a positive integer, an
            embedding is NaN or infinite, or `compute` is called before any embedding was passed.
        ShapeError: if embeddings do not have the shape (..., D).

    Examples:
        >>> import torch
        >>> from rankwise.measures import EffectiveRank
        >>> rank = EffectiveRank(num_features=4)
        >>> for batch in torch.eye(4).split(2):
        ...     rank.update(batch)
        >>> round(rank.compute().item(), 6)
        4.0
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    moments: Tensor
    count: Tensor

    def __init__(self, num_features: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        whole_number("`num_features`", num_features, fix="Pass the width of the embeddings.")
        zeros = torch.zeros(num_features, num_features, dtype=torch.float64)
        self.add_state("moments", zeros, dist_reduce_fx="sum")
        self.add_state("count", zeros[0, 0].clone(), dist_reduce_fx="sum")

    def update(self, embeddings: Float[Tensor, "... D"]) -> None:
        """Add embeddings (..., D) of any leading shape, such as (B, D) or (B, T, D)."""
        width = self.moments.shape[-1]
        if not (isinstance(embeddings, Tensor) and embeddings.ndim and embeddings.shape[-1] == width):
            raise ShapeError(
                "embeddings of `EffectiveRank`",
                expected=f"a tensor of shape (..., {width})",
                got=described(embeddings),
                fix="`num_features` is the length of the last axis.",
            )
        rows = RowMoments.of(embeddings.reshape(-1, width))
        if not bool(rows.moments.isfinite().all()):
            raise InputError(
                "embeddings of `EffectiveRank`",
                expected="finite numbers",
                got="a number that is NaN, infinite, or so large that its square overflows",
                fix="Leave out these embeddings, or compute them in float32.",
            )
        self.moments = self.moments + rows.moments.to(self.moments)
        self.count = self.count + rows.count.to(self.count)

    def compute(self) -> Float64[Tensor, ""]:
        """Return the effective rank of all embeddings so far, of all processes."""
        if not self.count:
            raise InputError(
                "`EffectiveRank`",
                expected="at least one embedding",
                got="none",
                fix="Call `update` before `compute`.",
            )
        return RowMoments(self.moments, self.count).effective_rank()

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        """Move the sums with a model. Its dtype does not apply: sums are float64 if the device has it."""

        def move(state: Tensor) -> Tensor:
            device = fn(torch.zeros(1, device=state.device)).device
            exact = float64_device(device) == device
            return state.to(device, torch.float64 if exact else torch.float32)

        return super()._apply(move, exclude_state)
