"""Audits for tests: records made by hand, and whole audits of random numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rankwise.auditing import (
    Audit,
    Finding,
    HeadRecord,
    Provenance,
    Remedy,
    StateRecord,
    UncapturedModule,
    remedy_text,
)
from rankwise.auditing.findings import diagnose as diagnose
from rankwise.auditing.measure_table import DRAWN as DRAWN
from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES, Measure
from rankwise.auditing.measure_table import PICTURED as PICTURED
from rankwise.auditing.records import AtInit as AtInit
from rankwise.auditing.records import InitialModels as InitialModels
from rankwise.importance.records import HeadImportance as HeadImportance
from rankwise.importance.records import ImportanceRecord, RemovableSet
from rankwise.tracing import Address

Fields = Mapping[str, Any]
NASTY = "</script><img src=x onerror=alert(1)>"
"""Ends a script, loads a picture and runs a command wherever it is not escaped."""


def head(**changes: Any) -> HeadRecord:
    """Return a head without findings unless a change causes one."""
    usual: dict[str, Any] = {
        "stack": "h", "site": "h.0.attn", "layer": 0, "head": 0, "kind": "softmax", "mask": "full",
        "sequences": 2, "tokens": 32, "sources": 32, "numerical_rank": 20, "effective_rank": 12,
        "stable_rank": 3, "sigma_max": 1.4, "row_entropy": 2, "first_token_mass": 0.1, "max_token_mass": 0.2,
        "row_spread": 0.7, "identity_distance": 0.8, "one_hot_rank": 20.4, "nearest_head": 1,
        "nearest_head_distance": 0.7,
    }  # fmt: skip
    fields = usual | changes
    fields = {"full_rank": min(fields["tokens"], fields["sources"])} | fields
    return HeadRecord(**(dict.fromkeys(("rank_low", "rank_high"), fields["numerical_rank"]) | fields))


def heads(*changes: Fields, **all_of_them: Any) -> list[HeadRecord]:
    """Return heads 0, 1, … of a mixer."""
    return [head(**({"head": at} | all_of_them | dict(change))) for at, change in enumerate(changes)]


def token_state(blocks: int, spread: float, **changes: Any) -> StateRecord:
    """Return token states of a spread, without findings unless a change causes one."""
    usual: dict[str, Any] = {
        "stack": "h", "site": f"h.{blocks}", "blocks": blocks, "sequences": 2, "tokens": 32,
        "hidden_size": 16, "norm": 10, "absolute_spread": 10 * spread, "spread": spread,
        "direction_spread": spread, "mean_cosine": 1 - spread**2, "effective_rank": 8,
        "effective_rank_without_massive": 8, "massive_tokens": 0, "largest_norm_ratio": 2,
        "largest_norm_share": 0.1 + 0.01 * blocks,
    }  # fmt: skip
    return StateRecord(**(usual | changes))


def token_states(*spreads: float, **changes: Any) -> list[StateRecord]:
    """Return token states with these spreads, from the input of the first block on."""
    return [token_state(blocks, spread, **changes) for blocks, spread in enumerate(spreads)]


def audit(
    *mixers: Iterable[HeadRecord],
    states: Sequence[StateRecord] = (),
    uncaptured: Sequence[UncapturedModule] = (),
    importance: ImportanceRecord | None = None,
) -> Audit:
    """Return an audit with the findings of its records."""
    measured = [head for mixer in mixers for head in mixer]
    return Audit(
        provenance=Provenance(model="m", delta=0.01),
        heads=measured,
        states=list(states),
        findings=diagnose(measured, states, uncaptured, importance),
        uncaptured=list(uncaptured),
        importance=importance,
    )


def importance(**changes: Any) -> ImportanceRecord:
    """Return the loss for which costs of removal were measured."""
    usual: dict[str, Any] = {
        "loss": "next tokens, causal", "unit": "nats per token", "value": 2.0, "sequences": 64,
        "counted": 640, "probes": 8, "seed": 0,
    }  # fmt: skip
    fields = usual | changes
    return ImportanceRecord(**({"reference": abs(fields["value"])} | fields))


def removable(heads: Iterable[Address], **changes: Any) -> RemovableSet:
    """Return a set of heads that costs 0.5 % on held-out sequences."""
    usual: dict[str, Any] = {
        "tolerance": 0.01, "chosen_on": 4, "chosen_relative": 0.004, "held_out": 4, "loss": 2.01,
        "cost": 0.01, "relative": 0.005, "low": 0.001, "high": 0.009, "sorted_by": "exact", "runs": 3,
    }  # fmt: skip
    return RemovableSet(heads=[*heads], **(usual | changes))


def changed(
    audit: Audit,
    heads: Mapping[int, Fields] | None = None,
    *,
    every: Fields | None = None,
    origin: Fields | None = None,
    **fields: Any,
) -> Audit:
    """Return a copy with other fields: of heads by index, of every head, of the provenance, of the audit."""
    if heads or every:
        fields["heads"] = [
            head.model_copy(update={**(every or {}), **(heads or {}).get(index, {})})
            for index, head in enumerate(audit.heads)
        ]
    if origin:
        fields["provenance"] = audit.provenance.model_copy(update=dict(origin))
    return audit.model_copy(update=fields)


def provenance(model: str = "sample/encoder-6x12", **changes: Any) -> Provenance:
    usual: dict[str, Any] = {
        "model_class": "BertModel", "revision": "3f8c1d0", "parameters": 66_362_880, "data": "sentences.txt",
        "delta": 0.01, "model_dtype": "bfloat16", "device": "cpu", "batches": 8, "sequences": 64,
        "created": "2026-01-02T03:04:05Z", "command": f"rankwise audit {model} --data sentences.txt",
        "versions": {"rankwise": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
        "notes": ["The model was in training mode and was put into evaluation mode for the audit."],
    }  # fmt: skip
    return Provenance(model=model, **(usual | changes))


def _drawn(rows: Sequence[Measure], share: float) -> dict[str, float]:
    """Return a number in the range of each measure that pages and tables show."""
    shown = [row for row in rows if (row.drawn or row.console) and not row.known_only]
    return {row.name: share + (0.0 if math.isnan(row.range.low) else row.range.low) for row in shown}


def random_head(rng: np.random.Generator, depth: float, **changes: Any) -> HeadRecord:
    """Return a head whose rank falls with ``depth`` in [0, 1]."""
    tokens = float(changes.get("tokens", 128.0))
    share = float(np.clip(0.95 - 0.75 * depth + rng.normal(0, 0.12), 0.02, 1.0))
    spectrum = np.exp(-np.linspace(0, 3 + 6 * (1 - share), 64)) * (1 + 3 * (1 - share))
    measures = _drawn([row for row in HEAD_MEASURES if not row.kinds], share) | {
        "numerical_rank": share * tokens,
        "effective_rank": 1 + share * 0.8 * (tokens - 1),
        "stable_rank": 1 + share**3 * 0.3 * tokens,
        "sigma_max": float(spectrum[0]),
        "row_entropy": math.log(tokens) * float(np.clip(rng.normal(0.6, 0.2), 0, 1)),
        "first_token_mass": float(rng.beta(1, 6)),
        "max_token_mass": float(rng.beta(2, 5)),
        "row_spread": float(np.clip(share + rng.normal(0, 0.05), 0, 1)),
        "identity_distance": float(np.clip(rng.normal(0.8, 0.1), 0, 1)),
        "nearest_head_distance": float(np.clip(rng.normal(0.5, 0.15), 0.01, 1)),
    }
    causal = changes.get("mask") == "causal"
    usual: dict[str, Any] = {
        "stack": "encoder.layer", "site": "encoder.layer.0.attention.self", "layer": 0, "head": 0,
        "kind": "softmax", "mask": "full", "sequences": 64, "tokens": tokens, "sources": tokens,
        "one_hot_rank": (tokens + 1) / 2 if causal else tokens * (1 - (1 - 1 / tokens) ** tokens),
        "nearest_head": 0, "std": {name: abs(value) * 0.1 for name, value in measures.items()},
        "spectrum": [float(value) for value in spectrum],
    }  # fmt: skip
    fields = usual | measures | changes
    size = {"full_rank": min(fields["tokens"], fields["sources"])}
    bounds = dict.fromkeys(("rank_low", "rank_high"), fields["numerical_rank"])
    return HeadRecord(**(size | bounds | fields))


def random_state(rng: np.random.Generator, depth: float, **changes: Any) -> StateRecord:
    relative = float(np.clip(0.95 * math.exp(-1.5 * depth) + rng.normal(0, 0.02), 0, 1))
    measures = _drawn(STATE_MEASURES, relative) | {
        "spread": relative,
        "direction_spread": relative,
        "mean_cosine": 1 - relative**2,
        "effective_rank": 1 + 90 * relative,
    }
    usual: dict[str, Any] = {
        "stack": "encoder.layer", "site": "encoder.layer.0", "blocks": 0, "sequences": 64, "tokens": 128.0,
        "hidden_size": 768, "norm": 300.0, "absolute_spread": 300.0 * relative,
        "std": {name: abs(value) * 0.08 for name, value in measures.items()},
    }  # fmt: skip
    return StateRecord(**(usual | measures | changes))


def grid(
    layers: int, heads: int, seed: int = 0, site: str = "encoder.layer.{}.attention.self", **changes: Any
) -> list[HeadRecord]:
    """Return random heads of layers; ``{}`` in ``site`` is the number of the layer."""
    rng = np.random.default_rng(seed)
    return [
        random_head(
            rng,
            layer / max(layers, 1),
            **{"layer": layer, "head": head, "site": site.format(layer)},
            **{"nearest_head": (head + 1) % heads if heads > 1 else None} | changes,
        )
        for layer in range(layers)
        for head in range(heads)
    ]


def random_states(layers: int, seed: int = 0, **changes: Any) -> list[StateRecord]:
    rng = np.random.default_rng(seed + 1)
    return [
        random_state(rng, blocks / max(layers, 1), blocks=blocks, **changes) for blocks in range(layers + 1)
    ]


def place(layer: int | None, head: int | None = None) -> Address:
    """Return the address of a head or a layer of `encoder`."""
    site = "" if layer is None or head is None else f"encoder.layer.{layer}.attention.self"
    return Address(stack="encoder.layer", layer=layer, head=head, site=site)


def finding(code: str = "SINK", severity: str = "warning", **changes: Any) -> Finding:
    usual: dict[str, Any] = {
        "where": place(2, 7),
        "evidence": {"max_token_mass": 0.93, "first_token_mass": 0.87},
        "meaning": "The head spends most of its weight on the first token.",
        "remedy": Remedy(words="compare the loss without it", code="rw.audit(model, batches)"),
    }
    return Finding(code=code, severity=severity, **(usual | changes))


def advice(finding: Finding, about: Provenance | None = None) -> str:
    """Return the remedy of a finding as a report shows it."""
    assert finding.remedy is not None
    return remedy_text(finding.remedy, about)


FINDINGS: list[tuple[str, str, Address, dict[str, float], str, dict[str, Any]]] = [
    (
        "COLLAPSE", "error", place(None), {"blocks": 6.0, "direction_spread": 0.213, "mean_cosine": 0.955},
        "After layer 6 all tokens point almost the same way.",
        {"remedy": Remedy(code="rw.skips.recommend(audit, model, batch)")},
    ),
    (
        "NONFINITE", "error", place(5, 11), {"heads": 1.0, "sequences": 64.0},
        "The mixing matrix held NaN or infinity in every sequence.",
        {"remedy": Remedy(words="use float32", code="rw.audit(model.float(), batches)")},
    ),
    (
        "SINK", "warning", place(2, 7), {"max_token_mass": 0.93, "first_token_mass": 0.87},
        "The head spends most of its weight on the first token.", {},
    ),
    (
        "CONSTANT", "warning", place(4, 3), {"row_spread": 0.01, "stable_rank": 1.0},
        "Every token gets the same mixture, so the head adds one vector to all of them.", {},
    ),
    (
        "OVERSIZED_HEADS", "warning", place(3, 4), {"nearest_head_distance": 0.02, "heads": 2.0},
        "Heads 4 and 5 need few of their channels.",
        {"heads": [4, 5], "remedy": Remedy(words="compare the loss with narrow heads")},
    ),
    (
        "OVERSIZED_HEADS", "info", place(0), {"required_head_dim": 4.0, "heads": 12.0},
        "The heads of this layer need few of their channels.", {},
    ),
    ("IDENTITY", "info", place(0, 1), {"identity_distance": 0.04}, "Every token keeps to itself.", {}),
    (
        "NOT_CAPTURED", "info", Address(site="pooler.mixer"), {},
        "A module that looks like a mixer was not captured.",
        {"remedy": Remedy(code="rw.audit(model, batches, sites=sites)")},
    ),
]  # fmt: skip


def encoder() -> Audit:
    """Return six layers of twelve heads with one finding of each code."""
    notable = {
        2 * 12 + 7: {"first_token_mass": 0.87, "max_token_mass": 0.93, "numerical_rank": 9.0},
        4 * 12 + 3: {"row_spread": 0.01, "stable_rank": 1.0},
        5 * 12 + 11: {
            "numerical_rank": math.nan, "effective_rank": math.nan, "sequences": 0, "nonfinite_sequences": 64,
        },
    }  # fmt: skip
    found = [
        finding(code, severity, where=where, evidence=evidence, meaning=meaning, **more)
        for code, severity, where, evidence, meaning, more in FINDINGS
    ]
    missed = UncapturedModule(
        name="pooler.mixer", type="TokenMixer", reason="it calls no operation that is known to mix"
    )
    whole = Audit(
        provenance=provenance(),
        heads=grid(6, 12),
        states=random_states(6),
        findings=found,
        uncaptured=[missed],
    )
    return changed(whole, notable)


def encoder_decoder() -> Audit:
    """Return encoder, decoder and cross-attention with another number of sources; the audit is incomplete."""
    decoder: dict[str, Any] = {"stack": "decoder.block", "tokens": 48.0}
    cross = "decoder.block.{}.layer.1.EncDecAttention"
    heads = [
        *grid(6, 8, 1, "encoder.block.{}.layer.0.SelfAttention", stack="encoder.block"),
        *grid(6, 8, 2, "decoder.block.{}.layer.0.SelfAttention", **decoder, sources=48.0, mask="causal"),
        *grid(6, 8, 3, cross, **decoder, sources=128.0, cross=True, identity_distance=math.nan),
    ]
    collapse = finding(
        "COLLAPSE",
        "error",
        where=Address(stack="decoder.block"),
        evidence={"blocks": 6.0, "direction_spread": 0.172, "mean_cosine": 0.97},
        meaning="After layer 6 all tokens point almost the same way.",
    )
    sink = finding(where=Address(stack="decoder.block", layer=4, head=6, site=cross.format(4)))
    return Audit(
        provenance=provenance("sample/encoder-decoder", model_class="T5ForConditionalGeneration"),
        heads=heads,
        states=[*random_states(6, 1, stack="encoder.block"), *random_states(6, 2, **decoder)],
        findings=[sink, collapse],
        complete=False,
    )


def nasty() -> Audit:
    """Return an audit in which every string would run a script if it is not escaped."""
    site = NASTY + "<!--{}"
    where = Address(stack=NASTY, layer=1, head=2, site=site.format(1))
    bad = Remedy(words=NASTY, code=NASTY, condition=NASTY)
    found = [
        finding(NASTY, "error", where=where, evidence={NASTY: 1.0}, meaning=NASTY, remedy=bad),
        finding(
            *("COLLAPSE", "error"),
            where=Address(stack=NASTY),
            evidence={"blocks": 1.0},
            meaning=NASTY,
            remedy=bad,
        ),
    ]
    about = provenance(
        NASTY,
        **dict.fromkeys(("model_class", "command", "revision"), NASTY),
        data=NASTY + " [bold]not markup[/bold] \x1b[31m",
        versions={NASTY: NASTY},
        notes=[NASTY, "<!--<script>", "\u2028 %{y} <b>x</b> &lt;"],
    )
    return Audit(
        provenance=about,
        heads=grid(2, 3, site=site, stack=NASTY, kind=NASTY),
        states=random_states(2, stack=NASTY, site=NASTY),
        findings=found,
        uncaptured=[UncapturedModule(name=NASTY, type=NASTY, reason=NASTY)],
    )


def sized(layers: int, heads: int) -> Audit:
    every = grid(layers, heads, mask="causal")
    found = [
        finding(
            "SINK", where=place(head.layer, head.head), evidence={"first_token_mass": head.first_token_mass}
        )
        for head in every
        if head.first_token_mass > 0.35
    ]
    return Audit(
        provenance=provenance(f"sample/decoder-{layers}x{heads}"),
        heads=every,
        states=random_states(layers) if layers else [],
        findings=found,
    )


def empty() -> Audit:
    return Audit(provenance=provenance("sample/empty"), heads=[], states=[], findings=[], complete=False)


def only_nan() -> Audit:
    """Return two layers of two heads without one finite number."""
    measures = (row.name for row in HEAD_MEASURES)
    unknown = dict.fromkeys(["tokens", "sources", "full_rank", "one_hot_rank", *measures], math.nan)
    heads = [one.model_copy(update=unknown | {"spectrum": [math.nan] * 4, "std": {}}) for one in grid(2, 2)]
    unknown = dict.fromkeys(["tokens", *(row.name for row in STATE_MEASURES)], math.nan)
    states = [one.model_copy(update=unknown | {"std": {}}) for one in random_states(2)]
    return Audit(provenance=provenance("sample/nan"), heads=heads, states=states, findings=[])


def mixed() -> Audit:
    """Return a stack that alternates masks and mixers, with one state-space head per layer."""
    heads = [
        one.model_copy(update={"mask": "causal", "one_hot_rank": 64.5} if one.layer % 4 == 1 else {})
        for one in grid(8, 6, 4, "layers.{}.self_attn", stack="layers")
        if one.layer % 2
    ]
    heads += grid(8, 1, 5, "layers.{}.mamba", stack="layers", kind="selective")[::2]
    states = random_states(8, 4, stack="layers")
    return Audit(provenance=provenance("sample/hybrid"), heads=heads, states=states, findings=[])


def estimated() -> Audit:
    """Return a long context: a layer each of exact ranks, estimates, and intervals without an estimate."""
    errors = {"numerical_rank": 12.0, "effective_rank": 4.0, "stable_rank": 0.01, "sigma_max": 1e-6}
    heads = []
    for one in grid(3, 4, 6, tokens=32768.0):
        rank = one.numerical_rank
        known = {"rank_low": rank, "rank_high": rank, "random_rank": 0.5 * one.tokens, "uniform_rank": 1.0}
        guess = known | {"estimated_sequences": 64, "stderr": errors, "spectrum": []}
        bound = guess | {"numerical_rank": math.nan, "rank_low": 0.5 * rank, "rank_high": 0.9 * rank}
        heads.append(one.model_copy(update=(known, guess, bound)[one.layer]))
    about = provenance("sample/long", rank_method="256 of 768 spectra exact, the others estimated")
    return Audit(provenance=about, heads=heads, states=random_states(3), findings=[])


def memberships() -> Audit:
    """Return two stacks of TSSA layers: over the tokens of a text, and over the patches of a picture."""
    rng = np.random.default_rng(7)
    heads = []
    for stack, tokens in (("text", 40), ("picture", 24)):
        made = grid(3, 4, 7, stack + ".{}.mixer", stack=stack, kind="diagonal", tokens=float(tokens))
        for one in made:
            share = [float(x) for x in rng.uniform(0, 0.5, tokens)]
            known = {"membership": 0.25, "variational_rate": 0.02, "one_hot_rank": math.nan, "mask": "other"}
            known |= {"membership_map": share}
            heads.append(one.model_copy(update=known))
    states = random_states(3, stack="text") + random_states(3, 2, stack="picture")
    return Audit(provenance=provenance("sample/tost"), heads=heads, states=states, findings=[])


def long_names() -> Audit:
    """Return an audit with names in which a line cannot break."""
    name, stack = "organisation/" + "model_" * 20, "transformer_" * 10
    heads = grid(3, 4, site=stack + ".{}." + "attention_" * 10, stack=stack, kind="semiseparable")
    where = Address(stack=stack, layer=1, head=2, site=heads[6].site)
    return Audit(
        provenance=provenance(name, command="rankwise audit " + name * 3, data="d" * 200, notes=["n" * 200]),
        heads=heads,
        states=random_states(3, stack=stack),
        findings=[finding(where=where, meaning="m" * 200, remedy=Remedy(code="r" * 200))],
        uncaptured=[UncapturedModule(name=stack * 2, type="T" * 100, reason="r" * 100)],
    )


ALL = {
    "long_names": long_names,
    "encoder": encoder,
    "encoder_decoder": encoder_decoder,
    "nasty": nasty,
    "no_layers": empty,
    "no_heads": lambda: encoder().model_copy(update={"heads": []}),
    "no_states": lambda: changed(encoder(), states=[]),
    "one_head": lambda: sized(1, 1),
    "large": lambda: sized(12, 32),
    "only_nan": only_nan,
    "mixed": mixed,
    "estimated": estimated,
    "memberships": memberships,
}
"""Audits by what is particular about them."""
