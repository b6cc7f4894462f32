"""Sizes and weight names of released ToST models, and configurations inferred from weight shapes."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rankwise.errors import InputError, one_of
from rankwise.models.configuration import ToSTConfig

LANGUAGE: dict[str, tuple[int, int, int]] = {
    "tost-base": (12, 768, 12),
    "tost-medium": (24, 1024, 16),
    "tost-large": (36, 1280, 20),
}
"""Number of layers, model width and number of heads of released language models; the head width is 64."""

VISION: dict[str, tuple[int, int, int]] = {
    "tost-t12": (12, 192, 4),
    "tost-s12": (12, 384, 8),
    "tost-m24": (24, 512, 8),
    "tost-l24": (24, 768, 16),
}
"""Number of layers, model width and number of heads of vision models, each with 16×16 and 8×8 patches."""

PRESETS = (*LANGUAGE, *(f"{name}-p{patch}" for name in VISION for patch in (16, 8)))
"""All names that `preset` accepts."""

END_OF_TEXT = 50256
LANGUAGE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "max_position_embeddings": 1024,
    "layer_scale": 1e-5,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
}
"""Fields that all released language models share: GPT-2's padded vocabulary, length and special token."""

VISION_DEFAULTS: dict[str, Any] = {
    "causal": False,
    "norm_eps": 1e-6,
    "image_size": 224,
    "class_attention_layers": 2,
    "tokens_norm": True,
}
"""Fields that all released vision models share."""

LANGUAGE_BLOCK = {
    "ln_1": "mixer_norm", "attn.c_attn": "mixer.in_proj", "attn.c_proj": "mixer.out_proj",
    "ln_2": "mlp_norm", "mlp.c_fc": "mlp.in_proj", "mlp.c_proj": "mlp.out_proj",
}  # fmt: skip
"""Name in this package of each module of a block, by released name; a module has a weight and a bias."""
LANGUAGE_SINGLES = {
    "gamma1": "mixer_scale.weight", "gamma2": "mlp_scale.weight",
    "attn.temp": "mixer.temperature", "attn.denom_bias": "mixer.position_bias",
}  # fmt: skip
"""Name in this package of each other parameter of a block, by released name."""
VISION_BLOCK = {
    "norm1": "mixer_norm", "attn.qkv": "mixer.in_proj", "attn.to_out.0": "mixer.out_proj",
    "norm2": "mlp_norm", "mlp.fc1": "mlp.in_proj", "mlp.fc2": "mlp.out_proj",
}  # fmt: skip
VISION_SINGLES = {name: new for name, new in LANGUAGE_SINGLES.items() if name != "attn.denom_bias"}
CLASS_BLOCK = {
    "norm1": "attention_norm", "attn.qkv": "attention.qkv_proj", "attn.proj": "attention.out_proj",
    "norm2": "mlp_norm", "mlp.fc1": "mlp.in_proj", "mlp.fc2": "mlp.out_proj",
}  # fmt: skip
CLASS_SINGLES = {"gamma1": "attention_scale.weight", "gamma2": "mlp_scale.weight"}
BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class ReleasedModel:
    """Kind (language or vision), configuration and {released weight name: name in this package}."""

    kind: str
    config: ToSTConfig
    names: dict[str, str] = field(repr=False)


def preset(name: str, **changes: Any) -> ToSTConfig:
    """Return the configuration of a released model.

    Source: the released code, whose README states 110M, 304M and 655M parameters for the language models.

    Args:
        name: one of `PRESETS`, such as ``tost-base``, ``tost-large`` or ``tost-t12-p16``.
        **changes: arguments of `ToSTConfig` that replace released values, such as ``num_labels``.

    Raises:
        InputError: if the name is unknown.

    Examples:
        >>> config = preset("tost-m24-p16")
        >>> config.num_hidden_layers, config.head_dim, config.layer_scale, config.num_labels
        (24, 64, 1e-05, 1000)
    """
    one_of("preset", name, PRESETS)
    if name in LANGUAGE:
        (layers, width, heads), defaults = LANGUAGE[name], LANGUAGE_DEFAULTS
    else:
        size, patch = name.rsplit("-p", 1)
        layers, width, heads = VISION[size]
        scale = vision_layer_scale(layers)
        defaults = {**VISION_DEFAULTS, "patch_size": int(patch), "layer_scale": scale}
        defaults |= {} if "id2label" in changes else {"num_labels": 1000}
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return ToSTConfig(**{**defaults, **sizes, **changes})


def vision_layer_scale(layers: int) -> float:
    """Return the initial LayerScale factor of a vision model: 1 below 24 layers, otherwise 1e-5."""
    return 1.0 if layers < 24 else 1e-5


def read_language_config(weights: Weights) -> ReleasedModel:
    """Return a language model's configuration, inferred from weight shapes; raise if a weight is missing."""
    layers = count(weights, r"transformer\.h\.(\d+)\.")
    vocabulary, width = sizes(weights, "transformer.wte.weight", 2)
    config = ToSTConfig(
        **{
            **LANGUAGE_DEFAULTS,
            "vocab_size": vocabulary,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": weights["transformer.h.0.attn.temp"].numel(),
            "intermediate_size": sizes(weights, "transformer.h.0.mlp.c_fc.weight", 2)[0],
            "max_position_embeddings": sizes(weights, "transformer.wpe.weight", 2)[0],
            "use_bias": "transformer.h.0.attn.c_attn.bias" in weights,
            **(dict.fromkeys(("bos_token_id", "eos_token_id")) if vocabulary <= END_OF_TEXT else {}),
        }
    )
    endings = ("weight", "bias") if config.use_bias else ("weight",)
    names = {
        "transformer.wte.weight": "model.embed_tokens.weight",
        "transformer.wpe.weight": "model.embed_positions.weight",
        "lm_head.weight": "lm_head.weight",
        **with_endings({"transformer.ln_f": "model.norm"}, endings),
        **in_layers("transformer.h", "model.layers", layers, LANGUAGE_BLOCK, LANGUAGE_SINGLES, endings),
    }
    return ReleasedModel("language", config, names)


def read_vision_config(weights: Weights, tokens_norm: bool) -> ReleasedModel:
    """Return a vision model's configuration, inferred from weight shapes; raise if a weight is missing."""
    layers = count(weights, r"blocks\.(\d+)\.")
    class_layers = count(weights, r"cls_attn_blocks\.(\d+)\.")
    halvings = count(weights, r"patch_embed\.proj\.(\d+)\.0\.weight")
    labels, width = sizes(weights, "head.weight", 2)
    config = ToSTConfig(
        **{
            **VISION_DEFAULTS,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": weights["blocks.0.attn.temp"].numel(),
            "intermediate_size": sizes(weights, "blocks.0.mlp.fc1.weight", 2)[0],
            "num_channels": sizes(weights, "patch_embed.proj.0.0.weight", 4)[1],
            "patch_size": 2**halvings,
            "class_attention_layers": class_layers,
            "tokens_norm": tokens_norm,
            "layer_scale": vision_layer_scale(layers),
            "num_labels": labels,
        }
    )
    ends = {
        "norm": "norm",
        "head": "classifier",
        "pos_embeder.token_projection": "positions.projection",  # the typo is in the released files
    }
    names = {
        "cls_token": "class_token",
        **with_endings(ends),
        **in_layers("blocks", "layers", layers, VISION_BLOCK, VISION_SINGLES),
        **in_layers("cls_attn_blocks", "layers", class_layers, CLASS_BLOCK, CLASS_SINGLES, first=layers),
    }
    for index in range(halvings):
        theirs, ours = f"patch_embed.proj.{2 * index}", "patch_embedding"
        names[f"{theirs}.0.weight"] = f"{ours}.convolutions.{index}.weight"
        names |= with_endings({f"{theirs}.1": f"{ours}.norms.{index}"}, BATCH_NORM)
    return ReleasedModel("vision", config, names)


def drop_unit_axes(released: str, weight: Tensor) -> Tensor:
    """Return a weight; temperatures (H, 1) and position biases (H, P, 1) lose the last axis."""
    if released.endswith((".attn.temp", ".attn.denom_bias")) and weight.shape[-1:] == (1,):
        return weight[..., 0]
    return weight


def with_endings(modules: Mapping[str, str], endings: Iterable[str] = ("weight", "bias")) -> dict[str, str]:
    """Return {released weight name: name in this package}, with each ending added to both module names."""
    return {f"{name}.{end}": f"{new}.{end}" for name, new in modules.items() for end in endings}


def in_layers(
    theirs: str,
    ours: str,
    layers: int,
    modules: Mapping[str, str],
    singles: Mapping[str, str],
    endings: Iterable[str] = ("weight", "bias"),
    first: int = 0,
) -> dict[str, str]:
    """Return {released weight name: name in this package} of layers; ``first`` is added to layer numbers."""
    block = {**singles, **with_endings(modules, endings)}
    return {
        f"{theirs}.{layer}.{name}": f"{ours}.{first + layer}.{new}"
        for layer in range(layers)
        for name, new in block.items()
    }


def count(names: Iterable[str], pattern: str) -> int:
    """Return the number of different layer indices that ``pattern`` matches in weight names."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def sizes(weights: Weights, name: str, axes: int) -> tuple[int, ...]:
    """Return the shape of a weight; raise if the weight is missing or has a wrong number of axes."""
    shape = tuple(weights[name].shape)
    if len(shape) != axes:
        raise InputError(f"weight {name}", expected=f"{axes} axes", got=f"shape {shape}", fix="Get it again.")
    return shape
