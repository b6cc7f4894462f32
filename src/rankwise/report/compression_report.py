"""Build the report on a compression."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from rankwise._internals.records import MISSING, format_number
from rankwise._internals.statistics import mean
from rankwise.auditing.records import Verdict
from rankwise.compression.records import (
    KEPT_KEY_BYTES,
    PAYS_COST,
    PAYS_SIZE,
    PAYS_TIME,
    Compression,
    HeadWidth,
    Preview,
    PreviewRow,
    WindowCost,
)
from rankwise.report.document import Document, Section, Table, nonempty
from rankwise.report.format import count, model_name


def compression_document(record: Compression) -> Document:
    """Return the report on a compression: cost, savings, remaining width per head, layers and next steps."""
    removed = [head for head in record.heads if head.part == "heads"]
    narrowed = [head for head in record.heads if head.part != "heads"]
    sites: dict[str, list[str]] = {}
    for site, reason in record.left_out.items():
        sites.setdefault(reason, []).append(site)
    left_out = [
        [f"{first} and {count(len(others), 'other')}" if others else first, reason]
        for reason, (first, *others) in sites.items()
    ]
    left = Table("Unchanged", ["layer", "why"], left_out)
    return Document(
        command="Rankwise compress",
        heading=model_name(record.model),
        setting=f"parts {', '.join(record.parts)} · calibrated on {record.sequences:,} sequences, "
        f"{record.tokens:,} tokens",
        verdict=Verdict(sentence=_headline(record, removed, narrowed)),
        sections=nonempty(
            Section(
                "costs", "Costs and savings", tables=[_costs(record), _savings(record), _quantized(record)]
            ),
            Section(
                "layers",
                "Layers",
                tables=[_blocks(record), _latents(record), _layers(record), left],
            ),
            Section("next", "Load the model", code=record.about.get("load", "")),
        ),
        notes=record.notes,
        origin=[(name, value) for name, value in record.about.items() if name != "load"],
    )


def _headline(record: Compression, removed: list[HeadWidth], narrowed: list[HeadWidth]) -> str:
    words = []
    if record.blocks:
        count = sum(block.step > 0 for block in record.blocks)
        words.append(f"{count} of {len(record.blocks)} blocks removed")
    if removed:
        words.append(f"{sum(not head.width for head in removed)} of {len(removed)} heads removed")
    if record.merged:
        words.append(f"{record.merged[0].before} key heads per layer merged to {record.merged[0].after}")
    if narrowed:
        before, after = mean(head.before for head in narrowed), mean(head.width for head in narrowed)
        words.append(f"queries and keys narrowed from {before:.0f} to {after:.1f} on average")
    if record.latents:
        rank = mean(latent.rank for latent in record.latents)
        channels = mean(latent.channels for latent in record.latents)
        latents = f"latents of {rank:.0f} channels on average, instead of {channels:.0f}"
        words.append(f"keys and values are computed from {latents} (decoding steps can be slower)")
    done = "; ".join(words)
    worst = record.worst
    cost = f"relative error of the output {format_number(worst.output_error, 4)}"
    if math.isfinite(worst.loss_before):
        added = f"{worst.loss_added:+.4f}" if math.isfinite(worst.loss_added) else MISSING
        spread = f" ± {worst.spread:.4f}" if math.isfinite(worst.spread) else ""
        losses = (format_number(loss, 4) for loss in (worst.loss_before, worst.loss_after))
        cost = f"loss {' → '.join(losses)} ({added}{spread})"
    elif math.isfinite(record.attention_kl):
        cost = f"attention KL {format_number(record.attention_kl, 4)} nats"
    sizes = [("parameters", record.parameters_before, record.parameters_after)]
    if record.latents or record.merged:
        tokens = f"bytes of cache at {record.kept_cache.tokens:,} tokens"
        sizes.append((tokens, record.kept_cache.before, record.kept_cache.after))
    saving = "".join(
        f", {abs(1 - after / before):.1%} {'fewer' if after <= before else 'more'} {noun}"
        for noun, before, after in sizes
        if before
    )
    if (size := record.kept_cache).kept_keys:
        saving += f" ({(size.after + size.kept_keys) / size.before:.0%} of the bytes with kept keys)"
    where = f"{record.measured_on} of {worst.tokens:,} tokens" if worst.tokens else record.measured_on
    return f"{done[:1].upper()}{done[1:]}: {cost} on {where}{saving}."


def _costs(record: Compression) -> Table:
    columns: dict[str, Callable[[WindowCost], str]] = {
        "tokens": lambda cost: f"{cost.tokens:,}",
        "windows": lambda cost: f"{cost.windows:,}",
        "loss": lambda cost: format_number(cost.loss_before, 4),
        "loss added": lambda cost: format_number(cost.loss_added, 4),
        "±": lambda cost: format_number(cost.spread, 4),
        "KL": lambda cost: format_number(cost.output_kl, 4),
        "error": lambda cost: format_number(cost.output_error, 4),
        "first": lambda cost: format_number(cost.first_error, 4),
        "others": lambda cost: format_number(cost.other_error, 4),
    }
    rows = [[cell(cost) for cell in columns.values()] for cost in record.costs]
    told = [number for number in range(len(columns)) if any(row[number] != MISSING for row in rows)]
    note = (
        f"Measured on {record.measured_on}, by length of windows. ±: standard error over windows. KL of the "
        "outputs: nats per token. Error: ‖y′ − y‖/‖y‖ of the outputs, of the first tokens, and of the others."
    )
    if math.isfinite(record.attention_kl):
        note += (
            f" Attention KL: {format_number(record.attention_kl, 4)} nats, KL(M‖M′) with M of the original, "
            "mean over rows, heads and layers, each layer with the inputs of the original."
        )
    rows = [[row[number] for number in told] for row in rows]
    return Table("Costs", [[*columns][number] for number in told], rows, note=note)


def _savings(record: Compression) -> Table:
    sizes = [("parameters", record.parameters_before, record.parameters_after)]
    for size in record.cache:
        sizes.append((f"bytes of cache, {size.tokens:,} tokens", size.before, size.after))
        if size.kept_keys:
            sizes.append(("with kept keys", size.before, size.after + size.kept_keys))
    rows = [
        [name, f"{before:,}", f"{after:,}", f"{after / before:.3f}" if before else MISSING]
        for name, before, after in sizes
    ]
    if record.timed:
        before, after = 1e3 * record.seconds_before, 1e3 * record.seconds_after
        numbers = (format_number(number, 2) for number in (before, after, after / before))
        rows.append([f"{record.timed}, ms", *numbers])
    note = (
        f"Bytes of one sequence. Kept keys: up to {KEPT_KEY_BYTES / 2**20:.0f} MB of decoded keys per layer, "
        "for all sequences of a batch together, so that small caches do not shrink. Steps are slower beyond "
        "these keys."
    )
    return Table(
        "Savings", ["", "before", "after", "after/before"], rows, note=note if record.latents else ""
    )


def _blocks(record: Compression) -> Table:
    rows = [
        [x.site, format_number(x.cost, 4), str(x.step or MISSING), format_number(x.joint_cost, 4)]
        for x in record.blocks
    ]
    note = "Increase of the loss on the calibration data, in the unit of the loss."
    return Table("Blocks", ["block", "cost alone", "removed in step", "joint cost so far"], rows, note=note)


def _quantized(record: Compression) -> Table:
    size = record.kept_cache
    rows = [PreviewRow(part="kv", cost=record.worst, cache_bytes=size.after), *record.quantized]
    shown = [0, 1, 2, 4, 5]  # without tokens and parameters
    rows = [row for row in rows if record.quantized and not row.refused]
    cells = [[_cells(row, size.before)[number] for number in shown] for row in rows]
    note = f"Cache: bytes of a sequence of {size.tokens:,} tokens, without kept keys."
    return Table("Next to quantized caches", [COLUMNS[number] for number in shown], cells, note=note)


def _cells(row: PreviewRow, cache: int) -> list[str]:
    cost = row.cost
    added = cost.loss_added if math.isfinite(cost.loss_before) else cost.output_error
    share = format_number(row.cache_bytes / cache if cache else math.nan, 3)
    costs = [format_number(number, 4) for number in (added, cost.spread)]
    size = f"{row.cache_bytes / 1e6:.3g} MB" if cache else MISSING
    sizes = size, share, f"{row.parameters / 1e6:.4g} M"
    return [way_name(row), *costs, f"{cost.tokens:,}" if cost.tokens else MISSING, *sizes]


def way_name(row: PreviewRow) -> str:
    """Return the words for a way to make a model smaller."""
    if not row.part:
        return f"{row.bits}-bit keys and values"
    part = f"uniform {row.part}" if row.uniform else row.part
    keep = f"{part}, keep {row.keep:g}" if math.isfinite(row.keep) else part
    return f"{keep}, {row.bits} bits" if row.bits else keep


COLUMNS = ["way", "loss added", "±", "tokens", "cache", "share", "parameters"]
WINDOWED = """\
from transformers.cache_utils import DynamicCache, DynamicLayer, HQQQuantizedLayer
cache = DynamicCache(config=model.config)
cache.layers = [HQQQuantizedLayer({bits}, 1, 1) if type(x) is DynamicLayer else x for x in cache.layers]
model.generate(ids, past_key_values=cache)"""
"""Code for quantized layers between windows, for which `QuantizedCache` has no option."""
Purpose = Literal["memory", "size", "speed"]
PURPOSES: dict[Purpose, str] = {
    "memory": "For memory", "size": "For fewer parameters", "speed": "For speed"
}  # fmt: skip
Chosen = dict[Purpose, PreviewRow | None]


def preview_document(record: Preview, command: str = "", notes: Sequence[str] = ()) -> Document:
    """Return the report on a preview: first the recommendation, then all ways, and the commands to follow.

    `command` is the command that compresses the model, to which a part and its share are added. `notes` say
    which data were measured.
    """
    chosen = {purpose: record.recommended(purpose) for purpose in PURPOSES}
    same = PreviewRow(part="unchanged", parameters=record.parameters, cache_bytes=record.cache_bytes)
    cells = [
        [*_cells(row, record.cache_bytes), format_number(row.time, 2)]
        for row in [same, *record.rows]
        if not row.refused
    ]
    refused = [[way_name(row), row.refused] for row in record.rows if row.refused]
    note = (
        f"Measured on {record.measured_on}, at the length of windows (tokens) with the largest cost. "
        f"Cache: bytes of a sequence of {record.cache_tokens:,} tokens, without the kept keys of `kv`, which "
        "the first line includes. Numbers of few bits are simulated: groups of 64 (tokens of keys, channels "
        "of values) share a scale and a zero, which count as bytes. Caches of transformers quantize keys by "
        "token, which can cost more below 8 bits. Time: of a decoding step or of a pass."
    )
    tables = [
        Table("Ways", [*COLUMNS, "time"], cells, note=note),
        Table("Refused", ["way", "why"], refused),
    ]
    return Document(
        command="Rankwise compress --preview",
        heading=model_name(record.model),
        setting="The model is unchanged.",
        verdict=Verdict(sentence=_recommendation(record, chosen)),
        sections=nonempty(
            Section("ways", "Ways", tables=tables),
            Section("next", "Follow it", code=_commands(record, chosen, command)),
        ),
        notes=list(notes),
        origin=[],
    )


def _recommendation(record: Preview, chosen: Chosen) -> str:
    """Return the first line of a preview: the chosen way for each purpose, or that nothing pays."""
    sizes: dict[str, Callable[[PreviewRow], str]] = {
        "memory": lambda row: (
            f"{(row.cache_bytes + row.kept_keys) / record.cache_bytes:.0%} of the cache"
            + ", kept keys included" * (row.kept_keys > 0)
        ),
        "size": lambda row: f"{row.parameters / record.parameters:.0%} of the parameters",
        "speed": lambda row: f"{row.time:.0%} of the time",
    }
    noun = (
        "loss" if any(math.isfinite(row.cost.loss_before) for row in record.rows) else "of the squared output"
    )
    said = [
        f"{PURPOSES[purpose]}: {way_name(row)} ({sizes[purpose](row)}, {row.cost.relative:+.2%} {noun})."
        for purpose, row in chosen.items()
        if row
    ]
    none = [words.lower() for purpose, words in PURPOSES.items() if not chosen[purpose]]
    if not said:
        least = f"{1 - PAYS_SIZE:.0%} (of the time, {1 - PAYS_TIME:.0%})"
        cost = f"{PAYS_COST:.0%} {noun}, two standard errors included,"
        said = [f"Nothing pays: no way costs at most {cost} and saves {least}."]
    elif none:
        said.append(f"Nothing pays {' or '.join(none)}.")
    return " ".join(said)


def _commands(record: Preview, chosen: Chosen, command: str) -> str:
    """Return the commands, or the code for a quantized cache, that follow a recommendation."""
    code = []
    for row in {way_name(row): row for row in chosen.values() if row}.values():
        options = f'{{"backend": "hqq", "nbits": {row.bits}, "axis_key": 1, "axis_value": 1}}'
        quantized = f'model.generate(ids, cache_implementation="quantized", cache_config={options})'
        if record.windowed:
            quantized = WINDOWED.format(bits=row.bits)
        quantized += "  # needs the package hqq"
        compressed = f"{command} --parts {row.part} --keep {row.keep:g}" + " --uniform" * row.uniform
        compressed += f" --out {'uniform-' * row.uniform}{row.part}-{row.keep:g}"
        code.append(compressed if row.part else quantized)
    return "\n".join(code)


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
