"""Scans with one decay per head and token: the mixing matrices (operators) of Mamba-2."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import Index, compute_dtype
from rankwise.operators.scan import CausalScanMixing, log_weights, scan, scan_transposed


class SemiseparableMixing(CausalScanMixing):
    r"""Scan with scalar decay: ``M[t, s] = c_t · b_s · (Π_{s < r ≤ t} a_r) · step_s`` for s ≤ t, else 0.

    Vectors c_t and b_s have N features, so any block on or below the diagonal has rank at most N. Heads may
    share c and b in G groups: head h of H uses group ``h // (H // G)``. In Mamba-2, log a = Δ·A and step = Δ,
    and the skip connection D·x is not part of M.

    Log-decays are added and never subtracted, so a = 0 (log a = −inf) and long sequences are exact up to
    rounding, and nothing overflows. `M @ V` and Mᵀ U take O(T N V) time and O(T (N + V)) memory per head.

    Source: T. Dao and A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality", ICML 2024, sections 3 and 6.

    Args:
        c: vectors that read the state, (..., G, T, N).
        b: vectors that are written to the state, (..., G, T, N).
        log_decay: log a, (..., H, T), in [−inf, 0], where H is a multiple of G. The decay of the first token
            has no effect.
        step: factor of each source token, (..., H, T); 1 by default.

    Raises:
        ShapeError: if the shapes of the tensors do not fit together.

    Examples:
        >>> import torch
        >>> one = torch.ones(1, 3, 1)
        >>> SemiseparableMixing(one, one, torch.full((1, 3), 0.5).log()).dense()[0].tolist()
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]
    """

    kind = "semiseparable"
    held = ("c", "b", "log_decay", "step")

    def __init__(
        self,
        c: Float[Tensor, "*groups T N"],
        b: Float[Tensor, "*groups T N"],
        log_decay: Float[Tensor, "*heads T"],
        step: Float[Tensor, "*heads T"] | None = None,
    ) -> None:
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
                expected="c and b (..., G, T, N), log_decay and step (..., H, T), H a multiple of G, "
                "T and N ≥ 1",
                got=f"c {tuple(c.shape)}, b {tuple(b.shape)}, log_decay {tuple(log_decay.shape)}{steps}",
                fix="Move the heads before the tokens.",
            )
        self.c, self.b, self.log_decay, self.step = c, b, log_decay, step

    @property
    def shape(self) -> torch.Size:
        """Shape (..., H, T, T) for H heads and T tokens."""
        return torch.Size([*self.log_decay.shape, self.log_decay.shape[-1]])

    @property
    def heads_per_group(self) -> int:
        """Number of heads in a group, which share c and b."""
        return self.log_decay.shape[-2] // self.c.shape[-3] if self.c.ndim > 2 else 1

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows of M from c, b and the decays: O((stop − start) T N) time."""
        work = compute_dtype(self.dtype)
        products = self.c[..., start:stop, :].to(work) @ self.b[..., :stop, :].to(work).mT
        weights = log_weights(self.log_decay[..., :stop].to(work), start).exp()
        rows = self._repeat_groups(products) * weights
        if self.step is not None:
            rows = rows * self.step[..., None, :stop].to(work)
        return F.pad(rows, (0, self.shape[-1] - stop))

    def _multiply(self, values: Tensor, transposed: bool) -> Tensor:
        c, b, decay = (tensor.to(values.dtype) for tensor in (self.c, self.b, self.log_decay))
        step = None if self.step is None else self.step[..., None].to(values.dtype)
        if step is not None and not transposed:
            values = values * step
        if self.heads_per_group > 1:
            groups = (c.shape[-3], self.heads_per_group)
            values = values.expand(torch.broadcast_shapes(values.shape, (*self.shape[:-1], 1)))
            decay, values = decay.unflatten(-2, groups), values.unflatten(-3, groups)
            c, b = c.unsqueeze(-3), b.unsqueeze(-3)
        mixed = (scan_transposed if transposed else scan)(c, b, decay, values)
        mixed = mixed.flatten(-4, -3) if self.heads_per_group > 1 else mixed
        return mixed * step if step is not None and transposed else mixed

    def __getitem__(self, index: Index) -> "SemiseparableMixing":
        """Return selected sequences and heads; if heads are selected, each head gets a copy of c and b."""
        if self.heads_per_group == 1:
            return super().__getitem__(index)
        picks = index if isinstance(index, tuple) else (index,)
        if len(picks) < self.log_decay.ndim - 1 and all(isinstance(pick, int | slice) for pick in picks):
            return self.map_tensors(lambda tensor: tensor[index])
        c, b = self._repeat_groups(self.c), self._repeat_groups(self.b)
        return SemiseparableMixing(c, b, self.log_decay, self.step)[index]

    def _repeat_groups(self, tensor: Tensor) -> Tensor:
        """Return a tensor (..., G, T, N) as (..., H, T, N): each group is repeated for its heads."""
        return tensor.repeat_interleave(self.heads_per_group, dim=-3) if self.heads_per_group > 1 else tensor
