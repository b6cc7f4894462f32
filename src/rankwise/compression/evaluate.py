"""Costs and savings: measure the original and the compressed model on the same data."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.batches import batch_size, first_sequences, tensors_in, to_device
from rankwise._internals.forward import Change, config_value, device_of, run_model
from rankwise._internals.linalg import as_float64
from rankwise._internals.torch_private import preserve_state
from rankwise.compression.trials import output_and_mask, relative_error
from rankwise.errors import InputError
from rankwise.importance.loss_choice import model_loss
from rankwise.importance.losses import real_outputs
from rankwise.tracing import CapturedMixer, CapturedState, capture

SEQUENCES = 16
"""Maximum number of sequences on which outputs are compared."""
CACHE_TOKENS = 8
"""Number of tokens for which the size of the cache is measured."""
ROUNDS = 16
"""Number of rounds in which both models are timed in turns; the first round warms up."""


@dataclass
class Snapshot:
    """Measurements of one model."""

    states: dict[tuple[str, int], Tensor]
    """Real tokens of the first batch, by stack and layer: encoder and decoder use the same layer numbers."""
    places: dict[str, tuple[str, int]]
    """Stack and layer of each mixer, by name."""
    output: Tensor
    """Output for the first batch."""
    fields: dict[str, Any]
    """Measured fields of a `Compression`."""

    def state_error(self, old: "Snapshot", place: tuple[str, int]) -> float:
        """Return the error of the states at a place; NaN if they were not seen."""
        states = [snapshot.states.get(place) for snapshot in (self, old)]
        return math.nan if states[0] is None or states[1] is None else relative_error(states[0], states[1])


def evaluate(
    model: nn.Module,
    batches: list[Any],
    changes: list[Change],
    old: Snapshot,
    timed: bool,
    on_step: Callable[[str], None],
) -> Snapshot:
    """Measure a model with its changes, which are applied when this is called and afterwards.

    `old` is the snapshot of the original, made before the work: so a measurement that fails costs no work.
    The fields of the result are those of both models.
    """
    on_step("comparing outputs")
    batches = [to_device(batch, device_of(model)) for batch in batches]
    new = snapshot(model, batches, "after")

    def pair(batch: Any) -> tuple[Tensor | None, Tensor | None]:
        after = log_probabilities(model, batch)
        with original(changes):
            return log_probabilities(model, batch), after

    new.fields |= old.fields
    new.fields["output_kl"] = output_kl(pair(batch) for batch in compared_batches(batches))
    new.fields["output_error"] = relative_error(new.output, old.output)
    if timed:
        on_step("measuring time")
        new.fields |= measure_seconds(model, batches[0], changes)
    return new


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


def snapshot(model: nn.Module, batches: list[Any], when: str) -> Snapshot:
    """Measure states, output, loss, parameters and cache of a model.

    `when`, "before" or "after", is the last word of field names such as ``loss_before``.
    """
    batches = [to_device(batch, device_of(model)) for batch in batches]
    states: dict[tuple[str, int], Tensor] = {}
    places: dict[str, tuple[str, int]] = {}

    def keep_tokens(site: CapturedState) -> None:
        real = site.mask if site.mask is not None else torch.ones(site.tokens.shape[:2], dtype=torch.bool)
        states[site.stack, site.layer] = site.tokens[real.to(site.tokens.device)].float().cpu()

    def keep_place(site: CapturedMixer) -> None:
        places.setdefault(site.name, (site.stack, site.layer))

    with torch.no_grad(), capture(model, on_state=keep_tokens, on_mixer=keep_place):
        run_model(model, batches[0])
    output, real = output_and_mask(model, batches[0])
    fields = {
        f"loss_{when}": measure_loss(model, batches),
        f"parameters_{when}": sum(parameter.numel() for parameter in model.parameters()),
        f"cache_bytes_{when}": cache_bytes(model, batches[0]),
    }
    return Snapshot(states, places, output[real].float().cpu(), fields)


# --- outputs ---------------------------------------------------------------------------------------------


def compared_batches(batches: list[Any]) -> Iterator[Any]:
    """Yield the first sequences of batches, up to `SEQUENCES`."""
    count = 0
    for batch in batches:
        if count < SEQUENCES:
            short = first_sequences(batch, SEQUENCES - count)
            count += batch_size(short)
            yield short


def log_probabilities(model: nn.Module, batch: Any) -> Float64[Tensor, "N V"] | None:
    """Return log p of the outputs at real tokens, on the CPU; None if the model returns no logits."""
    with torch.no_grad():
        out = run_model(model, batch)
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        return None
    return as_float64(logits[real_outputs(out, batch, logits)].flatten(0, -2)).log_softmax(-1).cpu()


def output_kl(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> float:
    """Return KL(p‖p′) in nats, mean over tokens, from pairs (log p, log p′); NaN if logits are missing."""
    total, tokens = 0.0, 0
    for before, after in pairs:
        if before is None or after is None:
            return math.nan
        total += float(F.kl_div(after, before, reduction="sum", log_target=True))
        tokens += before.shape[0]
    return max(total, 0.0) / max(tokens, 1e-300)  # a sum below 0 is rounding, by Gibbs' inequality


def is_decoder(model: nn.Module) -> bool:
    """Return True if a model generates text from its own cache alone."""
    can = getattr(model, "can_generate", None)
    return callable(can) and bool(can()) and not config_value(model, "is_encoder_decoder")


def cache_bytes(model: nn.Module, batch: Any) -> int:
    """Return the bytes per token in the cache of a decoder; 0 for other models."""
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
    """Return the mean loss of labels or next tokens, as `rankwise.importance` does; NaN without either."""
    try:
        loss = model_loss(model, batches)
    except InputError:  # an encoder-decoder without labels and decoder ids has nothing to predict
        if isinstance(batches[0], Mapping) and batches[0].get("labels") is not None:
            raise
        return math.nan
    return math.nan if loss.compares_outputs else loss.mean(model, batches)


# --- time ------------------------------------------------------------------------------------------------


def measure_seconds(model: nn.Module, batch: Any, changes: list[Change]) -> dict[str, Any]:
    """Return the time of a decoding step of a decoder, or of a pass of another model, before and after.

    A decoder reads all tokens of the first sequence but one, and is timed on the last.
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
        # not `run_model`, which would copy the cache within the measured time
        model(**inputs) if isinstance(inputs, Mapping) else run_model(model, inputs)
        seconds[when].append(now() - started)

    with torch.inference_mode(), preserve_state(model):
        for _ in range(ROUNDS):
            run("after")
            with original(changes):
                run("before")
    medians = {f"seconds_{when}": median(times[1:]) for when, times in seconds.items()}
    return {"timed": timed, **medians}
