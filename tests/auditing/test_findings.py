"""Findings appear at their thresholds, `compare` matches them, and the verdict counts them."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.records import (
    AtInit,
    HeadImportance,
    InitialModels,
    advice,
    audit,
    changed,
    head,
    heads,
    importance,
    token_state,
    token_states,
)
from tests.support.records import (
    finding as recorded,
)
from tests.support.records import (
    removable as removable_set,
)

from rankwise.auditing import (
    FINDING_RULES,
    Audit,
    Finding,
    HeadRecord,
    Provenance,
    Remedy,
    StateRecord,
    UncapturedModule,
    compare,
    findings,
    remedy_text,
)
from rankwise.auditing.findings import check_codes, diagnose
from rankwise.auditing.records import Verdict
from rankwise.auditing.remedies import LINEAR, compress_remedy, in_steps, removal_remedy
from rankwise.errors import InputError
from rankwise.importance.records import ImportanceRecord
from rankwise.report.comparison_report import finding_lists
from rankwise.tracing import Address

Fields = dict[str, Any]
CONSTANT = {"stable_rank": 1.05, "row_spread": 0.2}
NARROW = {"head_dim": 15, "required_head_dim": 2}
SINK = {"max_token_mass": 0.95}
BROKEN = {"nonfinite_sequences": 1}

CASES: dict[str, tuple[str, Fields, Fields]] = {
    "sink": ("SINK", {"max_token_mass": 0.91}, {"max_token_mass": 0.89}),
    "distance": ("CONSTANT", CONSTANT, CONSTANT | {"row_spread": 0.4}),
    "rank 1": ("CONSTANT", CONSTANT, CONSTANT | {"stable_rank": 1.2}),
    "identity": ("IDENTITY", {"identity_distance": 0.09}, {"identity_distance": 0.11}),
    "half": (
        "OVERSIZED_HEADS",
        {"head_dim": 10, "required_head_dim": 4},
        {"head_dim": 10, "required_head_dim": 5},
    ),
    "zero": (
        "OVERSIZED_HEADS",
        {"head_dim": 8, "required_head_dim": 1},
        {"head_dim": 8, "required_head_dim": 0},
    ),
    # 2 sequences of 32 tokens less their means: 62 tokens, 4 per channel
    "tokens": ("OVERSIZED_HEADS", NARROW, NARROW | {"head_dim": 16}),
    "queries": ("OVERSIZED_HEADS", NARROW | {"tokens": 31}, NARROW | {"tokens": 30}),
    "keys": ("OVERSIZED_HEADS", NARROW | {"sources": 31}, NARROW | {"sources": 30}),
    "nan": ("NONFINITE", {"nonfinite_sequences": 1}, {"nonfinite_sequences": 0}),
}
"""Code, a head that just has this finding, and a head that does not."""
LAYER_CASES: list[tuple[str, list[StateRecord], list[StateRecord]]] = [
    ("COLLAPSE", token_states(0.9, 0.8, 0.039), token_states(0.9, 0.8, 0.041)),
    ("COLLAPSE", token_states(0.06, 0.029), token_states(0.06, 0.031)),
    ("COLLAPSE", token_states(0.9, 0.02, tokens=8), token_states(0.9, 0.02, tokens=7)),
    ("COLLAPSE", token_states(0.9, 0.02), token_states(math.nan, 0.02)),
    (
        "INACTIVE_BLOCK",
        [token_state(1, 0.9, relative_update=0.009, largest_norm_share=0.5)],
        [token_state(1, 0.9, relative_update=0.009, largest_norm_share=0.51)],
    ),
    (
        "MASSIVE_TOKENS",
        token_states(0.9, 0.9, massive_tokens=0.5),
        token_states(0.9, 0.9, massive_tokens=0.49),
    ),
    (
        "MASSIVE_TOKENS",
        token_states(0.9, 0.9, massive_tokens=1, tokens=8),
        token_states(0.9, 0.9, massive_tokens=1, tokens=7),
    ),
    (
        "INACTIVE_BLOCK",
        [token_state(1, 0.9, relative_update=0.009)],
        [token_state(1, 0.9, relative_update=0.011)],
    ),
    ("NONFINITE", [token_state(1, math.nan, nonfinite_sequences=2)], [token_state(1, math.nan)]),
]
"""The same for rules of token states."""


def codes(*heads: HeadRecord) -> list[str]:
    return [finding.code for finding in diagnose(heads, (), ())]


def only(*heads: HeadRecord) -> Finding:
    [finding] = diagnose(heads, (), ())
    return finding


@pytest.mark.parametrize("case", CASES)
def test_a_finding_of_a_head_appears_at_its_threshold(case: str) -> None:
    """A comparison with a head just below the threshold reports it as resolved."""
    code, just, not_quite = CASES[case]
    assert codes(head(**just)) == [code]
    assert codes(head(**not_quite)) == []
    before, after = audit([head(**just)]), audit([head(**not_quite)])
    assert compare(before, before).is_empty
    assert [str(one.where) for one in compare(before, after).resolved] == ["h layer 0 head 0"]


@pytest.mark.parametrize(("code", "just", "not_quite"), LAYER_CASES)
def test_a_finding_of_a_layer_appears_at_its_threshold(
    code: str, just: list[StateRecord], not_quite: list[StateRecord]
) -> None:
    [finding] = diagnose((), just, ())
    assert (finding.code, finding.evidence["blocks"]) == (code, just[-1].blocks)
    assert diagnose((), not_quite, ()) == []


def test_every_rule_has_a_case() -> None:
    codes = {code for code, *_ in (*CASES.values(), *LAYER_CASES)}
    assert codes | {"NOT_CAPTURED", "RANDOM_WEIGHTS", "REMOVABLE"} == set(FINDING_RULES)


def test_the_walk_through_adds_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "FINDING_RULES", {**FINDING_RULES})
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    [example] = re.findall(r"```python\n(@rule\(.*?)```", page, re.DOTALL)
    exec(example, {**vars(findings)})
    assert codes(head(sigma_max=1001)) == ["STRETCH"]
    assert codes(head(sigma_max=999)) == []


def test_the_reference_has_the_codes_and_their_severities() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/findings.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(#(\w+)\) \| ((?:error|warning|info)[\w, ]*) \| ", page, re.MULTILINE)
    assert sorted((code, code.lower()) for code in FINDING_RULES) == sorted(
        (code, link) for code, link, _ in rows
    )
    severities = {code: severity.split(", ") for code, _, severity in rows}
    assert [one for one in examples() if one.severity not in severities[one.code]] == []


def test_every_code_is_known() -> None:
    assert check_codes(["collapse", "inactive-block"]) == ["COLLAPSE", "INACTIVE_BLOCK"]
    with pytest.raises(InputError, match="Did you mean COLLAPSE"):
        check_codes(["COLAPSE"])


def examples() -> list[Finding]:
    """Return findings of nearly all codes."""
    return [
        *(finding for _, just, _ in CASES.values() for finding in diagnose([head(**just)], (), ())),
        *(finding for _, just, _ in LAYER_CASES for finding in diagnose((), just, ())),
        *diagnose((), (), [UncapturedModule("mamba", "Mamba", "called, but nothing was seen")]),
    ]


def test_the_evidence_contains_the_deciding_number() -> None:
    found = examples()
    about_states = [
        finding for finding in found if finding.code == "NONFINITE" and finding.where.head is None
    ]
    for finding in found:
        assert FINDING_RULES[finding.code].decided_by in finding.evidence or finding in about_states


@pytest.mark.parametrize("code", [code for code, rule in FINDING_RULES.items() if rule.about == "head"])
def test_a_finding_states_the_known_cost_of_its_heads(code: str) -> None:
    """A head whose matrix is NaN has no cost."""
    priced = {"importance": HeadImportance(exact=0.01)}
    cases = [heads(just) for name, just, _ in CASES.values() if name == code]
    for case in cases:
        known = [one.model_copy(update=priced) for one in case]
        [finding] = diagnose(known, (), (), importance(reference=1.0))
        assert (finding.code, "the loss changes by +1.00%" in finding.meaning) == (code, code != "NONFINITE")


def test_a_sink_is_not_constant_as_well() -> None:
    assert codes(head(**CONSTANT | SINK)) == ["SINK"]


def test_short_sequences_have_no_findings() -> None:
    odd = {"max_token_mass": 0.99, "identity_distance": 0.0, "stable_rank": 1.0, "row_spread": 0.0}
    assert codes(head(tokens=7, sources=7, numerical_rank=1, one_hot_rank=4.6, **odd)) == []


@pytest.mark.parametrize("trouble", [SINK, CONSTANT])
def test_findings_on_few_tokens_are_notes_that_name_the_number(trouble: dict[str, float]) -> None:
    short, long = only(head(tokens=63, sources=200, **trouble)), only(head(tokens=64, sources=64, **trouble))
    assert (short.severity, long.severity) == ("info", "warning")
    assert short.meaning.endswith("Of 63 tokens; longer sequences may show another head.")
    assert "Of 6" not in long.meaning


@pytest.mark.parametrize(
    ("mask", "first", "severity"),
    [("causal", 0.95, "info"), ("causal", 0.02, "warning"), ("full", 0.95, "warning")],
)
def test_a_sink_on_the_first_token_of_a_decoder_is_a_note_without_action(mask, first, severity) -> None:
    long = {"tokens": 64, "sources": 64, "mask": mask, "first_token_mass": first}
    priced = {"importance": HeadImportance(exact=0.001)}
    found = [only(head(**SINK | long)), *diagnose([head(**SINK | long | priced)], (), (), importance())]
    for finding in found:
        assert (finding.code, finding.severity) == ("SINK", severity)
        assert ("normal in a decoder" in finding.remedy.no_action) == (severity == "info")
        sentence = audit([], states=token_states(0.9, 0.8)).model_copy(update={"findings": [finding]}).verdict
        assert bool(sentence.actions) == (severity == "warning")
    assert "+0.05%" in found[1].meaning.partition(". ")[0]


def test_oversized_heads_are_a_finding_per_mixer_at_the_least_required_width() -> None:
    finding = only(*heads(*({"head_dim": 12, "required_head_dim": needed} for needed in (12, 4, 3, 5))))
    assert (finding.code, finding.where.head, finding.heads) == ("OVERSIZED_HEADS", 2, [1, 2])
    evidence = {"heads": 2, "of": 4, "head_dim": 12, "required_head_dim": 3, "tolerance": 0.01}
    assert finding.evidence == pytest.approx(evidence | {"parameters": math.nan}, nan_ok=True)


def test_a_collapse_is_at_its_first_layer_and_each_stack_has_its_own() -> None:
    [finding] = diagnose((), token_states(0.9, 0.8, 0.03, 0.02), ())
    assert (finding.severity, finding.where, finding.evidence["blocks"]) == ("error", Address("h"), 2)
    assert finding.evidence["direction_spread_lowest"] == 0.02
    stacks = [token_state(at, value, stack=name) for at, value in enumerate((0.9, 0.02)) for name in "ab"]
    assert [finding.where.stack for finding in diagnose((), stacks, ())] == ["a", "b"]


@pytest.mark.parametrize(("site", "named"), [("h.0.attn", "h.0.attn"), ("", "the model itself")])
def test_nonfinite_attention_names_its_module(site: str, named: str) -> None:
    """The model itself may be a mixer, which has no name."""
    assert only(head(site=site, nonfinite_sequences=2)).meaning.startswith(f"Attention of {named}: ")


def test_modules_that_were_not_captured_are_counted_by_class() -> None:
    modules = [
        UncapturedModule(name=f"h.{at}.mamba", type="Mamba", reason="called, but nothing was seen")
        for at in range(3)
    ]
    [finding] = diagnose((), (), modules)
    assert finding.evidence == {"modules": 3}
    assert finding.remedy.words.startswith("write a function ")
    assert finding.remedy.code == "rw.audit(model, batches, sites={'h.0.mamba': operator_of})"


def test_the_most_severe_findings_are_first() -> None:
    long = SINK | {"tokens": 64, "sources": 64}
    found = diagnose(heads({"identity_distance": 0.0}, long, {"nonfinite_sequences": 1}, SINK), (), ())
    assert [finding.severity for finding in found] == ["error", "warning", "info", "info"]
    assert [finding.code for finding in found[2:]] == ["IDENTITY", "SINK"]


def outcomes(before: Audit, after: Audit) -> list[str]:
    """Return outcomes of a comparison, after a check that the reverse has the opposite outcomes."""
    opposite = {"new": "resolved", "resolved": "new"}
    there, back = compare(before, after), compare(after, before)
    assert [one.where for one in there.resolved] == [one.where for one in back.new]
    found = [one.outcome for one in there.findings]
    assert sorted(opposite.get(one.outcome, one.outcome) for one in back.findings) == sorted(found)
    return found


def one(**changes: Any) -> Audit:
    return audit([head(**changes)])


def states(*relative: float) -> Audit:
    return audit(states=token_states(*relative))


def missed(*layers: int, reason: str = "called, but nothing was seen") -> Audit:
    return audit(uncaptured=[UncapturedModule(f"h.{layer}.mixer", "Mixer", reason) for layer in layers])


def removable(*places: tuple[int, int]) -> Audit:
    """Return an audit whose heads at these layers and numbers can be removed together."""
    named = [Address(stack="h", layer=layer, site=f"h.{layer}.attn", head=head) for layer, head in places]
    return audit(heads({}), importance=importance(removable=removable_set(named)))


def attention(self: Fields, cross: Fields) -> Audit:
    """Return an audit of a layer with self- and cross-attention."""
    return audit(heads(self, site="h.0.self"), heads(cross, site="h.0.cross", cross=True))


REPLACED = ["new", "resolved"]
OUTCOMES: dict[str, tuple[Audit, Audit, list[str]]] = {
    "another head of the mixer is NaN": (
        audit(heads(BROKEN, {})), audit(heads({}, BROKEN)), ["unchanged"],
    ),
    "another head is a sink": (audit(heads(SINK, {})), audit(heads({}, SINK)), REPLACED),
    "another head is the identity": (
        audit(heads({"identity_distance": 0}, {})), audit(heads({}, {"identity_distance": 0})), REPLACED,
    ),
    "self- and cross-attention": (attention(BROKEN, {}), attention({}, BROKEN), REPLACED),
    "same attention": (attention(BROKEN, BROKEN), attention(BROKEN, BROKEN), ["unchanged"] * 2),
    "one of two calls": (
        audit(heads(SINK), heads(SINK)), audit(heads(SINK), heads({})), ["unchanged", "resolved"],
    ),
    "earlier collapse": (states(0.9, 0.8, 0.02), states(0.9, 0.02, 0.02), ["changed"]),
    "same collapse": (states(0.9, 0.8, 0.02), states(0.9, 0.8, 0.02), ["unchanged"]),
    "a sink by rounding": (one(max_token_mass=0.91), one(max_token_mass=0.9100003), ["unchanged"]),
    "collapse by rounding": (states(0.9, 0.8, 0.02), states(0.9, 0.8, 0.019999999), ["unchanged"]),
    "stronger sink": (one(max_token_mass=0.91), one(max_token_mass=0.99), ["changed"]),
    "more broken heads": (audit(heads(BROKEN, {})), audit(heads(BROKEN, BROKEN)), ["changed"]),
    "fewer uncaptured": (missed(0, 1, 2), missed(1, 2), ["changed"]),
    "uncaptured for another reason": (missed(0), missed(0, reason="written in C++"), REPLACED),
    "captured": (missed(0), missed(), ["resolved"]),
    "other cheapest head": (removable((0, 1)), removable((3, 2)), ["unchanged"]),
    "other order of removal": (removable((0, 1), (3, 2)), removable((3, 2), (0, 1)), ["unchanged"]),
    "no removable head": (removable((0, 1)), audit(heads({})), ["resolved"]),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTCOMES)
def test_a_comparison_names_the_outcome_of_each_finding(case: str) -> None:
    before, after, expected = OUTCOMES[case]
    assert outcomes(before, after) == expected


def test_outcomes_are_sorted_from_new_to_resolved() -> None:
    sinks = [{"max_token_mass": mass} for mass in (0.92, 0.95, 0.93, 0.94)]
    before, after = audit(heads(*sinks, {})), audit(heads(*sinks[1::-1], sinks[2], {}, sinks[3]))
    assert outcomes(before, after) == ["new", "changed", "changed", "unchanged", "resolved"]


def test_findings_in_another_order_are_unchanged() -> None:
    sinks = [{"max_token_mass": 0.95 - at / 100} for at in range(3)]
    reason = "called, but nothing was seen"
    whole = audit(
        heads(*sinks),
        states=token_states(0.9, 0.2, 0.02),
        uncaptured=[UncapturedModule(name="h.0.mixer", type="Mixer", reason=reason)],
    )
    found = {finding.code for finding in whole.findings}
    assert found >= {"COLLAPSE", "SINK", "NOT_CAPTURED"}
    assert compare(whole, whole).is_empty
    for after in (whole, changed(whole, findings=whole.findings[::-1])):
        assert outcomes(whole, after) == ["unchanged"] * len(whole.findings)


def test_a_code_without_a_rule_is_matched_by_its_place() -> None:
    old = [finding.model_copy(update={"code": "OLD"}) for finding in audit(heads(SINK, SINK)).findings]
    one, other = changed(audit(heads({})), findings=old), changed(audit(heads({})), findings=old[:1])
    assert outcomes(one, one) == ["unchanged"] * 2
    assert outcomes(one, other) == ["unchanged", "resolved"]


def test_a_change_shows_both_numbers() -> None:
    comparison = compare(removable((0, 1)), removable((3, 2), (0, 1)))
    [change] = comparison.findings
    assert (change.outcome, change.numbers) == ("changed", ("heads", 1, 2))
    [[item]] = [listed.items for listed in finding_lists(comparison)]
    assert (item.code, item.place, item.facts) == ("REMOVABLE", "", [("heads", "1 → 2")])
    assert not comparison.is_empty


HEALTHY = "Healthy: no collapse through depth, no inactive blocks, no constant heads."
STATES = token_states(0.9, 0.8)
ONE_BATCH = Provenance(model="m", delta=0.01, batches=1)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (audit(heads({}), states=STATES), HEALTHY),
        (audit(heads({"numerical_rank": 3}), states=STATES), HEALTHY),  # a rank is not a fault
        (audit(heads({})), "Healthy: no constant heads."),
        (audit([], states=STATES), "Healthy: no collapse through depth, no inactive blocks."),
        (audit(heads({}, tokens=5, sources=5)), "Nothing to judge: sequences have fewer than 8 tokens."),
        (
            audit([]),
            "Nothing was measured: no mixing operator and no token states were captured.",
        ),
        (
            changed(
                audit(heads({})), complete=False, provenance=Provenance(model="m", delta=0.01, batches=1)
            ),
            "Healthy: no constant heads. The audit stopped before the end: some measurements are missing.",
        ),
    ],
)
def test_a_verdict_without_actions_names_the_absent_faults(found: Audit, sentence: str) -> None:
    assert found.verdict == Verdict(sentence=sentence)


def test_collapse_is_not_called_absent_if_most_input_tokens_are_parallel() -> None:
    sentence = audit([], states=token_states(0.005, 0.004)).verdict.sentence
    unjudged = "Collapse cannot be judged: most input tokens are parallel."
    assert sentence == f"Healthy: no inactive blocks. {unjudged}"


@pytest.mark.parametrize("parameters", [1_000, 10_000_000])
def test_a_small_head_is_not_worth_its_cost(parameters: int) -> None:
    about = ONE_BATCH.model_copy(update={"parameters": parameters})
    heads_of_mixer = heads(CONSTANT, {}, head_dim=8)
    [finding] = diagnose(heads_of_mixer, STATES, (), provenance=about)
    assert finding.remedy is not None
    assert bool(finding.remedy.no_action) == (parameters > 1_000)


def test_the_words_on_massive_tokens_describe_the_state() -> None:
    many = {"massive_tokens": 3, "largest_norm_ratio": 40, "largest_norm_share": 0.6, "largest_at": {0: 2}}
    numbers = {"effective_rank": 7, "effective_rank_without_massive": 1}
    for blocks, where in ((0, "At the input"), (1, "After 1 block"), (2, "After 2 blocks")):
        states = [token_state(at, 0.9, **(many | numbers if at == blocks else {})) for at in range(3)]
        [finding] = diagnose((), states, ())
        assert finding.meaning.startswith(f"{where} the largest token, most often the first, has 40 times")
        assert "the rank is 7, and 1 without" in finding.meaning


def layers(*changes: Fields) -> list[list[HeadRecord]]:
    """Return mixers of two heads of ranks 20 and 12 plus changes, one per layer."""
    return [heads({}, {"numerical_rank": 12} | dict(change), layer=at) for at, change in enumerate(changes)]


def test_a_verdict_on_a_healthy_model_states_its_ranks_and_costs() -> None:
    plain = audit(*layers({}, {"numerical_rank": 4}, {}), states=STATES)
    assert plain.verdict.sentence == f"{HEALTHY} Lowest attention rank: 0.38 in layer 1."
    begun = {"at_init": AtInit(seeds=1, mean={"numerical_rank": 24.0}, seed_std={})}
    fallen = {"at_init": AtInit(seeds=1, mean={"numerical_rank": 32.0}, seed_std={})}
    models = {"at_init": InitialModels(seeds=[0], built="")}
    half = changed(audit(*layers({}, {}, {}), states=STATES), dict.fromkeys(range(6), begun), **models)
    drawn = changed(half, {4: fallen, 5: fallen})
    assert drawn.verdict.sentence == (
        f"{HEALTHY} Lowest attention rank relative to initialization: 0.50 in layer 2, 0.5 times the "
        "untrained 1.00."
    )
    costs = (0.02, 0.4, -0.03, 0.1)
    priced = {index: {"importance": HeadImportance(exact=cost)} for index, cost in enumerate(costs)}
    importance_known = changed(audit(*layers({}, {}), states=STATES), priced, importance=importance())
    assert "Cheapest and costliest head: layer 1 head 0 (-1.5%), layer 0 head 1 (+20.0%)." in (
        importance_known.verdict.sentence
    )


def test_a_verdict_counts_an_inactive_block_as_its_finding_does() -> None:
    states = token_states(0.9, 0.8, 0.7)
    states[2] = states[2].model_copy(update={"relative_update": 0.001})
    found = audit([], states=states)
    assert found.findings[0].meaning.startswith("Block 1 barely changes its tokens")
    assert found.verdict.sentence == "Worth a look: inactive blocks in layer 1."


def test_the_place_of_a_finding_is_an_address_of_blocks_and_heads() -> None:
    """The evidence of a collapse says after how many blocks; its place is the stack."""
    before, after = audit([], states=token_states(0.9, 0.8)), audit([], states=token_states(0.9, 0.02))
    [finding] = after.findings
    assert (finding.place, finding.evidence["blocks"]) == ("h", 1)
    [[item]] = [listed.items for listed in finding_lists(compare(before, after))]
    assert item.place == "h"
    earlier = compare(audit([], states=token_states(0.9, 0.8, 0.02)), after)
    [[item]] = [listed.items for listed in finding_lists(earlier)]
    assert ("blocks passed", "2 → 1") in item.facts
    assert only(head(**CONSTANT)).place == "h layer 0 head 0"


def test_a_verdict_counts_broken_states_by_the_block_that_wrote_them() -> None:
    states = [
        token_state(at, 0.9 if at < 3 else math.nan, nonfinite_sequences=2 * (at > 2)) for at in range(5)
    ]
    assert audit([], states=states).verdict.sentence == "Not healthy: NaN or infinity in layers 2, 3."
    head_and_state = audit(
        heads(BROKEN),
        states=[token_state(0, 0.9), token_state(1, math.nan, nonfinite_sequences=1)],
    )
    assert head_and_state.verdict.sentence == "Not healthy: NaN or infinity in layer 0."
    embedding = audit([], states=[token_state(0, math.nan, nonfinite_sequences=1)])
    assert embedding.verdict.sentence == "Not healthy: NaN or infinity in the input."


def test_the_first_broken_place_comes_first() -> None:
    states = [
        token_state(at, 0.9 if at < 1 else math.nan, nonfinite_sequences=2 * (at > 0)) for at in range(3)
    ]
    mixers = [[head(layer=at, site=f"h.{at}", nonfinite_sequences=2 * (at > 0))] for at in range(2)]
    places = [(finding.place, *finding.heads) for finding in audit(*mixers, states=states).findings]
    assert places == [("h layer 0",), ("h layer 1 head 0", 0), ("h layer 1",)]


@pytest.mark.parametrize("found", [audit([], states=token_states(0.9, 0.02)), audit(heads(BROKEN))])
def test_with_errors_only_their_remedies_are_actions(found: Audit) -> None:
    narrow = audit(heads(NARROW))
    assert narrow.verdict.actions == (advice(narrow.findings[0]),)
    both = changed(found, findings=[*found.findings, *narrow.findings, *removable((0, 1)).findings])
    assert {"OVERSIZED_HEADS", "REMOVABLE"} <= {finding.code for finding in both.findings}
    assert len(both.verdict.actions) == 1


def test_a_verdict_names_kinds_and_places_and_has_an_action_per_code() -> None:
    found = audit(
        heads(SINK, SINK, {"identity_distance": 0.01}, BROKEN),
        states=token_states(0.9, 0.02),
    )
    verdict = found.verdict
    assert verdict.sentence == (
        "Not healthy: NaN or infinity in layer 0; collapse through depth after 1 block."
    )
    remedies = {finding.code: advice(finding) for finding in reversed(found.findings)}
    assert verdict.actions == (remedies["NONFINITE"], remedies["COLLAPSE"])
    identity = audit(heads({"identity_distance": 0.01}))
    assert identity.verdict.actions == (f"h layer 0 head 0: {advice(identity.findings[0])}",)


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_a_verdict_has_the_actions_of_the_first_three_codes(number: int) -> None:
    named = ("INACTIVE_BLOCK", "SINK", "CONSTANT", "IDENTITY", "REMOVABLE")[:number]
    found = [recorded(code, remedy=Remedy(code=code)) for code in named]
    acts = changed(audit(heads(SINK)), findings=found).verdict.actions
    assert acts == tuple(f"`{code}`" for code in named[:3])


def test_actions_that_compress_are_joined_and_actions_with_a_condition_are_last() -> None:
    trained = ImportanceRecord(
        loss="a", unit="b", value=1.0, reference=1.0, sequences=1, counted=1, probes=0, seed=0
    )
    removal, narrowing = (
        removal_remedy(trained, 0.1, 0.01, 0.02),
        compress_remedy(["kv"], "0.01", "cache", "kv", 0.2),
    )
    remedies = {"REMOVABLE": removal, "SINK": removal, "OVERSIZED_HEADS": narrowing}
    found = [recorded(code, remedy=remedy) for code, remedy in remedies.items()]
    found.append(recorded("CONSTANT", remedy=Remedy(code="rw.audit(model, batches)")))
    holding = changed(audit(heads(SINK)), findings=found)
    other, both = holding.verdict.actions
    assert other == "`rw.audit(model, batches)`"
    code = 'rw.compress(model, batches, parts=["heads", "kv"], tolerance=0.02)'
    assert both == f"choose heads again and remove them; cache: `{code}`, if {LINEAR}"
    command = "rankwise compress m --text 'a b.txt' --parts heads,kv --tolerance 0.02 --out m-heads"
    for options, expected in (
        ([], command), ([["--delta", "1"]], command), ([["--tokenizer", "t"]], code),
    ):  # fmt: skip
        made = changed(holding, origin={"arguments": [["m"], ["--text", "a b.txt"], *options]})
        assert made.verdict.actions[1].split("`")[1] == expected


def test_steps_are_numbered_lines() -> None:
    steps = in_steps([Remedy(words="look", code="f(x)"), Remedy(words="or leave it")])
    assert remedy_text(steps) == "1. Look: `f(x)`.\n2. Or leave it."


@pytest.mark.parametrize("measured", [2, 1])
def test_no_saving_is_stated_if_a_head_to_remove_was_not_measured(measured: int) -> None:
    known = heads(*[{"head_dim": 4}] * 2)
    removed = removable_set(head.id for head in known)
    about = audit(known).provenance.model_copy(update={"parameters": 4000})
    states, costs = token_states(0.9, 0.8, hidden_size=9), importance(removable=removed)
    found = diagnose(known[:measured], states, (), costs, about)
    (saved,) = [one.evidence["parameters"] for one in found if one.code == "REMOVABLE"]
    assert saved == pytest.approx(0.04 if measured == 2 else math.nan, nan_ok=True)  # one head stays


@pytest.mark.parametrize("relative", [0.005, 0.011])
def test_heads_above_the_tolerance_on_held_out_sequences_are_not_an_action(relative: float) -> None:
    ids = [head.id for head in heads({}, {})]
    costs = importance(removable=removable_set(ids, relative=relative))
    (finding,) = diagnose((), (), (), costs)
    price = f"(these cost {relative:+.2%} on held-out sequences; 95 % interval +0.10% to +0.90%)"
    assert f"choose heads again and remove them {price}" in advice(finding)
    dear = "the held-out cost of +1.10% exceeds the tolerance of 1.00%"
    assert finding.remedy.no_action == (dear if relative > 0.01 else "")
    assert finding.remedy.costs == relative


NO_HEADS = "No heads are worth removing at 1.00% of the loss: "


@pytest.mark.parametrize(
    ("count", "changes", "said"),
    [
        (0, {}, "No heads to remove: none was found that costs at most 1.00% of the loss on the 4 of 8 seq"),
        (2, {}, NO_HEADS + "the savings are too small to notice (0.4%)."),
        (2, {"relative": 0.02}, NO_HEADS + "the held-out cost of +2.00% exceeds the tolerance of 1.00%."),
        (2, {"held_out": 0, "relative": math.nan}, NO_HEADS + "no sequence was held out to price it"),
        (2, {"parameters": 2000}, ""),
    ],
)
def test_a_search_in_vain_is_one_sentence_and_no_action(count: int, changes: Fields, said: str) -> None:
    known = heads(*[{"head_dim": 4}] * 2)
    about = audit(known).provenance.model_copy(update={"parameters": changes.get("parameters", 40_000)})
    changes = {name: value for name, value in changes.items() if name != "parameters"}
    costs = importance(removable=removable_set([head.id for head in known[:count]], **changes))
    states = token_states(0.9, 0.8, hidden_size=9)
    searched = changed(
        audit(known, states=states, importance=costs),
        findings=diagnose(known, states, (), costs, about),
    )
    assert searched.verdict.no_action.startswith(said)
    assert bool(searched.verdict.actions) == (not said) == (not searched.verdict.no_action)
    broken = changed(searched, findings=[*searched.findings, *audit(heads(BROKEN)).findings])
    assert broken.verdict.no_action == ""


def test_no_audit_is_advised_that_was_just_run() -> None:
    found = audit(heads(SINK))
    for arguments in ([["m"]], [["m"], ["--importance", "estimate"]]):
        about = found.provenance.model_copy(update={"arguments": arguments})
        (finding,) = diagnose(found.heads, (), (), provenance=about)
        words = "No action recommended: this audit ran with --importance already"
        repeated = len(arguments) > 1
        assert (advice(finding, about) == words) == repeated
        assert bool(changed(found, findings=[finding]).verdict.actions) != repeated


@pytest.mark.parametrize(
    ("dtype", "half"), [("float32", False), ("float64", False), ("bfloat16, float32", True)]
)
def test_float32_is_advised_against_nan_only_to_models_in_half_precision(dtype: str, half: bool) -> None:
    found = audit(heads(BROKEN))
    about = found.provenance.model_copy(update={"arguments": [["m"]], "model_dtype": dtype})
    (finding,) = diagnose(found.heads, (), (), provenance=about)
    assert ("`rankwise audit m --dtype float32" in advice(finding, about)) == half
    assert "`[name for name, weight" in advice(finding, about)


@pytest.mark.parametrize("change", [{"findings": []}, {"complete": False}])
def test_a_copy_has_its_own_verdict(change: dict[str, Any]) -> None:
    """A cached property would be copied."""
    one = audit(heads(SINK))
    first = one.verdict
    assert changed(one, **change).verdict != first
    assert "verdict" not in one.model_dump()
