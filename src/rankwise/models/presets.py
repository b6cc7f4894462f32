"""The configurations of the released models."""

from typing import Any

from rankwise.errors import InputError, did_you_mean
from rankwise.models.configuration import ToSTConfig

LANGUAGE: dict[str, tuple[int, int, int]] = {
    "tost-base": (12, 768, 12),
    "tost-medium": (24, 1024, 16),
    "tost-large": (36, 1280, 20),
}
"""Layers, width and heads of the language models; head width 64."""

VISION: dict[str, tuple[int, int, int]] = {
    "tost-t12": (12, 192, 4),
    "tost-s12": (12, 384, 8),
    "tost-m24": (24, 512, 8),
    "tost-l24": (24, 768, 16),
}
"""Layers, width and heads of the vision models; head widths 48, 48, 64, 48. Each with ``-p16`` or ``-p8``."""

PRESETS = (*LANGUAGE, *(f"{name}-p{patch}" for name in VISION for patch in (16, 8)))
"""All names that `preset` knows."""

LANGUAGE_FRAME: dict[str, Any] = {
    "vocab_size": 50304,
    "max_position_embeddings": 1024,
    "layer_scale": 1e-5,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
"""GPT-2's vocabulary rounded up to a multiple of 64, its block and its one special token."""

VISION_FRAME: dict[str, Any] = {
    "causal": False,
    "norm_eps": 1e-6,
    "image_size": 224,
    "class_attention_layers": 2,
    "tokens_norm": True,
}
"""What all vision models share."""


def vision_layer_scale(layers: int) -> float:
    """LayerScale's start in the released vision models: 1 in shallow ones, 1e-5 in those of 24 layers."""
    return 1.0 if layers < 24 else 1e-5


def preset(name: str, **changes: Any) -> ToSTConfig:
    """The configuration of a released model.

    Source: the released configurations; language counts in its README (110M, 304M, 655M).

    Args:
        name: one of `PRESETS`: ``tost-base``, ``tost-medium``, ``tost-large``; ``tost-t12-p16``, ….
        **changes: arguments of `ToSTConfig` to set otherwise, such as ``half_life`` or ``num_labels``.

    Raises:
        InputError: for a name that is not known.

    Examples:
        >>> config = preset("tost-m24-p16")
        >>> config.num_hidden_layers, config.head_dim, config.layer_scale, config.num_labels
        (24, 64, 1e-05, 1000)
    """
    if name not in PRESETS:
        raise InputError(
            "preset", expected="the name of a released size", got=repr(name), fix=did_you_mean(name, PRESETS)
        )
    if name in LANGUAGE:
        (layers, width, heads), frame = LANGUAGE[name], LANGUAGE_FRAME
    else:
        size, patch = name.rsplit("-p", 1)
        layers, width, heads = VISION[size]
        frame = {**VISION_FRAME, "patch_size": int(patch), "layer_scale": vision_layer_scale(layers)}
        frame |= {} if "id2label" in changes else {"num_labels": 1000}
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return ToSTConfig(**{**frame, **sizes, **changes})
