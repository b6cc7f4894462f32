"""Preview the ways to make a model smaller, next to quantized caches: costs and sizes, without a change."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from rankwise._internals.batches import each_batch, to_device, without_logits
from rankwise._internals.forward import Progress, config_value, device_of, eval_mode, preserve_random_state
from rankwise._internals.threads import exclusive
from rankwise.compression.evaluate import cache_bytes, measure_row, reference_tokens, refusal, snapshot
from rankwise.compression.quantized_cache import is_decoder, quantized_cache, quantized_latents
from rankwise.compression.records import Preview, PreviewRow
from rankwise.compression.run import check_compressible, part_targets, read_lengths
from rankwise.compression.trials import Job, check_finite, find_part, main_output, solve_part

BITS, LATENT_BITS = (8, 4, 3), 8
"""Bits of simulated keys and values, and of simulated latents."""
SHARES = (0.75, 0.5, 0.25)
"""Shares to keep at which each part is previewed."""


@exclusive
def preview(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    held_out: Iterable[Any] | None = None,
    parts: str | Sequence[str] | None = None,
    seed: int = 0,
    on_row: Callable[[Preview], object] = lambda preview: None,
    on_progress: Progress = lambda step, done: None,
) -> Preview:
    """Measure the cost and the savings of each way to make a model smaller. The model stays unchanged.

    The ways are keys and values of 8, 4 and 3 bits, which are simulated, and each part of `compress` at the
    shares 0.75, 0.5 and 0.25. A way that fails has a row with the reason.
    Cost: about one `compress` per row.

    Args:
        model: model as for `compress`.
        batches: calibration data.
        held_out: data on which the costs are measured; the calibration data by default.
        parts: names of the parts; all by default.
        seed: random seed of calibration and of sampled labels.
        on_row: function called after each row with the preview so far.
        on_progress: function called with each step's text, and the finished share of these steps, or NaN.

    Raises:
        CompressionError: if the model cannot be compressed, for instance because it is compressed already.
        InputError: if there are no batches, or the model does not run on one of them.

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)).eval()
        >>> batch = {"input_ids": torch.randint(0, 50, (4, 24))}
        >>> [(row.part, row.keep, row.bits) for row in preview(model, [batch], parts="width").rows][:4]
        [('', nan, 8), ('', nan, 4), ('', nan, 3), ('width', 0.75, 0)]
    """
    names = list(part_targets(parts, 0.5, None))
    check_compressible(model)
    data = list(each_batch(batches))
    eval_data = list(each_batch(held_out, "held_out")) if held_out is not None else data
    with eval_mode(model), preserve_random_state(model):
        read_lengths(model, data, "batches")
        lengths = [max(each, default=0) for each in read_lengths(model, eval_data, "held_out")]
        short = without_logits(model, to_device(data[0], device_of(model)))
        check_finite(model, main_output(model, short))
        before = snapshot(model, eval_data)
        done = Preview(
            model=config_value(model, "name_or_path") or type(model).__name__,
            measured_on="the calibration data" if held_out is None else "held-out data",
            cache_tokens=reference_tokens(model),
            parameters=before.parameters,
            cache_bytes=cache_bytes(before.cache, reference_tokens(model)),
            windowed=any(layer.most is not None for layer in before.cache),
        )
        measure = partial(measure_row, model, eval_data, lengths, before)
        for row in _rows(model, names, data, eval_data, measure, seed, on_progress):
            done = done.model_copy(update={"rows": [*done.rows, row]})
            on_row(done)
    return done


def _rows(
    model: nn.Module,
    names: list[str],
    data: list[Any],
    eval_data: list[Any],
    measure: Callable[..., PreviewRow],
    seed: int,
    report: Progress,
) -> Iterator[PreviewRow]:
    for bits in BITS if is_decoder(model) else ():
        report(f"{bits}-bit keys and values", math.nan)
        yield measure([partial(quantized_cache, model, bits)], bits=bits)
    for name in names:
        try:
            found = find_part(name, model, data[0])
        except Exception as error:  # a way that fails must not lose the others
            yield PreviewRow(part=name, refused=refusal(error))
            continue
        reused: dict[str, Any] = {}
        for uniform, keep in product([False, True] if name == "heads" else [False], SHARES):
            job = Job(
                model, found, data, eval_data, keep,
                seed=seed, on_progress=report, reused=reused, uniform=uniform,
            )  # fmt: skip
            ways = [lambda name=name, job=job: solve_part(name, job).change]
            row = measure(ways, part=name, keep=keep, uniform=uniform)
            yield row
            if name == "kv" and not row.refused:
                ways.append(partial(quantized_latents, model, LATENT_BITS))
                yield measure(ways, part=name, keep=keep, bits=LATENT_BITS)
