"""Token mixers, one file per mixer; `MIXERS` maps names to mixer classes."""

import inspect
from typing import TYPE_CHECKING

from rankwise.errors import one_of, whole_number
from rankwise.models.mixers.linear import LinearAttention
from rankwise.models.mixers.mamba import Mamba
from rankwise.models.mixers.mamba2 import Mamba2
from rankwise.models.mixers.mixer import Mixer, MixerOutput, MixerState
from rankwise.models.mixers.recurrent import RecurrentMixer
from rankwise.models.mixers.s4d import S4D
from rankwise.models.mixers.softmax import SoftmaxAttention
from rankwise.models.mixers.tssa import TokenStatisticsAttention

if TYPE_CHECKING:
    from rankwise.models.configuration import ToSTConfig

MIXERS: dict[str, type[Mixer]] = {
    "tssa": TokenStatisticsAttention,
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "s4d": S4D,
    "mamba": Mamba,
    "mamba2": Mamba2,
}
"""Mixers by their name in `ToSTConfig`."""


def build_mixer(config: "ToSTConfig", layer: int) -> Mixer:
    """Return the mixer of a layer; its arguments are fields and ``mixer_options`` of the configuration."""
    name = one_of(f"ToSTConfig `layer_types[{layer}]`", config.layer_types[layer], MIXERS)
    parameters = inspect.signature(MIXERS[name]).parameters
    options = config.mixer_options.get(name, {})
    for option, value in options.items():
        one_of(f"ToSTConfig `mixer_options[{name!r}]`", option, list(parameters)[1:])
        if parameters[option].annotation in (int, int | None) and value is not None:
            least = 0 if parameters[option].default == 0 else 1
            whole_number(f"ToSTConfig `mixer_options[{name!r}][{option!r}]`", value, least)
    fields = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "causal": config.causal,
        "bias": config.use_bias,
        "dropout": config.dropout,
        "half_life": config.half_life,
        "max_positions": config.max_position_embeddings if config.position_bias else 0,
    }
    return MIXERS[name](**{key: value for key, value in fields.items() if key in parameters} | options)


__all__ = [
    "MIXERS", "S4D", "LinearAttention", "Mamba", "Mamba2", "Mixer", "MixerOutput", "MixerState",
    "RecurrentMixer", "SoftmaxAttention", "TokenStatisticsAttention", "build_mixer",
]  # fmt: skip
