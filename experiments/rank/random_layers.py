"""Token states that random heads read: drawn or given, with positions, through random blocks."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rankwise._internals.rotary import ROPE_BASE, apply_rope, rope_angles

INPUTS = ("orthonormal", "gaussian")
POSITIONS = ("none", "rope", "learned")
BLOCKS = ("pre", "post", "attention")
"""Pre-norm as in GPT-2, Llama and ViT; post-norm as in BERT; attention alone, without skip, norm and MLP."""


@dataclass(frozen=True)
class Setting:
    """All that decides the law of one trial."""

    tokens: int
    mask: str = "full"
    inputs: str = "orthonormal"
    given: Tensor | None = None
    """(B, T, D) token states of the user's own; trial i reads sequence i mod B."""
    width: int | None = None
    heads: int | None = None
    """None: D // K, so that D = H·K."""
    kv_heads: int | None = None
    value_dim: int | None = None
    """None: as wide as queries and keys."""
    positions: str = "none"
    block: str = "attention"
    layers: int = 1
    temperature: float = 0.0
    delta: float = 1e-2
    seed: int = 0

    @property
    def knows_no_width(self) -> bool:
        """Whether queries and keys are Gaussian whatever D is: orthonormal rows times Gaussian weights."""
        return (
            self.given is None
            and self.inputs == "orthonormal"
            and self.layers == 1
            and self.positions != "learned"
        )

    @property
    def dim(self) -> int:
        """D of the states."""
        if self.given is not None:
            return self.given.shape[-1]
        return max(self.tokens, 64) if self.width is None else self.width

    @cached_property
    def fixed_states(self) -> Float[Tensor, "T D"]:
        """Orthonormal rows: one draw serves all trials, for Gaussian weights turn it anyhow."""
        generator = torch.Generator().manual_seed(self.seed)
        columns = torch.randn(self.dim, self.tokens, dtype=torch.float64, generator=generator)
        return torch.linalg.qr(columns).Q.mT.float()

    def generator(self, trial: int, *more: int) -> torch.Generator:
        """A stream of its own for each trial (and width)."""
        mixed = np.random.SeedSequence((self.seed, trial, *more)).generate_state(1)
        return torch.Generator().manual_seed(int(mixed[0]))


def token_states(setting: Setting, trial: int) -> Float[Tensor, "T D"]:
    """States of one trial, scaled so that the mean squared row norm is D; learned positions added.

    A learned position is a Gaussian row as long as a token's on average: both tables start from one
    distribution in the usual models.
    """
    generator = setting.generator(trial, 1)
    if setting.given is not None:
        states = setting.given[trial % len(setting.given)].float()
    elif setting.inputs == "orthonormal":
        states = setting.fixed_states
    else:
        states = torch.randn(setting.tokens, setting.dim, generator=generator)
    states = states / states.square().mean().sqrt()
    if setting.positions == "learned":
        states = states + torch.randn(states.shape, generator=generator)
    return states


def normalized(states: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
    """LayerNorm without gain: rows centred, of norm √D."""
    return F.layer_norm(states, states.shape[-1:])


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    """A weight with independent N(0, 1/fan-in) entries, fan-in first."""
    return torch.randn(shape, generator=generator) / math.sqrt(shape[0])


def with_rope(rows: Float[Tensor, "*H T K"]) -> Float[Tensor, "*H T K"]:
    """Return queries or keys with rotary positions 0 … T − 1."""
    tokens, width = rows.shape[-2:]
    return apply_rope(rows, *rope_angles(torch.arange(tokens), width, ROPE_BASE, rows.dtype), "halves")


@dataclass(frozen=True)
class RandomBlock:
    """One transformer block at random weights, for one width."""

    setting: Setting
    head_dim: int
    generator: torch.Generator

    @property
    def heads(self) -> int:
        """H."""
        setting = self.setting
        return max(1, setting.dim // self.head_dim) if setting.heads is None else setting.heads

    def query_key(
        self, states: Float[Tensor, "T D"]
    ) -> tuple[Float[Tensor, "H T K"], Float[Tensor, "Hkv T K"]]:
        """Queries and keys of all heads, positions in them."""
        states = normalized(states) if self.setting.block == "pre" else states
        query = self._split(states, self.heads, self.head_dim)
        key = self._split(states, self.setting.kv_heads or self.heads, self.head_dim)
        return (with_rope(query), with_rope(key)) if self.setting.positions == "rope" else (query, key)

    def mixed(
        self, states: Tensor, query: Float[Tensor, "H T K"], key: Float[Tensor, "Hkv T K"]
    ) -> Float[Tensor, "T D"]:
        """What softmax attention at τ = √K gives, through the output projection."""
        setting = self.setting
        states = normalized(states) if setting.block == "pre" else states
        value = self._split(states, len(key), setting.value_dim or self.head_dim)
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=setting.mask == "causal")
        joined = out.transpose(0, 1).flatten(1)
        return joined @ gaussian(self.generator, joined.shape[-1], setting.dim)

    def passed(self, states: Tensor, mixed: Tensor) -> Float[Tensor, "T D"]:
        """The rest of the block: skips, norms, an MLP of width 4 D."""
        if self.setting.block == "attention":
            return mixed
        after = self.setting.block == "post"
        states = normalized(states + mixed) if after else states + mixed
        hidden = F.gelu((states if after else normalized(states)) @ self._weight(1, 4))
        states = states + hidden @ self._weight(4, 1)
        return normalized(states) if after else states

    def _weight(self, rows: int, columns: int) -> Tensor:
        return gaussian(self.generator, rows * self.setting.dim, columns * self.setting.dim)

    def _split(self, states: Tensor, heads: int, width: int) -> Float[Tensor, "H T K"]:
        weight = gaussian(self.generator, self.setting.dim, heads * width)
        return (states @ weight).unflatten(-1, (heads, width)).transpose(0, 1)
