"""The tables of a compression: the same for the console and the page."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from rankwise._internals.records import format_number
from rankwise.compression.latent_tables import latent_tables, latent_words
from rankwise.compression.records import Budget, Compression


class CompressionTable(NamedTuple):
    """A titled table of words."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def headline(record: Compression) -> str:
    """What was done, paid and won, in one sentence."""
    narrowed = [head for head in record.heads if head.part != "heads"]
    removed = [head for head in record.heads if head.part == "heads"]
    words = []
    if removed:
        words.append(f"{sum(not head.width for head in removed)} of {len(removed)} heads removed")
    if narrowed:
        before = sum(head.before for head in narrowed) / len(narrowed)
        words.append(f"queries and keys narrowed from {before:.0f} to {record.mean_width:.1f} on average")
    if record.latents:
        words.append(latent_words(record))
    done = "; ".join(words)
    saved = 1 - record.parameters_after / record.parameters_before if record.parameters_before else math.nan
    price = (
        f"attention KL {format_number(record.kl, 4)} nats"
        if math.isfinite(record.kl)
        else f"error of the output {format_number(record.output_error, 4)}"
    )
    gain = f"{saved:.1%} fewer parameters" if saved >= 0 else f"{-saved:.1%} more parameters"
    if record.latents and record.cache_bytes_before:
        gain += f", {1 - record.cache_bytes_after / record.cache_bytes_before:.1%} fewer bytes of cache"
    return f"{done[:1].upper()}{done[1:]}: {price} on {record.figures}, {gain}."


def setting_words(record: Compression) -> str:
    """What it was calibrated on."""
    return (
        f"{record.model} · parts {', '.join(record.parts)} · calibrated on {record.sequences:,} sequences, "
        f"{record.tokens:,} tokens"
    )


def compression_tables(record: Compression) -> Iterator[CompressionTable]:
    """All tables that the record has numbers for."""
    yield _price(record)
    yield _gain(record)
    if record.budget is not None:
        yield _budget(record.budget, record.figures)
    if record.curves:
        yield _curves(record)
    for words in latent_tables(record):
        yield CompressionTable(*words)
    if record.layers:
        yield _layers(record)
    if record.left_out:
        yield CompressionTable(
            "Left as they were", ["attention layer", "why"], [[a, b] for a, b in record.left_out.items()]
        )


def _price(record: Compression) -> CompressionTable:
    rows = [
        [name, "0", format_number(value, 4)]
        for name, value in (
            ("attention KL, nats", record.kl),
            ("attention KL end to end, nats", record.kl_end_to_end),
            ("error of the output, ‖y′ − y‖/‖y‖", record.output_error),
        )
        if math.isfinite(value)
    ]
    if math.isfinite(record.loss_before):
        rows.append(["loss", f"{record.loss_before:.4f}", f"{record.loss_after:.4f}"])
        rows.append(
            ["perplexity", f"{math.exp(record.loss_before):.3f}", f"{math.exp(record.loss_after):.3f}"]
        )
    if record.metric:
        rows.append([record.metric, f"{record.metric_before:.4f}", f"{record.metric_after:.4f}"])
    return CompressionTable(
        "Price",
        ["", "before", "after"],
        rows,
        f"Measured on {record.figures}. Attention KL is KL(M‖M′), M the original's, mean over rows, heads "
        "and layers, each layer given what the original gave it; end to end, what layers before it give in "
        "the compressed model, on up to 2 sequences and over the heads that are left.",
    )


def _gain(record: Compression) -> CompressionTable:
    rows = [
        _pair("parameters", record.parameters_before, record.parameters_after),
    ]
    if record.cache_bytes_before:
        rows.append(_pair("cache, bytes a token", record.cache_bytes_before, record.cache_bytes_after))
    rows += [
        [
            f"{timing.phase}, {timing.tokens} tokens, ms",
            f"{timing.before:.2f}",
            f"{timing.after:.2f}",
            f"{timing.ratio:.2f} ({timing.low:.2f} to {timing.high:.2f})",
        ]
        for timing in record.latency
    ]
    return CompressionTable(
        "Gain",
        ["", "before", "after", "after/before"],
        rows,
        "Latency is the median of rounds that take turns on this machine, with the 10th and 90th percentile "
        "of their ratio: a range that holds 1 tells no gain."
        if record.latency
        else "Latency was not measured.",
    )


def _budget(budget: Budget, figures: str) -> CompressionTable:
    rows = [
        [share.part, f"{share.keep:.2f}", f"{share.bytes_saved:,}", format_number(share.price, 5)]
        for share in budget.shares
    ]
    saved = budget.bytes_before - budget.bytes_after
    left = f"{budget.bytes_after / budget.bytes_before:.2f}"
    rows.append(["together", left, f"{saved:,}", format_number(budget.price, 5)])
    cache = f" and the cache of {budget.cache_tokens:,} tokens" if budget.cache_tokens else ""
    asked = (
        f"{budget.keep:g} of them to stay" if budget.keep is not None else f"a price of {budget.tolerance:g}"
    )
    return CompressionTable(
        "One budget",
        ["part", "kept", "bytes saved", budget.unit],
        rows,
        f"Of {budget.bytes_before:,} bytes: the weights of {budget.layers} linear layers{cache}; asked was "
        f"{asked}. Kept: of each part in its own unit (width, heads, bytes of the cache), together of bytes. "
        "Prices are on the calibration data, each part's beside those before it; together on "
        f"{figures}: {format_number(budget.price_held_out, 5)}.",
    )


def _pair(name: str, before: int, after: int) -> list[str]:
    return [name, f"{before:,}", f"{after:,}", f"{after / before:.3f}"]


def _curves(record: Compression) -> CompressionTable:
    widths = [point.width for point in record.curves[0].points]
    return CompressionTable(
        "Attention KL against mean width",
        ["way", *(f"{width:g}" for width in widths)],
        [[curve.method, *(format_number(point.kl, 4) for point in curve.points)] for curve in record.curves],
        f"On up to 32 sequences of {record.figures}, without steps of calibration."
        + (" Weights alone: the SVD of W_qᵀ W_k." if any("alone" in c.method for c in record.curves) else ""),
    )


def _layers(record: Compression) -> CompressionTable:
    ranks = {latent.site: latent for latent in record.latents}
    rows = []
    for layer in record.layers:
        heads = [head for head in record.heads if head.site == layer.site]
        heads = [head for head in heads if head.part != "heads"] or heads
        widths = [head.width for head in heads]
        latent = ranks.get(layer.site)
        words = [" ".join(map(str, widths))] if widths else []
        words += [f"latent of {latent.rank}"] if latent is not None else []
        rows.append(
            [
                f"{heads[0].stack if heads else ''} {layer.layer}".strip(),
                ", ".join(words),
                f"{sum(widths) / len(widths):.1f}" if widths else "",
                format_number(layer.kl, 4),
                format_number(layer.kl_end_to_end, 4),
                format_number(layer.output_error, 4),
            ]
        )
    return CompressionTable(
        "Layers",
        ["layer", "widths of its heads", "mean", "attention KL", "end to end", "error of states"],
        rows,
        "End to end: attention KL in the compressed model, over the heads that are left. Error of states: "
        "‖y′ − y‖/‖y‖ behind the layer in the compressed model, first batch.",
    )
