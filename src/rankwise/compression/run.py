"""Compress parts of a model, each to its own target, and measure the costs and the savings."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rankwise._internals.forward import batch_size, eval_mode
from rankwise.compression.auto_model import note_structure
from rankwise.compression.memory import no_memory, out_of_memory
from rankwise.compression.parts import Job, PartResult
from rankwise.compression.parts import parts as known_parts
from rankwise.compression.prices import Prices, measure_prices
from rankwise.compression.record import Compression, LayerPrice
from rankwise.compression.remarks import grown, slower, unchanged
from rankwise.compression.request import (
    check_budget,
    check_untouched,
    listed_batches,
    targets_of,
)

SLOWER = 1.03
"""After/before above which a model is called slower, if 9 rounds of 10 say so too."""


def compress(
    model: nn.Module,
    batches: Iterable[Any],
    keep: float | int | Mapping[str, float | int] | None = None,
    tolerance: float | int | Mapping[str, float | int] | None = None,
    parts: str | Sequence[str] = "qk",
    calibrate: int = 0,
    held_out: Iterable[Any] | None = None,
    time: bool = False,
    seed: int = 0,
    on_step: Callable[[str], None] | None = None,
) -> Compression:
    """Make parts of a trained model smaller in place, and measure the cost and the savings.

    Each part has its own target, and starts from the model that the earlier parts left. Their order is fixed:
    ``heads`` removes attention heads with their weights; ``qk`` narrows queries and keys ;
    ``rotary`` does the same for rotated positions, in pairs of channels; ``kv`` computes a decoder's keys and
    values from one latent, which its cache stores. After ``qk`` or ``rotary``, ``kv`` reads the narrow keys.

    Args:
        model: any module; changed in place.
        batches: calibration data.
        keep: share to keep, 0 < keep < 1; 0.5 by default. A mapping names its parts, such as
            ``{"heads": 0.9, "kv": 0.5}``; a number applies to each of `parts`. The unit depends on the part:
            the width for ``qk`` and ``rotary``, bytes of the cache for ``kv``, the number of heads for
            ``heads``.
        tolerance: instead of `keep`, the largest cost on the calibration data, as a number or a mapping:
            attention KL in nats for ``qk`` and ``rotary``; KL of the outputs in nats, predicted to second
            order, for ``kv``; a share of the loss for ``heads``, as `rankwise.importance` measures it.
        parts: names of the parts, if neither `keep` nor `tolerance` is a mapping.
        calibrate: steps of Adam per layer.
        held_out: data on which the costs are measured; the calibration data by default.
        time: measure latency before and after.
        seed: random seed.
        on_step: called with a description of each step.

    Returns:
        Widths, costs and savings. The cost `output_kl` has the same unit for all parts.

    Raises:
        CompressionError: if a part is unknown or has two targets, a target is out of range, or a part cannot
            be done. The model is then unchanged.

    Examples:
        >>> import torch, rankwise as rw
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)).eval()
        >>> batch = {"input_ids": torch.randint(0, 50, (4, 24))}
        >>> done = rw.compress(model, [batch], keep={"qk": 0.75, "kv": 0.5})
        >>> done.parts, done.cache_bytes_after / done.cache_bytes_before <= 0.5
        (['qk', 'kv'], True)
    """
    keep = 0.5 if keep is None and tolerance is None else keep
    targets = targets_of(parts, keep, tolerance)
    chosen = list(targets)
    check_untouched(model)
    for own_keep, own_tolerance in targets.values():
        check_budget(own_keep, own_tolerance, calibrate)
    data = listed_batches(batches, "batches")
    figures = listed_batches(held_out, "held_out") if held_out is not None else []
    under_way = ""

    def said(what: str) -> None:
        nonlocal under_way
        under_way = what
        if on_step is not None:
            on_step(what)

    job = Job(model, data, figures or data, None, None, calibrate, seed, said)
    done: list[PartResult] = []
    with eval_mode(model):
        try:
            for name, (own_keep, own_tolerance) in targets.items():
                own = replace(job, keep=own_keep, tolerance=own_tolerance)
                done.append(known_parts()[name](own))
            prices = measure_prices(model, job.figures, done, time, said)
        except BaseException as error:
            for result in reversed(done):
                result.undo()
            if out_of_memory(error):
                raise no_memory(model, error, under_way) from error
            raise
    record = _record(model, job, chosen, done, prices, bool(figures))
    if hasattr(model, "config") and hasattr(model, "save_pretrained"):
        note_structure(model)
    slow = [slower(timing, record) for timing in record.latency if timing.ratio > SLOWER and timing.low > 1]
    for said_so in slow:
        warnings.warn(said_so, UserWarning, stacklevel=2)
    return record.model_copy(update={"notes": [*record.notes, *slow]})


def _record(
    model: nn.Module, job: Job, names: list[str], done: list[PartResult], prices: Prices, held_out: bool
) -> Compression:
    heads = [head for result in done for head in result.heads]
    numbers = {head.site: head.layer for head in heads}
    kl = {latent.site: math.nan for result in done for latent in result.latents}
    numbers |= {latent.site: latent.layer for result in done for latent in result.latents}
    for result in done:  # of removed heads there is no attention to compare
        kl |= {site: own for site, own in result.kl.items() if site not in kl or not math.isnan(own)}
    layers = [
        LayerPrice(
            site=site,
            layer=numbers[site],
            kl=own,
            output_error=prices.layer_errors.get(site, math.nan),
        )
        for site, own in kl.items()
    ]
    known = [layer.kl for layer in layers if not math.isnan(layer.kl)]
    notes = [note for result in done for note in result.notes]
    notes += [note for name, result in zip(names, done, strict=True) for note in unchanged(name, result)]
    notes += [*grown(prices.fields), *prices.notes]
    if not held_out:
        notes.append(
            "Prices were measured on the calibration data itself: held-out text shows what others pay."
        )
    return Compression(
        model=getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__,
        parts=names,
        complete=all(result.complete for result in done),
        sequences=sum(batch_size(batch) for batch in job.batches),
        tokens=max(result.tokens for result in done),
        figures="held-out data" if held_out else "the calibration data",
        heads=heads,
        layers=layers,
        curves=[curve for result in done for curve in result.curves],
        latents=[latent for result in done for latent in result.latents],
        kl=sum(known) / len(known) if known else float("nan"),
        left_out={name: reason for result in done for name, reason in result.left_out.items()},
        notes=notes,
        about={"torch": torch.__version__, "threads": str(torch.get_num_threads()), "seed": str(job.seed)},
        **prices.fields,
    )
