"""The part ``kv``: keys and values out of one latent, which is what the cache keeps."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import run_model
from rankwise.compression.cached_layers import find_cached_layers
from rankwise.compression.kv_modules import LatentLayer, latent_change
from rankwise.compression.latent_curves import latent_curves
from rankwise.compression.latent_moments import Moments, layer_moments, layer_weight, spectrum
from rankwise.compression.latent_ranks import ranks_for_keep, ranks_for_tolerance
from rankwise.compression.memory import naming_layer
from rankwise.compression.outputs import main_output, relative_error
from rankwise.compression.part_checks import check_some, keep_sound
from rankwise.compression.parts import Change, Job, PartResult, Prepared
from rankwise.compression.records import LatentRank
from rankwise.errors import CompressionError

LEAST_TOKENS = 0.5
"""Calibration tokens for each channel of the latent at full rank, below which moments say too little."""


def prepare_keys_values(job: Job) -> Prepared:
    """Factor keys and values of each layer through one latent, with one budget of bytes over layers.

    Args:
        job: what to do; ``keep`` is a share of the bytes of the cache, ``tolerance`` nats of the output's KL,
            as predicted to second order.

    Raises:
        CompressionError: if no layer can be done, or the request fits none.
    """
    layers, left_out = _usable(job.model, job.batches[0])
    moments = layer_moments(job.model, layers, job.batches, job.seed, job.on_step)
    notes = _check_tokens(layers, moments)
    if job.calibrate:
        notes.append(
            "Keys and values are factored in closed form: steps of calibration are for qk and rotary alone."
        )
    found = []
    for layer, moment in zip(layers, moments, strict=True):
        with naming_layer(layer.module):
            found.append(spectrum(moment.weight, moment.tokens, moment.gradients))
    nats = [directions.nats for directions in found]
    size = next(job.model.parameters()).element_size()

    def chosen(ranks: list[int]) -> Change:
        factors = [directions.factors(rank) for directions, rank in zip(found, ranks, strict=True)]
        return latent_change(job.model, layers, factors)

    def change(keep: float) -> Change:
        return chosen(ranks_for_keep(layers, nats, keep, size))

    def finish(wanted: Job) -> PartResult:
        if wanted.keep is not None:
            ranks = ranks_for_keep(layers, nats, wanted.keep, size)
        else:
            assert wanted.tolerance is not None, "`compress` gives a share or a tolerance"
            ranks = ranks_for_tolerance(nats, wanted.tolerance)
        curves = latent_curves(job, layers, moments, found, size) if job.nulls else []
        swap = chosen(ranks)
        swap.apply()
        return PartResult(
            latents=_records(job.model, layers, nats, ranks),
            latent_curves=curves,
            tokens=moments[0].count,
            left_out=left_out,
            notes=notes,
            undo=swap.undo,
            redo=swap.apply,
        )

    linear = {layer.path(name) for layer in layers for name in (layer.key, layer.value)}
    return Prepared(linear, change, finish)


def _records(
    model: nn.Module, layers: list[LatentLayer], nats: list[Tensor], ranks: list[int]
) -> list[LatentRank]:
    return [
        LatentRank(
            part="kv",
            site=layer.module,
            layer=_number(model, layer),
            before=layer.full,
            full=layer.rank,
            rank=rank,
            nats=float(own[rank:].sum()),
        )
        for layer, own, rank in zip(layers, nats, ranks, strict=True)
    ]


def _usable(model: nn.Module, batch: Any) -> tuple[list[LatentLayer], dict[str, str]]:
    """Layers that give the same through a latent of full rank, from a cache too; reasons for all others."""
    found, reasons = find_cached_layers(model, batch)
    layers = [layer for _, layer in sorted(found.items())]
    failed = keep_sound(model, batch, layers, partial(_same_at_full_rank, model))
    reasons |= {
        layer.module: "its outputs change when keys and values are read out of a full latent"
        for layer in failed
    }
    check_some(
        model,
        layers,
        reasons,
        "attention whose cached keys and values come from linear layers of the same tokens",
        "Leave `kv` out of the parts; in Python, `rw.capture` shows which mixers the model has.",
    )
    return layers, reasons


def _same_at_full_rank(
    model: nn.Module, layers: list[LatentLayer], batch: Any, before: Tensor, bound: float
) -> bool:
    """Whether outputs stay what they are, read at once and read in two halves with a cache between them."""
    with latent_change(model, layers, [full_factors(layer_weight(model, layer)) for layer in layers]):
        at_once = main_output(model, batch)
        in_halves = _in_halves(model, batch)
    after = [at_once] if in_halves is None else [at_once, in_halves]
    real = batch.get("attention_mask")
    real = real.bool() if isinstance(real, Tensor) and real.dim() == 2 else None
    return all(relative_error(output, before, real) <= bound for output in after)


def full_factors(weight: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """W = up · down at full rank, in a random orthonormal basis.

    Args:
        weight: W (N, D).
        seed: of the basis.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(weight.shape)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=weight.dtype)).Q
    if weight.shape[1] == size:
        return basis, weight @ basis.mT
    return basis @ weight, basis.mT


def _in_halves(model: nn.Module, batch: Any) -> Tensor | None:
    """Outputs of a text of ids that is read in two calls; None for other batches."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or ids.shape[1] < 2 or set(batch) - {"input_ids", "attention_mask", "labels"}:
        return None
    half = ids.shape[1] // 2
    first: dict[str, Any] = {"input_ids": ids[:, :half], "use_cache": True}
    second: dict[str, Any] = {"input_ids": ids[:, half:], "use_cache": True}
    if mask is not None:
        first["attention_mask"], second["attention_mask"] = mask[:, :half], mask
    with torch.no_grad():
        start = run_model(model, first)
        end = run_model(model, {**second, "past_key_values": start.past_key_values})
    return torch.cat([start.logits, end.logits], 1)


def _number(model: nn.Module, layer: LatentLayer) -> int:
    at: Any = model.get_submodule(layer.module).layer_idx
    return int(at)


def _check_tokens(layers: list[LatentLayer], moments: list[Moments]) -> list[str]:
    """Refuse too little text, and say where second moments lack rank."""
    tokens, full = moments[0].count, max(layer.rank for layer in layers)
    if tokens < LEAST_TOKENS * full:
        raise CompressionError(
            "the calibration data",
            expected=f"at least {round(LEAST_TOKENS * full)} tokens for latents of up to {full} channels, "
            f"better {10 * full}",
            got=f"{tokens}",
            fix="Give more text.",
        )
    poor = sum(
        int(torch.linalg.matrix_rank(matrix, hermitian=True)) < matrix.shape[0]
        for moment in moments
        for matrix in (moment.tokens, moment.gradients)
    )
    if not poor:
        return []
    return [
        f"Second moments of {poor} sets of tokens or gradients lack full rank on {tokens} tokens: a ridge "
        "was added; directions never seen are dropped first. More text says more."
    ]
