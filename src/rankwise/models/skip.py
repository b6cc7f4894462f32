"""The connection around a part of a block, and the scale of what the part adds."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class LambdaSkip(nn.Module):
    """``λ x + update``: what keeps the tokens of deep stacks apart.

    λ = 1 is the usual residual, λ = 0 none; a negative λ is a negative feedback.
    Source: "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", ICLR 2025.

    Args:
        hidden_size: D.
        kind: ``none``: no skip; ``fixed``: λ stays; ``learned``: one λ; ``channel``: D of them;
            ``shared``: one that the model ties to those of its other layers.
        init: λ at the start.

    Examples:
        >>> import torch
        >>> skip = LambdaSkip(2, "fixed", -1.0)
        >>> skip(torch.ones(1, 1, 2), torch.zeros(1, 1, 2)).tolist()
        [[[-1.0, -1.0]]]
    """

    def __init__(self, hidden_size: int, kind: str = "fixed", init: float = 1.0) -> None:
        super().__init__()
        self.kind, self.init = kind, float(init)
        sizes = {"learned": (), "shared": (), "channel": (hidden_size,)}
        self.weight = nn.Parameter(torch.empty(sizes[kind])) if kind in sizes else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """λ as at the start."""
        if self.weight is not None:
            nn.init.constant_(self.weight, self.init)

    def forward(self, x: Float[Tensor, "*B D"], update: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """λ x + update."""
        if self.kind == "none":
            return update
        if self.weight is None:
            return x + update if self.init == 1.0 else self.init * x + update
        return self.weight.to(x.dtype) * x + update

    def extra_repr(self) -> str:
        """Kind and start."""
        return f"{self.kind}, init={self.init:g}"


class LayerScale(nn.Module):
    """A learned factor by channel on what a part of a block adds.

    Source: Touvron et al., "Going deeper with Image Transformers", ICCV 2021, Section 2.

    Args:
        hidden_size: D.
        init: the factor at the start.
    """

    def __init__(self, hidden_size: int, init: float) -> None:
        super().__init__()
        self.init = float(init)
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every factor as at the start."""
        nn.init.constant_(self.weight, self.init)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """x, scaled."""
        return x * self.weight

    def extra_repr(self) -> str:
        """The start."""
        return f"init={self.init:g}"


def make_scale(hidden_size: int, init: float | None) -> nn.Module:
    """A `LayerScale`, or nothing where ``init`` is None."""
    return nn.Identity() if init is None else LayerScale(hidden_size, init)
