"""The gated delta rule: DeltaNet, Gated DeltaNet and Kimi Delta Attention."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import Index, MixingOperator, TensorMap, compute_dtype, leading, on_or_below
from rankwise.operators.delta_scan import delta_scan, delta_scan_transposed


class GatedDeltaMixing(MixingOperator):
    r"""The gated delta rule: a linear memory that is corrected by what it already holds.

    ``o_t = S_tᵀ q_t``, ``S_t = P_t S_{t−1} + β_t k_t v_tᵀ``, ``P_t = (I − β_t k_t k_tᵀ) diag(a_t)``, S_0 = 0;
    ``M[t, s] = β_s q_tᵀ P_t P_{t−1} … P_{s+1} k_s`` for s ≤ t, else 0; T = S.

    Any block on or below the diagonal has rank at most K. Without decay it is DeltaNet, with one decay a
    token Gated DeltaNet, with one a token and feature Kimi Delta Attention (KDA). Entries may have either
    sign, and rows need not sum to 1. Layers keep keys at norm 1 and β in [0, 2]: then no step makes a state
    longer; where ``β_t ‖k_t‖² > 2`` the rule itself can grow without bound.

    `@`, its transpose and `rows` (the transpose, applied to unit vectors) run over chunks: O(T K V) time and
    O(T (K + V)) memory for each head, V the width of the values or the number of rows.

    Source: S. Yang, B. Wang, Y. Zhang, Y. Shen and Y. Kim, "Parallelizing Linear Transformers with the Delta
    Rule over Sequence Length", NeurIPS 2024, section 3; S. Yang, J. Kautz and A. Hatamizadeh, "Gated Delta
    Networks: Improving Mamba2 with Delta Rule", ICLR 2025, section 3; Kimi Team, "Kimi Linear", 2025.

    Args:
        query: q, (..., H, T, K); a scale, where there is one, is part of it.
        key: k, of the same shape.
        beta: β, (..., H, T).
        log_decay: log a, in [−inf, 0]: (..., H, T), or (..., H, T, K) for one a feature; none means a = 1.
            That of the first token has no part.

    Raises:
        ShapeError: if they do not fit together.

    Examples:
        >>> import torch
        >>> one = torch.ones(1, 3, 1)
        >>> GatedDeltaMixing(one, one, torch.full((1, 3), 0.5)).dense()[0].tolist()
        [[0.5, 0.0, 0.0], [0.25, 0.5, 0.0], [0.125, 0.25, 0.5]]
    """

    kind = "gated delta"

    def __init__(
        self,
        query: Float[Tensor, "*heads T K"],
        key: Float[Tensor, "*heads T K"],
        beta: Float[Tensor, "*heads T"],
        log_decay: Float[Tensor, "..."] | None = None,
    ) -> None:
        _check(query, key, beta, log_decay)
        self.query, self.key, self.beta, self.log_decay = query, key, beta, log_decay

    @property
    def shape(self) -> torch.Size:
        """Leading axes, H, T, T."""
        return torch.Size([*self.beta.shape, self.beta.shape[-1]])

    @property
    def dtype(self) -> torch.dtype:
        """The widest of the types it was made from."""
        tensors = [self.query, self.key, self.beta, *([] if self.log_decay is None else [self.log_decay])]
        dtype = tensors[0].dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """Device of the queries."""
        return self.query.device

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Mᵀ applied to unit vectors: O(stop (stop − start) K)."""
        work = compute_dtype(self.dtype)
        if stop <= start:
            return self.beta.new_zeros((*self.shape[:-2], 0, self.shape[-1]), dtype=work)
        unit = torch.eye(stop, dtype=work, device=self.device)[:, start:]
        columns = delta_scan_transposed(*self._inputs(work, stop), unit)
        return F.pad(columns.mT, (0, self.shape[-1] - stop))

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """Entries on and below the diagonal."""
        return self.support_rows(0, self.shape[-2])

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows of the support: what lies on and below the diagonal."""
        seen = on_or_below(start, stop, self.shape[-1], self.device)
        return seen.expand(*self.shape[:-2], -1, -1)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V."""
        self._check(values, self.shape[-1], "M @ values")
        work = compute_dtype(torch.promote_types(self.dtype, values.dtype))
        return delta_scan(*self._inputs(work), values.to(work)).to(values.dtype)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Mᵀ U, from the end."""
        self._check(values, self.shape[-2], "M.mT @ values")
        work = compute_dtype(torch.promote_types(self.dtype, values.dtype))
        return delta_scan_transposed(*self._inputs(work), values.to(work)).to(values.dtype)

    @property
    def may_hide_columns(self) -> bool:
        """It has no mask: every token is seen by itself."""
        return False

    def __getitem__(self, index: Index) -> "GatedDeltaMixing":
        """Pick sequences and heads."""
        beta = leading(self.beta[..., None], index)[..., 0]
        decay = self.log_decay
        if decay is not None:
            by_token = decay.ndim == self.beta.ndim
            decay = leading(decay[..., None], index)[..., 0] if by_token else leading(decay, index)
        return GatedDeltaMixing(leading(self.query, index), leading(self.key, index), beta, decay)

    def _map(self, change: TensorMap) -> "GatedDeltaMixing":
        decay = None if self.log_decay is None else change(self.log_decay)
        return GatedDeltaMixing(change(self.query), change(self.key), change(self.beta), decay)

    def _inputs(self, work: torch.dtype, tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, β and log a with an axis of features, of the first tokens or all, in one type."""
        decay = torch.zeros_like(self.beta) if self.log_decay is None else self.log_decay
        decay = decay[..., None] if decay.ndim == self.beta.ndim else decay
        query, key, decay = (tensor[..., :tokens, :].to(work) for tensor in (self.query, self.key, decay))
        return query, key, self.beta[..., :tokens].to(work), decay


def _check(query: Tensor, key: Tensor, beta: Tensor, log_decay: Tensor | None) -> None:
    fits = (
        query.ndim >= 2
        and query.shape == key.shape
        and 0 not in query.shape[-2:]
        and beta.shape == query.shape[:-1]
        and (log_decay is None or log_decay.shape in (beta.shape, query.shape))
    )
    if not fits:
        decay = "" if log_decay is None else f", log_decay {tuple(log_decay.shape)}"
        raise ShapeError(
            "`GatedDeltaMixing`",
            expected="query and key (..., H, T, K), beta (..., H, T), log_decay (..., H, T) or "
            "(..., H, T, K), T and K ≥ 1",
            got=f"query {tuple(query.shape)}, key {tuple(key.shape)}, beta {tuple(beta.shape)}{decay}",
            fix="Move the heads before the tokens, and repeat key heads that several value heads share.",
        )
