"""What a model gives, as tensors that can be compared."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import run_model
from rankwise.errors import CompressionError

COUNTED = 8
"""Tokens whose cache is counted."""


def main_output(model: nn.Module, batch: Any) -> Tensor:
    """The first floating-point tensor of a forward pass that is no loss: logits, or the last states.

    Args:
        model: the model, in evaluation mode.
        batch: what it takes.
    """
    with torch.no_grad():
        out = run_model(model, batch)
    found = next(
        (tensor for tensor in _tensors(out) if tensor.is_floating_point() and tensor.dim() > 0), None
    )
    assert found is not None, "a model with mixers gives a tensor"
    return found


def check_finite(model: nn.Module, output: Tensor) -> None:
    """Refuse a model whose outputs hold NaN or infinity: no trial could tell one layer from another.

    Args:
        model: the model.
        output: what it gives, as `main_output` takes it.

    Raises:
        CompressionError: with the first weights that hold it.
    """
    if bool(output.isfinite().all()):
        return
    for name, weight in model.named_parameters():
        broken = weight.numel() - int(weight.isfinite().sum())
        if broken:
            layer, _, own = name.rpartition(".")
            raise CompressionError(
                f"layer {layer!r}" if layer else f"model {type(model).__name__}",
                expected="finite weights",
                got=f"NaN or infinity in {broken} of {weight.numel()} numbers of its {own}",
                fix="Mend the weights: `rankwise audit` shows what they reach. The model is as it was.",
            )
    broken = int((~output.isfinite()).sum())
    low = output.dtype in (torch.float16, torch.bfloat16)
    raise CompressionError(
        f"model {type(model).__name__}",
        expected="finite outputs",
        got=f"NaN or infinity in {broken} of {output.numel()}; its weights are finite",
        fix=("Use float32" if low else "Look at the batch")
        + ": `rankwise audit` shows where it begins. The model is as it was.",
    )


def relative_error(after: Tensor, before: Tensor, real: Tensor | None = None) -> float:
    """‖after − before‖/‖before‖, in float64.

    Args:
        after: a tensor.
        before: another of its shape.
        real: (B, T), which tokens count.
    """
    if real is not None and before.shape[:2] == real.shape:
        after, before = after[real], before[real]
    after, before = after.double(), before.double()
    return float((after - before).norm() / before.norm().clamp(min=1e-300))


def is_decoder(model: nn.Module) -> bool:
    """Whether a model generates from its own cache alone.

    Args:
        model: the model.
    """
    can = getattr(model, "can_generate", None)
    encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return callable(can) and bool(can()) and not encoder


def cache_bytes(model: nn.Module, batch: Any) -> int:
    """Bytes of keys and values that a decoder keeps for each token, counted in its cache; 0 for others.

    Args:
        model: the model, in evaluation mode.
        batch: what it takes.
    """
    if not is_decoder(model) or not isinstance(batch, dict) or "input_ids" not in batch:
        return 0
    ids = batch["input_ids"][:1, :COUNTED]
    with torch.no_grad():
        cache = getattr(run_model(model, {"input_ids": ids, "use_cache": True}), "past_key_values", None)
    kept = [
        tensor
        for layer in getattr(cache, "layers", [])
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(tensor, Tensor)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept) // ids.shape[1]


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    items = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple | list) else ()
    return [tensor for item in items for tensor in _tensors(item)]
