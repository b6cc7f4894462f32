"""Any model type of transformers, tiny: its default configuration with every size made small, by name."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

BATCH, TOKENS, DECODED = 2, 32, 8
LARGEST = 40_000_000
"""Parameters of a model with its own widths; more would take longer than the time limit."""
WIDTH, HEADS, LAYERS, VOCABULARY = 32, 4, 2, 100

SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?(num_|n_)key_value_heads|(num_)?kv_heads|num_global_key_value_heads|.*_kv_heads", 2),
    (r"(.*_)?num_attention_heads|.*attention_heads|num_heads|n_heads?|linear_num_heads", HEADS),
    (r"mamba_n_heads|mamba_num_heads", 2 * HEADS),
    (r"linear_num_(key|value)_heads|index_n_heads|indexer_n_heads|num_linear_.*heads", HEADS),
    (r"head_dim|.*_head_dim|d_kv|dim_head|attention_head_size|mamba_d_head|mamba_head_dim", 8),
    (r"rotary_dim", 4),
    (r"hidden_size|d_model|embed_dim|n_embd|embedding_size|word_embed_proj_dim|.*projection_dim", WIDTH),
    (r"(encoder|decoder|text|vision|output|out|projector|cross|audio|mm|fpn)_hidden_(size|dim)", WIDTH),
    (
        r"hidden_dim|attention_hidden_size|lru_width|out_dim|embedding_dim|output_dim|ple_embed_dim|emb_dim",
        WIDTH,
    ),
    (r"mamba_d_ssm", 2 * WIDTH),
    (r".*intermediate_(size|dim)|.*ffn_dim|mlp_dim|d_ff|n_inner|ffn_hidden_size|.*feedforward_dim", 48),
    (r"num_feat_extract_layers|num_conv_layers|number_of_conv_layers", 100),  # lists hold one entry for each
    (r"num_hidden_layers|.*_layers|num_layers|n_layers?|num_blocks|depth|.*_depth", LAYERS),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_moe_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", 2),
    (r"(n|num)_groups?|num_expert_groups?|topk_groups?|n_shared_experts|num_shared_experts", 1),
    (r"(q|kv|o)_lora_rank|.*_lora_rank|hc_lowrank", 8),
    (r"mamba_n_groups|.*_num_groups", 2),
    (r"mamba_d_state|state_size|ssm_state_size", 4),
    (r"upsample_groups", WIDTH),
    (r"max_source_positions", 50),
    (r"num_queries", 8),
    (r"(.*_)?vocab_size.*|.*_vocab_size|num_embeddings", VOCABULARY),
)
"""What a whole number of this name becomes where it was larger; the first pattern that fits is taken."""
BY_LAYER = re.compile(r".*(layer_types|layers_block_type|block_types|layers_type|mlp_layer_types)$")
KEPT = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
LEFT_OUT = ("transformers_version", "architectures", "dtype", "per_layer_config")
LEFT_OUT += ("stage_names", "attention_layers")
OUTPUTS = ("out_features", "out_indices")
"""Which stages of a backbone are given out: left out at first, which gives the last."""
NAMED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "prediction_length": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
"""Settings that a configuration leaves open, and a model needs."""
SWIN = {
    "embed_dim": 24,
    "window_size": 2,
    "image_size": 64,
}  # windows shrink for good where a picture is smaller
BY_TYPE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "zamba2": {
        "mamba_headdim": 8,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "hybrid_layer_ids": [1],
    },
    "bridgetower": {"hidden_size": 64},  # a head of its towers is 64 wide
    "bridgetower_text_model": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},
    "nemotron": {"num_key_value_heads": 2},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 4},
    "dots1": {"n_shared_experts": 1},
    "step3p5": {"sliding_window": 8},
    "owlvit_text_model": {"max_position_embeddings": 64},
    "owlv2_text_model": {"max_position_embeddings": 64},
    "mistral4": {"head_dim": 16, "qk_head_dim": 16},
    "longcat_flash": {"qk_head_dim": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "funnel": {"architectures": ["FunnelModel"]},
    "swin": SWIN,
    "donut-swin": SWIN,
    "maskformer-swin": SWIN,
}
"""What else a type needs to be built small: sizes that hang together, and settings left open."""
COMPILED = tuple((re.compile(pattern), value) for pattern, value in SIZES)


def small(settings: dict[str, Any], widths: bool = True, stages: bool = False) -> dict[str, Any]:
    """The settings of a configuration with every size made small.

    Args:
        settings: what `to_dict` gives.
        widths: whether widths and heads are made small too, or only depths, vocabularies and experts.
        stages: whether backbones give out all the stages that they gave before.
    """
    if settings.get("model_type") == "timm_backbone":  # which needs a further library
        stages = [f"stage{at}" for at in settings.get("out_indices") or [4] if at > 0]
        return {"model_type": "resnet", "depths": [1, 1, 1, 1], "out_features": stages}
    made = {
        name: _small(name, value, settings, widths, stages)
        for name, value in settings.items()
        if name not in LEFT_OUT and (stages or name not in OUTPUTS) and not name.startswith("_")
    }
    if widths:
        made |= BY_TYPE.get(str(settings.get("model_type")), {})
    if "use_timm_backbone" in made:
        made["use_timm_backbone"] = False
    kinds = {
        name: list(dict.fromkeys(value))
        for name, value in settings.items()
        if BY_LAYER.match(name) and isinstance(value, list | tuple) and value and isinstance(value[0], str)
    }
    if kinds:
        depth = max(LAYERS, *(len(one) for one in kinds.values()))
        made |= {name: (one * depth)[:depth] for name, one in kinds.items()}
        made |= {name: depth for name in KEPT if name in made}
    depth = made.get("num_hidden_layers")
    for name, value in made.items():  # one entry a layer
        if isinstance(value, list) and isinstance(depth, int) and name not in kinds:
            made[name] = value[:depth] if len(value) == settings["num_hidden_layers"] else value
    return made


def _small(name: str, value: Any, settings: dict[str, Any], widths: bool, stages: bool) -> Any:
    if isinstance(value, dict):
        named = all(isinstance(key, str) for key in value)
        return small(value, widths, stages) if named else value
    if name == "default_language" and value is None:
        return next(iter(settings.get("languages") or [None]))
    if name in OUTPUTS:
        return value
    if name.endswith(("_token_id", "_token_index", "_token_ids", "_id")):
        return _token(name, value)
    if isinstance(value, bool) or value is None:
        return value if value is not None else NAMED.get(name)
    if name == "attention_types":  # of GPT-Neo: kinds of layers, and how often
        return [[kinds, LAYERS // len(kinds)] for kinds, _ in value]
    if name.endswith("_in_channels") and isinstance(value, list) and widths:
        inner = settings.get("encoder_hidden_dim")  # what an encoder gives its decoder; else of a backbone
        return [WIDTH if one == inner else one for one in value] if len(set(value)) == 1 else value
    if isinstance(value, list | tuple) and value and all(isinstance(one, int) for one in value):
        return _small_list(name, list(value), widths)
    if not isinstance(value, int):
        return value
    if name == "image_size" and widths and isinstance(settings.get("patch_size"), int):
        return min(value, 4 * settings["patch_size"])
    if name in ("num_key_value_heads", "num_kv_heads") and value == settings.get("num_attention_heads"):
        return HEADS if widths else value
    if name in ("max_position_embeddings", "n_positions"):
        return min(value, 512)
    for pattern, target in COMPILED:
        if pattern.fullmatch(name):
            free = widths or "layer" in name or "vocab" in name or "expert" in name
            return min(value, target) if free else value
    return value


def _small_list(name: str, value: list[int], widths: bool) -> list[int]:
    if name in ("depths", "blocks_per_stage", "layers", "num_block_repeats", "stage_num_blocks"):
        return [min(one, 1) for one in value]
    if name == "mrope_section" and widths:
        return [2, 1, 1][: len(value)]
    if name == "eos_token_id":
        return [min(one, 2) for one in value]
    if name == "intermediate_size":
        return [min(one, 48) for one in value]
    return value


def _token(name: str, value: Any) -> Any:
    """Ids of special tokens, inside the small vocabulary and each another."""
    if isinstance(value, list | tuple):
        return [_token(name, one) for one in value]
    if not isinstance(value, int) or value < VOCABULARY:
        return value
    common = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return common.get(name, 70 + sum(map(ord, name)) % 29)


def builds(model_type: str) -> Iterator[tuple[str, nn.Module]]:
    """The model of a type: all sizes small; its own widths, few layers; small, all stages of its backbone."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    errors = []
    for size, widths, stages in (
        ("small", True, False),
        ("own widths, few layers", False, False),
        ("small, all stages", True, True),
    ):
        try:
            given = cls()
            open_ones = {name: None for name in NAMED if getattr(given, name, 0) is None}
            config = cls.from_dict(small(given.to_dict() | open_ones, widths, stages))
            if widths:
                _split_angles(config)
            for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
                if getattr(part, "use_cache", False):  # some caches want a layer of attention
                    part.use_cache = False
            if not widths:
                with torch.device("meta"):
                    count = transformers.AutoModel.from_config(config).num_parameters()
                if count > LARGEST:
                    raise ValueError(f"{count / 1e6:,.0f} million parameters with its own widths")
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(config)
        except Exception as error:
            errors.append(error)
            continue
        with torch.no_grad():  # tiny default weights make every attention uniform; widen them
            for parameter in model.parameters():
                if parameter.dim() >= 2 and parameter.is_floating_point():
                    parameter.normal_(0, max(1, parameter[0].numel()) ** -0.5)
        yield size, model.eval()
    if len(errors) == 3:
        raise errors[0]


def _split_angles(config: Any) -> None:
    """Rotary angles of width 8 in three sections, where a model would take sections for its own width."""
    import transformers

    parts = [config, getattr(config, "text_config", None)]
    models = [transformers.MODEL_MAPPING.get(type(part), None) for part in parts]
    modules = {inspect.getmodule(one[0] if isinstance(one, tuple) else one) for one in models if one}
    if any("mrope_section" in inspect.getsource(module) for module in modules if module):
        for part in parts:
            rope = getattr(part, "rope_parameters", None)
            if isinstance(rope, dict):
                half = int(4 * rope.get("partial_rotary_factor", 1.0))
                rope["mrope_section"] = [half - half // 2, half // 4, half // 2 - half // 4]
