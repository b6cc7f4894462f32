"""What a head width costs: parameters, operations, cache, and the time it takes on this machine."""

import math
import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from rankwise.plan.advice import reason, recommended, shape_notes
from rankwise.plan.records import HeadDimPlan, Option
from rankwise.plan.shape import Shape, other_shapes, present_shape

LONGEST = 1024
"""Tokens at which a layer is timed at most."""
SECONDS = 2.0
"""After this long no further round is timed; three rounds are, one to warm up."""
DECODES = 9
"""Times that one more token is timed in a round: it is so short that a single time is mostly chance."""
MULTIPLE = 8
"""Head widths that kernels like."""


def with_prices(
    plan: HeadDimPlan,
    width: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    device: str = "cpu",
    measure: bool = True,
) -> HeadDimPlan:
    """Add what K* buys: the setting of now and others with the planned width, priced and timed.

    The planned width is the upper end of the interval of K*, rounded up to a multiple of 8 that divides H·K
    of now where there is one. Recommended is *more heads*: as many channels H·K as now in heads of the
    planned width, so the same parameters; *fewer heads* where those of now are narrower than the interval of
    K*; and what there is where neither changes the number of heads.

    Args:
        plan: the plan.
        width: D.
        heads: H of now; D // 64 by default, at least 1.
        kv_heads: of now; as many as heads by default.
        head_dim: K of now; D // heads by default, an even number of it with rotary positions.
        value_dim: V of now; that of the plan by default, else K.
        device: where to time.
        measure: whether to time at all.

    Raises:
        ShapeError: as `present_shape`.
    """
    value_dim = plan.value_dim if value_dim is None else value_dim
    now = present_shape(width, heads, kv_heads, head_dim, value_dim, plan.positions)
    if head_dim is None and now.heads * now.head_dim != width:
        even = " and even" if plan.positions == "rope" else ""
        note = (
            f"{now.heads} heads do not share D = {width} in equal{even} parts: "
            f"K of now is taken as {now.head_dim}."
        )
        plan = plan.model_copy(update={"notes": [*plan.notes, note]})
    planned = planned_width(plan, now.heads * now.head_dim)
    shapes = [now, *other_shapes(now, planned, plan)] if plan.saturated else [now]
    tokens = min(plan.tokens, LONGEST)
    times = time_layers(shapes, width, tokens, plan.mask, device) if measure else {}
    options = [priced(shape, plan, width, times.get(shape.name)) for shape in shapes]
    best = recommended(options)
    step = 2 if plan.positions == "rope" else 1  # rotary positions turn pairs
    first, last = plan.curve[0][0], plan.curve[-1][0]
    return plan.model_copy(
        update={
            "options": options,
            "fixed_width": [
                priced(Shape(f"{width // k} × {k}", width // k, width // k, k, k), plan, width, None)
                for k in range(first, last + 1)
                if width % k == 0 and k % step == 0 and (k & (k - 1) == 0 or k in (now.head_dim, planned))
            ],
            "latency_tokens": tokens if measure else 0,
            "width": width,
            "value_dim": value_dim,
            "recommended": {
                "hidden_size": width,
                "num_attention_heads": best.heads,
                "num_key_value_heads": best.kv_heads,
                "head_dim": best.head_dim,
                **({"v_head_dim": best.value_dim} if best.value_dim != best.head_dim else {}),
            },
            "notes": [*plan.notes, *shape_notes(width, best)],
            "reason": reason(plan, planned, options, tokens if measure else 0),
        }
    )


def planned_width(plan: HeadDimPlan, width: int) -> int:
    """The upper end of the interval of K*, rounded up to a multiple of 8 that divides H·K if any does."""
    least = plan.interval[1]
    up = -(-least // MULTIPLE) * MULTIPLE
    fitting = [k for k in range(up, width + 1, MULTIPLE) if width % k == 0]
    return fitting[0] if fitting and fitting[0] <= 2 * up else up


def priced(shape: Shape, plan: HeadDimPlan, width: int, times: "Times | None") -> Option:
    """Parameters, operations and cache of one layer, and the rank that random weights give."""
    H, G, K, V = shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim
    T = plan.tokens
    parameters = width * (H * K + G * K + G * V + H * V)
    pairs = T * (T + 1) // 2 if plan.mask == "causal" else T * T
    share = math.nan if plan.positions == "rope" and K % 2 else plan.deciding.share_at(K)
    return Option(
        name=shape.name,
        heads=H,
        kv_heads=G,
        head_dim=K,
        value_dim=V,
        rank_share=share,
        rank_sum=H * share,
        interpolated=math.isfinite(share) and not plan.deciding.tried(K),
        parameters=parameters,
        flops=2 * T * parameters + 2 * pairs * H * (K + V),
        cache_bytes=2 * G * (K + V),
        prefill_ms=times.prefill if times else float("nan"),
        decode_ms=times.decode if times else float("nan"),
        padded=times.padded if times else False,
    )


@dataclass(frozen=True)
class Times:
    """Median milliseconds of one layer."""

    prefill: float
    decode: float
    padded: bool


def time_layers(shapes: list[Shape], width: int, tokens: int, mask: str, device: str) -> dict[str, Times]:
    """Time projections and attention of each shape in turns, so that a busy machine slows all alike.

    On a CPU fused attention is slow where queries and keys have another width than values; zeros that fill
    up the narrower ones change no result, and are used where that is faster.

    Args:
        shapes: what to time.
        width: D.
        tokens: T of the prefill, and of the cache of the decoding step.
        mask: "full" or "causal".
        device: of the tensors.
    """
    layers = {
        (shape.name, padded): _Layer(shape, width, tokens, mask == "causal", padded, device)
        for shape in shapes
        for padded in ((False, True) if shape.head_dim != shape.value_dim else (False,))
    }
    prefill: dict[tuple[str, bool], list[float]] = {name: [] for name in layers}
    decode: dict[tuple[str, bool], list[float]] = {name: [] for name in layers}
    started, rounds = time.perf_counter(), 0
    with torch.inference_mode():
        while rounds < 3 or (time.perf_counter() - started < SECONDS and rounds < 60):
            for name, layer in layers.items():
                prefill[name].append(_timed(layer.prefill, device))
                decode[name] += [_timed(layer.decode, device) for _ in range(DECODES)]
            rounds += 1
    found = {}
    for shape in shapes:
        ways = [name for name in layers if name[0] == shape.name]
        took = {
            name: (median(prefill[name][1:]), median(decode[name][DECODES:])) for name in ways
        }  # less warm-up
        best = min(ways, key=lambda name: took[name][0])
        found[shape.name] = Times(1e3 * took[best][0], 1e3 * took[best][1], best[1])
    return found


def _timed(call: "object", device: str) -> float:
    assert callable(call)
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


class _Layer:
    """An attention layer at random weights: projections, fused attention, output projection."""

    def __init__(
        self, shape: Shape, width: int, tokens: int, causal: bool, padded: bool, device: str
    ) -> None:
        self.shape, self.causal, self.padded = shape, causal, padded
        generator = torch.Generator().manual_seed(0)

        def drawn(*size: int) -> Tensor:
            return (torch.randn(size, generator=generator) / size[0] ** 0.5).to(device)

        self.states = drawn(tokens, width) * tokens**0.5
        self.weights = [
            drawn(width, shape.heads * shape.head_dim),
            drawn(width, shape.kv_heads * shape.head_dim),
            drawn(width, shape.kv_heads * shape.value_dim),
        ]
        self.out = drawn(shape.heads * shape.value_dim, width)
        self.cache = self._split(self.states)[1:]

    def prefill(self) -> Tensor:
        return self._attend(*self._split(self.states), causal=self.causal)

    def decode(self) -> Tensor:
        query, _, _ = self._split(self.states[-1:])
        return self._attend(query, *self.cache, causal=False)

    def _split(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        heads = (
            (shape.heads, shape.head_dim),
            (shape.kv_heads, shape.head_dim),
            (shape.kv_heads, shape.value_dim),
        )
        parts = [
            (states @ weight).unflatten(-1, size).transpose(0, 1)[None]
            for weight, size in zip(self.weights, heads, strict=True)
        ]
        return parts[0], parts[1], parts[2]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        scale, kept = query.shape[-1] ** -0.5, value.shape[-1]
        if self.padded:
            wide = max(query.shape[-1], kept)
            query, key, value = (F.pad(part, (0, wide - part.shape[-1])) for part in (query, key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )
        return out[0, ..., :kept].transpose(0, 1).flatten(1) @ self.out
