"""What the released checkpoints call things, and what that says about the model."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rankwise.errors import InputError
from rankwise.models.configuration import ToSTConfig
from rankwise.models.presets import LANGUAGE_FRAME, VISION_FRAME, vision_layer_scale

LANGUAGE_BLOCK = {
    "gamma1": "mixer_scale.weight",
    "gamma2": "mlp_scale.weight",
    "ln_1.weight": "mixer_norm.weight",
    "ln_1.bias": "mixer_norm.bias",
    "attn.temp": "mixer.temperature",
    "attn.denom_bias": "mixer.position_bias",
    "attn.c_attn.weight": "mixer.in_proj.weight",
    "attn.c_attn.bias": "mixer.in_proj.bias",
    "attn.c_proj.weight": "mixer.out_proj.weight",
    "attn.c_proj.bias": "mixer.out_proj.bias",
    "ln_2.weight": "mlp_norm.weight",
    "ln_2.bias": "mlp_norm.bias",
    "mlp.c_fc.weight": "mlp.in_proj.weight",
    "mlp.c_fc.bias": "mlp.in_proj.bias",
    "mlp.c_proj.weight": "mlp.out_proj.weight",
    "mlp.c_proj.bias": "mlp.out_proj.bias",
}
VISION_BLOCK = {
    "gamma1": "mixer_scale.weight",
    "gamma2": "mlp_scale.weight",
    "norm1.weight": "mixer_norm.weight",
    "norm1.bias": "mixer_norm.bias",
    "attn.temp": "mixer.temperature",
    "attn.qkv.weight": "mixer.in_proj.weight",
    "attn.qkv.bias": "mixer.in_proj.bias",
    "attn.to_out.0.weight": "mixer.out_proj.weight",
    "attn.to_out.0.bias": "mixer.out_proj.bias",
    "norm2.weight": "mlp_norm.weight",
    "norm2.bias": "mlp_norm.bias",
    "mlp.fc1.weight": "mlp.in_proj.weight",
    "mlp.fc1.bias": "mlp.in_proj.bias",
    "mlp.fc2.weight": "mlp.out_proj.weight",
    "mlp.fc2.bias": "mlp.out_proj.bias",
}
CLASS_BLOCK = {
    "gamma1": "attention_scale.weight",
    "gamma2": "mlp_scale.weight",
    "norm1.weight": "attention_norm.weight",
    "norm1.bias": "attention_norm.bias",
    "attn.qkv.weight": "attention.qkv_proj.weight",
    "attn.qkv.bias": "attention.qkv_proj.bias",
    "attn.proj.weight": "attention.out_proj.weight",
    "attn.proj.bias": "attention.out_proj.bias",
    "norm2.weight": "mlp_norm.weight",
    "norm2.bias": "mlp_norm.bias",
    "mlp.fc1.weight": "mlp.in_proj.weight",
    "mlp.fc1.bias": "mlp.in_proj.bias",
    "mlp.fc2.weight": "mlp.out_proj.weight",
    "mlp.fc2.bias": "mlp.out_proj.bias",
}
NO_SPECIAL_TOKENS: dict[str, None] = {"bos_token_id": None, "eos_token_id": None}
BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
LANGUAGE_ENDS = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.wpe.weight": "model.embed_positions.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    "transformer.ln_f.bias": "model.norm.bias",
    "lm_head.weight": "lm_head.weight",
}
VISION_ENDS = {
    "cls_token": "class_token",
    "norm.weight": "norm.weight",
    "norm.bias": "norm.bias",
    "head.weight": "classifier.weight",
    "head.bias": "classifier.bias",
    "pos_embeder.token_projection.weight": "positions.projection.weight",  # spelt so there
    "pos_embeder.token_projection.bias": "positions.projection.bias",
}

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class ReleasedModel:
    """A released checkpoint, understood.

    Args:
        kind: ``language`` or ``vision``.
        config: our configuration of it.
        names: what it must hold, and our name of each.
    """

    kind: str
    config: ToSTConfig
    names: dict[str, str] = field(repr=False)


def understand_language(weights: Weights) -> ReleasedModel:
    """Read the configuration of a language model off its shapes.

    Raises:
        KeyError: if a weight that says so is missing; its name is the error's argument.
    """
    layers = count(weights, r"transformer\.h\.(\d+)\.")
    vocabulary, width = sizes(weights, "transformer.wte.weight", 2)
    config = ToSTConfig(
        **{
            **LANGUAGE_FRAME,
            "vocab_size": vocabulary,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": weights["transformer.h.0.attn.temp"].numel(),
            "intermediate_size": sizes(weights, "transformer.h.0.mlp.c_fc.weight", 2)[0],
            "max_position_embeddings": sizes(weights, "transformer.wpe.weight", 2)[0],
            "use_bias": "transformer.h.0.attn.c_attn.bias" in weights,
            **({} if vocabulary > LANGUAGE_FRAME["eos_token_id"] else NO_SPECIAL_TOKENS),
        }
    )
    names = {**LANGUAGE_ENDS, **in_layers("transformer.h", "model.layers", layers, LANGUAGE_BLOCK)}
    return ReleasedModel("language", config, names if config.use_bias else without_biases(names))


def understand_vision(weights: Weights, tokens_norm: bool) -> ReleasedModel:
    """Read the configuration of a vision model off its shapes.

    Raises:
        KeyError: as for `understand_language`.
    """
    layers = count(weights, r"blocks\.(\d+)\.")
    class_layers = count(weights, r"cls_attn_blocks\.(\d+)\.")
    halvings = count(weights, r"patch_embed\.proj\.(\d+)\.0\.weight")
    labels, width = sizes(weights, "head.weight", 2)
    config = ToSTConfig(
        **{
            **VISION_FRAME,
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
    names = {
        **VISION_ENDS,
        **in_layers("blocks", "layers", layers, VISION_BLOCK),
        **in_layers("cls_attn_blocks", "layers", class_layers, CLASS_BLOCK, first=layers),
    }
    for index in range(halvings):
        theirs, ours = f"patch_embed.proj.{2 * index}", "patch_embedding"
        names[f"{theirs}.0.weight"] = f"{ours}.convolutions.{index}.weight"
        names |= {f"{theirs}.1.{part}": f"{ours}.norms.{index}.{part}" for part in BATCH_NORM}
    return ReleasedModel("vision", config, names)


def as_ours(released: str, weight: Tensor) -> Tensor:
    """Drop the axes of length 1 that temperatures (H, 1) and biases (H, P, 1) have there."""
    if released.endswith((".attn.temp", ".attn.denom_bias")) and weight.shape[-1:] == (1,):
        return weight[..., 0]
    return weight


def in_layers(
    theirs: str, ours: str, layers: int, block: Mapping[str, str], first: int = 0
) -> dict[str, str]:
    """The names of one block, for every layer; ours are counted from ``first``."""
    return {
        f"{theirs}.{layer}.{name}": f"{ours}.{first + layer}.{own}"
        for layer in range(layers)
        for name, own in block.items()
    }


def without_biases(names: Mapping[str, str]) -> dict[str, str]:
    """The names of a model without biases; its bias by position is another thing, and stays."""
    return {name: own for name, own in names.items() if not name.endswith(".bias")}


def count(names: Iterable[str], pattern: str) -> int:
    """How many numbers a pattern finds at the beginning of names: of a whole file, 0 to one less."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def sizes(weights: Weights, name: str, axes: int) -> tuple[int, ...]:
    """The shape of a weight that has so many axes.

    Raises:
        InputError: if it has not.
        KeyError: if it is missing.
    """
    shape = tuple(weights[name].shape)
    if len(shape) != axes:
        raise InputError(f"weight {name}", expected=f"{axes} axes", got=f"shape {shape}", fix="Get it again.")
    return shape
