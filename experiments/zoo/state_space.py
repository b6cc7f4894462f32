"""Tiny random state-space models and hybrids of transformers, and the mixers that capture should see."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4}


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


MAMBA = {"state_size": 4, "time_step_rank": 3}
MAMBA_2 = {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
JAMBA = ATTENTION | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
JAMBA |= {"mamba_d_state": 4, "mamba_dt_rank": 3, "num_experts": 2, "num_experts_per_tok": 1}
BAMBA = ATTENTION | HEADS | {"attn_layer_indices": [1], "mamba_chunk_size": 8}
FALCON_H1 = ATTENTION | HEADS | {"mamba_d_ssm": 64, "mamba_chunk_size": 8, "head_dim": 8}
FALCON_H1 |= {"ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.9]}
ZAMBA = ATTENTION | {"mamba_d_state": 4, "mamba_dt_rank": 3, "n_mamba_heads": 2, "num_hidden_layers": 3}
ZAMBA |= {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]}  # layers 2 and 3 share attention
ZAMBA_2 = ATTENTION | {"mamba_d_state": 4, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 8}
ZAMBA_2 |= {"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4}
ZAMBA_2 |= {"attention_head_dim": 16}
GRANITE = ATTENTION | HEADS | {"mamba_chunk_size": 8, "layer_types": ["mamba", "attention"]}
GRANITE |= {"num_local_experts": 0, "shared_intermediate_size": 48}
NEMOTRON = ATTENTION | {"ssm_state_size": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2}
NEMOTRON |= {"chunk_size": 8, "layers_block_type": ["mamba", "attention"], "head_dim": 8}
GEMMA = ATTENTION | {"block_types": ["recurrent", "attention"], "lru_width": 32, "head_dim": 8}
GEMMA |= {"attention_window_size": 8}
LFM = ATTENTION | {"layer_types": ["conv", "full_attention"]}
DELTA_TYPES = {"layer_types": ["linear_attention", "full_attention"]}
GATED_DELTA = DELTA_TYPES | {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
GATED_DELTA |= {"linear_key_head_dim": 6, "linear_value_head_dim": 8}
KIMI = DELTA_TYPES | {
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
}
KIMI |= {"q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 8}
KIMI |= {"n_group": 1, "topk_group": 1, "n_routed_experts": 2}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}
SELECTIVE, SEMISEPARABLE, SOFTMAX = "selective", "semiseparable", "softmax"
HYBRID = (SEMISEPARABLE, SOFTMAX)
DELTA = ("gated delta", SOFTMAX)
STATE_SPACE = {
    "Mamba": StateSpaceFamily("MambaModel", MAMBA, (SELECTIVE,) * 2),
    "Falcon-Mamba": StateSpaceFamily("FalconMambaModel", MAMBA, (SELECTIVE,) * 2),
    "Mamba-2": StateSpaceFamily("Mamba2Model", MAMBA_2, (SEMISEPARABLE,) * 2),
    "Jamba": StateSpaceFamily("JambaModel", JAMBA, (SELECTIVE, SOFTMAX)),
    "Bamba": StateSpaceFamily("BambaModel", BAMBA, HYBRID),
    "Falcon-H1": StateSpaceFamily("FalconH1Model", FALCON_H1, HYBRID * 2),
    "Zamba": StateSpaceFamily("ZambaModel", ZAMBA, (SELECTIVE, SOFTMAX) * 2 + (SELECTIVE,), states=4),
    "Zamba2": StateSpaceFamily("Zamba2Model", ZAMBA_2, (*HYBRID, SEMISEPARABLE)),
    "Granite 4": StateSpaceFamily("GraniteMoeHybridModel", GRANITE, HYBRID),
    "Nemotron-H": StateSpaceFamily("NemotronHModel", NEMOTRON, HYBRID),
    "RecurrentGemma": StateSpaceFamily(
        "RecurrentGemmaModel", GEMMA, HYBRID, masks_padding=False, has_path=False
    ),
    "LFM2": StateSpaceFamily("Lfm2Model", LFM | {"block_ff_dim": 48}, ("toeplitz", SOFTMAX)),
    "LFM3": StateSpaceFamily("Lfm3Model", LFM | {"head_dim": 8}, ("toeplitz", SOFTMAX)),
    "Qwen3-Next": StateSpaceFamily(
        "Qwen3NextModel", ATTENTION | GATED_DELTA | EXPERTS | {"head_dim": 8}, DELTA, has_path=False
    ),
    "Kimi-Linear": StateSpaceFamily("KimiLinearModel", ATTENTION | KIMI | EXPERTS, DELTA, has_path=False),
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
