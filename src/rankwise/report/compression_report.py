"""Build the report on a compression."""

import math

from rankwise._internals.records import MISSING, format_number
from rankwise._internals.statistics import mean
from rankwise.auditing.records import Verdict
from rankwise.compression.records import Compression, HeadWidth
from rankwise.report.document import Document, Section, Table, nonempty
from rankwise.report.format import model_name


def compression_document(record: Compression) -> Document:
    """Return the report on a compression: cost, savings, remaining width per head, layers and next steps."""
    removed = [head for head in record.heads if head.part == "heads"]
    narrowed = [head for head in record.heads if head.part != "heads"]
    left_out = [[site, reason] for site, reason in record.left_out.items()]
    left = Table("Unchanged", ["attention layer", "why"], left_out)
    return Document(
        command="Rankwise compress",
        heading=model_name(record.model),
        setting=f"parts {', '.join(record.parts)} · calibrated on {record.sequences:,} sequences, "
        f"{record.tokens:,} tokens",
        verdict=Verdict(sentence=_headline(record, removed, narrowed)),
        sections=nonempty(
            Section("costs", "Costs and savings", tables=[_costs(record), _savings(record)]),
            Section("layers", "Layers", tables=[_merged(record), _latents(record), _layers(record), left]),
            Section("next", "Load the model", code=record.about.get("load", "")),
        ),
        notes=record.notes,
        origin=[(name, value) for name, value in record.about.items() if name != "load"],
    )


def _headline(record: Compression, removed: list[HeadWidth], narrowed: list[HeadWidth]) -> str:
    words = []
    if removed:
        words.append(f"{sum(not head.width for head in removed)} of {len(removed)} heads removed")
    if record.merged:
        before, after = (
            mean(count(x) for x in record.merged)
            for count in (lambda x: sum(map(len, x.groups)), lambda x: len(x.groups))
        )
        words.append(f"{before:.0f} key heads per layer merged to {after:.0f}")
    if narrowed:
        before = mean(head.before for head in narrowed)
        words.append(f"queries and keys narrowed from {before:.0f} to {record.mean_width:.1f} on average")
    if record.latents:
        rank = mean(latent.rank for latent in record.latents)
        channels = mean(latent.channels for latent in record.latents)
        latents = f"latents of {rank:.0f} channels on average, instead of {channels:.0f}"
        words.append(f"keys and values are computed from {latents}")
    done = "; ".join(words)
    cost = f"relative error of the output {format_number(record.output_error, 4)}"
    if math.isfinite(record.loss_before):
        before, after = record.loss_before, record.loss_after
        comparable = before != 0 and math.isfinite(after)
        change = f" ({(after - before) / abs(before):+.2%})" if comparable else ""
        cost = f"loss {format_number(before, 4)} → {format_number(after, 4)}{change}"
    elif math.isfinite(record.attention_kl):
        cost = f"attention KL {format_number(record.attention_kl, 4)} nats"
    sizes = [("parameters", record.parameters_before, record.parameters_after)]
    if record.latents or record.merged:
        sizes.append(("bytes of cache", record.cache_bytes_before, record.cache_bytes_after))
    saving = "".join(
        f", {abs(1 - after / before):.1%} {'fewer' if after <= before else 'more'} {noun}"
        for noun, before, after in sizes
        if before
    )
    return f"{done[:1].upper()}{done[1:]}: {cost} on {record.measured_on}{saving}."


def _costs(record: Compression) -> Table:
    measured = {
        "attention KL, nats": record.attention_kl,
        "KL of the outputs, nats": record.output_kl,
        "relative error of the output, ‖y′ − y‖/‖y‖": record.output_error,
    }
    rows = [[name, "0", format_number(cost, 4)] for name, cost in measured.items() if math.isfinite(cost)]
    if math.isfinite(record.loss_before):
        losses = record.loss_before, record.loss_after
        rows.append(["loss", *(format_number(loss, 4) for loss in losses)])
    note = (
        f"Measured on {record.measured_on}. Attention KL is KL(M‖M′) with M of the original, mean over rows, "
        "heads and layers, each layer with the inputs of the original."
    )
    return Table("Costs", ["", "before", "after"], rows, note=note)


def _savings(record: Compression) -> Table:
    sizes = [("parameters", record.parameters_before, record.parameters_after)]
    if record.cache_bytes_before:
        sizes.append(("cache, bytes per token", record.cache_bytes_before, record.cache_bytes_after))
    rows = [
        [name, f"{before:,}", f"{after:,}", f"{after / before:.3f}" if before else MISSING]
        for name, before, after in sizes
    ]
    if record.timed:
        before, after = 1e3 * record.seconds_before, 1e3 * record.seconds_after
        numbers = (format_number(number, 2) for number in (before, after, after / before))
        rows.append([f"{record.timed}, ms", *numbers])
    return Table("Savings", ["", "before", "after", "after/before"], rows)


def _merged(record: Compression) -> Table:
    columns = ["layer", "key heads that became one", "error of logits", "error of values"]
    rows = [
        [
            f"{x.stack} {x.layer}".strip(),
            "; ".join(" ".join(map(str, heads)) for heads in x.groups),
            *(format_number(error) for error in (x.key_error, x.value_error)),
        ]
        for x in record.merged
    ]
    note = "Relative errors on the calibration data, before the least squares of the outputs."
    return Table("Merged key heads", columns, rows, note=note)


def _latents(record: Compression) -> Table:
    columns = ["layer", "channels of keys and values", "rank that loses nothing", "rank", "predicted KL"]
    rows = [
        [*map(str, (x.layer, x.channels, x.full_rank, x.rank)), format_number(x.output_kl)]
        for x in record.latents
    ]
    note = "Predicted KL of the outputs: nats per token, to second order, on the calibration data."
    return Table("Latents", columns, rows, note=note)


def _layers(record: Compression) -> Table:
    rows = []
    for layer in record.layers:
        heads = [head for head in record.heads if head.site == layer.site]
        heads = [head for head in heads if head.part != "heads"] or heads
        widths = {head.head: head.width for head in heads}
        shown = (str(widths.get(number, "–")) for number in range(max(widths, default=-1) + 1))  # –: removed
        if widths:
            cells = [f"{mean(widths.values()):.1f}", format_number(layer.attention_kl, 4)]
            rows.append([f"{heads[0].stack} {layer.layer}".strip(), " ".join(shown), *cells])
    return Table("Layers", ["layer", "widths of its heads", "mean", "attention KL"], rows)
