"""Shared by several parts: projections of attention layers, factors, trials, outputs and checks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from rankwise._internals.forward import Change, device_of, first_sequences, run_model, tensors_in, to_device
from rankwise._internals.linalg import as_float64
from rankwise._internals.records import grouped
from rankwise.errors import CompressionError
from rankwise.importance.losses import real_outputs
from rankwise.operators import DenseMixing, SoftmaxMixing
from rankwise.tracing import CapturedMixer, capture, record_calls
from rankwise.tracing.projections import Projection, find_projection, head_layouts, linear_parts, names_below

Layer = TypeVar("Layer", bound=Any)
"""Type of an attention layer with its `name` in the model."""
Step = Callable[[str], None]
FIT = 16
"""Maximum relative error of a rotation, in norms of heads and in fits, as a multiple of the dtype's eps."""
LEAST_TOKENS = 0.5
"""Minimum number of calibration tokens per channel of the widest head or latent."""


@dataclass(frozen=True)
class Projections:
    """Linear layers that compute the queries and keys of an attention layer."""

    name: str
    stack: str
    layer: int
    query: Projection
    key: Projection
    scale: float | None = None
    """Scale of the logits of an explicit softmax; None if fused attention shows queries and keys."""
    pairs: Int[Tensor, "P 2"] = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.long))
    """Pairs of channels of a head that rotary positions rotate into each other; empty without rotation."""

    @property
    def key_heads(self) -> int:
        """Key heads."""
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


@dataclass
class Factors:
    """Factors A and B of each head: logits Q Kᵀ become (Q A)(K B)ᵀ, before positions rotate queries and keys.

    Columns of removed channels are zero.
    """

    query: Float64[Tensor, "H K K"]
    key: Float64[Tensor, "G K K"]
    kept: list[list[int]]
    """Remaining channels of each key head, ascending."""


def random_bases(layer: Projections) -> Factors:
    """Draw random orthonormal factors of full width; the two channels of a rotary pair are only rotated."""
    generator = torch.Generator().manual_seed(0)
    free = torch.tensor(layer.unrotated, dtype=torch.long)
    bases = torch.eye(layer.width, dtype=torch.float64).repeat(layer.key_heads, 1, 1)
    for basis in bases:
        drawn = torch.randn(len(free), len(free), generator=generator, dtype=torch.float64)
        basis[free[:, None], free] = torch.linalg.qr(drawn).Q
        for first, second in layer.pairs.tolist():
            angle = 6.28 * torch.rand((), generator=generator, dtype=torch.float64)
            basis[first, first] = basis[second, second] = angle.cos()
            basis[first, second], basis[second, first] = angle.sin(), -angle.sin()
    kept = [list(range(layer.width))] * layer.key_heads
    return Factors(bases.repeat_interleave(layer.groups, 0), bases, kept)


def find_layers(
    model: nn.Module, batch: Any, read: Callable[[CapturedMixer, "Nearby"], Projections | str]
) -> tuple[list[Projections], dict[str, str]]:
    """Run two sequences; return the layers that `read` recognizes, and why each other layer is left out.

    `read` receives a mixer and the outputs of the modules near it in the same call.
    """
    sites: list[CapturedMixer] = []
    short = to_device(first_sequences(batch, 2), device_of(model))
    recording = record_calls(model, lambda *_: True)
    with recording as records, torch.no_grad(), capture(model, on_mixer=sites.append):
        run_model(model, short)
    outputs = grouped(records, attrgetter("name"))
    linear = {name for name in outputs if not not_linear(model, name)}
    found: list[Projections] = []
    skipped: dict[str, str] = {}
    for name, calls in grouped(sites, attrgetter("name")).items():
        layers = []
        for call, site in enumerate(calls):
            now = {other: own[min(call, len(own) - 1)].output for other, own in outputs.items()}
            layers.append(_unfit(site) or read(site, nearby(model, name, now, linear)))
        fitting = [layer for layer in layers if isinstance(layer, Projections)]
        if len(fitting) < len(layers):
            skipped[name] = next(layer for layer in layers if isinstance(layer, str))
        elif len(fitting) > 1 and len(fitting[0].pairs):
            skipped[name] = "it runs more than once"
        elif not all(_same(layer, fitting[0]) for layer in fitting):
            skipped[name] = "its calls read different projections"
        else:
            found.append(fitting[0])
    return found, skipped


@dataclass(frozen=True)
class Nearby:
    """Outputs of the modules near an attention layer in one of its calls."""

    model: nn.Module
    name: str
    linear: dict[str, Tensor]
    """Outputs of linear layers, which compression can change."""
    others: dict[str, Tensor]

    def source(self, what: str, name: str) -> str:
        """Return the reason that queries, keys or values come from one of the other modules."""
        return f"its {what} come from {name!r}, {not_linear(self.model, name)}"

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
            return self.source(what, side.module)
        own: dict[str, torch.Size] = {}
        for name, layer in self.model.get_submodule(self.name).named_modules():
            if linear_parts(layer) is None and not isinstance(layer, nn.Embedding):
                weights = layer.named_parameters(name, recurse=False)
                own |= {at: x.shape for at, x in weights if x.dim() > 1 and not x.numel() % (count * width)}
        if own:
            listed = ", ".join(f"{at!r} {tuple(shape)}" for at, shape in [*own.items()][:3])
            return f"its {what} come from parameters of its own, not from an nn.Linear: {listed}"
        return f"its {what} are the output of no module: its code changes them after its linear layers"


def nearby(model: nn.Module, name: str, outputs: Mapping[str, Any], linear: set[str]) -> Nearby:
    """Return the outputs of the modules near an attention layer, from those of all modules in one call."""
    tensors = {own: output for own, output in outputs.items() if isinstance(output, Tensor) and output.dim()}
    kinds = ([own for own in tensors if (own in linear) == kind] for kind in (True, False))
    near = ({own: tensors[own] for own in names_below(names, name)} for names in kinds)
    return Nearby(model, name, *near)


def not_linear(model: nn.Module, name: str) -> str:
    """Return why a module cannot be changed as a linear layer, as a relative clause; "" if it can."""
    outer = name.rpartition(".")[0]
    if any(is_adapter(model, own) for own in (name, outer, outer.rpartition(".")[0])):
        return "whose adapter is not merged: `merge_and_unload()` of peft merges it"
    module = model.get_submodule(name)
    if linear_parts(module) is not None:
        return ""
    return getattr(module, "reason", f"which is of class {type(module).__name__}, not nn.Linear")


def is_adapter(model: nn.Module, name: str) -> bool:
    """Return True for a module of peft, in which other layers add to the output of a linear layer."""
    return hasattr(model.get_submodule(name), "base_layer")


def equal_norms(heads: Float[Tensor, "B H T K"], outputs: Mapping[str, Tensor]) -> list[Projection]:
    """Return the layers with heads of the same norms as in attention: rotations keep norms."""
    batch, count, tokens, width = heads.shape
    wanted = as_float64(heads.transpose(1, 2)).norm(dim=-1)
    bound = FIT * torch.finfo(heads.dtype).eps * float(wanted.norm())
    found = []
    for name, output in outputs.items():
        if output.shape[:-1] != (batch, tokens) or output.shape[-1] < count * width:
            continue
        for channels in head_layouts(count, width, output.shape[-1]):
            norms = as_float64(output[..., channels.to(output.device)]).norm(dim=-1)
            if float((norms - wanted).norm()) <= bound:
                found.append(Projection(name, channels))
    return found


def _unfit(site: CapturedMixer) -> str:
    """Return why a mixer is no attention of one sequence; "" if it is."""
    operator = site.operator
    if not isinstance(operator, DenseMixing | SoftmaxMixing):
        return f"its mixing is {operator.kind}, not softmax attention"
    return "its queries and keys come from different sequences" if site.cross else ""


def _same(first: Projections, other: Projections) -> bool:
    pairs = ((first.query, other.query), (first.key, other.key))
    return all(a.module == b.module and bool((a.channels == b.channels).all()) for a, b in pairs)


def keep_passing(
    model: nn.Module,
    batch: Any,
    found: tuple[list[Layer], dict[str, str]],
    trial: Callable[[nn.Module, list[Layer]], Change],
    reason: str,
    expected: str,
    fix: str,
    outputs: Callable[[nn.Module, Any], list[Tensor]] = lambda model, batch: [main_output(model, batch)],
) -> tuple[list[Layer], dict[str, str]]:
    """Return the layers whose trial change does not change the outputs, and why each other layer is left out.

    All layers are tried together, and one by one only if that fails. Padded tokens do not count. Raise, with
    what was `expected` and its `fix`, if no layer is left.
    """
    layers, skipped = found
    short = to_device(first_sequences(batch, 2), device_of(model))
    before, real = output_and_mask(model, short)
    check_finite(model, before)
    bound = torch.finfo(before.dtype).eps ** 0.5

    def same(some: list[Layer]) -> bool:
        with trial(model, some):
            after = outputs(model, short)
        return all(relative_error(output[real], before[real]) <= bound for output in after)

    if layers and not same(layers):
        passing = [layer for layer in layers if same([layer])]
        names = {layer.name for layer in passing}
        skipped = skipped | {layer.name: reason for layer in layers if layer.name not in names}
        layers = passing
    check_some(model, layers, skipped, expected, fix)
    return layers, skipped


# --- outputs ---------------------------------------------------------------------------------------------


def main_output(model: nn.Module, batch: Any) -> Tensor:
    """Return the first floating-point tensor of a model's output that is not a scalar: logits or states."""
    return output_and_mask(model, batch)[0]


def output_and_mask(model: nn.Module, batch: Any) -> tuple[Tensor, Bool[Tensor, "B *T"]]:
    """Return the output of `main_output`, and the mask of its real tokens."""
    with torch.no_grad():
        out = run_model(model, batch)
    found = next((part for part in tensors_in(out) if part.is_floating_point() and part.dim() > 0), None)
    assert found is not None, "a model with mixers returns a tensor"
    return found, real_outputs(out, batch, found)


def at_once_and_in_halves(model: nn.Module, batch: Any) -> list[Tensor]:
    """Return the outputs for a text read at once; without other arguments than token ids, in halves, too."""
    whole = main_output(model, batch)
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or ids.shape[1] < 2 or set(batch) - {"input_ids", "attention_mask", "labels"}:
        return [whole]
    half = ids.shape[1] // 2
    first, second = ({"input_ids": part, "use_cache": True} for part in (ids[:, :half], ids[:, half:]))
    if mask is not None:
        first["attention_mask"], second["attention_mask"] = mask[:, :half], mask
    with torch.no_grad():
        start = run_model(model, first)
        end = run_model(model, {**second, "past_key_values": start.past_key_values})
    return [whole, torch.cat([start.logits, end.logits], 1)]


def relative_error(after: Tensor, before: Tensor) -> float:
    """Return ‖after − before‖/‖before‖ in float64."""
    after, before = as_float64(after), as_float64(before)
    return float((after - before).norm() / before.norm().clamp(min=1e-300))


# --- checks ----------------------------------------------------------------------------------------------


def check_finite(model: nn.Module, output: Tensor) -> None:
    """Raise if an output has NaN or infinity, and name the first weights that have it."""
    if bool(output.isfinite().all()):
        return
    named = ((name, own) for name, own in model.named_parameters() if not bool(own.isfinite().all()))
    name, values = next(named, ("", output))
    layer, _, own = name.rpartition(".")
    broken = f"NaN or infinity in {int((~values.isfinite()).sum())} of {values.numel()} numbers"
    fix = "Fix the weights" if name else "Use float32, or check the batch"
    raise CompressionError(
        f"layer {layer!r}" if layer else f"model {type(model).__name__}",
        expected="finite weights" if name else "finite outputs",
        got=f"{broken} of its {own}" if name else f"{broken}; its weights are finite",
        fix=f"{fix}: `rankwise audit` shows where it begins. The model is unchanged.",
    )


class NoLayersError(CompressionError):
    """A part of `compress` can change no layer of a model."""


def check_some(model: nn.Module, layers: list[Any], skipped: dict[str, str], expected: str, fix: str) -> None:
    """Raise with the first two reasons if no layer is left."""
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:2])
        raise NoLayersError(
            f"model {type(model).__name__}", expected=expected, got=reasons or "no such attention", fix=fix
        )


def check_tokens(tokens: int, width: int) -> None:
    """Raise if there are too few calibration tokens for the widest head or latent."""
    if tokens < LEAST_TOKENS * width:
        raise CompressionError(
            "the calibration data",
            expected=f"at least {round(LEAST_TOKENS * width)} tokens for width {width}, better {10 * width}",
            got=f"{tokens}",
            fix="Give more text.",
        )


def rank_notes(moments: Iterable[Float64[Tensor, "..."]], kinds: str, tokens: int) -> list[str]:
    """Return a note if second moments do not have full rank."""
    ranks = [torch.linalg.matrix_rank(moment, hermitian=True) < moment.shape[-1] for moment in moments]
    singular = sum(int(below.sum()) for below in ranks)
    if not singular:
        return []
    return [
        f"On {tokens} tokens, {kinds} do not span all their directions in {singular} places. The unused "
        "directions are dropped first, so inputs that use them can cost more: calibrate on varied text."
    ]
