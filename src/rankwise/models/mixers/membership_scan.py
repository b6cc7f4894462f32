"""What moves the content of tokens in causal TSSA: a scan whose steps are the memberships."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from rankwise.models.mixers.scanned import decay_to_end, in_front, rows_after
from rankwise.operators import DiagonalMixing, MixingOperator, SemiseparableMixing, SumMixing
from rankwise.operators.base import compute_dtype
from rankwise.ops import half_lives

Features = Float[Tensor, "B T H F"]
State = Float[Tensor, "B H F K"]


class MembershipScan(nn.Module):
    """A semiseparable operator beside TSSA's diagonal one.

    Formula: ``M_h[t, u] = δ_tu Π_u + c_t·b_u exp(-a_h Σ_{u < r ≤ t} Π_r) Π_u`` for u ≤ t, on the values
    ``-w_u / (1 + m_u)``; c and b are unit vectors of F features in each head, so a product is a cosine. That
    is Mamba-2's operator with the membership Π_r as its step: a head forgets only when tokens of its own
    arrive, and a masked token, whose Π is 0, is no source and lets nothing decay. a_h > 0 is learned.
    Cost: O(T F K) a head; the state has F K numbers a head, whatever T.
    Source: none, this is an option of this package; the scan is that of T. Dao and A. Gu, "Transformers are
    SSMs", ICML 2024, section 6.

    Args:
        heads: H.
        features: F.
        half_life: of each head in tokens, at the start and at memberships of 1 / H, None for 1,024; a ladder
            from 4 to 256 tokens where there are none.
    """

    def __init__(
        self, heads: int, features: int, half_life: Sequence[int | float | None] | None = None
    ) -> None:
        super().__init__()
        self.heads, self.features = heads, features
        lives = half_lives(heads, 4, 256).tolist() if half_life is None else half_life
        self.start = [1024.0 if life is None else min(float(life), 1024.0) for life in lives]
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rates of the half-lives it was built with."""
        rate = torch.tensor(2.0).log() * self.heads / torch.tensor(self.start)
        init.copy_(self.log_rate, rate.log().to(self.log_rate.dtype))

    def forward(
        self,
        mixed: Float[Tensor, "B T H K"],
        c: Features,
        b: Features,
        membership: Float[Tensor, "B T H"],
        past: State | None,
    ) -> tuple[Float[Tensor, "B T H K"], State]:
        """TSSA's output with what the scan adds to it.

        Args:
            mixed: TSSA's output, -Π w / (1 + m).
            c: what reads.
            b: what is written under.
            membership: Π.
            past: the state before these tokens.

        Returns:
            The sum, and the state after the last token.
        """
        wide = compute_dtype(mixed.dtype)
        values = mixed.transpose(1, 2).to(wide)
        scan, sources = self._scan(c, b, membership, None), values
        if past is not None:
            scan, sources = self._scan(c, b, membership, past), in_front(past, values)
        read = (scan @ sources)[..., -values.shape[-2] :, :]
        left = (scan.b * decay_to_end(scan.log_decay).exp()[..., None]).mT @ sources
        return (values + read).transpose(1, 2).to(mixed.dtype), left

    def operator(
        self, c: Features, b: Features, membership: Float[Tensor, "B T H"], past: State | None
    ) -> MixingOperator:
        """M, for values that do not hold Π; a state goes in front as F further sources."""
        step = membership.mT
        scan = self._scan(c, b, membership, past)
        states = 0 if past is None else self.features
        whole = torch.cat([step.new_ones(*step.shape[:2], states), step], -1)
        scan = SemiseparableMixing(scan.c, scan.b, scan.log_decay, whole)
        silent = torch.cat([step.new_zeros(*step.shape[:2], states), step], -1)
        operator = SumMixing(DiagonalMixing(silent), scan)
        return rows_after(operator, states) if states else operator

    def _scan(self, c: Features, b: Features, membership: Tensor, past: State | None) -> SemiseparableMixing:
        wide = compute_dtype(membership.dtype)
        c, b = (F.normalize(x.transpose(1, 2).to(wide), dim=-1) for x in (c, b))
        decay = -self.log_rate.to(wide).exp()[:, None] * membership.mT.to(wide)
        if past is not None:  # feature n of the state is a source with b = e_n that has not decayed yet
            b = in_front(torch.eye(self.features, dtype=wide, device=b.device), b)
            c = in_front(torch.zeros_like(b[..., : self.features, :]), c)
            decay = torch.cat([decay.new_zeros(*decay.shape[:2], self.features), decay], -1)
        return SemiseparableMixing(c, b, decay)
