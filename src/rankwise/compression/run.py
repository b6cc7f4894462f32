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
from rankwise.compression.parts import Job, PartResult, parts
from rankwise.compression.prices import Prices, measure_prices
from rankwise.compression.records import Compression, LayerPrice
from rankwise.compression.remarks import grown, slower, unchanged
from rankwise.compression.request import (
    check_budget,
    check_untouched,
    chosen_parts,
    listed_batches,
    targets_of,
)
from rankwise.errors import CompressionError

SLOWER = 1.03
"""After/before above which a model is called slower, if 9 rounds of 10 say so too."""


def compress_qk(
    model: nn.Module,
    batches: Iterable[Any],
    tolerance: float | int | None = None,
    width: float | int | None = None,
    calibrate: int = 0,
    held_out: Iterable[Any] | None = None,
    nulls: bool = True,
    time: bool = True,
    seed: int = 0,
    on_step: Callable[[str], None] | None = None,
) -> Compression:
    r"""Narrow the queries and keys of a trained model, in place, to what its attention needs of them.

    Formula: logits Q Kᵀ become (Q A)(K B)ᵀ with A, B of r columns: the least squared error over all pairs of
    the tokens seen, A = S^½ V_r, B = S^−½ V_r, V the eigenvectors of S^½ P S^½, P = Σ qqᵀ, S = Σ kkᵀ, keys
    not centred (KQ-SVD). Weights and biases take A and B in, exactly. Widths r differ by head: they are taken
    where they save most attention KL, mean over rows of KL(M‖M') in nats, M the original's attention.
    Needs: queries and keys that come from linear layers and meet in inner products alone. That is tested on
    the model itself; rotated positions and norms of queries and keys are refused. Heads that share keys keep
    sharing them.
    Cost: one run of the model on the batches, whose queries and keys stay in memory; 32 dense softmaxes for
    each head of 16 sequences; three for each step of calibration.
    Source: KQ-SVD, arXiv 2512.05916.

    Args:
        model: any module; changed in place. Attention code, class and configuration stay.
        batches: calibration data, dicts or tensors the model takes; a few thousand tokens.
        tolerance: mean attention KL it may cost on the calibration data, nats; 0.01 where no width is given.
        width: or the mean width of a key head.
        calibrate: steps of Adam on the attention KL of each layer; Ctrl-C keeps what is done.
        held_out: data to measure prices on; the calibration data by default, and the record says so.
        nulls: measure also what joint PCA, key PCA, weights alone and random directions would cost.
        time: measure latency before and after.
        seed: of calibration and random directions.
        on_step: told what is under way.

    Returns:
        Widths, prices and gains as a record: ``.save(path)``, ``.to_html(path)``.

    Raises:
        CompressionError: if the width is not below the present one, the text is too short, the model was
            compressed before, or none of its layers can be done. The model is then as it was.

    Warns:
        UserWarning: if the model became slower on this machine.

    Examples:
        >>> import torch, rankwise as rw
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = BertModel(BertConfig(vocab_size=99, **sizes)).eval()
        >>> batch = {"input_ids": torch.randint(0, 99, (4, 24))}
        >>> done = rw.compression.compress_qk(model, [batch], width=4, time=False, nulls=False)
        >>> done.mean_width, sorted({head.before for head in done.heads})
        (4.0, [16])
        >>> model.encoder.layer[0].attention.self.query  # doctest: +ELLIPSIS
        NarrowProjection(
          ... of 32 channels
          (narrow): Linear(in_features=32, out_features=..., bias=True)
        )
    """
    if width is not None and tolerance is not None:
        raise CompressionError(
            "`compress_qk`", expected="a tolerance or a width", got="both", fix="Leave one of them out."
        )
    tolerance = 0.01 if width is None and tolerance is None else tolerance
    return _compress(
        model, batches, ("qk",), None, tolerance, width, calibrate, held_out, nulls, time, seed, on_step
    )


def compress(
    model: nn.Module,
    batches: Iterable[Any],
    keep: float | int | Mapping[str, float | int] | None = None,
    tolerance: float | int | Mapping[str, float | int] | None = None,
    parts: str | Sequence[str] = "qk",
    calibrate: int = 0,
    held_out: Iterable[Any] | None = None,
    nulls: bool = True,
    time: bool = True,
    seed: int = 0,
    on_step: Callable[[str], None] | None = None,
    width: float | int | None = None,
) -> Compression:
    """Make parts of a trained model smaller in place, and measure the cost and the savings.

    Each part has its own target, and starts from the model that the earlier parts left. Their order is fixed:
    ``heads`` removes attention heads with their weights; ``qk`` narrows queries and keys (`compress_qk`);
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
        nulls: measure other methods for comparison.
        time: measure latency before and after.
        seed: random seed.
        on_step: called with a description of each step.
        width: for ``qk`` alone, the mean width of a key head, as in `compress_qk`.

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
        >>> done = rw.compress(model, [batch], keep={"qk": 0.75, "kv": 0.5}, time=False, nulls=False)
        >>> done.parts, done.cache_bytes_after / done.cache_bytes_before <= 0.5
        (['qk', 'kv'], True)
    """
    if width is not None and (keep is not None or tolerance is not None or chosen_parts(parts) != ["qk"]):
        raise CompressionError(
            "`width`",
            expected="the part qk alone, with neither a share to keep nor a tolerance",
            got=f"parts {parts!r}, keep {keep}, tolerance {tolerance}",
            fix="Use `keep` or `tolerance` for other parts.",
        )
    keep = 0.5 if keep is None and tolerance is None and width is None else keep
    return _compress(
        model, batches, parts, keep, tolerance, width, calibrate, held_out, nulls, time, seed, on_step
    )


def _compress(
    model: nn.Module,
    batches: Iterable[Any],
    names: str | Sequence[str],
    keep: float | int | Mapping[str, float | int] | None,
    tolerance: float | int | Mapping[str, float | int] | None,
    width: float | int | None,
    calibrate: int,
    held_out: Iterable[Any] | None,
    nulls: bool,
    time: bool,
    seed: int,
    on_step: Callable[[str], None] | None,
) -> Compression:
    targets = targets_of(names, keep, tolerance)
    chosen = list(targets)
    check_untouched(model)
    for own_keep, own_tolerance in targets.values():
        check_budget(own_keep, own_tolerance, width, calibrate)
    data = listed_batches(batches, "batches")
    figures = listed_batches(held_out, "held_out") if held_out is not None else []
    under_way = ""

    def said(what: str) -> None:
        nonlocal under_way
        under_way = what
        if on_step is not None:
            on_step(what)

    job = Job(model, data, figures or data, None, None, width, calibrate, nulls, seed, said)
    done: list[PartResult] = []
    with eval_mode(model):
        try:
            for name, (own_keep, own_tolerance) in targets.items():
                own = replace(job, keep=own_keep, tolerance=own_tolerance)
                done.append(parts()[name](own))
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
        warnings.warn(said_so, UserWarning, stacklevel=3)
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
            kl_end_to_end=prices.layer_moves.get(site, math.nan),
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
        latent_curves=[curve for result in done for curve in result.latent_curves],
        kl=sum(known) / len(known) if known else float("nan"),
        left_out={name: reason for result in done for name, reason in result.left_out.items()},
        notes=notes,
        about={"torch": torch.__version__, "threads": str(torch.get_num_threads()), "seed": str(job.seed)},
        **prices.fields,
    )
