"""The value and output weights of attention, found by what they compute; and what it mixes with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.capture import MixerSite, capture
from rankwise.errors import CaptureError
from rankwise.surgery.examples import Example, call
from rankwise.surgery.probe import probing
from rankwise.surgery.skips import SkipSite


@dataclass
class Mixing:
    """What is known of the mixer behind one λ-skip."""

    norm: float
    """‖M‖_F of the worst sequence, all heads together."""
    worst: float | None
    """What it can be at most."""
    value_norm: float | None = None
    """‖C‖_F, all heads together."""
    reach: Tensor | None = None
    """(B,): the most by which attention can move a token, whatever its weights."""


class LinearTap:
    """Keeps what linear maps of a model read and gave, while it runs."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._handles = [
            module.register_forward_hook(self._note)
            for module in model.modules()
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2 and _matrix(module) is not None
        ]

    def _note(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output.dim() >= 2:
            self.calls.append((module, args[0].detach(), output.detach()))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def mixings(model: nn.Module, batch: Example, sites: Sequence[SkipSite]) -> dict[tuple[str, int], Mixing]:
    """What is known of the mixers behind λ-skips, by name of the site and number of its call.

    A site is missing where its branch holds no captured mixer, or several of them.

    Args:
        model: the model, with its λ as they are.
        batch: what to run it on.
        sites: the sites.
    """
    mixers: list[MixerSite] = []
    tap = LinearTap(model)
    try:
        with probing(model), torch.no_grad(), capture(model, on_mixer=mixers.append, values=True):
            call(model, batch)
    except CaptureError:
        return {}
    finally:
        tap.close()
    found: dict[str, list[Mixing]] = {site.name: [] for site in sites}
    for mixer in mixers:
        site = max(sites, key=lambda one: _common(one.name, mixer.name))
        if _common(site.name, mixer.name):
            found[site.name].append(_mixing(mixer, tap.calls))
    return {
        (site.name, call): found[site.name][call]
        for site in sites
        for call in range(len(site.sums))
        if len(found[site.name]) == len(site.sums)  # mixers side by side in one branch are left out
    }


def _common(one: str, other: str) -> int:
    """How many parts of two names agree from the start, if any part after a number does or none has one."""
    count = 0
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            return 0 if a.isdigit() and b.isdigit() else count
        count += 1
    return count


def _mixing(mixer: MixerSite, calls: list[tuple[nn.Module, Tensor, Tensor]]) -> Mixing:
    operator = mixer.operator
    batch, heads, tokens = operator.shape[0], operator.shape[1], operator.shape[2]
    squares = torch.zeros(batch, dtype=torch.float64)
    for head in range(heads):
        dense = operator[:, head].dense(torch.float64)
        rows = mixer.valid_tokens.to(dense.device)[..., None]
        squares += (dense * rows).square().sum((-2, -1)).cpu()
    stochastic = mixer.kind == "softmax"
    found = Mixing(float(squares.max().sqrt()), (heads * tokens) ** 0.5 if stochastic else None)
    if not stochastic or mixer.values is None or mixer.output is None:
        return found
    read = _columns_of(mixer.values, [(module, out) for module, _, out in calls])
    gave = _columns_of(mixer.output, [(module, given) for module, given, _ in calls])
    if read is None or gave is None:
        return found
    value_weights = _picked(read, columns=False)
    output_weights = _picked(gave, columns=True)
    groups = heads // mixer.values.shape[1]
    square, reach = 0.0, torch.zeros(batch, dtype=torch.float64)
    for head in range(heads):
        into, out = value_weights[head // groups], output_weights[head]
        square += float((out @ into).square().sum())
        moved = mixer.values[:, head // groups].double().cpu() @ out.mT
        lengths = moved.norm(dim=-1).masked_fill(~mixer.valid_sources.cpu(), 0)
        reach += lengths.amax(-1)
    bias = getattr(gave[0], "bias", None)
    if isinstance(bias, Tensor):
        reach += float(bias.detach().double().norm())
    found.value_norm, found.reach = square**0.5, reach
    return found


def _columns_of(
    heads: Tensor, calls: Sequence[tuple[nn.Module, Tensor]]
) -> tuple[nn.Module, list[list[int]]] | None:
    """The call among whose columns those of (B, H, T, K) are, number for number, and which they are."""
    batch, count, tokens, width = heads.shape
    wanted = heads.permute(0, 2, 1, 3).reshape(batch * tokens, count * width)
    for module, columns in reversed(calls):
        if columns.numel() != batch * tokens * columns.shape[-1] or columns.dtype != heads.dtype:
            continue
        table = columns.reshape(batch * tokens, -1)
        places = {tuple(column): at for at, column in enumerate(table[:3].mT.tolist())}
        found = [places.get(tuple(column), -1) for column in wanted[:3].mT.tolist()]
        if -1 not in found and torch.equal(table[:, found], wanted):
            return module, [found[head * width : (head + 1) * width] for head in range(count)]
    return None


def _picked(found: tuple[nn.Module, list[list[int]]], columns: bool) -> list[Tensor]:
    module, heads = found
    matrix = _matrix(module)
    assert matrix is not None  # only such modules are tapped
    matrix = matrix.detach().double().cpu()
    return [matrix[:, head] if columns else matrix[head] for head in heads]


def _matrix(module: nn.Module) -> Tensor | None:
    """The matrix of a linear map, outputs first."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        return weight
    return weight.mT if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) else None
