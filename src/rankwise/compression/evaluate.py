"""Costs and savings: measure the original and the compressed model on the same data."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.forward import (
    Change,
    batch_size,
    config_value,
    device_of,
    first_sequences,
    run_model,
    tensors_in,
    to_device,
)
from rankwise._internals.linalg import as_float64
from rankwise._internals.torch_private import preserve_state
from rankwise.auditing.text_inputs import positions_of
from rankwise.compression.layers import output_and_mask, relative_error
from rankwise.compression.record import Latency
from rankwise.errors import first_line
from rankwise.importance.losses import real_outputs, real_tokens
from rankwise.tracing import CapturedMixer, CapturedState, capture

SEQUENCES = 16
"""Maximum number of sequences on which outputs are compared."""
CACHE_TOKENS = 8
"""Number of tokens for which the size of the cache is measured."""
SECONDS = 3.0
"""Seconds spent on each latency; at least five rounds are run, and the first does not count."""
ROUNDS = 25
STEPS = ROUNDS + 1
"""Maximum number of tokens that timed decoding adds to its cache."""
LENGTHS = (4, 1)
"""The timed lengths are the longest length divided by these."""
LONGEST = 512
"""Maximum number of tokens of the longest timed length."""


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
    notes: list[str] = field(default_factory=list)

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
        on_step("measuring latency")
        try:
            new.fields["latency"], new.notes = measure_latency(model, batches[0], changes)
        except Exception as error:
            new.notes = [f"Latency was not measured: {type(error).__name__}: {first_line(error)}."]
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
    task = measure_task(model, batches)
    fields = {
        f"loss_{when}": task.loss,
        f"metric_{when}": task.accuracy,
        "metric": task.metric,
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


# --- loss and accuracy -----------------------------------------------------------------------------------


@dataclass
class Task:
    """Sums of losses and correct predictions over batches."""

    loss_sum: float = 0.0
    targets: int = 0
    correct: int = 0
    labels: int = 0
    """Class labels that accuracy counts."""
    metric: Literal["", "accuracy", "token accuracy"] = ""

    @property
    def loss(self) -> float:
        """Mean loss per label or next token; NaN without any."""
        return self.loss_sum / self.targets if self.targets else math.nan

    @property
    def accuracy(self) -> float:
        """Share of correct predictions; NaN without class labels."""
        return self.correct / self.labels if self.labels else math.nan


def measure_task(model: nn.Module, batches: list[Any]) -> Task:
    """Return loss and accuracy on batches with ``labels``; for other batches, a decoder's next-token loss."""
    task = Task()
    for batch in batches:
        if not isinstance(batch, dict):
            continue
        labelled = isinstance(batch.get("labels"), Tensor)
        if labelled or ("input_ids" in batch and is_decoder(model)):
            with torch.no_grad():
                out = run_model(model, batch)
            if labelled:
                _add_labels(task, out, batch["labels"], is_decoder(model))
            else:
                _add_next_tokens(task, out, batch)
    return task


def _add_labels(task: Task, out: Any, labels: Tensor, decoder: bool) -> None:
    loss, logits = getattr(out, "loss", None), getattr(out, "logits", None)
    shifted = decoder and labels.dim() == 2  # nothing predicts the first token
    count = int(((labels[:, 1:] if shifted else labels) != -100).sum())
    if loss is not None and count:
        task.loss_sum, task.targets = task.loss_sum + float(loss) * count, task.targets + count
    if not isinstance(logits, Tensor) or labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        return
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    real = labels != -100
    task.correct += int((logits.argmax(-1) == labels)[real].sum())
    task.labels += int(real.sum())
    task.metric = "accuracy" if labels.dim() == 1 else "token accuracy"


def _add_next_tokens(task: Task, out: Any, batch: dict[str, Any]) -> None:
    logits, ids = getattr(out, "logits", None), batch["input_ids"]
    if logits is None:
        return
    real = real_tokens(batch, ids.shape)
    pairs = real[:, 1:] & real[:, :-1]
    task.loss_sum += float(F.cross_entropy(logits[:, :-1][pairs].float(), ids[:, 1:][pairs], reduction="sum"))
    task.targets += int(pairs.sum())


# --- latency ---------------------------------------------------------------------------------------------


def measure_latency(model: nn.Module, batch: Any, changes: list[Change]) -> tuple[list[Latency], list[str]]:
    """Time prefill at two lengths and, for decoders, decoding of one token after each; return also notes.

    A decoder fills its cache up to each length; a length without room for the decoded tokens is not timed.
    """
    found, notes = [], []
    for inputs, tokens in _inputs(model, batch):
        run = partial(run_model, model, inputs)
        found.append(_alternate("prefill", tokens, run, run, model, changes))
        if isinstance(inputs, dict) and is_decoder(model):
            if tokens <= STEPS:
                notes.append(
                    f"Decoding at a length of {tokens} tokens was not timed: {STEPS} of them are decoded, "
                    "and none is left for the cache."
                )
                continue
            found.append(_time_decoding(model, inputs["input_ids"][:, : tokens - STEPS], changes))
    return found, notes


def _inputs(model: nn.Module, batch: Any) -> list[tuple[Any, int]]:
    """Return one sequence of ids at two lengths; for other data, the first sequence and the whole batch."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if ids is None:
        return [(first_sequences(batch, 1), 1), (batch, batch_size(batch))]
    positions = positions_of(getattr(model, "config", None))
    # RoBERTa and OPT reserve two positions for padding.
    longest = positions - 2 if positions is not None and positions > 4 else LONGEST
    given = {"input_ids": ids}
    if "attention_mask" in batch:
        given["attention_mask"] = torch.ones_like(ids)
    decoded = batch.get("decoder_input_ids", batch.get("labels"))
    if config_value(model, "is_encoder_decoder") and isinstance(decoded, Tensor) and decoded.dim() == 2:
        given["decoder_input_ids"] = decoded.clamp(min=0)  # ignored labels are -100
    lengths = [max(2, min(longest, LONGEST) // divisor) for divisor in LENGTHS]
    return [
        ({name: own[:1, torch.arange(tokens) % own.shape[1]] for name, own in given.items()}, tokens)
        for tokens in lengths
    ]


def _time_decoding(model: nn.Module, ids: Tensor, changes: list[Change]) -> Latency:
    """Time steps of decoding; the original and the compressed model each continue their own cache."""

    def fill() -> Any:
        return run_model(model, {"input_ids": ids, "use_cache": True}).past_key_values

    def step(cache: Any) -> Any:
        # not `run_model`, which would copy the cache within the measured time
        return model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)

    with torch.no_grad():
        new = fill()
        with original(changes):
            old = fill()
    return _alternate("decode", ids.shape[1], partial(step, old), partial(step, new), model, changes)


def _alternate(
    phase: Literal["prefill", "decode"],
    tokens: int,
    before: Callable[[], Any],
    after: Callable[[], Any],
    model: nn.Module,
    changes: list[Change],
) -> Latency:
    """Time the compressed and the original model in alternating rounds."""
    device = device_of(model)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def seconds(run: Callable[[], Any]) -> float:
        start = now()
        run()
        return now() - start

    old: list[float] = []
    new: list[float] = []
    started = time.perf_counter()
    with torch.inference_mode(), preserve_state(model):
        while len(old) < 5 or (len(old) < ROUNDS - 2 and time.perf_counter() - started < SECONDS):
            new.append(1e3 * seconds(after))
            with original(changes):
                old.append(1e3 * seconds(before))
    first, second = torch.tensor(old[1:]), torch.tensor(new[1:])
    ratios = second / first
    return Latency(
        phase=phase,
        tokens=tokens,
        before=float(first.median()),
        after=float(second.median()),
        ratio=float(ratios.median()),
        low=float(ratios.quantile(0.1)),
        high=float(ratios.quantile(0.9)),
    )
