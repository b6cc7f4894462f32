"""Tiny random state-space models and hybrids of transformers, and the mixers that capture should see."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class StateSpaceFamily:
    """One family: its settings, and the kinds of its mixers in the order they run."""

    model: str
    settings: dict[str, Any]
    kinds: tuple[str, ...]
    states: int = 3
    masks_padding: bool = True
    """True if its state-space layers are passed the padding mask."""
    has_path: bool = True
    """True if `experiments.rank.gated_path` finds its path: not for a scan alone, or a norm before a gate."""


STATE_SPACE = {
    name: StateSpaceFamily(**{**family, "kinds": tuple(family["kinds"])})
    for name, family in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}


def tiny(name: str, head: str = "Model") -> nn.Module:
    """Return one family, tiny and random, in evaluation mode; `head="ForCausalLM"` for a language model."""
    import transformers

    family = STATE_SPACE[name]
    stem = family.model.removesuffix("Model")
    config = getattr(transformers, f"{stem}Config")(**SIZES | family.settings)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, stem + head)(config)
    with torch.no_grad():
        widen(model)
    return model.eval()


def widen(model: nn.Module) -> None:
    """Draw weights so large that tokens differ and masks, norms and gates matter."""
    for name, parameter in model.named_parameters():
        if name.endswith(("conv1d.bias", "conv_1d.bias", "conv.bias")):  # zero in a fresh model
            parameter.normal_(0, 0.5)
        elif parameter.dim() == 2:
            parameter.normal_(0, 1 / parameter.shape[-1] ** 0.5)
        elif parameter.dim() == 3:
            parameter.normal_(0, 0.5)
