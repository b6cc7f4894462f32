"""Audits made up by a seeded generator, in the ranges real ones have."""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

from rankwise.auditing.comparison import compare_two
from rankwise.auditing.history import History
from rankwise.auditing.records import Finding, HeadId, HeadRecord, LayerRecord, Provenance, Unseen
from rankwise.auditing.result import Audit
from rankwise.compression import Compression
from rankwise.plan.record import HeadDimPlan, TrainedWidth
from rankwise.report.audit_report import audit_document
from rankwise.report.comparison_report import comparison_document, history_document
from rankwise.report.compression_report import compression_document
from rankwise.report.document import Document
from rankwise.report.page import page_text
from rankwise.report.plan_report import plan_document
from rankwise.report.skip_report import certificate_document
from rankwise.skips.certificate import LayerCertificate, SkipCertificate, StackCertificate

OLD_FILES = Path(__file__).parents[1] / "old_files"
NASTY = "</script><img src=x onerror=alert(1)>"
"""Ends a script, loads a picture and runs a command wherever it is not escaped."""


def provenance(model: str = "sample/encoder-6x12", **fields: object) -> Provenance:
    given: dict[str, object] = {
        "model_class": "BertModel",
        "revision": "3f8c1d0",
        "parameters": 66_362_880,
        "data": "sentences.txt",
        "delta": 0.01,
        "model_dtype": "bfloat16",
        "device": "cpu",
        "batches": 8,
        "sequences": 64,
        "created": "2026-01-02T03:04:05Z",
        "command": f"rankwise audit {model} --data sentences.txt",
        "versions": {"rankwise": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
        "notes": ["The model was in training mode and was put into evaluation mode for the audit."],
    }
    return Provenance(model=model, **(given | fields))


def head_record(rng: np.random.Generator, depth: float, **fields: object) -> HeadRecord:
    """A head whose rank falls with ``depth`` in [0, 1]."""
    tokens = float(fields.get("tokens", 128.0))  # type: ignore[arg-type]
    causal = fields.get("mask", "full") == "causal"
    share = float(np.clip(0.95 - 0.75 * depth + rng.normal(0, 0.12), 0.02, 1.0))
    spectrum = np.exp(-np.linspace(0, 3 + 6 * (1 - share), 64)) * (1 + 3 * (1 - share))
    effective = 1 + share * 0.8 * (tokens - 1)
    measures = {
        "numerical_rank": share * tokens,
        "effective_rank": effective,
        "stable_rank": 1 + share**3 * 0.3 * tokens,
        "sigma_max": float(spectrum[0]),
        "row_entropy": math.log(tokens) * float(np.clip(rng.normal(0.6, 0.2), 0, 1)),
        "first_token_mass": float(rng.beta(1, 6)),
        "max_token_mass": float(rng.beta(2, 5)),
        "row_distance": float(np.clip(share + rng.normal(0, 0.05), 0, 1)),
        "identity_distance": float(np.clip(rng.normal(0.8, 0.1), 0, 1)),
        "nearest_distance": float(np.clip(rng.normal(0.5, 0.15), 0.01, 1)),
    }
    null = (tokens + 1) / 2 if causal else tokens * (1 - (1 - 1 / tokens) ** tokens)
    given: dict[str, object] = {
        "stack": "encoder.layer",
        "site": "encoder.layer.0.attention.self",
        "layer": 0,
        "head": 0,
        "kind": "softmax",
        "mask": "full",
        "sequences": 64,
        "tokens": tokens,
        "sources": tokens,
        "hardmax_rank": null,
        "nearest_head": 0,
        "std": {name: abs(value) * 0.1 for name, value in measures.items()},
        "spectrum": [float(value) for value in spectrum],
        **measures,
    }
    return HeadRecord(**(given | fields))


def layer_record(rng: np.random.Generator, depth: float, **fields: object) -> LayerRecord:
    relative = float(np.clip(0.95 * math.exp(-1.5 * depth) + rng.normal(0, 0.02), 0, 1))
    measures = {
        "relative_spread": relative,
        "mean_cosine": 1 - relative**2,
        "effective_rank": 1 + 90 * relative,
    }
    given: dict[str, object] = {
        "stack": "encoder.layer",
        "site": "encoder.layer.0",
        "layer": 0,
        "sequences": 64,
        "tokens": 128.0,
        "width": 768,
        "norm": 300.0,
        "token_spread": 300.0 * relative,
        "std": {name: abs(value) * 0.08 for name, value in measures.items()},
        **measures,
    }
    return LayerRecord(**(given | fields))


def grid(layers: int, heads: int, seed: int = 0, **fields: object) -> list[HeadRecord]:
    """``fields["site"]`` may hold ``{}`` for the layer."""
    rng = np.random.default_rng(seed)
    site = str(fields.pop("site", "encoder.layer.{}.attention.self"))
    return [
        head_record(
            rng,
            layer / max(layers, 1),
            layer=layer,
            head=head,
            site=site.format(layer),
            nearest_head=(head + 1) % heads if heads > 1 else None,
            **fields,
        )
        for layer in range(layers)
        for head in range(heads)
    ]


def states(layers: int, seed: int = 0, **fields: object) -> list[LayerRecord]:
    rng = np.random.default_rng(seed + 1)
    return [layer_record(rng, layer / max(layers, 1), layer=layer, **fields) for layer in range(layers + 1)]


def finding(code: str = "SINK", severity: str = "warning", **fields: object) -> Finding:
    where = HeadId(stack="encoder.layer", layer=2, head=7, site="encoder.layer.2.attention.self")
    given: dict[str, object] = {
        "where": where,
        "evidence": {"max_token_mass": 0.93, "first_token_mass": 0.87},
        "meaning": "The head spends most of its weight on the first token.",
        "remedy": "compare the loss without it: `rankwise compare BEFORE AFTER`",
    }
    return Finding(code=code, severity=severity, **(given | fields))


def _place(layer: int | None, head: int | None = None) -> HeadId:
    site = "" if layer is None or head is None else f"encoder.layer.{layer}.attention.self"
    return HeadId(stack="encoder.layer", layer=layer, head=head, site=site)


def encoder() -> Audit:
    """Six layers of twelve heads with one finding of each code."""
    heads = grid(6, 12)
    heads[2 * 12 + 7] = heads[2 * 12 + 7].model_copy(
        update={"first_token_mass": 0.87, "max_token_mass": 0.93, "numerical_rank": 9.0}
    )
    heads[4 * 12 + 3] = heads[4 * 12 + 3].model_copy(update={"row_distance": 0.01, "stable_rank": 1.0})
    heads[5 * 12 + 11] = heads[5 * 12 + 11].model_copy(
        update={"numerical_rank": math.nan, "effective_rank": math.nan, "sequences": 0, "nonfinite": 64}
    )
    found = [
        finding(
            "COLLAPSE",
            "error",
            where=_place(6),
            evidence={"relative_spread": 0.213, "mean_cosine": 0.955},
            meaning="After layer 6 all tokens point almost the same way.",
            remedy="rankwise skip sample/encoder-6x12 --init 1.0",
        ),
        finding(
            "NONFINITE",
            "error",
            where=_place(5, 11),
            evidence={"nonfinite": 64.0, "sequences": 0.0},
            meaning="The mixing matrix held NaN or infinity in every sequence.",
            remedy="rankwise audit sample/encoder-6x12 --dtype float32",
        ),
        finding(),
        finding(
            "CONSTANT",
            where=_place(4, 3),
            evidence={"row_distance": 0.01, "stable_rank": 1.0},
            meaning="Every token gets the same mixture, so the head adds one vector to all of them.",
        ),
        finding(
            "DUPLICATE_HEADS",
            where=_place(3, 4),
            evidence={"nearest_distance": 0.02},
            heads=[4, 5],
            meaning="Heads 4 and 5 mix alike.",
            remedy="rankwise compress sample/encoder-6x12",
        ),
        finding(
            "LOW_RANK",
            where=_place(4),
            evidence={"numerical_rank": 44.1, "hardmax_rank": 81.1},
            meaning="The heads of this layer mix in fewer directions than every reference.",
        ),
        finding(
            "IDENTITY",
            "info",
            where=_place(0, 1),
            evidence={"identity_distance": 0.04},
            meaning="Every token keeps to itself.",
        ),
        finding(
            "HIGH_RANK",
            "info",
            where=_place(0),
            evidence={"numerical_rank": 120.0, "hardmax_rank": 81.1},
            meaning="The heads of this layer mix in more directions than every reference.",
        ),
        finding(
            "NOT_CAPTURED",
            "info",
            where=HeadId(site="pooler.mixer"),
            evidence={},
            meaning="A module that looks like a mixer was not captured.",
            remedy="rankwise audit sample/encoder-6x12 --site pooler.mixer",
        ),
    ]
    uncaptured = [
        Unseen(name="pooler.mixer", type="TokenMixer", reason="it calls no operation that is known to mix")
    ]
    return Audit(
        provenance=provenance(), heads=heads, layers=states(6), findings=found, uncaptured=uncaptured
    )


def encoder_decoder() -> Audit:
    """Three panels: encoder, decoder and cross-attention with another number of sources."""
    decoder = {"stack": "decoder.block", "tokens": 48.0, "sources": 48.0}
    heads = [
        *grid(6, 8, 1, stack="encoder.block", site="encoder.block.{}.layer.0.SelfAttention"),
        *grid(6, 8, 2, **decoder, mask="causal", site="decoder.block.{}.layer.0.SelfAttention"),
        *grid(
            6,
            8,
            3,
            stack="decoder.block",
            tokens=48.0,
            sources=128.0,
            cross=True,
            identity_distance=math.nan,
            site="decoder.block.{}.layer.1.EncDecAttention",
        ),
    ]
    layers = [*states(6, 1, stack="encoder.block"), *states(6, 2, stack="decoder.block", tokens=48.0)]
    where = HeadId(stack="decoder.block", layer=4, head=6, site="decoder.block.4.layer.1.EncDecAttention")
    collapse = finding(
        "COLLAPSE",
        "error",
        where=HeadId(stack="decoder.block", layer=6),
        evidence={"relative_spread": 0.172, "mean_cosine": 0.97},
        meaning="After layer 6 all tokens point almost the same way.",
    )
    found = [finding(where=where), collapse]
    about = provenance("sample/encoder-decoder", model_class="T5ForConditionalGeneration")
    return Audit(provenance=about, heads=heads, layers=layers, findings=found, complete=False)


def nasty() -> Audit:
    """Every string that a model or a text could bring in tries to get out of its place."""
    site = NASTY + "<!--{}"
    fields = {"stack": NASTY, "site": site, "kind": NASTY}
    where = HeadId(stack=NASTY, layer=1, head=2, site=site.format(1))
    found = [
        finding(NASTY, "error", where=where, evidence={NASTY: 1.0}, meaning=NASTY, remedy=NASTY),
        finding("COLLAPSE", "error", where=HeadId(stack=NASTY, layer=1), meaning=NASTY, remedy=NASTY),
    ]
    about = provenance(
        NASTY,
        model_class=NASTY,
        data=NASTY + " [bold]not markup[/bold] \x1b[31m",
        command=NASTY,
        revision=NASTY,
        versions={NASTY: NASTY},
        notes=[NASTY, "<!--<script>", "\u2028 %{y} <b>x</b> &lt;"],
    )
    return Audit(
        provenance=about,
        heads=grid(2, 3, **fields),
        layers=states(2, stack=NASTY, site=NASTY),
        findings=found,
        uncaptured=[Unseen(name=NASTY, type=NASTY, reason=NASTY)],
    )


def sized(layers: int, heads: int) -> Audit:
    found = [
        finding(
            "SINK", where=_place(head.layer, head.head), evidence={"first_token_mass": head.first_token_mass}
        )
        for head in grid(layers, heads)
        if head.first_token_mass > 0.35
    ]
    about = provenance(f"sample/decoder-{layers}x{heads}")
    return Audit(
        provenance=about,
        heads=grid(layers, heads, mask="causal"),
        layers=states(layers) if layers else [],
        findings=found,
    )


def empty() -> Audit:
    return Audit(provenance=provenance("sample/empty"), heads=[], layers=[], findings=[], complete=False)


def only_nan() -> Audit:
    """Two layers of two heads without one finite number."""
    measures = (
        "numerical_rank effective_rank stable_rank sigma_max row_entropy first_token_mass max_token_mass "
        "row_distance"
    )
    others = "tokens sources hardmax_rank identity_distance nearest_distance"
    missing = dict.fromkeys(f"{measures} {others}".split(), math.nan)
    heads = [
        head.model_copy(update={**missing, "spectrum": [math.nan] * 4, "std": {}}) for head in grid(2, 2)
    ]
    gone = dict.fromkeys(
        ["tokens", "norm", "token_spread", "relative_spread", "mean_cosine", "effective_rank"], math.nan
    )
    layers = [layer.model_copy(update={**gone, "std": {}}) for layer in states(2)]
    return Audit(provenance=provenance("sample/nan"), heads=heads, layers=layers, findings=[])


def mixed() -> Audit:
    """A stack that alternates masks and mixers, with one lonely state-space head a layer."""
    full = [h for h in grid(8, 6, 4, stack="layers", site="layers.{}.self_attn") if h.layer % 2]
    masked = [
        h.model_copy(update={"mask": "causal", "hardmax_rank": 64.5}) if h.layer % 4 == 1 else h for h in full
    ]
    lonely = [
        h for h in grid(8, 1, 5, stack="layers", site="layers.{}.mamba", kind="selective") if h.layer % 2 == 0
    ]
    return Audit(
        provenance=provenance("sample/hybrid"),
        heads=[*masked, *lonely],
        layers=states(8, 4, stack="layers"),
        findings=[],
    )


def estimated() -> Audit:
    """A long context: exact ranks, estimates, and estimates that only bound the rank, side by side."""
    errors = {"numerical_rank": 12.0, "effective_rank": 4.0, "stable_rank": 0.01, "sigma_max": 1e-6}
    heads = []
    for head in grid(3, 4, 6, tokens=32768.0):
        rank = head.numerical_rank
        known = {"rank_low": rank, "rank_high": rank, "random_rank": 0.5 * head.tokens, "uniform_rank": 1.0}
        guess = known | {"estimated": 64, "stderr": errors, "spectrum": []}
        bound = guess | {"numerical_rank": math.nan, "rank_low": 0.5 * rank, "rank_high": 0.9 * rank}
        heads.append(head.model_copy(update=(known, guess, bound)[head.layer]))
    about = provenance("sample/long", method="256 of 768 spectra exact, the others estimated")
    return Audit(provenance=about, heads=heads, layers=states(3), findings=[])


def memberships() -> Audit:
    """Two stacks of TSSA layers: one over the tokens of a text, one over the patches of a picture."""
    rng = np.random.default_rng(7)
    heads = []
    for stack, tokens, lies in (("text", 40, None), ("picture", 24, (4, 6))):
        for head in grid(
            3, 4, 7, stack=stack, site=stack + ".{}.mixer", kind="diagonal", tokens=float(tokens)
        ):
            share = [float(x) for x in rng.uniform(0, 0.5, tokens)]
            known = {"membership": 0.25, "coding_rate": 0.02, "hardmax_rank": math.nan, "mask": "other"}
            heads.append(head.model_copy(update=known | {"membership_map": share, "membership_grid": lies}))
    layers = states(3, stack="text") + states(3, 2, stack="picture")
    return Audit(provenance=provenance("sample/tost"), heads=heads, layers=layers, findings=[])


def long_names() -> Audit:
    """Names without a place to break them."""
    name, stack = "organisation/" + "model_" * 20, "transformer_" * 10
    heads = grid(3, 4, stack=stack, site=stack + ".{}." + "attention_" * 10, kind="semiseparable")
    where = HeadId(stack=stack, layer=1, head=2, site=heads[6].site)
    found = [finding(where=where, meaning="m" * 200, remedy="rankwise audit " + "r" * 200)]
    uncaptured = [Unseen(name=stack * 2, type="T" * 100, reason="r" * 100)]
    about = provenance(name, command="rankwise audit " + name * 3, data="d" * 200, notes=["n" * 200])
    layers = states(3, stack=stack)
    return Audit(provenance=about, heads=heads, layers=layers, findings=found, uncaptured=uncaptured)


ALL = {
    "long_names": long_names,
    "encoder": encoder,
    "encoder_decoder": encoder_decoder,
    "nasty": nasty,
    "no_layers": empty,
    "no_heads": lambda: encoder().model_copy(update={"heads": []}),
    "no_states": lambda: encoder().model_copy(update={"layers": []}),
    "one_head": lambda: sized(1, 1),
    "large": lambda: sized(48, 32),
    "only_nan": only_nan,
    "mixed": mixed,
    "estimated": estimated,
    "memberships": memberships,
}


def page(audit: Audit) -> str:
    """The page of an audit."""
    return page_text(audit_document(audit))


def data(audit: Audit) -> Mapping[str, Any]:
    """What the scripts of the page of an audit read."""
    return audit_document(audit).data(0)


def nasty_plan() -> Document:
    trained = [TrainedWidth(head=HeadId(stack=NASTY, layer=0, head=0), width=4, required=math.nan)]
    plan = HeadDimPlan(
        tokens=64, mask=NASTY, tolerance=0.01, barrier=40.0, inputs=NASTY, trials=2, head_dim=4,
        curve=[(2, 0.2, math.nan), (4, 0.4, 0.1)], interval=(2, 4), saturated=True, trained=trained,
        notes=[NASTY], about={NASTY: NASTY}, complete=False,
    )  # fmt: skip
    return plan_document(plan)


R = TypeVar("R")


def nasty_copy(file: str, load: Callable[[Path], R]) -> R:
    """Load a copy of an old file whose texts would escape and whose spreads are missing."""

    def nasty_value(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: nasty_value(key, item) for key, item in value.items()}
        if isinstance(value, list):
            return [nasty_value(name, item) for item in value]
        if isinstance(value, str) and name not in {"format", "phase", "part"}:
            return NASTY
        return None if name in {"kl", "kl_calibrated", "nats", "effective_rank"} else value

    content = json.loads((OLD_FILES / file).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.json"
        path.write_text(json.dumps(nasty_value("", content)), encoding="utf-8")
        return load(path)


def nasty_certificate() -> Document:
    def filled(kind: type[BaseModel]) -> dict[str, Any]:
        kinds = {name: str(field.annotation) for name, field in kind.model_fields.items()}
        return {
            name: NASTY if "str" in of else None if "bool" in of else math.inf if "float" in of else 1
            for name, of in kinds.items()
        }

    layer, stack = LayerCertificate(**filled(LayerCertificate)), StackCertificate(**filled(StackCertificate))
    return certificate_document(
        SkipCertificate(a=0.5, sequences=1, layers=[layer], stacks=[stack], notes=[NASTY])
    )


DOCUMENTS: dict[str, Callable[[], Document]] = {
    "audit": lambda: audit_document(nasty()),
    "comparison": lambda: comparison_document(compare_two(nasty(), only_nan())),
    "history": lambda: history_document(History.of([nasty(), only_nan(), only_nan()], [NASTY, "b", "c"])),
    "plan": nasty_plan,
    "compression": lambda: compression_document(
        nasty_copy("compressed/together/compression.json", Compression.load)
    ),
    "certificate": nasty_certificate,
}
"""The six kinds, with names that would escape and numbers that are not finite."""
