"""Build the report on an audit: verdict, findings, heads, token states, importance and provenance."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from typing import Any

from rankwise._internals.records import MISSING, format_number, grouped
from rankwise._internals.statistics import mean
from rankwise.auditing.importance_findings import describe_removable, estimate_words, whole_words
from rankwise.auditing.measure_table import (
    DRAWN,
    HEAD_MEASURES,
    REFERENCES,
    STATE_MEASURES,
    HeadMeasure,
    mixer_kind,
    share,
)
from rankwise.auditing.records import HeadRecord, StateRecord
from rankwise.auditing.result import Audit
from rankwise.importance.records import FEW_PASSES, MORE_TRIES, HeadImportance, ImportanceRecord
from rankwise.report.document import Document, Items, Section, Table, nonempty
from rankwise.report.figures import depth_curves, has_room, map_layout, membership_maps, severity_signs
from rankwise.report.finding_links import Target, common_notes, find_targets, finding_items, severities_of
from rankwise.report.format import RANK, count, model_name, round_for_page
from rankwise.report.head_columns import head_columns
from rankwise.report.head_details import pack_attention_maps, pack_spectra
from rankwise.report.heatmap_grid import Grid, grids_of

MOST_LAYERS, FEW_LAYERS = 16, 5
"""Maximum number of layers on the first screen: if no finding is an error, and if a finding is an error."""
_CONSOLE_HEADS = [measure for measure in HEAD_MEASURES if measure.console]
_STATES = sorted(STATE_MEASURES, key=lambda measure: not measure.console)
"""Measures of token states. Measures that the console shows come first."""


def audit_document(audit: Audit) -> Document:
    """Return the report on an audit, with the data of the interactive parts of its page."""
    grids = grids_of(audit.heads)
    targets = find_targets(audit.findings, audit)
    findings = finding_items(audit.findings, targets, grids, audit.provenance)
    depth = [depth_curves(measure, audit.states) for measure in DRAWN] if audit.states else []
    numbers = [_console_layers(grid, audit.heads) for grid in grids]
    numbers += [_console_states(*stack) for stack in grouped(audit.states, attrgetter("stack")).items()]
    uncaptured = [[module.name, module.type, module.reason] for module in audit.uncaptured]
    about = audit.provenance

    flagged = list(severities_of(audit.findings, targets))
    initial = [[] if head.at_init is None else head.at_init.spectrum for head in audit.heads]
    maps, omitted = pack_attention_maps(audit, flagged)
    data = {
        "delta": about.delta,
        "grids": [_grid_data(grid, audit, targets) for grid in grids],
        "heads": _head_data(audit.heads, grids),
        "columns": [column.data() for column in head_columns(audit.heads)],
        "texts": audit.texts,
        "opening": next(iter([*maps, *flagged, *range(len(audit.heads))]), None),
        "targets": [asdict(target) for target in targets],
        "findings": [[finding.severity, finding.code, finding.meaning] for finding in audit.findings],
        "costs": _head_costs(audit),
        "spectra": pack_spectra([head.spectrum for head in audit.heads]),
        "initial_spectra": pack_spectra(initial) if any(initial) else None,
        "maps": maps,
        "maps_omitted": omitted,
    }
    return Document(
        command="rankwise audit",
        heading=model_name(about.model).removeprefix("the "),
        setting=_setting(audit),
        verdict=audit.verdict,
        warnings=[] if audit.heads else ["No heads: no mixing operator was captured."],
        first=_layers_in_words(audit, grids),
        hints=_hints(audit),
        sections=nonempty(
            Section("findings", "Findings", lists=[Items("", findings)] if findings else []),
            Section("heads", "Heads", include="heads.html" if grids else ""),
            Section(
                "states",
                "Through the depth",
                "Tokens after each block, from the input (0) on. Bands: ± one standard deviation.",
                figures=depth,
            ),
            _importance(audit),
            Section(
                "memberships",
                "Memberships",
                "How far each token of the first sequence belongs to each head, Π: the heads sum to 1. "
                "Such a layer has no attention map: it scales every token by its memberships.",
                figures=membership_maps(grids, audit.heads),
                choice="Layer",
            ),
            Section("numbers", "Numbers", tables=numbers, include="numbers.html" if numbers else ""),
            Section(
                "uncaptured",
                "Not captured",
                "Modules that look as if they mixed tokens. No number above includes them.",
                tables=[Table("Not captured", ["module", "type", "reason"], uncaptured, console_rows=5)],
            ),
        ),
        notes=about.notes,
        origin=_origin(audit),
        complete=audit.complete,
        data=data,
    )


def _setting(audit: Audit) -> str:
    """Return the sizes of model and data, the loss, and the duration of the audit, as far as known."""
    about, layers = audit.provenance, grouped(audit.heads, attrgetter("stack", "layer"))
    counts, lengths = {len(heads) for heads in layers.values()}, {head.tokens for head in audit.heads}
    by = f" × {count(counts.pop(), 'head')}" if len(counts) == 1 else f", {count(len(audit.heads), 'head')}"
    length = lengths.pop() if len(lengths) == 1 else math.nan
    unit = "" if audit.importance is None else audit.importance.unit
    of = "" if math.isnan(length) else f" of {format_number(length, 0)} tokens"
    facts = [
        count(len(layers), "layer") + by if layers else "",
        count(about.sequences, "sequence") + of + (" on average" if of and length != round(length) else ""),
        f"loss {audit.loss:.4g} {unit}" if math.isfinite(audit.loss) else "",
        "" if math.isnan(about.seconds) else f"{format_number(max(about.seconds, 1.0), 0)} s",
    ]
    return " · ".join(filter(None, facts))


def _layers_in_words(audit: Audit, grids: Sequence[Grid]) -> list[Table]:
    """Return the table of the first screen, if there is data: a row per layer, a column per quantity."""
    spread = {(state.stack, state.blocks): state.direction_spread for state in audit.states}
    rows: dict[str, dict[str, str]] = {}
    for grid in grids:
        for name, row in zip(grid.row_names, grid.rows, strict=True):
            heads = [audit.heads[index] for index in row.cells.values()]
            rows[name if len(grids) == 1 else f"{grid.title} {name}"] = {
                "attention\nrank": _mean_rank_share(heads),
                "at\ninitialization": _initial_share(heads),
                "random\nheads": _mean_share("random_rank", heads),
                "spread\nafter": _spread_words(spread.get((grid.stack, row.layer + 1), math.nan)),
                **_removal_costs(audit, heads),
            }
    if not grids:
        rows = {
            f"{stack} {blocks}": {"direction\nspread": _spread_words(value)}
            for (stack, blocks), value in spread.items()
        }
    names = [name for name in next(iter(rows.values()), {}) if any(x[name] != MISSING for x in rows.values())]
    listed = [[label, *(row[name] for name in names)] for label, row in rows.items()]
    step = math.ceil(len(listed) / (FEW_LAYERS if _has_errors(audit) else MOST_LAYERS))
    shown = [*listed[:-1:step], listed[-1]] if step > 1 else listed
    signed = any(RANK.shown_field(head) != RANK.name for head in audit.heads)
    facts = ["δ relative to σ₁"] * signed + [f"every {step} layers"] * (step > 1)
    return [Table(", ".join(facts), ["layer" if grids else "blocks\npassed", *names], shown)] if names else []


def _spread_words(value: float) -> str:
    return "<0.01" if 0 < value < 0.005 else format_number(value, 2)


def _removal_costs(audit: Audit, heads: Sequence[HeadRecord]) -> dict[str, str]:
    """Return the smallest and the largest removal cost of the heads as texts, by column name.

    Costs are shares of `ImportanceRecord.reference`. Both texts are `MISSING` if no cost is known.
    """
    costs = [head.importance.cost for head in heads if head.importance]
    costs = [cost for cost in costs if math.isfinite(cost)]
    names = "cheapest\nhead", "costliest\nhead"
    if audit.importance is None or not costs:
        return dict.fromkeys(names, MISSING)
    shares = [audit.importance.share(cost) for cost in (min(costs), max(costs))]
    return {name: f"{share:+.1%}" for name, share in zip(names, shares, strict=True)}


def _hints(audit: Audit) -> list[str]:
    """Return hints on the first screen: how to read its table, and how to measure missing columns.

    If findings include an error, missing columns are not mentioned.
    """
    has_costs, by_command = any(head.importance for head in audit.heads), bool(audit.provenance.command)
    reference, choice = "", ""
    if audit.importance is not None:
        reference, choice = audit.importance.reference_name, audit.importance.choice
    exact = any(head.importance and head.importance.method == "exact" for head in audit.heads)
    costs = "cost of removing it" if exact else "estimated cost of removing it (can be far too low)"
    columns = (
        (audit.heads, "attention rank 1.00 = full rank, as many independent patterns as tokens"),
        (audit.at_init, "at initialization: of the same model untrained, on the same data"),
        (any(head.random_rank >= 0 for head in audit.heads), "random heads: of random queries and keys"),
        (audit.states, "spread after: 0 = most tokens are parallel"),
        (has_costs, f"cheapest, costliest head: {costs}, as a share of {reference}"),
        (choice, f"costs are {choice}"),
    )
    # exact costs of few heads, with a check; or five backward passes, which take as long as five to ten
    count = len(audit.heads)
    passes = 5 + count.bit_length() + MORE_TRIES + (10 if count > 2 * FEW_PASSES else min(count, FEW_PASSES))
    options = (
        (audit.at_init, "ranks at initialization", "--at-init", "at_init=True", "3 more audits"),
        (
            *(has_costs, "costs of removing heads", "--importance", "importance=True"),
            f"as long as ≤ {passes} forward passes per batch",
        ),
    )
    missing = [
        f"{what}, `{option if by_command else argument}` ({cost})"
        for is_measured, what, option, argument, cost in options
        if audit.heads and not is_measured and not _has_errors(audit)
    ]
    lines = {
        "How to read this": [words for is_shown, words in columns if is_shown],
        "Not measured": missing,
    }
    return [f"{name}: {'; '.join(words)}." for name, words in lines.items() if words]


def _has_errors(audit: Audit) -> bool:
    return any(finding.severity == "error" for finding in audit.findings)


def _console_layers(grid: Grid, all_heads: Sequence[HeadRecord]) -> Table:
    """Return a table with one row per layer of a grid. Its facts are properties that all layers share."""
    heads = [all_heads[index] for index in grid.indices]
    kinds, masks = {head.kind for head in heads}, {head.mask for head in heads}
    lengths = {format_number(head.tokens, 0) for head in heads}
    facts = [
        *(kinds if len(kinds) == 1 else []),
        *(f"{mask} mask" for mask in masks if len(masks) == 1 and kinds != {"diagonal"}),
        *(["δ relative to σ₁"] if any(RANK.shown_field(head) != RANK.name for head in heads) else []),
        *([grid.pattern] if grid.pattern != grid.title else []),
        *("1 token" if length == "1" else f"{length} tokens" for length in lengths if len(lengths) == 1),
    ]
    columns: dict[str, Callable[[Sequence[HeadRecord]], str]] = {"heads": lambda layer: str(len(layer))}
    for name, values in (("kind", kinds), ("mask", masks)):
        if len(values) > 1:
            columns[name] = partial(_texts, name)
    if len(lengths) > 1:
        columns["tokens"] = lambda layer: format_number(mean(head.tokens for head in layer), 0)
    columns["rank\nshare"] = _mean_rank_share
    for field, words in REFERENCES.items():
        if field == "one_hot_rank" or any(math.isfinite(getattr(head, field)) for head in heads):
            columns[words.replace(" ", "\n")] = partial(_mean_share, field)
    for measure in _CONSOLE_HEADS:
        has_kind = not measure.kinds or kinds & set(measure.kinds)
        if has_kind and measure.known_in(heads):
            columns[measure.console] = partial(_layer_number, measure)
    layers = [[all_heads[index] for index in row.cells.values()] for row in grid.rows]
    return Table(
        grid.title,
        ["layer", *columns],
        [[str(layer[0].layer), *(text(layer) for text in columns.values())] for layer in layers],
        facts=", ".join(facts),
        redrawn=True,
    )


def _texts(name: str, heads: Sequence[HeadRecord]) -> str:
    return ", ".join(dict.fromkeys(getattr(head, name) for head in heads))


def _mean_share(field: str, heads: Sequence[HeadRecord]) -> str:
    return format_number(mean(share(getattr(head, field), head) for head in heads), 2)


def _initial_share(heads: Sequence[HeadRecord]) -> str:
    drawn = [(head, head.at_init.mean) for head in heads if head.at_init]
    return format_number(mean(share(ranks[RANK.shown_field(head)], head) for head, ranks in drawn), 2)


def _layer_number(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> str:
    whole = measure.over_heads(map(measure.value, heads))
    mark = "≈" if any(measure.name in head.stderr for head in heads) else ""
    return mark + format_number(whole, measure.digits)


def _mean_rank_share(heads: Sequence[HeadRecord]) -> str:
    """Return the mean of rank/min(T, S) as text, or its range if estimates only bound some ranks."""
    rank = mean(map(RANK.value, heads))
    if all(math.isfinite(RANK.value(head)) or not head.estimated_sequences for head in heads):
        return ("≈" if any(head.estimated_sequences for head in heads) else "") + format_number(rank, 2)
    if any(RANK.shown_field(head) != RANK.name for head in heads):
        return format_number(rank, 2)  # audits do not store bounds of a relative rank
    ends = (mean(share(h.rank_low, h) for h in heads), mean(share(h.rank_high, h) for h in heads))
    return "–".join(format_number(end, 2) for end in ends)


def _console_states(stack: str, records: Sequence[StateRecord]) -> Table:
    states = sorted(records, key=lambda state: state.blocks)
    return Table(
        f"{stack}, token states" if stack else "token states",
        ["blocks\npassed", "tokens", *(measure.console or measure.head.lower() for measure in _STATES)],
        [
            [
                str(state.blocks),
                format_number(state.tokens, 0),
                *(measure.formatted(state) for measure in _STATES),
            ]
            for state in states
        ],
        facts="direction spread of 0: most tokens are parallel",
        console_columns=2 + sum(bool(measure.console) for measure in _STATES),
    )


def _origin(audit: Audit) -> list[tuple[str, str]]:
    about = audit.provenance
    parameters = f"{about.parameters:,}" if about.parameters else ""
    sequences = f"{about.sequences} in {count(about.batches, 'batch', 'batches')}"
    initial = "" if audit.at_init is None else str(audit.at_init)
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    facts = [
        ("Model", about.model), ("Class", about.model_class), ("Revision", about.revision),
        ("Parameters", parameters), ("Data", about.data), ("Sequences", sequences),
        ("Threshold δ", str(about.delta)), ("Method", about.rank_method),
        ("Model's dtype", about.model_dtype),
        ("Device", about.device), ("Initialization", initial),
        ("Created", about.created), ("Complete", "yes" if audit.complete else "no"),
        ("Versions", versions), ("Command", about.command),
    ]  # fmt: skip
    return [(name, value) for name, value in facts if value]


def _importance(audit: Audit) -> Section:
    """Return the section on the costs of removing heads and blocks. It is empty without measured costs."""
    importance = audit.importance
    if importance is None or not any(head.importance for head in audit.heads):
        return Section("importance", "Importance")
    whole = whole_words(importance)
    costs = [head.importance for head in audit.heads if head.importance and not head.importance.why_not]
    methods = " and ".join(sorted({cost.method for cost in costs})) or "not known"
    removable = ""
    if (heads := importance.removable) is not None:
        limit = f"{heads.tolerance:.2%} of {importance.reference_name}"
        removable = f"none was found at {limit} on the sequences that choose"
        removable = describe_removable(importance, heads, math.nan) if heads.heads else removable
    facts = [
        ("Loss", f"{importance.loss}: {whole}" if whole else importance.loss),
        ("Costs of heads", f"{importance.choice or methods}; zero in a head's place"),
        *estimate_words({head.id: head.importance for head in audit.heads if head.importance}, importance),
        *([("Heads that can be removed together", removable)] if removable else []),
        *(("Note", note) for note in importance.notes),
    ]
    blocks = Table(
        "Blocks",
        ["stack", "block", "estimated", "exact"],
        [
            [block.stack, str(block.layer), format_number(block.estimate, 4), _cost(importance, block.exact)]
            for block in importance.blocks
        ],
        note="Cost of removing all that a block adds to the residual stream.",
    )
    return Section(
        "importance",
        "Importance",
        "Cost of removing a head, on the same data. Rank describes how a head mixes; cost, how much the "
        "loss depends on the head.",
        facts=facts,
        tables=[blocks],
    )


def _cost(importance: ImportanceRecord, cost: float) -> str:
    loss_share = importance.share(cost)
    return format_number(cost, 4) + ("" if math.isnan(loss_share) else f" ({loss_share:.1%})")


def _head_costs(audit: Audit) -> dict[str, Any] | None:
    """Return the exact and the estimated cost of removing each head. Return None without measured costs."""
    importance = audit.importance
    if importance is None or not any(head.importance for head in audit.heads):
        return None
    costs = [head.importance or HeadImportance() for head in audit.heads]
    return {
        "unit": importance.unit,
        "reference": None if math.isnan(importance.share(1.0)) else 1 / importance.share(1.0),
        "of": importance.reference_name,
        "exact": [round_for_page(cost.exact) for cost in costs],
        "estimate": [round_for_page(cost.estimate) for cost in costs],
    }


def _grid_data(grid: Grid, audit: Audit, targets: Sequence[Target]) -> dict[str, Any]:
    """Return a grid for the page: title, facts that most heads share, cells, layout, signs of findings."""
    heads = [audit.heads[index] for index in grid.indices]
    notes = common_notes(audit.findings, targets, grid)
    kinds = dict.fromkeys(head.kind for head in heads)
    masks = dict.fromkeys(f"{head.mask} mask" for head in heads if mixer_kind(head.kind).mixes_tokens)
    tokens = f"{format_number(mean(head.tokens for head in heads), 0)} tokens"
    if grid.cross:
        tokens += f" reading {format_number(mean(head.sources for head in heads), 0)}"
    said = [f"{code}: {number} of {len(heads)} heads" for code, number in notes.items()]
    return {
        "title": grid.title,
        "pattern": grid.pattern,
        "facts": [*kinds, *masks, tokens, *said],
        "diagonal": "diagonal" in kinds,
        "cells": grid.cells,
        "signs": severity_signs(grid, severities_of(audit.findings, targets, notes)),
        "layout": map_layout(grid.row_names, [str(number) for number in grid.columns]),
        "numbers": has_room(grid.rows, grid.columns),
    }


def _head_data(heads: Sequence[HeadRecord], grids: Sequence[Grid]) -> Mapping[str, Any]:
    """Return one list per property, with one entry per head. Texts are stored as indices of unique texts."""
    homes = {index: number for number, grid in enumerate(grids) for index in grid.indices}
    plain = {"layer": "layer", "head": "head", "full_rank": "full_rank", "nearest": "nearest_head"}
    plain |= {"sequences": "sequences", "nonfinite": "nonfinite_sequences"}
    coded = {"kind": "kind", "mask": "mask", "site": "site", "max_token": "named_peak"}
    return {
        "grid": [homes[index] for index in range(len(heads))],
        "tokens": [round_for_page(head.tokens) for head in heads],
        **{name: [getattr(head, field) for head in heads] for name, field in plain.items()},
        **{name: _coded([getattr(head, field) for head in heads]) for name, field in coded.items()},
    }


def _coded(texts: Sequence[str]) -> dict[str, Any]:
    words = list(dict.fromkeys(texts))
    places = {word: place for place, word in enumerate(words)}
    return {"words": words, "of": [places[text] for text in texts]}
