"""Define `LambdaSkip`, the λ-skip of models that are built with λ-skips. This file needs torch alone."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def own_skips(model: nn.Module) -> dict[str, "LambdaSkip"]:
    """Return the `LambdaSkip` modules of a model by name, except those that compute a plain x + f(x)."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LambdaSkip) and (module.kind, module.init) != ("fixed", 1.0)
    }


class LambdaSkip(nn.Module):
    """Skip connection ``λ x + update``, which keeps the tokens of a deep stack distinct.

    λ = 1 is the usual residual connection; with λ = 0, there is none. A negative λ subtracts the input.
    Source: "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", ICLR 2025.

    Args:
        hidden_size: model width D.
        kind: ``none``: no skip connection; ``fixed``: λ is a constant; ``learned``: one learned λ;
            ``channel``: one learned λ per channel; ``shared``: one λ that the layers of the model share.
        init: constant λ, or initial value of a learned λ.

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
        """Set a learned λ to its initial value."""
        if self.weight is not None:
            nn.init.constant_(self.weight, self.init)

    def current(self) -> Float[Tensor, "*D"]:
        """Return the current λ: 0 for ``none``, `init` for ``fixed``, otherwise the detached weight."""
        if self.weight is not None:
            return self.weight.detach()
        return torch.tensor(0.0 if self.kind == "none" else self.init, dtype=torch.float32)

    def forward(self, x: Float[Tensor, "*B D"], update: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Return λ x + update, where the update is the output f(x) of the block."""
        if self.kind == "none":
            return update
        if self.weight is None:
            return x + update if self.init == 1.0 else self.init * x + update
        return self.weight.to(x.dtype) * x + update

    def extra_repr(self) -> str:
        """Return the kind and the initial λ, for printing."""
        return f"{self.kind}, init={self.init:g}"
