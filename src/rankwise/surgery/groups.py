"""Parameter groups for optimisers: λ is a gain, so weight decay, which pulls it to 0, is left off."""

from typing import Any

from torch import nn

from rankwise.surgery.errors import SkipError
from rankwise.surgery.skips import skips_of


def skip_parameter_groups(
    model: nn.Module, weight_decay: float = 0.01, lr: float | None = None, only_skips: bool = False
) -> list[dict[str, Any]]:
    """Split a model's parameters for an optimiser: its λ without weight decay, all others with it.

    Args:
        model: a model with λ-skips.
        weight_decay: of the others.
        lr: the learning rate of λ, if it is to have one of its own.
        only_skips: leave the others out.

    Returns:
        Groups as `torch.optim` takes them, λ first.

    Raises:
        SkipError: if no λ of the model can learn.

    Examples:
        >>> import torch, rankwise.surgery as surgery
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> _ = surgery.add_lambda_skip(layer, example=torch.randn(1, 5, 8))
        >>> groups = surgery.skip_parameter_groups(layer, weight_decay=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.0), (12, 0.1)]
    """
    scales = [one for one in skips_of(model).values() if one.requires_grad]
    if not scales:
        raise SkipError(
            f"model {type(model).__name__}",
            wanted="λ-skips that can learn",
            got="none",
            fix="Put them in with `rw.add_lambda_skip(model, learnable=True)`.",
        )
    first: dict[str, Any] = {"params": scales, "weight_decay": 0.0}
    if lr is not None:
        first["lr"] = lr
    taken = {id(one) for one in scales}
    others = [one for one in model.parameters() if id(one) not in taken and one.requires_grad]
    return [first] if only_skips else [first, {"params": others, "weight_decay": weight_decay}]
