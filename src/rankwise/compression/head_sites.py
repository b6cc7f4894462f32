"""Where the heads of an attention layer come from and where they go to, told from their values."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from rankwise._internals.forward import run_model
from rankwise.compression.qk_modules import runs_of
from rankwise.compression.removed_heads import CutLinear, RemovedHeads
from rankwise.operators import SoftmaxMixing
from rankwise.tracing import MixerSite, capture, record_calls
from rankwise.tracing.projections import (
    CLOSE,
    Projection,
    each_once,
    find_projection,
    is_linear,
    linear_parts,
    names_below,
)

RUNGS = 4
"""Ways in which layers read their number of heads: not at all, by name, by width, from the configuration."""
CONFIG_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
CONFIG_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")


@dataclass(frozen=True)
class HeadSite:
    """An attention layer and the linear layers around its heads."""

    name: str
    heads: int
    value_heads: int
    """Heads of keys and values."""
    value_width: int
    outputs: dict[str, list[tuple[Int[Tensor, "_ _"], bool]]]
    """Of each layer that makes heads: channels of each, and whether they are of queries."""
    sizes: dict[str, int]
    """How many channels each of these layers has."""
    into: str
    """The linear layer that reads what the heads give, side by side."""
    rung: int = 0

    @property
    def group(self) -> int:
        """Query heads that go together: those that read one key head, where keys are grouped."""
        return self.heads // self.value_heads if self.value_heads > 1 else 1

    @property
    def units(self) -> int:
        """How many sets of heads go together."""
        return self.heads // self.group

    def without(self, units: set[int], module: nn.Module) -> RemovedHeads:
        """The change that removes some units.

        Args:
            units: which.
            module: the attention layer, as it is.
        """
        kept = [unit for unit in range(self.units) if unit not in units]
        query = [unit * self.group + at for unit in kept for at in range(self.group)]
        shared = self.value_heads == 1  # keys stay while a head is left that reads them
        values = ([0] if kept else []) if shared else kept
        cuts = [self._cut(name, set(query), set(values)) for name in self.outputs]
        places = [head * self.value_width + at for head in query for at in range(self.value_width)]
        slot = 0 if kept else self.value_width
        size = self.heads * self.value_width
        cuts.append(CutLinear(module=self.into, side="in", size=size, runs=runs_of(places), slot=slot))
        sizes, config = self._sizes(module, len(query) or 1, len(values) or 1)
        return RemovedHeads(module=self.name, cuts=cuts, sizes=sizes, config=config)

    def _cut(self, name: str, query: set[int], values: set[int]) -> CutLinear:
        gone: set[int] = set()
        slot = 0
        for channels, of_queries in self.outputs[name]:
            kept = query if of_queries else values
            slot += channels.shape[1]
            gone |= {c for h, own in enumerate(channels.tolist()) if h not in kept for c in own}
        left = [channel for channel in range(self.sizes[name]) if channel not in gone]
        size = self.sizes[name]
        return CutLinear(module=name, side="out", size=size, runs=runs_of(left), slot=0 if left else slot)

    def _sizes(
        self, module: nn.Module, heads: int, value_heads: int
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Attributes and fields of the configuration that say how many heads there are."""
        counts = {self.value_heads: value_heads, self.heads: heads}
        groups = {self.heads // self.value_heads: heads // value_heads}
        widths = {self.heads * self.value_width: heads * self.value_width}
        numbers = {name: value for name, value in vars(module).items() if type(value) is int}
        sizes: dict[str, int] = {}
        if self.rung >= 1:
            sizes |= {n: counts[v] for n, v in numbers.items() if _counts_heads(n) and v in counts}
            sizes |= {n: groups[v] for n, v in numbers.items() if "group" in n and v in groups}
        if self.rung >= 2:
            sizes |= {n: widths[v] for n, v in numbers.items() if v in widths and n not in sizes and v > 1}
        config: dict[str, int] = {}
        read = getattr(module, "config", None)
        if self.rung >= 3 and read is not None:
            config = {n: heads for n in CONFIG_HEADS if getattr(read, n, None) == self.heads}
            config |= {n: value_heads for n in CONFIG_KEY_HEADS if getattr(read, n, None) == self.value_heads}
        return sizes, config


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in ("dim", "size", "width", "group"))


def find_head_sites(model: nn.Module, batch: Any) -> tuple[list[HeadSite], dict[str, str]]:
    """Find the linear layers before and behind the heads of every attention layer.

    Args:
        model: the model, in evaluation mode.
        batch: what it takes, on its device; a sequence or two.

    Returns:
        The layers; and the reason for each one that cannot be done.
    """
    sites: list[MixerSite] = []
    seeing = capture(model, on_mixer=sites.append, values=True)
    with record_calls(model, is_linear) as linear, torch.no_grad(), seeing:
        run_model(model, batch)
    inputs = {call.name: call.args[0] for call in linear if call.args}
    outputs = {call.name: call.output for call in linear if call.args}
    found: dict[str, HeadSite] = {}
    reasons: dict[str, str] = {}
    for site in reversed(sites):  # of layers that run more than once, tensors of the last call were kept
        if site.name in found or site.name in reasons:
            continue
        head_site = _site(model, site, inputs, outputs)
        if isinstance(head_site, str):
            reasons[site.name] = head_site
        else:
            found[site.name] = head_site
    return list(reversed(found.values())), reasons


def _site(
    model: nn.Module, site: MixerSite, inputs: dict[str, Tensor], outputs: dict[str, Tensor]
) -> HeadSite | str:
    if site.kind != "softmax":
        return f"its mixing is {site.kind}: only heads of softmax attention are removed"
    if site.values is None or site.output is None:
        return "what its heads give is not seen"
    if not bool(site.output.isfinite().all()):
        return "what its heads give holds NaN or infinity"
    into = _reader(site, inputs)
    if into is None:
        return "what its heads give is the input of no linear layer: a norm, a gate or a fused module follows"
    near = {name: outputs[name] for name in names_below(list(outputs), site.name) if name != into}
    values = each_once(site.values)
    batch, tokens = values.shape[0], values.shape[2]
    value = find_projection(
        values, {n: output for n, output in near.items() if output.shape[:2] == (batch, tokens)}
    )
    if value is None:
        return "its values are the output of no linear layer"
    heads, value_heads = site.output.shape[1], values.shape[1]
    if heads % value_heads:
        return f"{heads} query heads do not share {value_heads} value heads evenly"
    sizes = {name: linear_parts(model.get_submodule(name))[0].shape[0] for name in near}  # type: ignore[index]
    widths = {site.values.shape[-1]}
    if isinstance(site.operator, SoftmaxMixing):
        widths.add(site.operator.query.shape[-1])
    made = _makers(value, heads, value_heads, widths, sizes)
    if made is None:
        return f"{value.module!r} holds more than queries, keys and values, in an order that is not known"
    own = {name: sizes[name] for name in made}
    return HeadSite(site.name, heads, value_heads, site.values.shape[-1], made, own, into)


def _makers(
    value: Projection, heads: int, value_heads: int, widths: set[int], sizes: dict[str, int]
) -> dict[str, list[tuple[Tensor, bool]]] | None:
    """Which channels make which heads: where the values lie, the queries and keys lie beside them."""
    width = value.channels.shape[1]
    alone = value_heads * width == sizes[value.module]
    if not alone:
        blocks = _beside(value.channels, heads, value_heads, sizes[value.module])
        return None if blocks is None else {value.module: blocks}
    made = {value.module: [(value.channels, False)]}
    for name, size in sizes.items():
        if name == value.module:
            continue
        for count, of_queries in ((heads, True), (value_heads, False)):
            if size in {count * width for width in widths}:
                channels = torch.arange(size).reshape(count, -1)
                made[name] = [(channels, of_queries)]
                break
    return made


def _beside(
    values: Int[Tensor, "G V"], heads: int, value_heads: int, size: int
) -> list[tuple[Tensor, bool]] | None:
    """Channels that lie in one projection with the values: [q | k | v], or q, k, v of each head."""
    width = values.shape[1]
    if size != (heads + 2 * value_heads) * width:
        return None
    channels = torch.arange(size)
    if int(values[0, 0]) == (heads + value_heads) * width and int(values[-1, -1]) == size - 1:
        query, key = channels[: heads * width], channels[heads * width : (heads + value_heads) * width]
        return [
            (query.reshape(heads, -1), True),
            (key.reshape(value_heads, -1), False),
            (values, False),
        ]
    if heads == value_heads and bool((values[:, 0] == torch.arange(heads) * 3 * width + 2 * width).all()):
        return [(channels.reshape(heads, -1), True)]
    return None


def _reader(site: MixerSite, inputs: dict[str, Tensor]) -> str | None:
    """The layer that reads what the heads give, side by side: inside the layer, or beside it."""
    assert site.output is not None
    joined = site.output.transpose(1, 2).flatten(2)
    bound = CLOSE * torch.finfo(joined.dtype).eps * float(joined.abs().max())
    parent = site.name.rpartition(".")[0]
    inside = [name for name in inputs if name.startswith(f"{site.name}.") or not site.name]
    around = [name for name in inputs if name.startswith(f"{parent}.") or not parent]
    for name in dict.fromkeys([*inside, *around]):
        given = inputs[name]
        if given.numel() != joined.numel() or given.shape[-1] != joined.shape[-1]:
            continue
        if float((given.reshape(joined.shape) - joined).abs().max()) <= bound:
            return name
    return None
