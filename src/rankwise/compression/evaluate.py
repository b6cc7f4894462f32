"""Measure costs and savings: compare the original and the compressed model on the same data."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import batch_size, first_sequences, tensors_in, to_device
from rankwise._internals.forward import Change, Progress, config_value, device_of, run_model
from rankwise._internals.linalg import as_float64
from rankwise._internals.torch_private import preserve_state
from rankwise.errors import InputError
from rankwise.importance.loss_choice import choose_loss, model_loss
from rankwise.importance.losses import DivergenceLoss, real_outputs, token_logits
from rankwise.importance.output_head import TokenLogits, first_pass
from rankwise.importance.settings import ImportanceSettings

SEQUENCES = 16
"""Maximum number of sequences on which outputs are compared."""
CACHE_TOKENS = 8
"""Number of tokens for which the size of the cache is measured."""
ROUNDS = 16
"""Number of rounds in which both models are timed in turns; the first round warms up."""


def evaluate(
    model: nn.Module,
    batches: list[Any],
    changes: list[Change],
    old: dict[str, Any],
    timed: bool,
    on_progress: Progress,
) -> dict[str, Any]:
    """Return the measured fields of a `Compression`, for the original and the changed model.

    The changes must be applied before the call, and they stay applied. `old` is the `snapshot` of the
    original, made before the work, so that no work is lost if a measurement fails.
    """
    on_progress("comparing outputs", math.nan)
    batches = [to_device(batch, device_of(model)) for batch in batches]
    fields = old | snapshot(model, batches, "after") | compare_outputs(model, batches, changes)
    if timed:
        on_progress("measuring time", math.nan)
        fields |= measure_seconds(model, batches[0], changes)
    return fields


@contextmanager
def original(changes: list[Change]) -> Iterator[None]:
    """Context manager that undoes changes for one block of code."""
    for change in reversed(changes):
        change.undo()
    try:
        yield
    finally:
        for change in changes:
            change.apply()


def snapshot(model: nn.Module, batches: list[Any], when: str) -> dict[str, Any]:
    """Return the loss, the number of parameters and the cache size of a model.

    `when`, "before" or "after", is the last word of field names such as ``loss_before``.
    """
    batches = [to_device(batch, device_of(model)) for batch in batches]
    return {
        f"loss_{when}": measure_loss(model, batches),
        f"parameters_{when}": sum(parameter.numel() for parameter in model.parameters()),
        f"cache_bytes_{when}": cache_bytes(model, batches[0]),
    }


# --- outputs ---------------------------------------------------------------------------------------------


def compare_outputs(model: nn.Module, batches: list[Any], changes: list[Change]) -> dict[str, float]:
    """Return ``output_kl`` and ``output_error`` of the real tokens of at most `SEQUENCES` sequences.

    The KL is the mean KL(p‖p′) in nats, where the original model predicts p and the changed model p′. It is
    NaN if the output is no prediction of classes. The error is ‖y′ − y‖/‖y‖ of the outputs.
    """
    compared, count = list[Any](), 0
    for batch in batches:
        if count < SEQUENCES:
            compared.append(first_sequences(batch, SEQUENCES - count))
            count += batch_size(compared[-1])
    total = tokens = changed = whole = 0.0
    with torch.no_grad():
        with original(changes):
            first, settings = first_pass(model, compared[0]), ImportanceSettings(loss="output")
            loss, prepared = choose_loss(model, compared, first, settings)
        for batch in prepared:
            after = loss.run(model, batch)
            with original(changes):
                before = loss.run(model, batch)
            new, old = token_logits(after), token_logits(before)
            real = real_outputs(old.output, batch.batch, old.states)

            def squares(logits: Tensor, states: Tensor, old: TokenLogits = old) -> Tensor:
                y = as_float64(old.of_rows(states)).flatten(1)
                change = as_float64(logits).flatten(1) - y
                return torch.stack((change.square().sum(1), y.square().sum(1)), 1)

            sums = new.by_rows(squares, real, old.rows(real)).sum(0)
            changed, whole = changed + float(sums[0]), whole + float(sums[1])
            if isinstance(loss, DivergenceLoss):
                losses = loss.read(after, replace(batch, reference_output=loss.keep(before, batch)))
                total, tokens = total + float(losses.total.sum()), tokens + float(losses.count.sum())
    is_kl = isinstance(loss, DivergenceLoss)
    return {
        "output_kl": max(total, 0.0) / max(tokens, 1e-300) if is_kl else math.nan,  # KL < 0 is rounding
        "output_error": math.sqrt(changed / max(whole, 1e-300)),
    }


def is_decoder(model: nn.Module) -> bool:
    """Return True if a model generates text and is not an encoder-decoder."""
    can = getattr(model, "can_generate", None)
    return callable(can) and bool(can()) and not config_value(model, "is_encoder_decoder")


def cache_bytes(model: nn.Module, batch: Any) -> int:
    """Return the bytes that a decoder caches per token. Return 0 for other models or without token ids."""
    if not is_decoder(model) or not isinstance(batch, dict) or "input_ids" not in batch:
        return 0
    ids = batch["input_ids"][:1, :CACHE_TOKENS]
    with torch.no_grad():
        cache = getattr(run_model(model, {"input_ids": ids, "use_cache": True}), "past_key_values", None)
    layers = getattr(cache, "layers", [])
    kept = tensors_in([getattr(layer, name, None) for layer in layers for name in ("keys", "values")])
    return sum(tensor.numel() * tensor.element_size() for tensor in kept) // ids.shape[1]


# --- loss -----------------------------------------------------------------------------------------------


def measure_loss(model: nn.Module, batches: list[Any]) -> float:
    """Return the mean loss of labels or next tokens. Return NaN if the data have nothing to predict."""
    try:
        loss = model_loss(model, batches)
    except InputError:  # an encoder-decoder without labels and decoder ids has nothing to predict
        if isinstance(batches[0], Mapping) and batches[0].get("labels") is not None:
            raise
        return math.nan
    return math.nan if loss.compares_outputs else loss.mean(model, batches)


# --- time ------------------------------------------------------------------------------------------------


def measure_seconds(model: nn.Module, batch: Any, changes: list[Change]) -> dict[str, Any]:
    """Return what was timed, and the median seconds of the original and of the compressed model.

    A decoder reads all tokens of the first sequence but the last, and the step for the last token is timed.
    For other models, one forward pass is timed.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if ids is not None and ids.shape[1] > 1 and is_decoder(model):

        def prepare() -> dict[str, Any]:
            cache = run_model(model, {"input_ids": ids[:1, :-1], "use_cache": True}).past_key_values
            return {"input_ids": ids[:1, -1:], "past_key_values": cache, "use_cache": True}

        timed = f"decoding step after {ids.shape[1] - 1} tokens"
    else:
        prepare, timed = lambda: batch, "pass"
    device, seconds = device_of(model), {"before": list[float](), "after": list[float]()}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def run(when: str) -> None:
        inputs = prepare()
        started = now()
        # `run_model` would copy the cache within the measured time
        model(**inputs) if isinstance(inputs, Mapping) else run_model(model, inputs)
        seconds[when].append(now() - started)

    with torch.inference_mode(), preserve_state(model):
        for _ in range(ROUNDS):
            run("after")
            with original(changes):
                run("before")
    medians = {f"seconds_{when}": median(times[1:]) for when, times in seconds.items()}
    return {"timed": timed, **medians}
