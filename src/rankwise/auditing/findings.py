"""Findings: a table of rules, a function per code, and `diagnose`, which applies all of them to an audit."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, TypeVar

from rankwise._internals.statistics import WIDTH_TOLERANCE
from rankwise.auditing.importance_findings import (
    describe_removable,
    importances_by_head,
    with_removal_cost,
)
from rankwise.auditing.importance_records import ImportanceRecord
from rankwise.auditing.measure_table import NULLS, mixer_kind
from rankwise.auditing.records import (
    SEVERITY_ORDER,
    BaselineAt,
    Finding,
    HeadId,
    HeadRecord,
    LayerRecord,
    RankAt,
    Severity,
    Unseen,
)
from rankwise.errors import InputError, did_you_mean

R = TypeVar("R")
K = TypeVar("K", bound=Hashable)

MIN_TOKENS = 8
"""Shorter sequences are not judged: many 2×2 matrices are close to the identity or have nearly equal rows."""
STRUCTURE_TOKENS = 64
"""For shorter sequences, SINK and CONSTANT are notes: the mass that 20 tokens leave to one token may be
spread among 500."""
SINK_MASS = 0.9
"""Nine tenths of every row are on one token, so the head passes on little else."""
CONSTANT_STABLE_RANK = 1.1
"""At most a tenth of the energy of the strongest direction lies outside it …"""
CONSTANT_DISTANCE = 0.3
"""… and at most 9 % (0.3²) of the energy distinguishes rows."""
IDENTITY_DISTANCE = 0.1
"""M − I has 1 % of the joint energy of M and I, so about 1 % of a row is on other tokens."""
DUPLICATE_DISTANCE = 0.1
"""The difference of two heads has 1 % of their joint energy."""
HIGH_RANK, LOW_RANK = 1.25, 0.5
"""Bounds of the numerical rank relative to every known reference, at every threshold of the band.

The standard deviation of a hardmax rank is below 8 % for T ≥ 32. The references are uninformed heads at
temperature 0, at the head's own temperature and at an infinite one. A rank between two references is that of
an uninformed head at another temperature. Without a mask uniform attention has rank 1, and no rank is lower.
"""
COLLAPSE_WARNING, COLLAPSE_ERROR = 0.3, 0.1
"""μ/‖Y‖ at which 9 % and 1 % of the energy of the token states distinguish tokens."""
COLLAPSE_FALL = 0.5
"""A collapse has also halved the μ/‖Y‖ of the input, because inputs may be similar to begin with."""
INACTIVE_TURN = 0.01
"""1e-4 of the energy of the output of a block or mixer is its own; the rest is its input."""
OVERSIZED_HEADS = 0.4
"""Share of the head dimension: half of the channels can be removed, with a margin of a tenth for the error of
the second-order KL (docs/how-to/findings.md)."""
TOKENS_PER_CHANNEL = 4
"""With N tokens per channel, eigenvalues of second moments are within (1 ± 1/√N)² of the true eigenvalues
(Marchenko and Pastur): from 1/4 to 9/4. Fewer tokens require a small head dimension in any head."""

WITHOUT_HEAD = "set the weights of the output projection that read this head to 0, and compare the loss"
"""Part of a linear map reads each attention head, whatever its library calls that map."""


@dataclass(frozen=True)
class Measured:
    """Records of an audit from which findings follow."""

    heads: Sequence[HeadRecord]
    layers: Sequence[LayerRecord]
    uncaptured: Sequence[Unseen]
    importance: ImportanceRecord | None

    @cached_property
    def mixers(self) -> list[list[HeadRecord]]:
        """Heads grouped by mixer."""
        return _grouped(self.heads, lambda head: (head.stack, head.layer, head.site, head.cross))


Subject = Literal["model", "stack", "layer", "mixer", "group", "head", "modules"]
Find = TypeVar("Find", bound=Callable[..., Iterator[Finding]])


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Properties of all findings with one code."""

    find: Callable[..., Iterator[Finding]]
    """Yields the findings of `Measured`, or of one `HeadRecord` if the rule is about a head."""
    about: Subject
    """Subject of the finding; two audits have the same finding if code and subject are equal.

    A ``group`` is several heads of a mixer, equal to another group that has two of them. A finding about
    ``modules`` is about all modules of a class that were not captured for one reason.
    """
    decided_by: str
    """Key of the evidence that decides how strong the finding is."""
    worse: Literal["higher", "lower", "neither"]
    """Direction in which that number is worse: neither if it is only room for compression."""
    shown_by: str = ""
    """Measure whose map or curve shows the finding."""
    remedy: str
    """Next step for the reader, with commands in backticks and fields in braces."""
    causes_action: bool = True
    """False if the finding describes the model and no action follows."""
    with_costs: bool = False
    """True if the finding states the cost of removing its heads, where it was measured."""


RULES: dict[str, Rule] = {}
"""Rules by code, in the order in which they are applied."""


def rule(*codes: str, **properties: Any) -> Callable[[Find], Find]:
    """Register a function as the rule of the codes that its findings have; see `Rule`."""

    def register(find: Find) -> Find:
        RULES.update(dict.fromkeys(codes, Rule(find=find, **properties)))
        return find

    return register


def diagnose(
    heads: Sequence[HeadRecord],
    layers: Sequence[LayerRecord],
    uncaptured: Sequence[Unseen],
    importance: ImportanceRecord | None = None,
) -> list[Finding]:
    """Return all findings, sorted by severity, then in the order of the rules and of the model.

    Args:
        heads: records of the heads.
        layers: records of the token states.
        uncaptured: modules that were not captured.
        importance: costs of removal; findings about heads then state them.
    """
    measured = Measured(heads, layers, uncaptured, importance)
    rules = {id(rule.find): rule for rule in RULES.values()}.values()
    found: list[Finding] = []
    for about_heads, some in groupby(rules, lambda rule: rule.about == "head"):
        finds = [rule.find for rule in some]
        for subject in heads if about_heads else [measured]:
            found += (finding for find in finds for finding in find(subject))
    if importance is not None:
        found = with_removal_costs(found, heads, importance)
    return sorted(found, key=lambda finding: SEVERITY_ORDER[finding.severity])


def with_removal_costs(
    findings: Sequence[Finding], heads: Sequence[HeadRecord], importance: ImportanceRecord
) -> list[Finding]:
    """Return findings that state the cost of removing their heads, where their rule says so."""
    known = importances_by_head(heads)
    return [
        with_removal_cost(finding, rule.about, known, importance) if rule.with_costs else finding
        for finding in findings
        for rule in [RULES[finding.code]]
    ]


def about(code: str) -> Subject | Literal[""]:
    """Return the subject of the findings with a code; an empty string for an unknown code."""
    return RULES[code].about if code in RULES else ""


def check_codes(codes: Sequence[str]) -> list[str]:
    """Return the codes of findings in upper case.

    Args:
        codes: codes in any case, with hyphens or underscores.

    Raises:
        InputError: if no finding has one of the codes; names the nearest code.
    """
    known = [code.upper().replace("-", "_") for code in codes]
    for code in known:
        if code not in RULES:
            raise InputError(
                f"code {code}", expected="a code of a finding", got=code, fix=did_you_mean(code, list(RULES))
            )
    return known


@rule(
    "REMOVABLE", about="model", decided_by="heads", worse="neither", shown_by="removal_cost",
    remedy="rankwise compress MODEL --parts heads --tolerance {tolerance:g} --text TEXT --out DIR",
)  # fmt: skip
def removable(measured: Measured) -> Iterator[Finding]:
    """Find the heads that can be removed together."""
    found = None if measured.importance is None else measured.importance.removable
    if measured.importance is None or found is None or not found.heads:
        return
    first = found.heads[0]
    alone = len(found.heads) == 1
    yield _finding(
        "REMOVABLE",
        HeadId(stack=first.stack, layer=first.layer, site=first.site, head=first.head) if alone else HeadId(),
        {"heads": len(found.heads), "cost": found.cost, "relative": found.relative, "loss": found.loss},
        describe_removable(measured.importance, found),
        tolerance=found.tolerance,
    )


@rule(
    "NONFINITE", about="mixer", decided_by="heads", worse="higher",
    remedy="see whether half precision overflowed, `rankwise audit MODEL --text TEXT --dtype float32 --out "
    "DIR`; what is not finite in float32 either comes from inputs or from weights, `[name for name, weight "
    "in model.named_parameters() if not weight.isfinite().all()]`",
)  # fmt: skip
def nonfinite(measured: Measured) -> Iterator[Finding]:
    """Find mixers and token states with NaN or infinity."""
    meaning = "NaN or infinity appears here; those sequences are left out of every mean."
    for mixer in measured.mixers:
        broken = [head for head in mixer if head.nonfinite]
        if broken:
            yield _finding(
                "NONFINITE",
                broken[0],
                {"heads": len(broken), "sequences": max(head.nonfinite for head in broken)},
                f"Attention of {broken[0].site or 'the model itself'}: {meaning}",
                "error",
                broken,
            )
    for layer in measured.layers:
        if layer.nonfinite:
            evidence = {"sequences": layer.nonfinite}
            said = f"Token states after {layer.layer} blocks: {meaning}"
            yield _finding("NONFINITE", layer, evidence, said, "error")


@rule(
    "COLLAPSE", about="stack", decided_by="relative_spread_lowest", worse="lower",
    shown_by="relative_spread", remedy="rw.skips.recommend(audit, model, batch)",
)  # fmt: skip
def collapse(measured: Measured) -> Iterator[Finding]:
    """Find stacks in which tokens become alike."""
    for group in _grouped(measured.layers, lambda layer: layer.stack):
        states = [layer for layer in group if layer.tokens >= MIN_TOKENS]
        first = states[0].relative_spread if states else math.nan
        threshold = min(COLLAPSE_WARNING, COLLAPSE_FALL * first)
        low = [layer for layer in states[1:] if layer.relative_spread < threshold]
        if not low or math.isnan(first):
            continue
        start, lowest = low[0], min(layer.relative_spread for layer in low)
        yield _finding(
            "COLLAPSE",
            start,
            {
                "relative_spread": start.relative_spread,
                "relative_spread_layer_0": first,
                "relative_spread_lowest": lowest,
                "mean_cosine": start.mean_cosine,
            },
            f"Tokens become alike: after {start.layer} blocks μ/‖Y‖ is {start.relative_spread:.2g}, where "
            f"the first block reads {first:.2g}.",
            "error" if lowest < COLLAPSE_ERROR else "warning",
        )


@rule(
    "INACTIVE_BLOCK", about="layer", decided_by="relative_update", worse="lower",
    remedy="see how much mixing its λ-skip or LayerScale leaves, `rankwise skip MODEL --text TEXT "
    "--certify`; or {change} and compare the loss",
)  # fmt: skip
def inactive_block(measured: Measured) -> Iterator[Finding]:
    """Find blocks that return their input, because a λ, a LayerScale or a gate suppresses the rest."""
    for layer in measured.layers:
        if layer.relative_update < INACTIVE_TURN:
            yield _finding(
                "INACTIVE_BLOCK",
                layer,
                _fields(layer, "relative_update norm"),
                f"Block {layer.layer - 1} hardly changes its tokens: only {layer.relative_update:.1g} of "
                "what it gives is not what it reads, at some scale.",
                "warning",
                change="take the block out of its list",
            )


@rule(
    "SINK", about="head", decided_by="max_token_mass", worse="higher", shown_by="max_token_mass",
    remedy=WITHOUT_HEAD, with_costs=True,
)  # fmt: skip
def sink(head: HeadRecord) -> Iterator[Finding]:
    """Find a head that spends nine tenths of every row on one token."""
    if _is_judged(head) and head.max_token_mass > SINK_MASS:
        yield _finding(
            "SINK",
            head,
            _fields(head, "max_token_mass first_token_mass row_entropy"),
            f"{_token_name(head)} takes {head.max_token_mass:.0%} of a row on average: the head passes on "
            f"little else.{_length_note(head)}",
            _structure_severity(head),
        )


@rule(
    "CONSTANT", about="head", decided_by="row_distance", worse="lower", shown_by="row_distance",
    remedy=WITHOUT_HEAD, with_costs=True,
)  # fmt: skip
def constant(head: HeadRecord) -> Iterator[Finding]:
    """Find a head whose rows are nearly equal, unless it is a sink."""
    alike = head.stable_rank < CONSTANT_STABLE_RANK and head.row_distance < CONSTANT_DISTANCE
    if _is_judged(head) and alike and not head.max_token_mass > SINK_MASS:
        yield _finding(
            "CONSTANT",
            head,
            _fields(head, "stable_rank row_distance"),
            f"All rows are nearly the same: every token gets the same average.{_length_note(head)}",
            _structure_severity(head),
        )


@rule(
    "IDENTITY", about="head", decided_by="identity_distance", worse="lower", shown_by="identity_distance",
    remedy="put a linear map of each token in its place, the product of its output and value projections, "
    "and compare the loss", with_costs=True,
)  # fmt: skip
def identity(head: HeadRecord) -> Iterator[Finding]:
    """Find a head that mixes nothing."""
    if _is_judged(head) and head.identity_distance < IDENTITY_DISTANCE:
        yield _finding(
            "IDENTITY",
            head,
            _fields(head, "identity_distance effective_rank"),
            f"Every token keeps to itself: the head mixes nothing.{_length_note(head)}",
        )


@rule(
    "DUPLICATE_HEADS", about="group", decided_by="heads", worse="higher", shown_by="nearest_distance",
    remedy="give {which} the {weights} of one of them, and compare the loss", with_costs=True,
)  # fmt: skip
def duplicate_heads(measured: Measured) -> Iterator[Finding]:
    """Find groups of attention heads of a mixer that mix alike: each head and its nearest head, joined.

    Two heads that each have a finding of their own are not joined. Channels of state-space mixers are left
    out, because dozens of them are alike.
    """
    for mixer in measured.mixers:
        by_number = {head.head: head for head in mixer if not mixer_kind(head.kind).state_space}
        groups: dict[int, set[int]] = {}
        distances: dict[int, float] = {}
        for head in by_number.values():
            other = by_number.get(-1 if head.nearest_head is None else head.nearest_head)
            if other is None or _tokens(head) < MIN_TOKENS or not head.nearest_distance < DUPLICATE_DISTANCE:
                continue
            if not (_has_finding(head) and _has_finding(other)):
                joined = groups.get(head.head, {head.head}) | groups.get(other.head, {other.head})
                groups.update(dict.fromkeys(joined, joined))
                distances[head.head] = head.nearest_distance
        for group in {min(group): sorted(group) for _, group in sorted(groups.items())}.values():
            yield _finding(
                "DUPLICATE_HEADS",
                by_number[group[0]],
                {"heads": len(group), "nearest_distance": max(distances.get(at, 0.0) for at in group)},
                f"Heads {', '.join(map(str, group[:-1]))} and {group[-1]} mix the same way.",
                heads=[by_number[at] for at in group],
                which="both" if len(group) == 2 else "all",
                weights="query and key weights" if mixer[0].kind in ("softmax", "linear") else "weights",
            )


@rule(
    "HIGH_RANK", "LOW_RANK", about="mixer", decided_by="heads", worse="higher", shown_by="numerical_rank",
    remedy="see what {question}: `rw.audit(model, batches, {option}=True)`", with_costs=True,
    causes_action=False,
)  # fmt: skip
def unusual_rank(measured: Measured) -> Iterator[Finding]:
    """Find heads with more or less rank than at initialization, or else than every reference rank.

    Most heads of a trained model have more rank or less than the references.
    """
    for mixer in measured.mixers:
        long = [head for head in mixer if _tokens(head) >= MIN_TOKENS]
        for judged in (
            [head for head in long if has_baseline(head)],
            [head for head in long if not has_baseline(head) and _references(head)],
        ):
            for code in ("HIGH_RANK", "LOW_RANK"):
                found = [head for head in judged if rank_code(head) == code]
                if found:
                    yield _rank_finding(code, found, len(judged))


def _rank_finding(code: str, found: list[HeadRecord], judged: int) -> Finding:
    head = max(found, key=_distance_from_references)
    rank, baseline = _middle_rank(head), head.baseline if has_baseline(head) else None
    band: Sequence[RankAt | BaselineAt] = head.band if baseline is None else baseline.band
    deltas = {"delta_low": band[0].delta, "delta_high": band[-1].delta}
    span = "{delta_low:.2g} to {delta_high:.2g}.".format(**deltas)
    evidence: dict[str, float | int] = {"heads": len(found), "of": judged, "numerical_rank": rank}
    references = head.band[len(head.band) // 2].nulls
    words = f"{len(found)} of {judged} heads have"
    if baseline is None:
        than = f"over {HIGH_RANK:g} times" if code == "HIGH_RANK" else "less than half"
        said = ", ".join(f"{NULLS[name]} {value:.0f}" for name, value in references.items())
        words += f" {than} the rank of each reference (of {head.tokens:.0f}: {said}), whatever δ from {span}"
        question, option = "training did", "baseline"
    else:
        at, (initial,) = baseline.band[len(baseline.band) // 2], _references(head)
        evidence |= {
            "baseline": initial,
            "baseline_std": at.seed_std,
            "difference": (at.difference_low + at.difference_high) / 2,
            "margin": at.margin,
            "pairs": at.pairs,
            "seeds": baseline.seeds,
        }
        words += (
            f" {'more' if code == 'HIGH_RANK' else 'less'} rank than the same heads at fresh weights on the "
            f"same data: head {head.head} has {rank:.0f} of {head.smaller:.0f}, fresh {initial:.0f}; over "
            f"sequences and seeds the difference varies by ±{at.margin:.2g}. So it is for δ from {span}"
        )
        question, option = "the model loses without it", "importance"
    evidence |= references | deltas
    return _finding(code, head, evidence, words, heads=found, question=question, option=option)


def has_baseline(head: HeadRecord) -> bool:
    """Return whether the rank at initialization, its standard deviation and the scale of M are known."""
    return mixer_kind(head.kind).scale_is_known and head.baseline is not None and head.baseline.judged


def rank_code(head: HeadRecord) -> str | None:
    """Return HIGH_RANK or LOW_RANK if it holds at every threshold of the band, else None.

    The reference is the same head at initialization if the audit judges it, else every known reference rank.
    """
    if head.baseline is not None and has_baseline(head):
        points = head.baseline.band
        high = all(point.difference_low > point.margin for point in points)
        low = all(-point.difference_high > point.margin for point in points)
    else:
        known = bool(_references(head))
        high = known and all(at.rank_low > HIGH_RANK * max(at.nulls.values()) for at in head.band)
        low = known and all(at.rank_high < LOW_RANK * min(at.nulls.values()) for at in head.band)
    return "HIGH_RANK" if high else "LOW_RANK" if low else None


def _references(head: HeadRecord) -> list[float]:
    """Return the ranks at δ that the rank of a head is compared with; none if a threshold has none."""
    if head.baseline is not None and has_baseline(head):
        at = head.baseline.band[len(head.baseline.band) // 2]
        return [(at.rank_low + at.rank_high) / 2]
    known = bool(head.band) and all(at.nulls for at in head.band)
    return list(head.band[len(head.band) // 2].nulls.values()) if known else []


def _distance_from_references(head: HeadRecord) -> float:
    """Return the logarithmic distance to the nearest reference at δ."""
    rank = _middle_rank(head)
    return min(abs(math.log((rank + 1) / (reference + 1))) for reference in _references(head))


def _middle_rank(head: HeadRecord) -> float:
    """Return the numerical rank, or the middle of its interval if an estimate only bounds it."""
    return (head.least_rank + head.most_rank) / 2 if math.isnan(head.numerical_rank) else head.numerical_rank


@rule(
    "OVERSIZED_HEADS", about="mixer", decided_by="heads", worse="neither", shown_by="required_head_dim",
    remedy="`rankwise compress MODEL --parts qk --tolerance {tolerance:g} --text TEXT --out DIR`, with the "
    "part rotary in place of qk where positions are rotated in",
)  # fmt: skip
def oversized_heads(measured: Measured) -> Iterator[Finding]:
    """Find heads that require less than half of their head dimension.

    Heads that require none weigh all tokens evenly, as at initialization, and are left out.
    """
    for mixer in measured.mixers:
        known = {head.head: head.width or 0 for head in mixer if _has_enough_tokens(head)}
        judged = [head for head in mixer if head.head in known]
        found = [head for head in judged if 1 <= head.required_head_dim <= OVERSIZED_HEADS * known[head.head]]
        if found:
            least = min(found, key=lambda head: head.required_head_dim / known[head.head])
            width = known[least.head]
            yield _finding(
                "OVERSIZED_HEADS",
                least,
                {
                    "heads": len(found),
                    "of": len(judged),
                    "width": width,
                    "required_head_dim": least.required_head_dim,
                    "tolerance": WIDTH_TOLERANCE,
                },
                f"{len(found)} of {len(judged)} heads need less than half the width of their queries and "
                f"keys: head {least.head} {least.required_head_dim:.0f} of {width}. With it attention stays "
                f"within {WIDTH_TOLERANCE:g} nats on these sequences (KL to second order, rows weighed "
                "evenly).",
                heads=found,
                tolerance=WIDTH_TOLERANCE,
            )


def _has_enough_tokens(head: HeadRecord) -> bool:
    """Return whether the tokens determine the second moments of the channels."""
    if math.isnan(head.required_head_dim) or _tokens(head) < MIN_TOKENS:
        return False
    # Centering takes one token of each sequence.
    return head.sequences * (_tokens(head) - 1) >= TOKENS_PER_CHANNEL * (head.width or 0)


@rule(
    "NOT_CAPTURED", about="modules", decided_by="modules", worse="higher",
    remedy="rw.audit(model, batches, sites={{{name!r}: adapter}})",
)  # fmt: skip
def not_captured(measured: Measured) -> Iterator[Finding]:
    """Find modules that look like mixers and were not captured."""
    for modules in _grouped(measured.uncaptured, lambda module: (module.type, module.reason)):
        first = modules[0]
        yield _finding(
            "NOT_CAPTURED",
            HeadId(site=first.name),
            {"modules": len(modules)},
            f"{len(modules)} × {first.type} looks like a mixer and is not in this audit: {first.reason}.",
            "info" if first.reason.startswith("never called") else "warning",
            name=first.name,
        )


def place_of(record: HeadRecord | LayerRecord) -> HeadId:
    """Return the address of a head or of the token states of a layer."""
    head = record.head if isinstance(record, HeadRecord) else None
    return HeadId(stack=record.stack, layer=record.layer, site=record.site, head=head)


def _finding(
    code: str,
    where: HeadRecord | LayerRecord | HeadId,
    evidence: Mapping[str, float | int],
    meaning: str,
    severity: Severity = "info",
    heads: Sequence[HeadRecord] = (),
    **fields: object,
) -> Finding:
    """Make a finding with the remedy of its rule, whose fields are filled in."""
    return Finding(
        code=code,
        severity=severity,
        where=where if isinstance(where, HeadId) else place_of(where),
        evidence=dict(evidence),
        meaning=meaning,
        remedy=RULES[code].remedy.format(**fields),
        heads=[head.head for head in heads],
    )


def _fields(record: HeadRecord | LayerRecord, names: str) -> dict[str, float]:
    return {name: getattr(record, name) for name in names.split()}


def _grouped(records: Sequence[R], key: Callable[[R], K]) -> list[list[R]]:
    """Group records by key, in the order of the first of each group: records of stacks may alternate."""
    groups: dict[K, list[R]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.values())


def _tokens(head: HeadRecord) -> float:
    return min(head.tokens, head.sources)


def _is_judged(head: HeadRecord) -> bool:
    return _tokens(head) >= MIN_TOKENS and not math.isnan(head.stable_rank)


def _has_finding(head: HeadRecord) -> bool:
    finds = {id(rule.find): rule.find for rule in RULES.values() if rule.about == "head"}.values()
    return any(True for find in finds for _ in find(head))


def _structure_severity(head: HeadRecord) -> Severity:
    return "warning" if _tokens(head) >= STRUCTURE_TOKENS else "info"


def _length_note(head: HeadRecord) -> str:
    note = f" Of {_tokens(head):.0f} tokens; longer sequences may show another head."
    return note if _tokens(head) < STRUCTURE_TOKENS else ""


def _token_name(head: HeadRecord) -> str:
    """Return the token with the largest mass, and in how many sequences if not in all."""
    if not head.max_token:
        return "One token"
    name = head.max_token.removeprefix("the ")
    name = f"The {name}" if name != head.max_token else name
    some = f" (in {head.max_token_sequences} of {head.sequences} sequences)"
    return name if head.max_token_sequences == head.sequences else name + some
