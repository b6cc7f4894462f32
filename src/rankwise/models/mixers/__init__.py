"""Mixers, one file each; `MIXERS` is the only list of them.

A mixer is a `Mixer` (see `rankwise.models.mixers.base`): ``forward``, ``mixing_operator`` and ``values`` take
the same arguments; ``state_size(tokens)``; ``from_config(config)``. To add one: a file here, a line below.
"""

import inspect
from typing import TYPE_CHECKING

from rankwise.errors import InputError, did_you_mean
from rankwise.models.mixers.base import Mixer, MixerOutput, MixerState
from rankwise.models.mixers.linear import LinearAttention
from rankwise.models.mixers.mamba import Mamba
from rankwise.models.mixers.mamba2 import Mamba2
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


def build_mixer(config: "ToSTConfig", layer: int) -> Mixer:
    """The mixer of one layer.

    Raises:
        InputError: for a name that is not in `MIXERS`, or an option that the mixer does not take.
    """
    name = config.layer_types[layer]
    if name not in MIXERS:
        raise InputError(
            f"ToSTConfig `layer_types[{layer}]`",
            expected="the name of a mixer",
            got=repr(name),
            fix=did_you_mean(name, MIXERS),
        )
    known = list(inspect.signature(MIXERS[name]).parameters)[1:]
    for option in config.mixer_options.get(name, {}):
        if option not in known:
            raise InputError(
                f"ToSTConfig `mixer_options[{name!r}]`",
                expected=f"arguments of {MIXERS[name].__name__}",
                got=repr(option),
                fix=did_you_mean(str(option), known),
            )
    return MIXERS[name].from_config(config)


__all__ = [
    "MIXERS",
    "S4D",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "Mixer",
    "MixerOutput",
    "MixerState",
    "SoftmaxAttention",
    "TokenStatisticsAttention",
    "build_mixer",
]
