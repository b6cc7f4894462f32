"""Linear layers that compute only some of their channels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from rankwise.errors import CompressionError
from rankwise.tracing.projections import linear_parts

Runs = list[tuple[int, int]]
"""Channels as (first, how many), ascending."""


class NarrowProjection(nn.Module):
    """A linear layer of which only some channels are computed; the others are zero.

    What reads it finds every head at its place and width, so a model's attention, masks and positions need no
    change. A zero at the same place of query and key adds nothing to a logit. Fused attention on a CPU is
    slow where queries and keys are narrower than values; with zeros filled in they are as wide.

    Args:
        narrow: the layer that computes: linear, or keys and values out of a latent.
        runs: where its channels go.
        out_features: how many there are with the zeros.
    """

    def __init__(self, narrow: nn.Linear, runs: Sequence[tuple[int, int]], out_features: int) -> None:
        super().__init__()
        self.narrow = narrow
        self.runs: Runs = [(int(first), int(count)) for first, count in runs]
        self.in_features, self.out_features = narrow.in_features, out_features
        self.loading = False
        self.register_buffer("channels", _channels(self.runs).to(narrow.weight.device), persistent=False)

    def __getattr__(self, name: str) -> Any:
        """While a checkpoint is loaded, weight and bias are those of the layer that computes.

        Families such as T5 and SigLIP initialise ``attention.q.weight`` by name where the files lack it. At
        any other time there is no ``weight``: code that computes with it would leave the zeros out.
        """
        if name in ("weight", "bias") and self.__dict__.get("loading"):
            return getattr(self.narrow, name)
        return super().__getattr__(name)

    def forward(self, tokens: Float[Tensor, "... D"]) -> Float[Tensor, "... O"]:
        """Compute the channels there are, and put them in their places."""
        some = self.narrow(tokens)
        return some.new_zeros(*some.shape[:-1], self.out_features).index_copy_(-1, self.channels, some)

    def place_channels(self) -> None:
        """Set ``channels`` again, on the device of the weights: a model built without memory has none."""
        self.channels = _channels(self.runs).to(next(self.narrow.parameters()).device)

    def extra_repr(self) -> str:
        """Sizes, as `nn.Linear` shows them."""
        return f"{self.narrow.out_features} of {self.out_features} channels"

    def widened(self) -> nn.Linear:
        """A plain linear layer of the whole width that gives the same.

        Raises:
            CompressionError: if keys and values come out of a latent.
        """
        narrow = self.narrow
        if not isinstance(narrow, nn.Linear):
            raise CompressionError(
                "`widened`",
                expected="a narrowed layer that is linear",
                got="one whose keys are read out of a latent",
                fix="Load the original.",
            )
        options: Any = {"device": narrow.weight.device, "dtype": narrow.weight.dtype}
        plain = nn.Linear(self.in_features, self.out_features, narrow.bias is not None, **options)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()
            plain.weight[self.channels] = narrow.weight
            if narrow.bias is not None:
                plain.bias[self.channels] = narrow.bias
        return plain


@dataclass(frozen=True)
class HeadFactors:
    """What becomes of some heads in one linear layer."""

    channels: Int[Tensor, "H K"]
    factors: list[Float64[Tensor, "K _"]]
    """For each head: its r new channels are factorᵀ times its K old ones."""
    places: list[list[int]] | None = None
    """Where in each head they go; by default its first r places."""


def narrowed(module: nn.Module, changes: Sequence[HeadFactors]) -> NarrowProjection:
    """A narrower layer in place of a linear one; biases go through the same factors, exactly.

    Args:
        module: `nn.Linear` or ``Conv1D``.
        changes: of heads in disjoint channels; all other channels stay.
    """
    parts = linear_parts(module)
    assert parts is not None
    weight, bias = parts[0].detach(), None if parts[1] is None else parts[1].detach()
    gone: set[int] = set()
    rows: dict[int, tuple[Tensor, Tensor | None]] = {}
    for change in changes:
        places_of = change.places or [list(range(factor.shape[1])) for factor in change.factors]
        for channels, factor, own in zip(change.channels.tolist(), change.factors, places_of, strict=True):
            gone |= set(channels)
            turn = factor.to(weight.device).mT
            new = (turn @ weight[channels].double()).to(weight.dtype)
            shift = None if bias is None else (turn @ bias[channels].double()).to(bias.dtype)
            for at, place in enumerate(own):
                rows[channels[place]] = new[at], None if shift is None else shift[at]
    places = sorted(rows.keys() | (set(range(weight.shape[0])) - gone))
    options: Any = {"device": weight.device, "dtype": weight.dtype}
    narrow = nn.Linear(weight.shape[1], len(places), bias is not None, **options)
    with torch.no_grad():
        narrow.weight.copy_(torch.stack([rows[at][0] if at in rows else weight[at] for at in places]))
        if bias is not None:
            shifts = [rows[at][1] if at in rows else bias[at] for at in places]
            narrow.bias.copy_(torch.stack([shift for shift in shifts if shift is not None]))
    trained = any(parameter.requires_grad for parameter in module.parameters())
    narrow.requires_grad_(trained)
    return NarrowProjection(narrow, runs_of(places), weight.shape[0]).train(module.training)


def runs_of(places: Sequence[int]) -> Runs:
    """Ascending numbers as runs.

    Args:
        places: the numbers.

    Examples:
        >>> runs_of([0, 1, 2, 7, 8])
        [(0, 3), (7, 2)]
    """
    runs: Runs = []
    for place in places:
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs


def narrow_projections(model: nn.Module) -> Iterator[tuple[str, NarrowProjection]]:
    """The narrowed layers of a model, by name.

    Args:
        model: the model.
    """
    return ((name, module) for name, module in model.named_modules() if isinstance(module, NarrowProjection))


def put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put a module into the place of another, and return that one.

    Args:
        model: the model.
        name: of the place.
        module: what goes there.
    """
    parent, _, own = name.rpartition(".")
    holder = model.get_submodule(parent)
    before = holder.get_submodule(own)
    setattr(holder, own, module)
    return before


def _channels(runs: Runs) -> Int[Tensor, "n"]:
    return torch.cat([torch.arange(first, first + count) for first, count in runs] or [torch.arange(0)])
