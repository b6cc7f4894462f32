"""Linear attention, from the feature maps of queries and keys."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import (
    Index,
    MixingOperator,
    TensorMap,
    compute_dtype,
    leading,
    on_or_below,
)
from rankwise.operators.scan import scan, scan_transposed


class LinearAttentionMixing(MixingOperator):
    r"""Linear attention ``M = diag(1/z) (Φ(Q) Φ(K)ᵀ ⊙ mask)``, its rank at most F without a mask.

    The feature maps Φ have been applied already. ``z`` holds the row sums, z_t = φ(q_t) · Σ_s φ(k_s) over the
    sources that row t sees, plus ``eps``; without normalising it is 1. A row whose z is 0 is zero.

    Cost: `@` and its transpose are O((T + S) F V) time and O((T + S) (F + V)) memory for each head; the
    causal ones run over chunks.

    Source: A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
    Attention", ICML 2020, eqs. 4 and 5, causal eqs. 8 and 9.

    Args:
        query_features: φ(q), (..., H, T, F).
        key_features: φ(k), (..., H, S, F).
        is_causal: row i sees columns 0 … i (counted from the top left).
        normalized: divide each row by its sum. The features must then be such that no sum is near zero;
            positive ones are.
        eps: added to the row sums, as many implementations do.

    Raises:
        ShapeError: if the features do not fit together.

    Examples:
        >>> import torch
        >>> q, k = torch.rand(2, 4, 16, 8), torch.rand(2, 4, 16, 8)
        >>> operator = LinearAttentionMixing(q, k, is_causal=True, normalized=True)
        >>> operator.shape, bool((operator.dense().sum(-1) - 1).abs().max() < 1e-6)
        (torch.Size([2, 4, 16, 16]), True)
    """

    kind = "linear"

    def __init__(
        self,
        query_features: Float[Tensor, "*batch T F"],
        key_features: Float[Tensor, "*batch S F"],
        is_causal: bool = False,
        normalized: bool = False,
        eps: float = 0.0,
    ) -> None:
        _check_features(query_features, key_features)
        self.query_features, self.key_features = query_features, key_features
        self.is_causal, self.normalized, self.eps = is_causal, normalized, float(eps)

    @property
    def shape(self) -> torch.Size:
        """Leading axes, T, S."""
        return torch.Size([*self.query_features.shape[:-1], self.key_features.shape[-2]])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the query features."""
        return self.query_features.dtype

    @property
    def device(self) -> torch.device:
        """Device of the query features."""
        return self.query_features.device

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Products of the features: O((stop − start) S F)."""
        query, key = self._features(compute_dtype(self.dtype))
        products = query[..., start:stop, :] @ key.mT
        products = products.tril(start) if self.is_causal else products
        return products * self._inverse(products.sum(-1, keepdim=True)) if self.normalized else products

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """All entries, or those on and below the diagonal."""
        return self.support_rows(0, self.shape[-2])

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows ``start`` to ``stop`` of the support."""
        sources = self.shape[-1]
        if self.is_causal:
            seen = on_or_below(start, stop, sources, self.device)
        else:
            seen = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        return seen.expand(*self.shape[:-2], stop - start, sources)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V."""
        self._check(values, self.shape[-1], "M @ values")
        query, key = self._features(self._work(values))
        given = values.to(query.dtype)
        if self.is_causal:
            tokens = self.shape[-2]
            mixed = scan(query, _to_length(key, tokens), None, _to_length(given, tokens))
        else:
            mixed = query @ (key.mT @ given)
        mixed = mixed * self._inverse(self._row_sums(query, key)) if self.normalized else mixed
        return mixed.to(values.dtype)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Mᵀ U."""
        self._check(values, self.shape[-2], "M.mT @ values")
        query, key = self._features(self._work(values))
        given = values.to(query.dtype)
        given = given * self._inverse(self._row_sums(query, key)) if self.normalized else given
        if self.is_causal:
            tokens, sources = self.shape[-2:]
            mixed = _to_length(scan_transposed(query, _to_length(key, tokens), None, given), sources)
        else:
            mixed = key @ (query.mT @ given)
        return mixed.to(values.dtype)

    @property
    def may_hide_columns(self) -> bool:
        """It has no mask: every token is seen by itself."""
        return False

    def __getitem__(self, index: Index) -> "LinearAttentionMixing":
        """Pick sequences and heads."""
        return self._map(lambda features: leading(features, index))

    def _map(self, change: TensorMap) -> "LinearAttentionMixing":
        query, key = change(self.query_features), change(self.key_features)
        return LinearAttentionMixing(query, key, self.is_causal, self.normalized, self.eps)

    def _features(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.query_features.to(dtype), self.key_features.to(dtype)

    def _work(self, values: Tensor) -> torch.dtype:
        """The type to sum in."""
        return compute_dtype(torch.promote_types(self.dtype, values.dtype))

    def _row_sums(self, query: Tensor, key: Tensor) -> Float[Tensor, "*batch T 1"]:
        if self.is_causal:  # where rows outnumber columns the later ones see all
            seen = _to_length(key, self.shape[-2]).cumsum(-2)
            return (query * seen).sum(-1, keepdim=True)
        return query @ key.sum(-2)[..., None]

    def _inverse(self, row_sums: Tensor) -> Tensor:
        divisor = row_sums + self.eps
        return torch.where(divisor == 0, 0.0, 1 / torch.where(divisor == 0, 1.0, divisor))


def _to_length(tensor: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens, with zeros where there are fewer."""
    missing = length - tensor.shape[-2]
    return tensor[..., :length, :] if missing <= 0 else F.pad(tensor, (0, 0, 0, missing))


def _check_features(query: Tensor, key: Tensor) -> None:
    fits = (
        query.ndim == key.ndim >= 2
        and query.shape[:-2] == key.shape[:-2]
        and query.shape[-1] == key.shape[-1]
        and 0 not in (*query.shape[-2:], *key.shape[-2:])
    )
    if not fits:
        raise ShapeError(
            "`LinearAttentionMixing`",
            expected="query features (..., H, T, F) and key features (..., H, S, F) with T, S, F ≥ 1",
            got=f"{tuple(query.shape)} and {tuple(key.shape)}",
            fix="Repeat key heads that several query heads share.",
        )
