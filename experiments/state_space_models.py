"""Tiny random state-space models and hybrids of transformers, and what capture should see in each."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4}


@dataclass(frozen=True)
class StateSpaceFamily:
    """One family: its settings, and the kinds of its mixers in the order they run."""

    model: str
    settings: dict[str, Any]
    kinds: tuple[str, ...]
    states: int = 3
    masks_padding: bool = True
    """Whether its state-space layers are told of padding."""
    has_path: bool = True
    """Whether `experiments.rank.gated_path` finds its path: not of a scan alone, or a norm before a gate."""


GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
KIMI = {
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 2,
}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


SELECTIVE, SEMISEPARABLE, SOFTMAX = "selective", "semiseparable", "softmax"
STATE_SPACE: dict[str, StateSpaceFamily] = {
    "Mamba": StateSpaceFamily("MambaModel", {"state_size": 4, "time_step_rank": 3}, (SELECTIVE,) * 2),
    "Falcon-Mamba": StateSpaceFamily(
        "FalconMambaModel", {"state_size": 4, "time_step_rank": 3}, (SELECTIVE,) * 2
    ),
    "Mamba-2": StateSpaceFamily(
        "Mamba2Model",
        {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
        (SEMISEPARABLE,) * 2,
    ),
    "Jamba": StateSpaceFamily(
        "JambaModel",
        ATTENTION
        | {
            "mamba_d_state": 4,
            "mamba_dt_rank": 3,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        },
        (SELECTIVE, SOFTMAX),
    ),
    "Bamba": StateSpaceFamily(
        "BambaModel",
        ATTENTION | MAMBA_2 | {"attn_layer_indices": [1], "mamba_chunk_size": 8},
        (SEMISEPARABLE, SOFTMAX),
    ),
    "Falcon-H1": StateSpaceFamily(
        "FalconH1Model",
        ATTENTION
        | MAMBA_2
        | {
            "mamba_d_ssm": 64,
            "mamba_chunk_size": 8,
            "head_dim": 8,
            "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.9],
        },
        (SEMISEPARABLE, SOFTMAX) * 2,
    ),
    "Zamba": StateSpaceFamily(
        "ZambaModel",
        ATTENTION
        | {
            "mamba_d_state": 4,
            "mamba_dt_rank": 3,
            "n_mamba_heads": 2,
            "num_hidden_layers": 3,  # it shares the attention of the second with the third
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        },
        (SELECTIVE, SOFTMAX, SELECTIVE, SOFTMAX, SELECTIVE),
        states=4,
    ),
    "Zamba2": StateSpaceFamily(
        "Zamba2Model",
        ATTENTION
        | {
            "mamba_d_state": 4,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "attention_head_dim": 16,
        },
        (SEMISEPARABLE, SOFTMAX, SEMISEPARABLE),
    ),
    "Granite 4": StateSpaceFamily(
        "GraniteMoeHybridModel",
        ATTENTION
        | MAMBA_2
        | {
            "mamba_chunk_size": 8,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        },
        (SEMISEPARABLE, SOFTMAX),
    ),
    "Nemotron-H": StateSpaceFamily(
        "NemotronHModel",
        ATTENTION
        | {
            "ssm_state_size": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "attention"],
            "head_dim": 8,
        },
        (SEMISEPARABLE, SOFTMAX),
    ),
    "RecurrentGemma": StateSpaceFamily(
        "RecurrentGemmaModel",
        ATTENTION
        | {
            "block_types": ["recurrent", "attention"],
            "lru_width": 32,
            "head_dim": 8,
            "attention_window_size": 8,
        },
        (SEMISEPARABLE, SOFTMAX),
        masks_padding=False,
        has_path=False,
    ),
    "LFM2": StateSpaceFamily(
        "Lfm2Model",
        ATTENTION | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
        ("toeplitz", SOFTMAX),
    ),
    "LFM3": StateSpaceFamily(
        "Lfm3Model",
        ATTENTION | {"layer_types": ["conv", "full_attention"], "head_dim": 8},
        ("toeplitz", SOFTMAX),
    ),
    "Qwen3-Next": StateSpaceFamily(
        "Qwen3NextModel",
        ATTENTION | GATED_DELTA | EXPERTS | {"head_dim": 8},
        ("gated delta", SOFTMAX),
        has_path=False,
    ),
    "Kimi-Linear": StateSpaceFamily(
        "KimiLinearModel", ATTENTION | KIMI | EXPERTS, ("gated delta", SOFTMAX), has_path=False
    ),
}


def tiny(name: str, head: str = "Model") -> nn.Module:
    """One family, tiny and random, in evaluation mode; ``head="ForCausalLM"`` for one that writes."""
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
    """Weights so large that tokens differ and masks, norms and gates matter."""
    for name, parameter in model.named_parameters():
        if name.endswith(("conv1d.bias", "conv_1d.bias", "conv.bias")):  # zero in a fresh model
            parameter.normal_(0, 0.5)
        elif parameter.dim() == 2:
            parameter.normal_(0, 1 / parameter.shape[-1] ** 0.5)
        elif parameter.dim() == 3:
            parameter.normal_(0, 0.5)
