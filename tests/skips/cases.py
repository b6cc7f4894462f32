"""Models of many families, tiny and random, with a batch for each."""

from collections.abc import Callable
from typing import Any

import torch
from experiments.skips.skip_families import REFUSED
from experiments.zoo.transformers import BERT, FAMILIES, LLAMA, hugging_face, text_inputs
from torch import Tensor, nn

from rankwise._internals.batches import tensors_in

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]
STATE_SPACE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
MAMBA2 = STATE_SPACE | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "expand": 2}
BAMBA = LLAMA | {
    "attn_layer_indices": [1], "mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_expand": 2,
}  # fmt: skip
MODERN = {
    "Mamba": (hugging_face("MambaModel", **STATE_SPACE), 2),
    "Mamba-2": (hugging_face("Mamba2Model", **MAMBA2), 2),
    "Bamba": (hugging_face("BambaModel", **BAMBA), 3),
    "FNet": (hugging_face("FNetModel", **{k: v for k, v in BERT.items() if k != "num_attention_heads"}), 3),
}


def _family(family: Any) -> Build:
    return lambda: (family.build(family.implementations[0]), family.inputs())


def _modern(build: Callable[[], nn.Module]) -> Build:
    return lambda: (build(), text_inputs())


FOUND: dict[str, tuple[Build, int]] = {
    **{family.name: (_family(family), family.mixers) for family in FAMILIES if family.name != REFUSED},
    **{name: (_modern(build), sites) for name, (build, sites) in MODERN.items()},
} | {"ALBERT": (_family(next(family for family in FAMILIES if family.name == "ALBERT")), 1)}
"""Builder of a model and a batch, and the number of λ, by family; layers of ALBERT share one λ."""


def outputs(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """Return all tensors of a model's output, without gradients."""
    with torch.no_grad():
        return tensors_in(model(**batch))


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return True if two outputs are bit-identical."""
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))
