"""How long a forward pass takes before and after, in rounds that take turns."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankwise._internals.forward import batch_size, first_sequences, run_model
from rankwise.compression.outputs import is_decoder
from rankwise.compression.record import Latency

SECONDS = 3.0
"""For each pair of measurements; at least five rounds are done, of which the first does not count."""
ROUNDS = 25
STEPS = ROUNDS + 1
"""Tokens that decoding may add to its cache."""
LENGTHS = (4, 1)
"""Divisors of the longest length that is measured."""
LONGEST = 512
"""Tokens, at most."""


def measure_latency(
    model: nn.Module, batch: Any, before: Callable[[], None], after: Callable[[], None]
) -> tuple[list[Latency], list[str]]:
    """Time prefill at two lengths and, for models that generate, one token of decoding after each.

    Decoding fills the rest of a length; where a length has no room for that, its decoding is left out.

    Of a batch of token ids, one sequence is repeated or cut to the lengths. Of any other batch, its first
    sequence and the whole batch are run.

    Args:
        model: compressed, in evaluation mode.
        batch: what it takes, on its device.
        before: makes the model as it was.
        after: makes it compressed again.

    Returns:
        The times, and notes on what was left out.
    """
    found, notes = [], []
    for given, tokens in _inputs(model, batch):
        found.append(_turns("prefill", tokens, partial(run_model, model, given), model, before, after))
        if isinstance(given, dict) and is_decoder(model):
            if tokens <= STEPS:
                notes.append(
                    f"Decoding at a length of {tokens} tokens was not timed: {STEPS} of them are decoded, "
                    "and none is left for the cache."
                )
                continue
            found.append(_decode(model, given, tokens, before, after))
    return found, notes


def _inputs(model: nn.Module, batch: Any) -> list[tuple[Any, int]]:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if ids is None:
        alone = first_sequences(batch, 1)
        return [(alone, 1), (batch, batch_size(batch))]
    longest = min(longest_input(model) or LONGEST, LONGEST)
    made = []
    for divisor in LENGTHS:
        tokens = max(2, longest // divisor)
        times = -(-tokens // ids.shape[1])
        tiled = ids[:1].repeat(1, times)[:, :tokens]
        given = {"input_ids": tiled}
        if "attention_mask" in batch:
            given["attention_mask"] = torch.ones_like(tiled)
        if "decoder_input_ids" in batch:
            given["decoder_input_ids"] = tiled
        made.append((given, tokens))
    return made


def longest_input(model: nn.Module) -> int | None:
    """Positions that the model's configuration names, less two that padding indices take.

    Args:
        model: the model.
    """
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return positions - 2 if isinstance(positions, int) and positions > 4 else None


def _decode(
    model: nn.Module,
    given: dict[str, Tensor],
    tokens: int,
    before: Callable[[], None],
    after: Callable[[], None],
) -> Latency:
    caches = {}
    given = {"input_ids": given["input_ids"][:, : tokens - STEPS]}
    with torch.no_grad():
        for name, make in (("after", after), ("before", before)):
            if name == "before":
                make()
            caches[name] = run_model(model, {**given, "use_cache": True}).past_key_values
    after()
    token, state = given["input_ids"][:, -1:], {"name": "after"}

    def step() -> Any:
        return run_model(
            model, {"input_ids": token, "past_key_values": caches[state["name"]], "use_cache": True}
        )

    def as_before() -> None:
        before()
        state["name"] = "before"

    def as_after() -> None:
        after()
        state["name"] = "after"

    return _turns("decode", given["input_ids"].shape[1], step, model, as_before, as_after)


def _turns(
    phase: Literal["prefill", "decode"],
    tokens: int,
    call: Callable[[], Any],
    model: nn.Module,
    before: Callable[[], None],
    after: Callable[[], None],
) -> Latency:
    cuda = next(
        (parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"), None
    )

    def timed() -> float:
        if cuda is not None:
            torch.cuda.synchronize(cuda)
        start = time.perf_counter()
        call()
        if cuda is not None:
            torch.cuda.synchronize(cuda)
        return 1e3 * (time.perf_counter() - start)

    old: list[float] = []
    new: list[float] = []
    started = time.perf_counter()
    with torch.inference_mode():
        while len(old) < 5 or (len(old) < ROUNDS - 2 and time.perf_counter() - started < SECONDS):
            new.append(timed())
            before()
            try:
                old.append(timed())
            finally:
                after()
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
