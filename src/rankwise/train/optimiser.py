"""Optimisers of torch, with weight decay for weights that multiply, and for no others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from rankwise.models import parameter_groups
from rankwise.train.settings import OptimiserSettings


def make_optimiser(model: nn.Module, settings: OptimiserSettings) -> Optimizer:
    """The optimiser that settings ask for, over all weights that train.

    Args:
        model: the model.
        settings: which optimiser, and its numbers.
    """
    groups = weights_by_treatment(model)
    rest: list[dict[str, Any]] = [
        {"params": groups["decayed"] + ([] if settings.name == "muon" else groups["matrices"])},
        {"params": groups["plain"], "weight_decay": 0.0},
    ]
    adamw = AdamW(
        [group for group in rest if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )
    if settings.name == "adamw":
        return adamw
    muon = Muon(
        groups["matrices"],
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # updates as large as AdamW's, so that both take one learning rate
    )
    return Together([muon, adamw])


def weights_by_treatment(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Weights that train, each once.

    Args:
        model: the model.

    Returns:
        ``matrices`` of linear layers between tokens and logits; other ``decayed`` weights (embeddings,
        convolutions, the head); ``plain`` ones, which do not decay, λ among them.
    """
    embedded = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)() or getattr(model, "classifier", None)
    ends = embedded | ({id(head.weight)} if isinstance(head, nn.Linear) else set())
    decayed, plain = (group["params"] for group in parameter_groups(model, 0.0))
    linear = {id(one.weight) for one in model.modules() if isinstance(one, nn.Linear)} - ends
    return {
        "matrices": [weight for weight in decayed if id(weight) in linear],
        "decayed": [weight for weight in decayed if id(weight) not in linear],
        "plain": plain,
    }


class Together(Optimizer):
    """Several optimisers that step as one and share the schedule of the learning rate.

    Args:
        parts: optimisers of different weights.
    """

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """One list of groups for schedules: the very dicts that the parts read."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let every part step.

        Args:
            closure: called once before them, as torch's optimisers do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What each part keeps."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each part what it kept.

        Args:
            state_dict: from `state_dict`.
        """
        for part, kept in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(kept)
        self._share()
