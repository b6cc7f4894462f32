"""Keys and values of an attention layer through one latent: the modules, and how they are built."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, Field
from torch import Tensor, nn

from rankwise.compression.narrow import Runs, runs_of
from rankwise.compression.rotation import Rotation
from rankwise.tracing.projections import linear_parts


class LatentLayer(BaseModel, extra="forbid"):
    """An attention layer whose keys and values are read out of one latent, as data.

    Names are below the attention layer, but for ``rotary``, which is a name in the model.
    """

    kind: Literal["latent"] = "latent"
    module: str
    key: str
    """The linear layer that made keys."""
    value: str
    """The one that made values; the same where they are fused."""
    heads: int
    """Key heads."""
    key_channels: Runs
    """Of the linear layer, head by head, as (first, how many); of narrowed keys, those that are left."""
    value_channels: Runs
    rank: int = Field(ge=1)
    """Width of the latent."""
    key_width: int = 0
    """Channels of a key head, with those that narrowing made zero; 0 where keys were not narrowed."""
    key_places: Runs = Field(default_factory=list)
    """Where the channels of narrowed keys go, counted over heads."""
    key_factor: float = 1.0
    value_factor: float = 1.0
    norm: str = ""
    """A module that keys pass before rotation."""
    norm_axes: Literal["flat", "tokens", "heads"] = "tokens"
    """How it takes them: (B, T, G·K), (B, T, G, K) or (B, G, T, K)."""
    rotary: str = ""
    """The module that gives cosines and sines; none where positions are not rotated in."""
    rotary_options: dict[str, str] = Field(default_factory=dict)
    rotation: Rotation = "halves"

    @property
    def fused(self) -> bool:
        """Whether one linear layer makes keys and values."""
        return self.key == self.value

    @property
    def full(self) -> int:
        """Channels of keys and values together: what a cache keeps without a latent."""
        return sum(count for _, count in (*self.key_channels, *self.value_channels))

    @property
    def bytes_of_position(self) -> int:
        """Of each token in the cache: a number that says where it is rotated to."""
        return 4 if self.rotary else 0

    def below(self, name: str) -> str:
        """The name in the model of a module of the attention layer.

        Args:
            name: below the attention layer.
        """
        return f"{self.module}.{name}" if self.module else name


class Latent:
    """The latent of the call that is under way, so that keys and values do not both compute it."""

    def __init__(self) -> None:
        self.owner: LatentProjection | None = None
        self.close()

    def open(self, positions: Tensor | None) -> None:
        """A call of the attention layer begins.

        Args:
            positions: of its tokens.
        """
        self.is_open, self.positions = True, positions
        self.tokens: Tensor | None = None
        self.value: Tensor | None = None

    def close(self) -> None:
        """The call is over: nothing is kept."""
        self.is_open = False
        self.tokens = self.value = self.positions = None

    def of(self, tokens: Float[Tensor, "... D"]) -> Float[Tensor, "... r"]:
        """The latent of tokens; computed once in a call.

        Args:
            tokens: what the attention layer reads.
        """
        assert self.owner is not None
        if not self.is_open:
            return self.owner.down(tokens)
        if self.tokens is not tokens or self.value is None:
            self.tokens, self.value = tokens, self.owner.down(tokens)
        return self.value

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self.owner, "is_open": False, "positions": None, "tokens": None, "value": None}


class LatentProjection(nn.Module):
    """A linear layer whose channels of keys or values come from the latent.

    Where keys and values have a layer each, that of the keys owns the first factor, ``down``, and both have
    an ``up``. In a fused layer the other channels stay what they are, in ``rest``.

    Args:
        latent: shared by the layers of keys and of values.
        down: of the layer that owns it, else None.
        up: from the latent to keys, values, or keys and values.
        rest: the other channels, or None.
        runs: pieces of [rest, up] in the order of the channels.
    """

    def __init__(
        self, latent: Latent, down: nn.Linear | None, up: nn.Linear, rest: nn.Linear | None, runs: Runs
    ) -> None:
        super().__init__()
        self.latent, self.runs = latent, runs
        self.up = up
        self.down: nn.Linear
        if down is not None:
            self.down = down
            latent.owner = self
        self.rest = rest

    def forward(self, tokens: Float[Tensor, "... D"]) -> Float[Tensor, "... O"]:
        """All channels in their order."""
        read = self.up(self.latent.of(tokens))
        if self.rest is None:
            return read
        joined = torch.cat([self.rest(tokens), read], -1)
        if len(self.runs) == 1:
            return joined
        return torch.cat([joined.narrow(-1, first, count) for first, count in self.runs], -1)

    @property
    def out_features(self) -> int:
        """Channels, as many as the linear layer had."""
        return sum(count for _, count in self.runs)


def channels_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers in runs.

    Args:
        runs: as (first, how many).
    """
    return [at for first, count in runs for at in range(first, first + count)]


def latent_modules(model: nn.Module, layer: LatentLayer) -> dict[str, nn.Module]:
    """Projections through a latent for one attention layer, by name, with ``down`` and ``up`` still to fill.

    Args:
        model: with linear layers in those places.
        layer: what to build.
    """
    latent = Latent()
    keys, values = channels_of(layer.key_channels), channels_of(layer.value_channels)
    if layer.fused:
        name = layer.below(layer.key)
        return {name: _projection(model, name, latent, keys + values, layer.rank, True)}
    names = layer.below(layer.key), layer.below(layer.value)
    return {
        names[0]: _projection(model, names[0], latent, keys, layer.rank, True),
        names[1]: _projection(model, names[1], latent, values, layer.rank, False),
    }


def _projection(
    model: nn.Module, name: str, latent: Latent, channels: list[int], rank: int, owns: bool
) -> LatentProjection:
    before = model.get_submodule(name)
    parts = linear_parts(before)
    assert parts is not None
    weight, bias = parts[0].detach(), None if parts[1] is None else parts[1].detach()
    options: Any = {"device": weight.device, "dtype": weight.dtype}
    down = nn.Linear(weight.shape[1], rank, False, **options) if owns else None
    up = nn.Linear(rank, len(channels), bias is not None, **options)
    left = sorted(set(range(weight.shape[0])) - set(channels))
    rest = nn.Linear(weight.shape[1], len(left), bias is not None, **options) if left else None
    with torch.no_grad():
        if bias is not None:
            up.bias.copy_(bias[channels])
        if rest is not None:
            rest.weight.copy_(weight[left])
            if bias is not None:
                rest.bias.copy_(bias[left])
    place = {channel: at for at, channel in enumerate(left + channels)}
    runs = ordered_runs([place[channel] for channel in range(weight.shape[0])])
    made = LatentProjection(latent, down, up, rest, runs)
    made.requires_grad_(any(parameter.requires_grad for parameter in before.parameters()))
    return made.train(before.training)


def ordered_runs(numbers: Sequence[int]) -> Runs:
    """Numbers in any order as runs, as (first, how many).

    Args:
        numbers: the numbers.

    Examples:
        >>> ordered_runs([4, 5, 0, 1])
        [(4, 2), (0, 2)]
    """
    runs: Runs = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs += runs_of([number])
    return runs


def fill(
    modules: dict[str, nn.Module],
    layer: LatentLayer,
    down: Float[Tensor, "r D"],
    up: Float[Tensor, "N r"],
) -> None:
    """Put factors into projections.

    Args:
        modules: what `latent_modules` gave.
        layer: what they were built for.
        down: from tokens to the latent.
        up: from the latent to [keys, values] as the linear layers gave them, without biases.
    """
    count = sum(count for _, count in layer.key_channels)
    projections = [module for module in modules.values() if isinstance(module, LatentProjection)]
    rows = [up] if layer.fused else [up[:count], up[count:]]
    with torch.no_grad():
        projections[0].down.weight.copy_(down)
        for projection, own in zip(projections, rows, strict=True):
            projection.up.weight.copy_(own)
