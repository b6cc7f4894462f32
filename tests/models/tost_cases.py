"""Tiny models and mixers, with weights large enough that every part matters."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from rankwise.models import (
    MIXERS,
    S4D,
    LinearAttention,
    Mamba,
    Mamba2,
    SoftmaxAttention,
    TokenStatisticsAttention,
    ToSTConfig,
)
from rankwise.models.mixers import RecurrentMixer, build_mixer

GOLDEN = Path(__file__).parents[1] / "golden"
WIDTH, HEADS, LIMIT = 12, 3, 24

VARIANTS = {name: {"layer_types": name} for name in MIXERS} | {
    "tssa-decayed": {"layer_types": "tssa", "half_life": [2.0, None, 9.0]},
    "shared-skip": {"layer_types": "tssa", "skip": "shared", "skip_init": -1.0},
    "hybrid": {"layer_types": ["tssa", "softmax"]},
    "unbounded": {"layer_types": "tssa", "half_life": 4.0, "position_embeddings": "none"},
    "post-norm": {"norm_position": "post", "skip": "channel", "layer_scale": 0.5},
    "scanned": {
        "half_life": [2.0, None, 9.0],
        "mixer_options": {"tssa": {"conv_tokens": 3, "features": 4}},
    },
    "gated": {"gate": True, "norm": "rms", "skip": "learned", "skip_init": -1.0, "use_bias": False},
}
"""Configurations that go through every mixer and every option at least once."""


def config(**changes) -> ToSTConfig:
    """Return a configuration of two layers and 29 token ids; id 0 is padding."""
    small = {
        "vocab_size": 29, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "max_position_embeddings": LIMIT, "pad_token_id": 0,
    }  # fmt: skip
    return ToSTConfig(**{**small, **changes})


def stirred(module: nn.Module, seed: int = 0, scale: float = 0.5) -> nn.Module:
    """Random parameters everywhere, so that no bias, scale or temperature sits at a harmless start."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.data.add_((scale * noise).to(parameter.dtype))
    return module.eval()


def texts(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    """Token ids without padding."""
    return torch.randint(1, 29, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def _tssa(**options) -> nn.Module:
    return TokenStatisticsAttention(WIDTH, HEADS, **{"causal": True, **options})


def _softmax(**options) -> nn.Module:
    return SoftmaxAttention(WIDTH, HEADS, **options)


def _default(name: str, causal: bool = True) -> Callable[[], nn.Module]:
    return partial(build_mixer, config(layer_types=name, causal=causal), 0)


LIVES = [1.5, 6.0, float("inf")]
CAUSAL = {name: _default(name) for name in MIXERS} | {
    "tssa": _tssa,
    "tssa-narrow": lambda: _tssa(head_dim=1, bias=False),
    "tssa-bias": lambda: _tssa(max_positions=LIMIT),
    "tssa-decayed": lambda: _tssa(half_life=LIVES),
    "tssa-conv": lambda: _tssa(conv_tokens=3),
    "tssa-scan": lambda: _tssa(features=2),
    "tssa-both": lambda: _tssa(half_life=LIVES, conv_tokens=2, features=5),
    "softmax": _softmax,
    "softmax-rotary": lambda: _softmax(query_dim=4, rotary_base=50.0),
    "softmax-narrow": lambda: _softmax(query_dim=1, head_dim=5),
    "linear-narrow": lambda: LinearAttention(WIDTH, HEADS, feature_dim=2, head_dim=5, bias=False),
    "linear-sums": lambda: LinearAttention(WIDTH, HEADS, normalized=False),
    "s4d": lambda: S4D(WIDTH, state_dim=3),
    "mamba": lambda: Mamba(WIDTH, state_dim=4),
    "mamba-plain": lambda: Mamba(WIDTH, state_dim=3, expand=1, conv_tokens=1, step_rank=2, bias=False),
    "mamba2": lambda: Mamba2(WIDTH, HEADS, state_dim=4),
    "mamba2-groups": lambda: Mamba2(WIDTH, 4, head_dim=2, state_dim=3, groups=2, conv_tokens=2),
}
BOTH_WAYS = {
    f"{name}, both ways": _default(name, causal=False)
    for name, made in MIXERS.items()
    if not issubclass(made, RecurrentMixer)
} | {
    "tssa-narrow, both ways": lambda: _tssa(causal=False, head_dim=1, bias=False),
    "softmax-rotary, both ways": lambda: _softmax(causal=False, query_dim=4, rotary_base=50.0),
    "softmax-narrow, both ways": lambda: _softmax(causal=False, query_dim=1, head_dim=5),
}


def mixer(name: str) -> nn.Module:
    """One mixer of `CAUSAL` or `BOTH_WAYS`, in float64."""
    torch.manual_seed(0)
    scale = 0.5 if name.startswith(("tssa", "softmax")) else 0.3
    return stirred({**CAUSAL, **BOTH_WAYS}[name]().double(), scale=scale)
