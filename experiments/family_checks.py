"""One family, captured and compared with what the model itself computed."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rankwise as rw
from experiments.tiny_models import Batch

DTYPE = torch.float64
IMPLEMENTATIONS = ("sdpa", "eager")
Replay = Callable[[nn.Module, Tensor, list[Tensor]], Tensor]
"""From a block, the state it read and the products M V inside it, to the state it gave."""


@dataclass(frozen=True)
class Family:
    """One model family: how to build it, what to feed it, how many mixers it has."""

    name: str
    build: Callable[..., nn.Module]
    inputs: Callable[[], Batch]
    mixers: int
    """Attention calls in one forward pass."""
    states: int
    """Token states in one forward pass: blocks + 1 for each stack."""
    eager: bool = True
    """Whether it also comes as a hand-written softmax (``attn_implementation="eager"``)."""
    fused: bool = True
    """Whether it comes with `scaled_dot_product_attention`."""
    final_norm: str = ""
    """The module that stands between the last state and the last of its ``hidden_states``."""
    replay: Replay | None = None
    """How to go on from M V, where the layer's own product is hidden in a fused kernel."""

    @property
    def implementations(self) -> tuple[str, ...]:
        """The ways its attention is computed."""
        return tuple(
            name for name, there in zip(IMPLEMENTATIONS, (self.fused, self.eager), strict=True) if there
        )


@dataclass(frozen=True)
class Row:
    """What one family showed; NaN where the model does not offer what would be compared."""

    family: Family
    implementation: str
    trace: rw.Trace
    identical: bool
    product_error: float
    attention_error: float
    state_error: float

    @property
    def complete(self) -> bool:
        """Whether every mixer and every state there is was captured."""
        found = len(self.trace.mixers), len(self.trace.states)
        return found == (self.family.mixers, self.family.states) and not self.trace.uncaptured


def check(family: Family, implementation: str) -> Row:
    """Capture one family and compare it with itself."""
    model, batch = prepared(family, implementation)
    with torch.no_grad():
        alone = tensors(model(**batch))
        with rw.capture(model, values=True) as trace:
            watched = tensors(model(**batch))
        told = told_by_eager_twin(family)
    identical = len(alone) == len(watched) and all(map(torch.equal, alone, watched))
    return Row(
        family,
        implementation,
        trace,
        identical,
        product_error(family, model, trace),
        max((difference(trace.mixers[at].operator.dense(), m) for at, m in told.matrices), default=math.nan),
        max(state_errors(family, trace, told, model), default=math.nan),
    )


def prepared(family: Family, implementation: str | None) -> tuple[nn.Module, Batch]:
    """The model and its batch in float64."""
    batch = {
        name: value.to(DTYPE) if value.is_floating_point() else value
        for name, value in family.inputs().items()
    }
    return family.build(implementation).to(DTYPE), batch


def tensors(output: Any) -> list[Tensor]:
    """All tensors in what a model gave."""
    if isinstance(output, Tensor):
        return [output]
    values = (
        output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    )
    return [tensor for value in values for tensor in tensors(value)]


def difference(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference; infinite where shapes differ."""
    return float((one - other).abs().max()) if one.shape == other.shape else math.inf


# --- M V against what the model's own attention gave --------------------------------------------------------


def applied(site: rw.tracing.MixerSite) -> Tensor:
    """M V in float64 from the dense matrix, one value head for each head."""
    assert site.values is not None
    groups = site.operator.shape[1] // site.values.shape[1]
    return site.operator.dense(DTYPE) @ site.values.to(DTYPE).repeat_interleave(groups, dim=1)


def product_error(family: Family, model: nn.Module, trace: rw.Trace) -> float:
    """Largest difference between M V and the attention's own output, or what follows from it."""
    if family.replay is None:
        return max(
            math.inf if site.output is None else difference(applied(site), site.output)
            for site in trace.mixers
        )
    states = {(state.stack, state.layer): state for state in trace.states}
    errors = []
    for (stack, layer), state in states.items():
        if layer == 0:
            continue
        products = [applied(m) for m in trace.mixers if (m.stack, m.layer) == (stack, layer - 1)]
        block = model.get_submodule(state.name)
        replayed = family.replay(block, states[stack, layer - 1].tokens, products)
        errors.append(difference(replayed, state.tokens))
    return max(errors, default=math.inf)


def merged(attention: nn.MultiheadAttention, product: Tensor) -> Tensor:
    """What `torch.nn.MultiheadAttention` makes of M V."""
    return attention.out_proj(product.transpose(1, 2).flatten(2))


@torch.no_grad()
def replay_attention(block: Any, state: Tensor, products: list[Tensor]) -> Tensor:
    """The rest of `TorchAttention.Block`."""
    return state + merged(block.attention, products[0])


@torch.no_grad()
def replay_layer(layer: Any, state: Tensor, products: list[Tensor]) -> Tensor:
    """The rest of PyTorch's encoder or decoder layer, norms last."""
    decodes = isinstance(layer, nn.TransformerDecoderLayer)
    attentions = [layer.self_attn, layer.multihead_attn] if decodes else [layer.self_attn]
    norms = [layer.norm1, layer.norm2, layer.norm3] if decodes else [layer.norm1, layer.norm2]
    for attention, norm, product in zip(attentions, norms, products, strict=False):
        state = norm(state + merged(attention, product))
    return norms[-1](state + layer.linear2(layer.activation(layer.linear1(state))))


# --- M and states against what transformers reports ---------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a model says of itself: matrices by the number of their mixer, states by stack."""

    matrices: list[tuple[int, Tensor]]
    states: dict[str, tuple[Tensor, ...]]


def told_by_eager_twin(family: Family) -> Told:
    """``output_attentions`` and ``output_hidden_states`` of the eager model with the same weights."""
    model, batch = prepared(family, "eager")
    if not hasattr(model, "config"):
        return Told([], {})
    output = model(**batch, output_attentions=True, output_hidden_states=True)
    if "encoder_attentions" in output:
        pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
        matrices = [*output.encoder_attentions, *(matrix for pair in pairs for matrix in pair)]
        states = {"encoder": output.encoder_hidden_states, "decoder": output.decoder_hidden_states}
        return Told(list(enumerate(matrices)), states)
    told = output.attentions
    if len(told) != family.mixers:  # Swin tells the last block of each stage
        each = family.mixers // len(told)
        return Told([(each * (at + 1) - 1, matrix) for at, matrix in enumerate(told)], {})
    return Told(list(enumerate(told)), {"": output.hidden_states})


def state_errors(family: Family, trace: rw.Trace, told: Told, model: nn.Module) -> Iterator[float]:
    """Differences of captured states from the hidden states of the same stack."""
    for prefix, hidden in told.states.items():
        states = [state.tokens for state in trace.states if state.stack.startswith(prefix)]
        norm = ".".join(part for part in (prefix, family.final_norm) if part)
        if family.final_norm:
            with torch.no_grad():
                states[-1] = model.get_submodule(norm)(states[-1])
        yield from (difference(one, other) for one, other in zip(states, hidden, strict=True))
