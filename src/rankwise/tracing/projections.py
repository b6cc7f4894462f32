"""Find the linear layers that compute queries, keys and values of a mixer, and the layer after its heads.

The tensors of attention are compared with the inputs and outputs of all modules in one forward pass. Names
and model families do not matter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from operator import attrgetter
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rankwise._internals.forward import run_model
from rankwise._internals.linalg import as_float64
from rankwise._internals.records import grouped
from rankwise._internals.rotary import fit_rotation
from rankwise.operators import DenseMixing, SoftmaxMixing
from rankwise.tracing import CapturedMixer, RecordedCall, capture, record_calls

CLOSE = 64
"""Largest allowed difference of heads and linear output, in units of eps times the largest entry."""
FIT = 16
"""Largest allowed relative error of a rotation, for norms of heads and for fits, in units of eps."""
SMALLEST = 1e-12
"""Attention entries below this number are ignored: masked, or too imprecise for their logarithm."""


@dataclass(frozen=True)
class Projection:
    """A linear layer next to the heads of a mixer, and the channels that form each head."""

    module: str
    """Name of the linear layer in the model."""
    channels: Int[Tensor, "H K"]
    """Output channels of each head: ``heads[..., h, :, i] = factor · output[..., channels[h, i]]``. For the
    layer that reads the heads, these are input channels."""
    factor: float = 1.0
    """Factor that the model multiplies the output by before attention, such as 1/√K in OPT."""
    norm: str = ""
    """Module that normalizes the output before attention."""
    norm_axes: Literal["flat", "tokens", "heads"] = "tokens"
    """Shape of the heads in `norm`: (B, T, H·K), (B, T, H, K) or (B, H, T, K)."""


@dataclass(frozen=True)
class QueryKeyProjections:
    """Linear layers that compute the queries and keys of an attention layer."""

    name: str
    stack: str
    layer: int
    query: Projection
    key: Projection
    scale: float | None = None
    """Scale of the logits of an explicit softmax. None if fused attention shows queries and keys."""
    pairs: Int[Tensor, "P 2"] = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.long))
    """Pairs of channels of a head that rotary positions rotate into each other. Empty without rotation."""

    @property
    def key_heads(self) -> int:
        """Number of key heads."""
        return len(self.key.channels)

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return len(self.query.channels) // self.key_heads

    @property
    def width(self) -> int:
        """K, the width of queries and keys."""
        return self.query.channels.shape[1]

    @property
    def unrotated(self) -> list[int]:
        """Channels of a head that no rotation changes."""
        rotated = set(self.pairs.flatten().tolist())
        return [channel for channel in range(self.width) if channel not in rotated]


# --- one forward pass ------------------------------------------------------------------------------------


def not_linear(model: nn.Module, name: str) -> str:
    """Return why a module cannot be changed as a linear layer, as a relative clause. Return "" if it can."""
    outer = name.rpartition(".")[0]
    if any(is_adapter(model, module) for module in (name, outer, outer.rpartition(".")[0])):
        return "whose adapter is not merged: `merge_and_unload()` of peft merges it"
    module = model.get_submodule(name)
    linear = linear_parts(module) is not None
    return "" if linear else f"which is of class {type(module).__name__}, not nn.Linear"


def is_adapter(model: nn.Module, name: str) -> bool:
    """Return True for a module of peft, in which other layers add to the output of a linear layer."""
    return hasattr(model.get_submodule(name), "base_layer")


@dataclass(frozen=True)
class ObservedPass:
    """Modules and mixers of one forward pass."""

    model: nn.Module
    output: Any
    calls: dict[str, list[RecordedCall]]
    """Calls of each module, by name."""
    mixers: dict[str, list[CapturedMixer]]
    """Calls of each captured mixer, by name."""
    is_linear: Callable[[nn.Module, str], bool]

    @cached_property
    def linear(self) -> set[str]:
        """Names of the modules that count as linear layers."""
        return {name for name in self.calls if self.is_linear(self.model, name)}

    def projections(self, name: str, call: int = -1) -> "MixerProjections":
        """Return the `MixerProjections` of one call of a mixer, by default of the last call."""
        last = {module: calls[min(call, len(calls) - 1)] for module, calls in self.calls.items()}
        outputs = {module: seen.output for module, seen in last.items() if _is_array(seen.output)}
        firsts = {module: seen.args[0] for module, seen in last.items() if seen.args}
        inputs = {module: first for module, first in firsts.items() if _is_array(first)}
        linear = _near(name, {module: x for module, x in outputs.items() if module in self.linear})
        others = _near(name, {module: x for module, x in outputs.items() if module not in self.linear})
        mixer = self.mixers[name][call] if name in self.mixers else None
        return MixerProjections(self.model, name, linear, others, inputs, mixer)


def observe(
    model: nn.Module,
    batch: Any,
    is_linear: Callable[[nn.Module, str], bool] = lambda model, name: not not_linear(model, name),
) -> ObservedPass:
    """Run a model and record all module calls and mixers; `is_linear` selects modules that can be changed."""
    mixers: list[CapturedMixer] = []
    watching = capture(model, on_mixer=mixers.append, values=True)
    with record_calls(model, lambda *_: True) as calls, torch.no_grad(), watching:
        output = run_model(model, batch)
    name = attrgetter("name")
    return ObservedPass(model, output, grouped(calls, name), grouped(mixers, name), is_linear)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _near(site: str, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs inside a module; if there are none, the outputs inside its parent module."""
    around = f"{site.rpartition('.')[0]}."
    inside = {name: x for name, x in outputs.items() if name.startswith(f"{site}.") or not site}
    return inside or {name: x for name, x in outputs.items() if name.startswith(around)}


# --- the finder ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixerProjections:
    """Linear layers around the heads of one mixer call. Each property searches its layer on the first read.

    If no layer is found, the property is a text with the reason.
    """

    model: nn.Module
    name: str
    linear: dict[str, Tensor]
    """Outputs of the linear layers near the mixer."""
    others: dict[str, Tensor]
    """Outputs of the other modules near the mixer."""
    inputs: dict[str, Tensor]
    """First inputs of all modules."""
    mixer: CapturedMixer | None = None

    @cached_property
    def query_key(self) -> QueryKeyProjections | str:
        """Layers of queries and keys, which may be rotated, if attention reads only their inner products."""
        assert self.mixer is not None
        operator, place = self.mixer.operator, (self.mixer.name, self.mixer.stack, self.mixer.layer)
        if not isinstance(operator, DenseMixing | SoftmaxMixing):
            return f"its mixing is {operator.kind}, not softmax attention"
        if self.mixer.cross:
            return "its queries and keys come from different sequences"
        if isinstance(operator, DenseMixing):
            explicit = self._explicit_softmax(operator.matrix)
            if isinstance(explicit, str):
                return f"its softmax is written out by hand, and {explicit}"
            return QueryKeyProjections(*place, *explicit)
        keys = operator.key
        query = find_projection(operator.query, self.linear)
        key = find_projection(keys, self.linear) or find_projection(keys := each_once(keys), self.linear)
        if query is not None and key is not None:
            return QueryKeyProjections(*place, query, key)
        rotated = self._rotated(operator.query, keys)
        return (
            rotated
            if isinstance(rotated, str)
            else QueryKeyProjections(*place, *rotated[:2], pairs=rotated[2])
        )

    @cached_property
    def value(self) -> Projection | str:
        """Layer of the values. A value head that several query heads share is counted once."""
        if self.mixer is None or self.mixer.values is None:
            return "the outputs of its heads are not seen"
        values, reader = each_once(self.mixer.values), self.output
        shape, skipped = (values.shape[0], values.shape[2]), "" if isinstance(reader, str) else reader.module
        outputs = {name: x for name, x in self.linear.items() if x.shape[:2] == shape and name != skipped}
        return find_projection(values, outputs) or self.reason("values", values)

    @cached_property
    def output(self) -> Projection | str:
        """Layer that reads the concatenated heads."""
        if self.mixer is None or self.mixer.output is None:
            return "the outputs of its heads are not seen"
        heads = self.mixer.output
        joined = heads.transpose(1, 2).flatten(2)
        bound = CLOSE * torch.finfo(joined.dtype).eps * float(joined.abs().max())
        parent = self.name.rpartition(".")[0]
        inside = [name for name in self.inputs if name.startswith(f"{self.name}.") or not self.name]
        around = [name for name in self.inputs if name.startswith(f"{parent}.") or not parent]
        for name in sorted(
            dict.fromkeys([*inside, *around]), key=lambda name: bool(not_linear(self.model, name))
        ):
            given = self.inputs[name]
            if given.numel() != joined.numel() or given.shape[-1] != joined.shape[-1]:
                continue
            if float((given.reshape(joined.shape) - joined).abs().max()) <= bound:
                if reason := not_linear(self.model, name):
                    return f"its concatenated heads are read by {name!r}, {reason}"
                return Projection(name, torch.arange(joined.shape[-1]).reshape(heads.shape[1], -1))
        return "no module reads its concatenated heads: its code changes them before"

    def sources(self, heads: Float[Tensor, "B H T K"]) -> list[tuple[float, Projection]]:
        """Return the linear layers that heads come from, directly or through a norm, with their errors."""
        sources = [] if (direct := _fit(heads, self.linear)) is None else [direct]
        batch, count, tokens, width = heads.shape
        shapes: dict[Literal["flat", "tokens", "heads"], tuple[int, ...]] = {
            "flat": (batch, tokens, count * width),
            "tokens": (batch, tokens, count, width),
            "heads": (batch, count, tokens, width),
        }
        for norm, after in self.others.items():
            before = self.inputs.get(norm, after[..., :0])
            axes = next(
                (axes for axes, shape in shapes.items() if before.shape == after.shape == shape), None
            )
            if axes is None:
                continue
            if axes == "heads":
                before, after = before.transpose(1, 2), after.transpose(1, 2)
            # The heads are the output of the norm, and its input is the output of a linear layer.
            output = _fit(heads, {norm: after.reshape(shapes["flat"])})
            if output is None or output[1].factor != 1:
                continue
            source = _fit(before.reshape(shapes["tokens"]).transpose(1, 2), self.linear)
            if source is not None and source[1].factor == 1:
                sources.append((output[0], replace(source[1], norm=norm, norm_axes=axes)))
        return sources

    def reason(self, what: str, heads: Float[Tensor, "B H T K"]) -> str:
        """Return why queries, keys or values are the output of no linear layer."""
        batch, count, tokens, width = heads.shape
        outputs = {}
        for name, output in {**self.others, **self.linear}.items():
            output = output.transpose(1, 2) if output.shape == heads.shape else output
            if output.shape[:2] == (batch, tokens):
                outputs[name] = output.flatten(2)
        same = find_projection(heads, outputs)
        for side in [same] if same else equal_norms(heads, outputs):
            if side.module in self.linear:
                return f"positions are rotated into its {what}"
            return self._other_source(what, side.module)
        shapes: dict[str, torch.Size] = {}
        for name, layer in self.model.get_submodule(self.name).named_modules():
            if linear_parts(layer) is None and not isinstance(layer, nn.Embedding):
                weights = dict(layer.named_parameters(name, recurse=False)).items()
                shapes |= {x: w.shape for x, w in weights if w.dim() > 1 and not w.numel() % (count * width)}
        if shapes:
            listed = ", ".join(f"{place!r} {tuple(shape)}" for place, shape in [*shapes.items()][:3])
            return f"its {what} come from parameters of its own, not from an nn.Linear: {listed}"
        return f"its {what} are the output of no module: its code changes them after its linear layers"

    def _other_source(self, what: str, name: str) -> str:
        return f"its {what} come from {name!r}, {not_linear(self.model, name)}"

    def _rotated(
        self, queries: Float[Tensor, "B H T K"], keys: Float[Tensor, "B G S K"]
    ) -> tuple[Projection, Projection, Int[Tensor, "P 2"]] | str:
        """Return the layers of queries and keys before rotary positions, and the rotated pairs of channels.

        No formula for the angles is assumed. The rotation takes a pair (x, y) to (x cos − y sin, x sin + y
        cos), with one angle for all heads. The cos and sin of each token and pair are fitted to the model's
        own values, and the residual must be rounding alone. Otherwise return the reason as text.
        """
        query, key = equal_norms(queries, self.linear), equal_norms(keys, self.linear)
        if not query or not key:
            return self.reason("keys", keys) if query else self.reason("queries", queries)
        bound = FIT * torch.finfo(queries.dtype).eps
        for q in query:
            for k in key:
                before = [side_of(self.linear[side.module], side) for side in (q, k)]
                pairs = _pairs(before, [queries, keys], bound)
                if pairs is not None:
                    return q, k, pairs
        return "its queries and keys are not rotated by one angle per pair of channels, equal for all heads"

    def _explicit_softmax(
        self, matrix: Float[Tensor, "B H T S"]
    ) -> tuple[Projection, Projection, float] | str:
        """Find two linear layers whose outputs, used as queries and keys, reproduce the logits of attention.

        Return the query projection, the key projection and the scale of their inner products, or the reason
        why no pair fits. Assume that masks and position biases are equal in all sequences. The logarithms of
        attention of two sequences then differ only by scaled inner products and one constant per row.
        """
        if matrix.shape[-2] != matrix.shape[-1]:
            return "its queries and keys are of different tokens"
        if matrix.shape[0] < 2:
            return "the first batch has one sequence: begin with two"
        both = as_float64(matrix[:2])
        seen = (both > SMALLEST).all(0)
        target = _centred(both.clamp(min=1e-300).log(), seen)
        size = float(target.norm())
        if size == 0:
            return "the first two sequences are equal, or their logits do not depend on them"
        bound = torch.finfo(matrix.dtype).eps ** 0.5
        sides = list(_candidates(matrix.shape[1], matrix.shape[2], {**self.linear, **self.others}))
        for (query, q, q_channels), (key, k, k_channels) in permutations(sides, 2):
            if q.shape != k.shape:
                continue
            logits = _centred(q @ k.mT, seen)
            scale = float((logits * target).sum()) / max(float((logits * logits).sum()), 1e-300)
            if scale != 0 and float((target - scale * logits).norm()) <= bound * size:
                for what, name in (("queries", query), ("keys", key)):
                    if name in self.others:
                        return self._other_source(what, name)
                return Projection(query, q_channels), Projection(key, k_channels), scale
        return (
            "its logits are not scaled inner products of two projections plus terms that all sequences "
            "share: `model.set_attn_implementation('sdpa')` may show more"
        )


# --- comparisons -----------------------------------------------------------------------------------------


def linear_parts(module: nn.Module) -> tuple[Float[Tensor, "O D"], Float[Tensor, "O"] | None] | None:
    """Return weight (out, in) and bias of a linear layer, as views. Return None for any other module.

    ``Conv1D`` of transformers counts as linear; its weight is stored transposed.
    """
    if isinstance(module, nn.Linear):
        return module.weight, module.bias
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return module.weight.mT, module.bias  # type: ignore[return-value]
    return None


def find_projection(
    heads: Float[Tensor, "B H T K"], outputs: Mapping[str, Float[Tensor, "B T O"]]
) -> Projection | None:
    """Return the linear layer whose output, cut into heads, equals ``heads`` up to a constant factor.

    Channels of head h may begin at ``offset + h·K``, as in a projection of queries or in ``[q | k | v]``. If
    each head has g adjacent parts (queries, keys, values), part j may also begin at ``(h·g + j)·K``. Return
    None if no layer fits, for example because rotary positions or a norm change the output.
    """
    batch, count, tokens, width = heads.shape
    flat = as_float64(heads.transpose(1, 2).reshape(batch * tokens, count, width))
    for name, output in outputs.items():
        if output.shape[-1] < count * width or output.numel() != flat.shape[0] * output.shape[-1]:
            continue
        rows = as_float64(output.reshape(-1, output.shape[-1]))
        for channels in head_layouts(count, width, rows.shape[-1]):
            factor = _factor(flat, rows[:, channels], output.dtype)
            if factor is not None:
                return Projection(name, channels, factor)
    return None


def equal_norms(heads: Float[Tensor, "B H T K"], outputs: Mapping[str, Tensor]) -> list[Projection]:
    """Return the layers whose outputs have the norms of ``heads``, because rotations keep norms."""
    batch, count, tokens, width = heads.shape
    wanted = as_float64(heads.transpose(1, 2)).norm(dim=-1)
    bound = FIT * torch.finfo(heads.dtype).eps * float(wanted.norm())
    layers = []
    for name, output in outputs.items():
        if output.shape[:-1] != (batch, tokens) or output.shape[-1] < count * width:
            continue
        for channels in head_layouts(count, width, output.shape[-1]):
            norms = as_float64(output[..., channels.to(output.device)]).norm(dim=-1)
            if float((norms - wanted).norm()) <= bound:
                layers.append(Projection(name, channels))
    return layers


def side_of(output: Float[Tensor, "B T O"], side: Projection) -> Float[Tensor, "B H T K"]:
    """Return the part of a linear layer's output that holds the heads, as (B, H, T, K)."""
    return output[..., side.channels.to(output.device)].permute(0, 2, 1, 3)


def head_layouts(heads: int, width: int, outputs: int) -> list[Int[Tensor, "H K"]]:
    """Return the channels (H, K) of each possible layout of H heads of width K in a linear output."""
    head, dim = torch.arange(heads)[:, None], torch.arange(width)
    blocks = [start + head * width + dim for start in range(0, outputs - heads * width + 1, width)]
    group = outputs // (heads * width)
    interleaved = [(head * group + offset) * width + dim for offset in range(group)] if group > 1 else []
    return blocks + interleaved


def each_once(heads: Float[Tensor, "B H S K"]) -> Float[Tensor, "B G S K"]:
    """Return the G distinct key or value heads, which attention code may repeat for groups of queries."""
    count = heads.shape[1]
    for group in range(count, 1, -1):
        if count % group == 0:
            repeated = heads.unflatten(1, (-1, group))
            if bool((repeated == repeated[:, :, :1]).all()):
                return repeated[:, :, 0]
    return heads


def _factor(heads: Tensor, candidate: Tensor, dtype: torch.dtype) -> float | None:
    norm = float((candidate * candidate).sum())
    if norm == 0:
        return None
    factor = float((heads * candidate).sum()) / norm
    off = float((heads - factor * candidate).abs().max())
    fits = off <= CLOSE * torch.finfo(dtype).eps * float(heads.abs().max())
    if not fits or factor == 0:
        return None
    return 1.0 if abs(factor - 1) < 1e-9 else factor


def _fit(heads: Tensor, outputs: Mapping[str, Tensor]) -> tuple[float, Projection] | None:
    """Return the error and the projection of the first layer that fits. Return None if no layer fits.

    A factor that differs from 1 only by rounding is set to 1.
    """
    side = find_projection(heads, outputs)
    if side is None:
        return None
    if abs(side.factor - 1) < 8 * torch.finfo(heads.dtype).eps:
        side = replace(side, factor=1.0)
    output = outputs[side.module].reshape(-1, outputs[side.module].shape[-1])[:, side.channels]
    rows = heads.transpose(1, 2).reshape(output.shape)
    return float((as_float64(rows) - side.factor * as_float64(output)).norm()), side


def _pairs(before: list[Tensor], after: list[Tensor], bound: float) -> Tensor | None:
    """Return the rotated pairs of channels, from two halves or neighbors. Return None if nothing rotates."""
    width = before[0].shape[-1]
    prefixes = [torch.arange(end, device=before[0].device) for end in range(width - width % 2, 1, -2)]
    layouts: Iterable[Tensor] = (
        pairs for dims in prefixes for pairs in (dims.reshape(2, -1).T, dims.reshape(-1, 2))
    )
    fitting = next((pairs for pairs in layouts if fit_rotation(pairs, before, after)[1] <= bound), None)
    if fitting is None:
        return None
    # Two channels that are equal bit by bit before and after are not rotated and not a pair.
    same = torch.stack([(a == b).flatten(0, 2).all(0) for a, b in zip(before, after, strict=True)]).all(0)
    turning = fitting[~same[fitting].all(1)]
    return turning if len(turning) else None


def _centred(logits: Float[Tensor, "2 H T S"], seen: Tensor) -> Float[Tensor, "H T S"]:
    """Return the difference of two sequences' logits, minus its mean over the ``seen`` entries of a row."""
    change = torch.where(seen, logits[0] - logits[1], 0.0)
    mean = change.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(seen, change - mean, 0.0)


def _candidates(
    heads: int, tokens: int, outputs: Mapping[str, Tensor]
) -> Iterator[tuple[str, Float[Tensor, "2 H T K"], Tensor]]:
    """Yield (name, heads, channels) for each way to split outputs of one, two or three of q, k, v."""
    for name, output in outputs.items():
        if output.dim() != 3 or output.shape[1] != tokens or output.shape[0] < 2:
            continue
        for share in (1, 2, 3):
            width, rest = divmod(output.shape[-1], share * heads)
            if rest or not width:
                continue
            for channels in head_layouts(heads, width, output.shape[-1]):
                yield name, as_float64(output[:2, :, channels].permute(0, 2, 1, 3)), channels
