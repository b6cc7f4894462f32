"""Linear attention as a mixing matrix (an operator), from feature maps of queries and keys."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import FastMixing, causal_rows, compute_dtype
from rankwise.operators.scan import scan, scan_transposed


class LinearAttentionMixing(FastMixing):
    """Linear attention ``M = diag(1/z) (Φ(Q) Φ(K)ᵀ ⊙ mask)``; without a causal mask, M has rank ≤ F.

    A feature map φ turns each query and key into F features; row t of Φ(Q) is φ(q_t). The divisor z_t is
    φ(q_t) · Σ_s φ(k_s) + ``eps``, summed over the columns s that row t sees. If M is not normalized, z_t = 1.
    If z_t = 0, row t of M is 0.

    Products with M and Mᵀ take O((T + S) F V) time and O((T + S) (F + V)) memory per head; causal products
    run over chunks of tokens.

    Source: A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
    Attention", ICML 2020, eqs. 4 and 5, causal eqs. 8 and 9.

    Args:
        query_features: φ(q), (..., H, T, F).
        key_features: φ(k), (..., H, S, F).
        is_causal: True if row i sees only columns 0 … i, as in torch's causal mask.
        normalized: True to divide each row by its sum. Positive features keep the sums away from 0.
        eps: constant added to the row sums.

    Raises:
        ShapeError: if the shapes of the features do not fit together.

    Examples:
        >>> import torch
        >>> q, k = torch.rand(2, 4, 16, 8), torch.rand(2, 4, 16, 8)
        >>> operator = LinearAttentionMixing(q, k, is_causal=True, normalized=True)
        >>> operator.shape, bool((operator.dense().sum(-1) - 1).abs().max() < 1e-6)
        (torch.Size([2, 4, 16, 16]), True)
    """

    kind = "linear"
    held = ("query_features", "key_features")
    options = ("is_causal", "normalized", "eps")
    may_hide_columns = False

    def __init__(
        self,
        query_features: Float[Tensor, "*batch T F"],
        key_features: Float[Tensor, "*batch S F"],
        is_causal: bool = False,
        normalized: bool = False,
        eps: float = 0.0,
    ) -> None:
        query, key = query_features, key_features
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
        self.query_features, self.key_features = query, key
        self.is_causal, self.normalized, self.eps = is_causal, normalized, float(eps)

    @property
    def shape(self) -> torch.Size:
        """Shape (..., H, T, S) for H heads, T queries and S keys."""
        return torch.Size([*self.query_features.shape[:-1], self.key_features.shape[-2]])

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows of M from the features: O((stop − start) S F) time."""
        work = compute_dtype(self.dtype)
        products = self.query_features[..., start:stop, :].to(work) @ self.key_features.to(work).mT
        products = products.tril(start) if self.is_causal else products
        return products * self._inverse(products.sum(-1, keepdim=True)) if self.normalized else products

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return rows of the support: True everywhere, or on and below the diagonal if causal."""
        sources = self.shape[-1]
        everywhere = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        seen = causal_rows(start, stop, sources, self.device) if self.is_causal else everywhere
        return seen.expand(*self.shape[:-2], stop - start, sources)

    def _multiply(self, values: Tensor, transposed: bool) -> Tensor:
        query, key = self.query_features.to(values.dtype), self.key_features.to(values.dtype)
        tokens, sources = self.shape[-2:]
        inverse = self._inverse(self._row_sums(query, key)) if self.normalized else None
        if transposed and inverse is not None:
            values = values * inverse
        if not self.is_causal:
            mixed = key @ (query.mT @ values) if transposed else query @ (key.mT @ values)
        elif transposed:
            mixed = _to_length(scan_transposed(query, _to_length(key, tokens), None, values), sources)
        else:
            mixed = scan(query, _to_length(key, tokens), None, _to_length(values, tokens))
        return mixed if transposed or inverse is None else mixed * inverse

    def _row_sums(self, query: Tensor, key: Tensor) -> Float[Tensor, "*batch T 1"]:
        if self.is_causal:  # rows t ≥ S see all S columns, so keys are padded to T
            seen = _to_length(key, self.shape[-2]).cumsum(-2)
            return (query * seen).sum(-1, keepdim=True)
        return query @ key.sum(-2)[..., None]

    def _inverse(self, row_sums: Tensor) -> Tensor:
        """Return 1/z for z = row sum + ``eps``, but 0 if z = 0; the inner `where` keeps gradients finite."""
        divisor = row_sums + self.eps
        return torch.where(divisor == 0, 0.0, 1 / torch.where(divisor == 0, 1.0, divisor))


def _to_length(tensor: Tensor, length: int) -> Tensor:
    """Return the first ``length`` tokens, padded with zeros if the tensor has fewer."""
    missing = length - tensor.shape[-2]
    return tensor[..., :length, :] if missing <= 0 else F.pad(tensor, (0, 0, 0, missing))
