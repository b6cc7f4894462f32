"""Measure costs and savings: compare the original and the compressed model on the same data."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import batch_size, first_sequences, to_device
from rankwise._internals.forward import Change, Progress, device_of, run_model
from rankwise._internals.linalg import as_float64
from rankwise._internals.torch_private import preserve_state
from rankwise.auditing.batches import longest_sequence
from rankwise.compression.kv_modules import LatentCache, LatentProjection
from rankwise.compression.quantized_cache import GROUP, is_decoder, quantized_cache
from rankwise.compression.records import CACHE_TOKENS, CacheSize, PreviewRow, WindowCost
from rankwise.errors import InputError, RankwiseError, first_line
from rankwise.importance.loss_choice import choose_loss, model_loss
from rankwise.importance.losses import DivergenceLoss, SequenceLosses, real_outputs, token_logits
from rankwise.importance.output_head import TokenLogits, first_pass
from rankwise.importance.settings import ImportanceSettings

SEQUENCES, COMPARED_TOKENS = 16, 2048
"""Maximum number of sequences, and of their tokens, on which outputs are compared at one length."""
SIZES = (1024, CACHE_TOKENS)
"""Numbers of tokens at which the size of the cache is recorded, next to the largest that the model reads."""
PROMPT = 8
"""Number of tokens for which the cache is filled to measure its size per token."""
ROUNDS = 9
"""Number of rounds in which both models are timed in turns."""


@dataclass(frozen=True)
class Snapshot:
    """Measurements of one model: the original or the compressed model."""

    losses: list[SequenceLosses]
    """Losses of each batch. Empty if the data have nothing to predict."""
    parameters: int
    cache: list["CachedLayer"]


def snapshot(model: nn.Module, batches: list[Any]) -> Snapshot:
    """Return the losses, the number of parameters and the cache of a model.

    The snapshot of the original is made before the work, so that no work is lost if a measurement fails.
    """
    batches = [to_device(batch, device_of(model)) for batch in batches]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Snapshot(measure_losses(model, batches), parameters, cached_layers(model, batches[0]))


def evaluate(
    model: nn.Module,
    batches: list[Any],
    lengths: list[int],
    changes: list[Change],
    old: Snapshot,
    timed: bool,
    on_progress: Progress,
) -> dict[str, Any]:
    """Return the measured fields of a `Compression`, for the original and the changed model.

    The changes must be applied before the call, and they stay applied. `lengths` are the real tokens of the
    longest sequence of each batch.
    """
    on_progress("comparing outputs", math.nan)
    batches = [to_device(batch, device_of(model)) for batch in batches]
    new = snapshot(model, batches)
    costs = costs_by_length(model, batches, lengths, changes, old, new)
    longest = longest_text(model)
    cache = [
        CacheSize(
            tokens=tokens,
            before=cache_bytes(old.cache, tokens),
            after=cache_bytes(new.cache, tokens),
            kept_keys=kept_keys(model, tokens),
        )
        for tokens in sorted({min(tokens, longest) for tokens in (*SIZES, longest)})
        if old.cache
    ]
    sizes = {"parameters_before": old.parameters, "parameters_after": new.parameters}
    fields: dict[str, Any] = {"costs": costs, "cache": cache, **sizes}
    if any(size.kept_keys for size in cache):
        on_progress("comparing with quantized caches", math.nan)
        with original(changes):
            ways = {bits: [partial(quantized_cache, model, bits)] for bits in (8, 4)}
            fields["quantized"] = [
                measure_row(model, batches, lengths, old, way, bits=bits) for bits, way in ways.items()
            ]
    if timed:
        on_progress("measuring time", math.nan)
        fields |= measure_seconds(model, batches[0], changes)
    return fields


def costs_by_length(
    model: nn.Module,
    batches: list[Any],
    lengths: list[int],
    changes: list[Change],
    old: Snapshot,
    new: Snapshot,
    compare: bool = True,
) -> list[WindowCost]:
    """Return the costs of changes, which are applied, from short to long batches; `compare` adds outputs.

    Batches whose lengths lie between the same powers of two share one cost.
    """
    costs, order = [], sorted(range(len(batches)), key=lambda number: lengths[number])
    for _, group in groupby(order, lambda number: max(lengths[number] - 1, 0).bit_length()):  # ⌈log₂ tokens⌉
        numbers = sorted(group)
        chosen, tokens = [batches[number] for number in numbers], max(lengths[number] for number in numbers)
        compared = compare_outputs(model, chosen, tokens, changes) if compare else {}
        losses = added_loss(*([x.losses[number] for number in numbers if x.losses] for x in (old, new)))
        windows = sum(batch_size(batch) for batch in chosen)
        costs.append(WindowCost(tokens=tokens, windows=windows, **losses, **compared))
    return costs


def measure_row(
    model: nn.Module,
    batches: list[Any],
    lengths: list[int],
    before: Snapshot,
    ways: Sequence[Callable[[], Change]],
    **fields: Any,
) -> PreviewRow:
    """Return the row of changes that are made and applied one after the other, measured, and undone.

    The loss is measured, or the error of outputs if there is none. The row of a failure has its reason.
    """
    row, batches = PreviewRow(**fields), [to_device(batch, device_of(model)) for batch in batches]
    try:
        with ExitStack() as applied:
            changes = [applied.enter_context(way()) for way in ways]
            after = snapshot(model, batches)
            costs = costs_by_length(model, batches, lengths, changes, before, after, not after.losses)
            seconds = {} if row.bits else measure_seconds(model, batches[0], changes)
            kept = kept_keys(model, reference_tokens(model))
    except Exception as error:  # a way that fails must not lose the others
        return row.model_copy(update={"refused": refusal(error)})
    tokens = reference_tokens(model)
    cache = [layer.quantized(row.bits, bool(row.part)) if row.bits else layer for layer in after.cache]
    return row.model_copy(
        update={
            "cost": max(costs, key=lambda cost: cost.cost),
            "parameters": after.parameters,
            "cache_bytes": cache_bytes(cache, tokens),
            "kept_keys": kept,
            "time": seconds["seconds_after"] / seconds["seconds_before"] if seconds else math.nan,
        }
    )


def refusal(error: Exception) -> str:
    """Return the reason for which a way is refused."""
    return str(error) if isinstance(error, RankwiseError) else f"{type(error).__name__}: {first_line(error)}"


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


# --- outputs ---------------------------------------------------------------------------------------------


def compare_outputs(
    model: nn.Module, batches: list[Any], length: int, changes: list[Change]
) -> dict[str, float]:
    """Return ``output_kl`` and the errors of a `WindowCost`, from the first sequences of `length` tokens.

    The KL is the mean KL(p‖p′) in nats, where the original model predicts p and the changed model p′. It is
    NaN if the output is no prediction of classes. The errors are ‖y′ − y‖/‖y‖ of the outputs of all real
    tokens, of the first token of each sequence, and of the others.
    """
    compared, count = list[Any](), 0
    most = min(SEQUENCES, max(1, COMPARED_TOKENS // max(length, 1)))
    for batch in batches:
        if count < most:
            compared.append(first_sequences(batch, most - count))
            count += batch_size(compared[-1])
    total = tokens = 0.0
    squares = torch.zeros(2, 2, dtype=torch.float64)  # of the first token and of the others: ‖y′ − y‖², ‖y‖²
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

            def of_rows(logits: Tensor, states: Tensor, old: TokenLogits = old) -> Tensor:
                y = as_float64(old.of_rows(states)).flatten(1)
                change = as_float64(logits).flatten(1) - y
                return torch.stack((change.square().sum(1), y.square().sum(1)), 1)

            by_token = new.by_rows(of_rows, real, old.rows(real)).cpu().double()
            is_first = (real & (real.cumsum(1) == 1))[real].cpu()
            squares += torch.stack((by_token[is_first].sum(0), by_token[~is_first].sum(0)))
            if isinstance(loss, DivergenceLoss):
                losses = loss.read(after, replace(batch, reference_output=loss.keep(before, batch)))
                total, tokens = total + float(losses.total.sum()), tokens + float(losses.count.sum())
    is_kl = isinstance(loss, DivergenceLoss)
    changed, whole = torch.cat((squares.sum(0, keepdim=True), squares)).unbind(1)
    errors = (changed / whole).sqrt().tolist()  # 0/0 is NaN: no such token
    return {
        "output_kl": max(total, 0.0) / max(tokens, 1e-300) if is_kl else math.nan,  # KL < 0 is rounding
        **dict(zip(("output_error", "first_error", "other_error"), errors, strict=True)),
    }


@dataclass(frozen=True)
class CachedLayer:
    """Keys and values of one layer: bytes per token, and the most tokens that the layer keeps, if limited."""

    bytes: float | int
    most: int | None
    numbers: tuple[int, int]
    """Floating-point numbers of the keys and of the values of one token."""
    size: int
    """Bytes of such a number."""
    has_latents: bool = False

    def quantized(self, bits: int, latents: bool) -> "CachedLayer":
        """Return the layer with numbers of a few bits, if it keeps what is quantized: latents, or all tokens.

        Groups have 64 tokens of keys, or 64 channels of values or latents. A window stays as it is, because
        no cache of transformers quantizes it.
        """
        if self.has_latents is not latents or (self.most is not None and not latents):
            return self
        keys, values = self.numbers
        groups = (-(-keys // GROUP) if latents else keys / GROUP) + -(-values // GROUP)
        return replace(self, bytes=self.bytes + (keys + values) * (bits / 8 - self.size) + 4 * groups)


def cached_layers(model: nn.Module, batch: Any) -> list[CachedLayer]:
    """Return the layers of a decoder's cache. Return none for other models or without token ids."""
    if not is_decoder(model) or not isinstance(batch, Mapping) or "input_ids" not in batch:
        return []
    ids = batch["input_ids"][:1, :PROMPT]
    with torch.no_grad():
        cache = getattr(run_model(model, {"input_ids": ids, "use_cache": True}), "past_key_values", None)
    layers = []
    for layer in getattr(cache, "layers", []):
        tensors: list[Any] = [getattr(layer, name, None) for name in ("keys", "values")]
        if all(isinstance(x, Tensor) and x.dim() > 2 for x in tensors):
            counts = [x[0].numel() // x.shape[-2] for x in tensors]
            total = sum(count * x.element_size() for count, x in zip(counts, tensors, strict=True))
            # transformers keeps the window without the present token
            most = layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else None
            numbers = [count * x.is_floating_point() for count, x in zip(counts, tensors, strict=True)]
            size, latents = tensors[0].element_size(), isinstance(layer, LatentCache)
            layers.append(CachedLayer(total, most, (numbers[0], numbers[1]), size, latents))
        else:
            layers.append(CachedLayer(0, None, (0, 0), 0))  # it has no keys, or another layer's
    return layers


def longest_text(model: nn.Module) -> int:
    """Return the most tokens that a model reads, or `CACHE_TOKENS` if its configuration has no limit."""
    return longest_sequence(model) or CACHE_TOKENS


def reference_tokens(model: nn.Module) -> int:
    """Return the number of tokens of the sequence to whose cache a share to keep refers."""
    return min(CACHE_TOKENS, longest_text(model))


def cache_bytes(layers: list[CachedLayer], tokens: int) -> int:
    """Return the bytes of the cache of one sequence."""
    return round(sum(layer.bytes * min(tokens, layer.most or tokens) for layer in layers))


def kept_keys(model: nn.Module, tokens: int) -> int:
    """Return the bytes of decoded keys that the layers with latents of a model keep for one sequence."""
    modules = [module for module in model.modules() if isinstance(module, LatentProjection)]
    total = 0
    for module in {id(module.state): module for module in modules}.values():
        layer, size = module.state.layer, next(module.parameters()).element_size()
        numbers = layer.heads * layer.key_width or sum(count for _, count in layer.key_channels)
        total += min(module.state.kept_bytes, numbers * size * tokens)
    return total


# --- loss -----------------------------------------------------------------------------------------------


def measure_losses(model: nn.Module, batches: list[Any]) -> list[SequenceLosses]:
    """Return the losses of labels or next tokens, by batch. Return none if there is nothing to predict."""
    try:
        loss = model_loss(model, batches)
    except InputError:  # an encoder-decoder without labels and decoder ids has nothing to predict
        if isinstance(batches[0], Mapping) and batches[0].get("labels") is not None:
            raise
        return []
    return [] if loss.compares_outputs else loss.by_batch(model, batches)


def added_loss(before: list[SequenceLosses], after: list[SequenceLosses]) -> dict[str, float]:
    """Return the loss before, the mean loss added per token, and its standard error over sequences.

    With d_i the loss added to sequence i and n_i its tokens, the mean is r = Σ d_i/Σ n_i, and its variance is
    N/(N − 1)·Σ (d_i − r n_i)²/(Σ n_i)².
    """
    if not before:
        return {}
    count, total, changed = (
        torch.cat(x).cpu().double()
        for x in ([y.count for y in before], [y.total for y in before], [y.total for y in after])
    )
    tokens, added = count.sum(), changed - total
    mean = added.sum() / tokens
    variance = (added - mean * count).square().sum() / tokens.square() * len(count) / (len(count) - 1)
    spread = variance.sqrt() if len(count) > 1 else math.nan
    return {"loss_before": float(total.sum() / tokens), "loss_added": float(mean), "spread": float(spread)}


# --- time ------------------------------------------------------------------------------------------------


def measure_seconds(model: nn.Module, batch: Any, changes: list[Change]) -> dict[str, Any]:
    """Return the timed task, and the seconds of the original and the changed model in their fastest rounds.

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
    return {"timed": timed} | {f"seconds_{when}": min(times) for when, times in seconds.items()}
