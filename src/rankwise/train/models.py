"""Models that recipes name: transformers of Hugging Face, and mixers in the frame of `rankwise.models`."""

import math
from collections.abc import Callable
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

from rankwise._internals.rotary import ROPE_BASE
from rankwise.data.tasks import Task
from rankwise.errors import InputError, did_you_mean
from rankwise.models import ToSTConfig
from rankwise.ops import half_lives
from rankwise.train.settings import ModelSettings

MakeConfig = Callable[[ModelSettings, Task, int], PreTrainedConfig]
HEADS = {
    "language": AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "image": AutoModelForImageClassification,
}
ONLY_CAUSAL = ("s4d", "mamba", "mamba2")
SHORTEST_HALF_LIFE = 4
"""Tokens: of the fastest head of ``tost-decayed``; the slowest one's is the length of a sequence."""


def build_model(settings: ModelSettings, task: Task, tokens: int) -> PreTrainedModel:
    """A model with random weights, for a task.

    Args:
        settings: which one, and how large.
        task: what it reads and what it tells.
        tokens: length of a training sequence.

    Raises:
        InputError: for an unknown model or option, and for a number of weights it cannot have.
    """
    config = model_config(settings, task, tokens)
    return HEADS[task.kind].from_config(config)


def model_config(settings: ModelSettings, task: Task, tokens: int) -> PreTrainedConfig:
    """The Hugging Face configuration of settings, its feed-forward width chosen by ``parameters``.

    Args:
        settings: which one, and how large.
        task: what it reads and what it tells.
        tokens: length of a training sequence.

    Raises:
        InputError: as `build_model`.
    """
    if settings.name not in MODELS:
        fix = did_you_mean(settings.name, MODELS)
        raise InputError("`model.name`", expected="a model", got=repr(settings.name), fix=fix)
    if settings.parameters is not None:
        settings = settings.model_copy(update={"feed_forward": _matched(settings, task, tokens)})
    return MODELS[settings.name](settings, task, tokens)


def count_parameters(settings: ModelSettings, task: Task, tokens: int) -> int:
    """How many weights a model has, shared ones once; none of them is made.

    Args:
        settings: which one, and how large.
        task: what it reads and what it tells.
        tokens: length of a training sequence.
    """
    config = model_config(settings, task, tokens)
    with torch.device("meta"):
        model = HEADS[task.kind].from_config(config)
    return sum(weight.numel() for weight in model.parameters())


def _matched(settings: ModelSettings, task: Task, tokens: int) -> int:
    """The feed-forward width whose count is nearest: the count grows by the same with each unit of width."""
    narrow, wide = (
        count_parameters(
            settings.model_copy(update={"parameters": None, "feed_forward": width}), task, tokens
        )
        for width in (1, 2)
    )
    wanted = settings.parameters or 0
    width = 1 + round((wanted - narrow) / (wide - narrow))
    if width < 1:
        raise InputError(
            "`model.parameters`",
            expected=f"at least {narrow:,} for {settings.name} at width {settings.width}",
            got=f"{wanted:,}",
            fix="Raise it, or lower model.width or model.layers.",
        )
    return width


def _transformer(settings: ModelSettings, task: Task, tokens: int) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "hidden_size": settings.width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
    }
    wide = settings.feed_forward
    plain = 4 * settings.width if wide is None else wide
    if task.kind == "image":
        return _made(ViTConfig, settings, task, common | _images(task, tokens), plain)
    common |= {
        "vocab_size": task.vocab_size,
        "max_position_embeddings": tokens,
        "pad_token_id": task.pad_token_id,
    }
    if task.kind == "sequence":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return _made(BertConfig, settings, task, common | dropout, plain)
    tokens_of_text = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
    gated = round(8 * settings.width / 3)  # three matrices with as many weights as two of width 4 D
    return _made(LlamaConfig, settings, task, common | tokens_of_text, gated if wide is None else wide)


def _images(task: Task, tokens: int) -> dict[str, int]:
    channels, side, _ = task.image_shape or (0, 0, 0)
    return {"num_channels": channels, "image_size": side, "patch_size": side // math.isqrt(tokens)}


def _mixers(mixer: str, **fixed: Any) -> MakeConfig:
    """Our frame with one mixer; fixed fields may be functions of the settings and of the length."""

    def make(settings: ModelSettings, task: Task, tokens: int) -> PreTrainedConfig:
        more = {name: value(settings, tokens) if callable(value) else value for name, value in fixed.items()}
        content: dict[str, Any] = {
            "hidden_size": settings.width,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": settings.heads,
            "layer_types": mixer,
            "causal": task.kind == "language" or mixer in ONLY_CAUSAL,
            "pooling": None if task.kind == "language" else "mean",
            **more,
        }
        if task.kind == "image":
            content |= _images(task, tokens)
        else:
            content |= {
                "vocab_size": task.vocab_size,
                "max_position_embeddings": tokens,
                "pad_token_id": task.pad_token_id,
            }
        wide = 4 * settings.width if settings.feed_forward is None else settings.feed_forward
        return _made(ToSTConfig, settings, task, content, wide)

    return make


def _made(kind: Any, settings: ModelSettings, task: Task, content: dict[str, Any], wide: int) -> Any:
    """A configuration; options have the last word, and must be fields that it has."""
    made = vars(kind(**content, intermediate_size=wide))
    known = {"num_labels", *(field for field in made if not field.startswith("_"))}
    for name in settings.options:
        if name not in known:
            raise InputError(
                f"`model.options.{name}`",
                expected=f"a field of {kind.__name__}",
                got="an unknown one",
                fix=did_you_mean(name, known).partition(" Known:")[0] or "Leave it out.",
            )
    _check_words(settings, task)
    labels = {"num_labels": task.num_labels} if task.kind != "language" else {}
    options = {**settings.options}
    if isinstance(mixers := options.get("mixer_options"), dict):  # what it does not name stays
        own = content.get("mixer_options", {})
        options["mixer_options"] = {
            name: {**own.get(name, {}), **mixers.get(name, {})} for name in {**own, **mixers}
        }
    return kind(**{**content, "intermediate_size": wide, **labels, **options})


def _check_words(settings: ModelSettings, task: Task) -> None:
    words = settings.options.get("vocab_size")
    if task.kind != "image" and isinstance(words, int) and words < (task.vocab_size or 0):
        raise InputError(
            "`model.options.vocab_size`",
            expected=f"at least {task.vocab_size:,}, the tokens of the task",
            got=f"{words:,}",
            fix="Leave it out.",
        )


def _every_fourth(settings: ModelSettings, _: int) -> list[str]:
    return ["softmax" if layer % 4 == 3 else "tssa" for layer in range(settings.layers)]


CONTENT = {"tssa": {"conv_tokens": 4, "features": 16}}
"""Options of TSSA by which content moves: a short convolution, and a scan of 16 features a head."""
ROTARY = {"softmax": {"rotary_base": ROPE_BASE}}


def _ladder(settings: ModelSettings, tokens: int) -> list[float]:
    lives: list[float] = half_lives(settings.heads, SHORTEST_HALF_LIFE, tokens).tolist()
    return lives


MODELS: dict[str, MakeConfig] = {
    "transformer": _transformer,
    "tost": _mixers("tssa"),
    "tost-decayed": _mixers("tssa", half_life=_ladder),
    "tost-uniform": _mixers("tssa", membership="uniform"),
    "tost-hybrid": _mixers("tssa", half_life=_ladder, mixer_options=ROTARY, layer_types=_every_fourth),
    "tost-scan": _mixers("tssa", half_life=_ladder, mixer_options=CONTENT),
    "tost-scan-hybrid": _mixers(
        "tssa", half_life=_ladder, mixer_options=CONTENT | ROTARY, layer_types=_every_fourth
    ),
    "softmax": _mixers("softmax"),
    "softmax-rotary": _mixers("softmax", mixer_options=ROTARY),
    "linear": _mixers("linear"),
    "s4d": _mixers("s4d"),
    "mamba": _mixers("mamba"),
    "mamba2": _mixers("mamba2"),
}
"""``transformer``: blocks of Llama (next token), BERT (sequences), ViT (images); the others are ours."""
