"""`compress`: one budget over parts of a model, with what it costs and what it gains, measured."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from rankwise._internals.forward import batch_size, eval_mode
from rankwise.compression.budget import SharedBudget
from rankwise.compression.memory import no_memory, out_of_memory
from rankwise.compression.output_price import OutputPrice
from rankwise.compression.parts import Job, PartResult, parts
from rankwise.compression.prices import Prices, measure_prices
from rankwise.compression.records import Budget, Compression, LayerPrice
from rankwise.compression.remarks import grown, slower, unchanged
from rankwise.compression.request import (
    check_budget,
    check_untouched,
    chosen_parts,
    listed_batches,
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
    keep: float | int | None = None,
    tolerance: float | int | None = None,
    parts: Sequence[str] = ("qk",),
    calibrate: int = 0,
    held_out: Iterable[Any] | None = None,
    nulls: bool = True,
    time: bool = True,
    seed: int = 0,
    on_step: Callable[[str], None] | None = None,
    cache_tokens: int | None = None,
    width: float | int | None = None,
) -> Compression:
    """Compress parts of a trained model in place, under one budget.

    Parts are done one after another, each on the model that the ones before left: ``heads``, heads removed
    with their weights; ``qk``, narrower queries and keys (`compress_qk`); ``rotary``, the same where
    positions are rotated in, by pairs; ``kv``, a decoder's keys and values out of one latent, which is what
    its cache keeps, before rotation. After ``qk`` or ``rotary``, ``kv`` reads the narrow keys out of it.

    Several parts share one budget of bytes: of the weights of all linear layers that they make smaller, and
    of the cache of ``cache_tokens`` tokens. Each part is tried alone at some shares; what it saves and what
    that costs the model's outputs are measured, and bytes are taken where they cost least. The price is
    KL(p‖p') of the outputs in nats, mean over tokens, or ‖y' − y‖²/‖y‖² where the model gives no logits.

    Args:
        model: any module; changed in place.
        batches: calibration data.
        keep: share to keep, 0 < keep < 1; 0.5 by default. Of several parts, a share of these bytes. Of one
            part alone, of its own unit: of ``qk`` and ``rotary`` the width, of ``kv`` the bytes of the cache,
            of ``heads`` their number.
        tolerance: or what it may cost. Of several parts, the price of all together on the calibration data.
            Of one part alone, nats: of ``qk`` and ``rotary`` the attention KL, of ``kv`` the KL of the
            outputs as predicted to second order; of ``heads``, the share of the loss that removing them
            together may cost, the loss as `rankwise.importance` takes it.
        parts: which, by name.
        calibrate: steps of Adam for each layer.
        held_out: data to measure prices on.
        nulls: measure other ways beside.
        time: measure latency before and after.
        seed: of whatever is drawn.
        on_step: told what is under way.
        cache_tokens: tokens whose cache counts in a budget that parts share; by default as many as the model
            has positions, less two that some families reserve for padding, 2,048 at most.
        width: or the mean width of a key head, for ``qk`` alone, as in `compress_qk`.

    Returns:
        Widths, prices and gains.

    Raises:
        CompressionError: if a part is unknown, the budget is not between 0 and 1, or a part cannot be done:
            then no part is.
    """
    if keep is not None and tolerance is not None:
        raise CompressionError(
            "`compress`", expected="a share to keep or a tolerance", got="both", fix="Leave one of them out."
        )
    if width is not None and (keep is not None or tolerance is not None or chosen_parts(parts) != ["qk"]):
        raise CompressionError(
            "`width`",
            expected="the part qk alone, with neither a share to keep nor a tolerance",
            got=f"parts {parts!r}, keep {keep}, tolerance {tolerance}",
            fix="Use `keep` or `tolerance` for other parts.",
        )
    keep = 0.5 if keep is None and tolerance is None and width is None else keep
    return _compress(
        model,
        batches,
        parts,
        keep,
        tolerance,
        width,
        calibrate,
        held_out,
        nulls,
        time,
        seed,
        on_step,
        cache_tokens,
    )


def _compress(
    model: nn.Module,
    batches: Iterable[Any],
    names: Sequence[str],
    keep: float | int | None,
    tolerance: float | int | None,
    width: float | int | None,
    calibrate: int,
    held_out: Iterable[Any] | None,
    nulls: bool,
    time: bool,
    seed: int,
    on_step: Callable[[str], None] | None,
    cache_tokens: int | None = None,
) -> Compression:
    chosen = chosen_parts(names)
    check_untouched(model)
    check_budget(keep, tolerance, width, calibrate)
    data = listed_batches(batches, "batches")
    figures = listed_batches(held_out, "held_out") if held_out is not None else []
    under_way = ""

    def said(what: str) -> None:
        nonlocal under_way
        under_way = what
        if on_step is not None:
            on_step(what)

    job = Job(model, data, figures or data, keep, tolerance, width, calibrate, nulls, seed, said)
    done: list[PartResult] = []
    budget: Budget | None = None
    with eval_mode(model):
        try:
            if len(chosen) == 1:
                done.append(parts()[chosen[0]](job).finish(job))
            else:
                shared = SharedBudget(job, cache_tokens)
                held_out_price = OutputPrice(model, job.figures)
                done += shared.do(chosen)
                budget = shared.record().model_copy(update={"price_held_out": held_out_price.now()})
            prices = measure_prices(model, job.figures, done, time, said)
        except BaseException as error:
            for result in reversed(done):
                result.undo()
            if out_of_memory(error):
                raise no_memory(model, error, under_way) from error
            raise
    record = _record(model, job, chosen, done, prices, bool(figures)).model_copy(update={"budget": budget})
    _note_structure(model)
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


def _note_structure(model: nn.Module) -> None:
    """Into the model's configuration, so that `save_pretrained` writes it."""
    if hasattr(model, "config") and hasattr(model, "save_pretrained"):
        from rankwise.compression.auto_model import note_structure

        note_structure(model)
