"""Input and output of the parts, trials of their changes on the model, and checks that several parts share.

CONTRIBUTING describes how to add a part.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from rankwise._internals.batches import first_sequences, map_tensors, tensors_in, to_device
from rankwise._internals.forward import HALF, Change, Progress, device_of, in_float32, run_model
from rankwise._internals.linalg import as_float64
from rankwise.auditing.error_hints import batch_errors
from rankwise.compression.quantized_cache import is_decoder
from rankwise.compression.records import BlockRemoval, HeadWidth, LatentRank, MergedKeys
from rankwise.errors import CompressionError
from rankwise.importance.losses import real_outputs
from rankwise.importance.output_head import CHUNK

Layer = TypeVar("Layer", bound=Any)
"""Type of an attention layer with its `name` in the model."""
Found = tuple[list[Layer], dict[str, str]]
"""Layers that a part can change, and the reason why each other layer is left out."""
LEAST_TOKENS = 0.5
"""Minimum number of calibration tokens per channel of the widest head or latent."""


@dataclass
class Job:
    """Data and target of one part."""

    model: nn.Module
    """Model in evaluation mode, with the changes of the earlier parts."""
    found: Found[Any]
    batches: list[Any]
    """Calibration data."""
    eval_batches: list[Any]
    """Data on which costs are measured: held-out data, or the calibration data."""
    keep: float | int | None = None
    """Share to keep, 0 < keep < 1. None if there is a tolerance."""
    tolerance: float | int | None = None
    """Largest cost, in the unit of the part. None if there is a share to keep."""
    calibrate: int = 0
    """Steps of Adam per layer."""
    seed: int = 0
    on_progress: Progress = lambda step, done: None
    remove: int | None = None
    """Number of blocks to remove, instead of a share or a tolerance."""
    reused: dict[str, Any] = field(default_factory=dict)
    """Statistics that a part reuses for other targets, on the same model and data."""
    uniform: bool = False
    """If True, the part ``heads`` removes as many heads from each layer."""

    @property
    def short(self) -> Any:
        """Two sequences of the calibration data, for trials."""
        return to_device(first_sequences(self.batches[0], 2), device_of(self.model))


@dataclass
class Solution:
    """Change of one part, not yet applied, with its records."""

    change: Change
    heads: list[HeadWidth] = field(default_factory=list)
    latents: list[LatentRank] = field(default_factory=list)
    blocks: list[BlockRemoval] = field(default_factory=list)
    merged: list[MergedKeys] = field(default_factory=list)
    kl: dict[str, float] = field(default_factory=dict)
    """Attention KL per site on the evaluation data. Empty for parts that do not compare attention."""
    key_heads: dict[str, list[int]] = field(default_factory=dict)
    """Numbers, before the part, of the key heads that it left, by site. Empty if it removes none."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Layers that cannot be changed, each with the reason."""
    notes: list[str] = field(default_factory=list)
    cost: float = math.nan
    """Cost on the evaluation data, in the unit of the tolerance. NaN if the part does not measure it."""


class NoLayersError(CompressionError):
    """Raised if a part of `compress` can change no layer of a model."""


def find_part(name: str, model: nn.Module, batch: Any) -> Found[Any]:
    """Return the layers that a part can change. Raise `NoLayersError` if there are none.

    Two sequences of the batch are run, and `CompressionError` is raised if outputs are not finite. The model
    runs in float32, because small differences of outputs decide which layers work. In half precision, the
    effect of a rotation, or of a change next to a large bias, is as small as rounding.
    """
    short = to_device(first_sequences(batch, 2), device_of(model))
    with batch_errors(model, short, "`batches`, batch 1"):
        output = main_output(model, short)
    check_finite(model, output)
    with in_float32(model):
        wide = map_tensors(short, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor)
        layers: Found[Any] = _module(name, "find").find(model, wide)
    return layers


def check_part(name: str, job: Job) -> None:
    """Raise `CompressionError` if a part knows before its work that it cannot reach the target of a job."""
    getattr(_module(name, "solve"), "check", lambda job: None)(job)


def solve_part(name: str, job: Job) -> Solution:
    """Return the solution of a part for the layers that it can change."""
    solution: Solution = _module(name, "solve").solve(job)
    return solution


def _module(part: str, what: str) -> Any:
    return import_module(f"rankwise.compression.{part.replace('-', '_')}_{what}")


def keep_passing(
    model: nn.Module,
    found: tuple[list[Layer], dict[str, str]],
    trial: Callable[[list[Layer]], str],
    expected: str,
) -> tuple[list[Layer], dict[str, str]]:
    """Return the layers that pass a trial, and why each other layer is left out.

    `trial` returns why some layers fail together, "" if they pass. All layers are tried together. If this
    trial fails, each layer is tried alone. Raise `NoLayersError`, with `expected`, if no layer is left.
    """
    layers, skipped = found
    if layers and trial(layers):
        reasons = {layer.name: trial([layer]) for layer in layers}
        skipped = skipped | {name: reason for name, reason in reasons.items() if reason}
        layers = [layer for layer in layers if not reasons[layer.name]]
    check_some(model, layers, skipped, expected)
    return layers, skipped


def same_outputs(
    model: nn.Module,
    batch: Any,
    change: Callable[[nn.Module, list[Layer]], Change],
    reason: str,
    outputs: Callable[[nn.Module, Any], list[Tensor]] = lambda model, batch: [main_output(model, batch)],
) -> Callable[[list[Layer]], str]:
    """Return a trial that fails, with a reason, if a change of layers changes outputs of real tokens."""
    before, real = output_and_mask(model, batch)
    before, bound = before[real], torch.finfo(before.dtype).eps ** 0.5

    def trial(layers: list[Layer]) -> str:
        with change(model, layers):
            after = outputs(model, batch)
        return "" if all(relative_error(output[real], before) <= bound for output in after) else reason

    return trial


# --- outputs ---------------------------------------------------------------------------------------------


def main_output(model: nn.Module, batch: Any) -> Tensor:
    """Return the first floating-point tensor of a model's output that is not a scalar: logits or states."""
    return output_and_mask(model, batch)[0]


def output_and_mask(model: nn.Module, batch: Any) -> tuple[Tensor, Bool[Tensor, "B *T"]]:
    """Return the tensor that `main_output` returns, and the mask of its real tokens."""
    with torch.no_grad():
        out = run_model(model, batch)
    tensor = next((x for x in tensors_in(out) if x.is_floating_point() and x.dim() > 0), None)
    assert tensor is not None, "a model with mixers returns a tensor"
    return tensor, real_outputs(out, batch, tensor)


def at_once_and_in_halves(model: nn.Module, batch: Any) -> list[Tensor]:
    """Return the output for a text that is read at once and, if possible, in halves with a cache.

    The last token is read alone, as in generation. Halves need a decoder, at least two tokens, and a batch of
    token ids, with at most a mask and labels as other arguments.
    """
    whole = main_output(model, batch)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    others = set(batch) - {"input_ids", "attention_mask", "labels"} if ids is not None else ()
    if ids is None or ids.shape[1] < 2 or others or not is_decoder(model):
        return [whole]
    mask = batch.get("attention_mask")
    cache, logits = None, []
    for first, last in pairwise(sorted({0, ids.shape[1] // 2, ids.shape[1] - 1, ids.shape[1]})):
        part = {"input_ids": ids[:, first:last], "use_cache": True}
        part |= {} if mask is None else {"attention_mask": mask[:, :last]}
        with torch.no_grad():
            out = run_model(model, part | ({} if cache is None else {"past_key_values": cache}))
        cache = out.past_key_values
        logits.append(out.logits)
    return [whole, torch.cat(logits, 1)]


def relative_error(after: Tensor, before: Tensor) -> float:
    """Return ‖after − before‖/‖before‖ in float64, which is the dtype of only `CHUNK` values at once."""
    chunks = zip(*(values.flatten().split(CHUNK) for values in (after, before)), strict=True)
    wide = (tuple(map(as_float64, pair)) for pair in chunks)
    norms = [((new - old).norm(), old.norm()) for new, old in wide]
    difference, norm = (float(torch.stack(parts).norm()) for parts in zip(*norms, strict=True))
    return difference / max(norm, 1e-300)


# --- checks ----------------------------------------------------------------------------------------------


def check_finite(model: nn.Module, output: Tensor) -> None:
    """Raise `CompressionError` if an output has NaN or infinity. The error names the first such weights."""
    if bool(output.isfinite().all()):
        return
    named = ((name, weight) for name, weight in model.named_parameters() if not bool(weight.isfinite().all()))
    name, values = next(named, ("", output))
    layer, _, weight = name.rpartition(".")
    broken = f"NaN or infinity in {int((~values.isfinite()).sum())} of {values.numel()} numbers"
    fix = "Fix the weights" if name else "Use float32, or check the batch"
    raise CompressionError(
        f"layer {layer!r}" if layer else f"model {type(model).__name__}",
        expected="finite weights" if name else "finite outputs",
        got=f"{broken} of its {weight}" if name else f"{broken}; its weights are finite",
        fix=f"{fix}: `rankwise audit` shows where it begins. The model is unchanged.",
    )


def check_some(model: nn.Module, layers: list[Any], skipped: dict[str, str], expected: str) -> None:
    """Raise `NoLayersError`, with the first two reasons in `skipped`, if no layer is left."""
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:2])
        raise NoLayersError(
            f"model {type(model).__name__}",
            expected=expected,
            got=reasons or "none",
            fix="",
        )


def check_tokens(tokens: int, width: int) -> None:
    """Raise `CompressionError` if there are too few calibration tokens for the widest head or latent."""
    if tokens < LEAST_TOKENS * width:
        raise CompressionError(
            "the calibration data",
            expected=f"at least {round(LEAST_TOKENS * width)} tokens for width {width}, better {10 * width}",
            got=f"{tokens}",
            fix="Give more text.",
        )
