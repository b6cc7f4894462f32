"""Models of the training experiments: transformers, and mixers in the frame of `rankwise.models`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
)

from experiments.tasks.task import Task
from experiments.training.config import TrainingConfig
from rankwise._internals.rotary import ROPE_BASE
from rankwise.models import MIXERS, TokenStatisticsAttention, ToSTConfig
from rankwise.models.mixers import RecurrentMixer
from rankwise.ops import half_lives

HEADS = {
    "language": AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "image": AutoModelForImageClassification,
}
SHORTEST_HALF_LIFE = 4
"""Tokens, for the fastest head of `tost-decayed`; the slowest head has the length of a sequence."""
CONTENT = {"tssa": {"conv_tokens": 4, "features": 16}}
"""TSSA with a short convolution, and a scan of 16 features per head: content moves between tokens."""
ROTARY = {"softmax": {"rotary_base": ROPE_BASE}}
Fields = Callable[[TrainingConfig], dict[str, Any]]


def build_model(config: TrainingConfig, task: Task) -> PreTrainedModel:
    return _make_model(model_config(config, task), task)


def model_config(config: TrainingConfig, task: Task) -> PreTrainedConfig:
    """Return the configuration of transformers; `parameters` decides the feed-forward width.

    The number of parameters is linear in that width, so that two counts determine it.
    """
    if config.parameters is None:
        return _make_config(config, task, None)
    plain = replace(config, parameters=None)
    narrow, wide = (parameter_count(_make_config(plain, task, width), task) for width in (1, 2))
    width = 1 + round((config.parameters - narrow) / (wide - narrow))
    if width < 1:
        raise ValueError(
            f"expected at least {narrow:,} parameters for {config.model}, got {config.parameters:,}"
        )
    return _make_config(plain, task, width)


def parameter_count(made: PreTrainedConfig, task: Task) -> int:
    with torch.device("meta"):
        model = _make_model(made, task)
    return sum(weight.numel() for weight in model.parameters())


def _make_model(made: PreTrainedConfig, task: Task) -> PreTrainedModel:
    """Build a model; the temperature of `tost-uniform` is 0 and not learned, so all memberships are 1 / H."""
    model = HEADS[task.kind].from_config(made)
    if getattr(made, "uniform_memberships", False):
        for module in model.modules():
            if isinstance(module, TokenStatisticsAttention):
                del module.temperature
                module.register_buffer("temperature", torch.zeros(module.num_heads))
    return model


def _make_config(config: TrainingConfig, task: Task, feed_forward: int | None) -> PreTrainedConfig:
    content: dict[str, Any] = {
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
    }
    if task.kind == "image":
        channels, side, _ = task.image_shape or (0, 0, 0)
        patch = side // math.isqrt(config.tokens)
        content |= {"num_channels": channels, "image_size": side, "patch_size": patch}
    else:
        content |= {
            "vocab_size": task.vocab_size,
            "max_position_embeddings": task.length,
            "pad_token_id": task.pad_token_id,
        }
    if task.kind != "language":
        content["num_labels"] = task.num_labels
    plain = 4 * config.width
    kind: Any = ToSTConfig
    if config.model != "transformer":
        content |= MODELS[config.model](config)
        recurrent = issubclass(MIXERS.get(str(content["layer_types"]), object), RecurrentMixer)
        content["causal"] = task.kind == "language" or recurrent
        content["pooling"] = None if task.kind == "language" else "mean"
    elif task.kind == "image":
        kind = ViTConfig
    elif task.kind == "sequence":
        kind = BertConfig
        content |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    else:
        kind = LlamaConfig
        content |= {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
        plain = round(8 * config.width / 3)  # three matrices with as many weights as two of width 4 D
    content["intermediate_size"] = plain if feed_forward is None else feed_forward
    options = dict(config.model_options)
    if "mixer_options" in options:  # other options of the model stay
        own, mixers = content.get("mixer_options", {}), options["mixer_options"]
        options["mixer_options"] = {
            name: {**own.get(name, {}), **mixers.get(name, {})} for name in {**own, **mixers}
        }
    if unknown := set(options) - set(vars(kind(**content))):
        raise ValueError(f"expected fields of {kind.__name__}, got {', '.join(sorted(unknown))}")
    return kind(**{**content, **options})


def _decayed(*, hybrid: bool = False, **fixed: Any) -> Fields:
    """TSSA with statistics that forget; a hybrid has softmax attention in every fourth layer."""

    def fields(config: TrainingConfig) -> dict[str, Any]:
        lives = half_lives(config.heads, SHORTEST_HALF_LIFE, config.tokens).tolist()
        layers = ["softmax" if layer % 4 == 3 else "tssa" for layer in range(config.layers)]
        return {"layer_types": layers if hybrid else "tssa", "half_life": lives, **fixed}

    return fields


def _mixer(name: str, **fixed: Any) -> Fields:
    return lambda config: {"layer_types": name, **fixed}


MODELS: dict[str, Fields] = {
    "transformer": lambda config: {},
    "tost": _mixer("tssa"),
    "tost-decayed": _decayed(),
    "tost-uniform": _mixer("tssa", uniform_memberships=True, position_bias=False),
    "tost-hybrid": _decayed(hybrid=True, mixer_options=ROTARY),
    "tost-scan": _decayed(mixer_options=CONTENT),
    "tost-scan-hybrid": _decayed(hybrid=True, mixer_options=CONTENT | ROTARY),
    "softmax-rotary": _mixer("softmax", mixer_options=ROTARY),
    **{name: _mixer(name) for name in MIXERS if name != "tssa"},
}
"""`transformer`: blocks of Llama (next token), BERT (sequences) or ViT (images); others: a mixer, by name."""
