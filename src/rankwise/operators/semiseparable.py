"""State-space duality: the operator of Mamba-2 and of other models with one decay a head and token."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import Index, MixingOperator, TensorMap, compute_dtype, leading, on_or_below
from rankwise.operators.scan import log_weights, scan, scan_transposed


class SemiseparableMixing(MixingOperator):
    r"""A scan with scalar decay: ``M[t, s] = c_t · b_s · (Π_{s < r ≤ t} a_r) · step_s`` for s ≤ t, else 0.

    T = S. Any block on or below the diagonal has rank at most N. Fewer heads of c and b than of decays are
    groups: head h reads group ``h // (H // G)``. Mamba-2 has log a = Δ·A and step = Δ; its D·x is a skip
    beside M and has no part in it.

    Decays stay logarithms and are only ever added, so a = 0 (−inf), a = 1 and any length are exact to
    rounding, and nothing overflows. `@` and its transpose run over chunks: O(T N V) time and O(T (N + V))
    memory for each head.

    Source: T. Dao and A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality", ICML 2024, sections 3 and 6.

    Args:
        c: what reads the state, (..., G, T, N).
        b: what enters the state, of the same shape.
        log_decay: log a, (..., H, T), in [−inf, 0], H a multiple of G. That of the first token has no part.
        step: a factor of each source, of the shape of ``log_decay``; 1 by default.

    Raises:
        ShapeError: if they do not fit together.

    Examples:
        >>> import torch
        >>> one = torch.ones(1, 3, 1)
        >>> SemiseparableMixing(one, one, torch.full((1, 3), 0.5).log()).dense()[0].tolist()
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]
    """

    kind = "semiseparable"

    def __init__(
        self,
        c: Float[Tensor, "*groups T N"],
        b: Float[Tensor, "*groups T N"],
        log_decay: Float[Tensor, "*heads T"],
        step: Float[Tensor, "*heads T"] | None = None,
    ) -> None:
        _check(c, b, log_decay, step)
        self.c, self.b, self.log_decay, self.step = c, b, log_decay, step

    @property
    def shape(self) -> torch.Size:
        """Leading axes, H, T, T."""
        return torch.Size([*self.log_decay.shape, self.log_decay.shape[-1]])

    @property
    def dtype(self) -> torch.dtype:
        """The wider of the types of c and the decays."""
        return torch.promote_types(self.c.dtype, self.log_decay.dtype)

    @property
    def device(self) -> torch.device:
        """Device of c."""
        return self.c.device

    @property
    def per_group(self) -> int:
        """Heads that share one c and b."""
        return self.log_decay.shape[-2] // self.c.shape[-3] if self.c.ndim > 2 else 1

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Products of c and b under their decay: O((stop − start) T N)."""
        work = compute_dtype(self.dtype)
        products = self.c[..., start:stop, :].to(work) @ self.b[..., :stop, :].to(work).mT
        weights = log_weights(self.log_decay[..., :stop].to(work), start).exp()
        rows = self._ungrouped(products) * weights
        if self.step is not None:
            rows = rows * self.step[..., None, :stop].to(work)
        return F.pad(rows, (0, self.shape[-1] - stop))

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
        work = self._work(values)
        given = values.to(work)
        given = given if self.step is None else given * self.step[..., None].to(work)
        return self._scanned(scan, given, work).to(values.dtype)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Mᵀ U, scanned from the end."""
        self._check(values, self.shape[-2], "M.mT @ values")
        work = self._work(values)
        mixed = self._scanned(scan_transposed, values.to(work), work)
        mixed = mixed if self.step is None else mixed * self.step[..., None].to(work)
        return mixed.to(values.dtype)

    @property
    def may_hide_columns(self) -> bool:
        """It has no mask: every token is seen by itself."""
        return False

    def __getitem__(self, index: Index) -> "SemiseparableMixing":
        """Pick sequences and heads; c and b stay grouped where all heads are kept."""
        step = None if self.step is None else leading(self.step[..., None], index)[..., 0]
        decay = leading(self.log_decay[..., None], index)[..., 0]
        c, b = (self.c, self.b) if self._keeps_heads(index) else map(self._ungrouped, (self.c, self.b))
        return SemiseparableMixing(leading(c, index), leading(b, index), decay, step)

    def _map(self, change: TensorMap) -> "SemiseparableMixing":
        step = None if self.step is None else change(self.step)
        return SemiseparableMixing(change(self.c), change(self.b), change(self.log_decay), step)

    def _scanned(self, way: Callable[..., Tensor], values: Tensor, work: torch.dtype) -> Tensor:
        c, b, decay = self.c.to(work), self.b.to(work), self.log_decay.to(work)
        if self.per_group == 1:
            return way(c, b, decay, values)
        groups = (self.c.shape[-3], self.per_group)
        values = values.expand(torch.broadcast_shapes(values.shape, (*self.shape[:-1], 1)))
        decay, values = decay.unflatten(-2, groups), values.unflatten(-3, groups)
        mixed = way(c.unsqueeze(-3), b.unsqueeze(-3), decay, values)
        return mixed.flatten(-4, -3)

    def _work(self, values: Tensor) -> torch.dtype:
        """The type to sum in."""
        return compute_dtype(torch.promote_types(self.dtype, values.dtype))

    def _ungrouped(self, tensor: Tensor) -> Tensor:
        """What belongs to a group, once for each of its heads."""
        return tensor.repeat_interleave(self.per_group, dim=-3) if self.per_group > 1 else tensor

    def _keeps_heads(self, index: Index) -> bool:
        """Whether an index stops before the axis of heads."""
        picks = index if isinstance(index, tuple) else (index,)
        return len(picks) < self.log_decay.ndim - 1 and all(isinstance(pick, int | slice) for pick in picks)


def _check(c: Tensor, b: Tensor, log_decay: Tensor, step: Tensor | None) -> None:
    fits = (
        c.ndim >= 2
        and c.shape == b.shape
        and 0 not in c.shape[-2:]
        and log_decay.ndim == c.ndim - 1
        and log_decay.shape[-1] == c.shape[-2]
        and log_decay.shape[:-2] == c.shape[:-3]
        and (c.ndim == 2 or (c.shape[-3] > 0 and log_decay.shape[-2] % c.shape[-3] == 0))
        and (step is None or step.shape == log_decay.shape)
    )
    if not fits:
        steps = "" if step is None else f", step {tuple(step.shape)}"
        raise ShapeError(
            "`SemiseparableMixing`",
            expected="c and b (..., G, T, N), log_decay and step (..., H, T), H a multiple of G, T and N ≥ 1",
            got=f"c {tuple(c.shape)}, b {tuple(b.shape)}, log_decay {tuple(log_decay.shape)}{steps}",
            fix="Move the heads before the tokens.",
        )
