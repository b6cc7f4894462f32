"""Tiny models and mixers, with weights large enough that every part matters."""

from pathlib import Path

import torch
from torch import nn

from rankwise.models import MIXERS, SoftmaxAttention, TokenStatisticsAttention, ToSTConfig

GOLDEN = Path(__file__).parents[1] / "golden"
WIDTH, HEADS, LIMIT = 12, 3, 24

VARIANTS = {
    "tssa": {"layer_types": "tssa"},
    "tssa-decayed": {"layer_types": "tssa", "half_life": [2.0, None, 9.0]},
    "tssa-uniform": {"layer_types": "tssa", "membership": "uniform", "skip": "shared", "skip_init": -1.0},
    "softmax": {"layer_types": "softmax"},
    "hybrid": {"layer_types": ["tssa", "softmax"]},
    "unbounded": {"layer_types": "tssa", "half_life": 4.0, "position_embeddings": "none"},
    "post-norm": {"norm_position": "post", "skip": "channel", "layer_scale": 0.5},
    "scanned": {
        "half_life": [2.0, None, 9.0],
        "mixer_options": {"tssa": {"conv_tokens": 3, "features": 4}},
    },
    "gated": {"gate": True, "norm": "rms", "skip": "learned", "skip_init": -1.0, "use_bias": False},
}
"""Configurations that go through every option at least once."""


def config(**changes) -> ToSTConfig:
    """Two layers over 29 tokens, 0 of which is padding."""
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


def mixers(causal: bool) -> dict[str, nn.Module]:
    """One mixer of each kind and option, in float64."""
    made = {
        "tssa": TokenStatisticsAttention(WIDTH, HEADS, causal=causal),
        "tssa-narrow": TokenStatisticsAttention(WIDTH, HEADS, head_dim=1, causal=causal, bias=False),
        "tssa-uniform": TokenStatisticsAttention(WIDTH, HEADS, causal=causal, membership="uniform"),
        "softmax": SoftmaxAttention(WIDTH, HEADS, causal=causal),
        "softmax-rotary": SoftmaxAttention(WIDTH, HEADS, query_dim=4, rotary_base=50.0, causal=causal),
        "softmax-narrow": SoftmaxAttention(WIDTH, HEADS, query_dim=1, head_dim=5, causal=causal),
    }
    if causal:
        lives = [1.5, 6.0, float("inf")]
        made["tssa-bias"] = TokenStatisticsAttention(WIDTH, HEADS, causal=True, max_positions=LIMIT)
        made["tssa-decayed"] = TokenStatisticsAttention(WIDTH, HEADS, causal=True, half_life=lives)
        made["tssa-conv"] = TokenStatisticsAttention(WIDTH, HEADS, causal=True, conv_tokens=3)
        made["tssa-scan"] = TokenStatisticsAttention(WIDTH, HEADS, causal=True, features=2)
        made["tssa-both"] = TokenStatisticsAttention(
            WIDTH, HEADS, causal=True, half_life=lives, conv_tokens=2, features=5
        )
    return {name: stirred(mixer.double()) for name, mixer in made.items()}


CAUSAL, BOTH_WAYS = sorted(mixers(True)), sorted(mixers(False))
assert {"tssa", "softmax"} <= set(MIXERS)
