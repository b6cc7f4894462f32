"""The protocol of a mixer."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from rankwise.errors import InputError, ShapeError
from rankwise.operators import MixingOperator

MixerState = tuple[Tensor, ...]
"""What a mixer keeps for decoding: tensors whose first axis is the batch, never changed in place."""


class MixerOutput(NamedTuple):
    """What a mixer gives back.

    Attributes:
        output: (B, T, D), what the block adds to the skip.
        state: what the next call needs, None unless it was asked for.
    """

    output: Float[Tensor, "B T D"]
    state: MixerState | None = None


class Mixer(nn.Module, ABC):
    """The part of a block by which tokens meet: ``output = heads joined of (M V), projected``.

    All three methods below take the arguments of `forward`, so that whatever is called on the way through a
    model can be asked for its operator. To add a mixer: one file with a subclass, one line in
    `rankwise.models.mixers.MIXERS`.
    """

    causal: bool
    """Whether a token sees only itself and earlier ones; only then is there a state."""
    output_projection = "out_proj"
    """The module inside that reads the heads side by side, (B, T, H V)."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> "Mixer":
        """Build from a `rankwise.models.ToSTConfig`, and its ``mixer_options`` for this mixer."""

    @abstractmethod
    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixerOutput:
        """Mix the tokens.

        Args:
            hidden_states: the tokens of this call.
            attention_mask: true or 1 where a token of this call is real; all are, by default. A masked token
                has no influence on another, and what is put out in its place is not to be read.
            state: what an earlier call gave back, to go on from there.
            return_state: whether to give back a state.
        """

    @abstractmethod
    def mixing_operator(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> MixingOperator:
        """M, (B, H, T, S), as `forward` would use it."""

    @abstractmethod
    def values(
        self,
        hidden_states: Float[Tensor, "B T D"],
        attention_mask: Shaped[Tensor, "B T"] | None = None,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
    ) -> Float[Tensor, "B H S V"]:
        """What M is applied to: their product, heads joined, is what is projected to the output."""

    @abstractmethod
    def state_size(self, tokens: int) -> int:
        """Numbers a state holds for one sequence, after that many tokens."""


def token_mask(
    attention_mask: Shaped[Tensor, "B T"] | None, hidden_states: Float[Tensor, "B T D"]
) -> Bool[Tensor, "B T"] | None:
    """The mask as booleans, checked against the tokens.

    Raises:
        ShapeError: if it is not one value for each token of this call.
        InputError: if it holds other values than 0 and 1.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ShapeError(
            "`attention_mask`",
            expected=f"one value for each token, {tuple(hidden_states.shape[:2])}",
            got=f"{tuple(attention_mask.shape)}",
            fix="A mixer takes the mask of the tokens of this call; its state remembers earlier ones.",
        )
    return real_tokens(attention_mask)


def real_tokens(attention_mask: Shaped[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """The mask as booleans.

    Raises:
        InputError: if it holds other values than 0 and 1; not looked at while compiling.

    Examples:
        >>> real_tokens(torch.tensor([[0.0, 1.0]])).tolist()
        [[False, True]]
    """
    real = attention_mask.bool()
    plain = attention_mask.dtype == torch.bool or torch.compiler.is_compiling()
    if not plain and not torch.equal(real.to(attention_mask.dtype), attention_mask):
        other = attention_mask[real.to(attention_mask.dtype) != attention_mask]
        raise InputError(
            "`attention_mask`",
            expected="1 (or true) for real tokens and 0 for padding",
            got=f"{other[0].item()}",
            fix="A mask that is added to scores, 0 and -inf, is the other way round: pass (mask == 0).",
        )
    return real


def options_of(config: Any, name: str, **more: Any) -> dict[str, Any]:
    """What a mixer is built with: what a config says of all mixers, then of this mixer.

    Args:
        config: a `rankwise.models.ToSTConfig`.
        name: of the mixer; ``config.mixer_options[name]`` has the last word.
        more: what else the config says that this mixer takes.

    Returns:
        Keyword arguments.
    """
    given = {"causal": config.causal, "bias": config.use_bias, "dropout": config.dropout}
    return {**given, **more, **config.mixer_options.get(name, {})}


def head_width(subject: str, hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    """The width of a head: as asked, or the model width over the heads.

    Args:
        subject: what has the heads, for the error.
        hidden_size: D.
        num_heads: H.
        head_dim: K, or None.

    Raises:
        InputError: if a size is under 1, or the heads do not divide the width and no ``head_dim`` is given.
    """
    sizes = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "head_dim": 1 if head_dim is None else head_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{subject} `{name}`", expected="at least 1", got=f"{size}", fix="Raise it.")
    if head_dim is None and hidden_size % num_heads:
        raise InputError(
            f"{subject} heads",
            expected=f"a number that divides the width {hidden_size}",
            got=f"{num_heads}",
            fix="Choose other sizes, or give head_dim.",
        )
    return hidden_size // num_heads if head_dim is None else head_dim


def make_dropout(subject: str, rate: float) -> nn.Dropout:
    """A dropout.

    Raises:
        InputError: if the rate is no probability.
    """
    if not 0 <= rate <= 1:
        raise InputError(
            f"{subject} `dropout`", expected="a rate from 0 to 1", got=f"{rate}", fix="0 drops nothing."
        )
    return nn.Dropout(rate)
