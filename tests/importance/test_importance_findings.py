"""Records and findings state costs of removal if importance is known."""

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from importance_cases import ids, language_model
from tests.support import records
from tests.support.documents import audit_document
from tests.support.records import HeadImportance, diagnose
from tests.support.records import importance as importance_record
from typer.testing import CliRunner

import rankwise as rw
from rankwise.auditing.importance_findings import (
    BLOCK_CAUTION,
    HEAD_CAUTION,
    estimate_words,
    spearman,
)
from rankwise.cli import app
from rankwise.importance import ImportanceSettings, ablation_cost
from rankwise.importance.records import BlockImportance
from rankwise.report.page import page_text
from rankwise.tracing import Address


@pytest.fixture(scope="module")
def audit():
    settings = ImportanceSettings(exact=True, probes=4, tolerance=0.2)
    return rw.audit(language_model(), iter([{"input_ids": ids(2, 12)}]), importance=settings)


def test_every_head_has_its_importance(audit):
    assert [head.removal_cost for head in audit.heads] == [head.importance.exact for head in audit.heads]
    assert all(head.importance.method == "exact" for head in audit.heads)
    assert [block.layer for block in audit.importance.blocks] == [0, 1]


def test_importance_is_saved_loaded_and_framed(audit, tmp_path):
    again = rw.Audit.load(audit.save(tmp_path))
    assert again.model_dump_json() == audit.model_dump_json()
    frame = audit.to_frame()
    assert "removal_cost" not in frame  # the same numbers again
    assert list(frame["importance_exact"]) == [head.importance.exact for head in audit.heads]


def test_the_set_of_an_audit_can_be_run_again(audit):
    heads = audit.importance.removable.heads
    found = ablation_cost(language_model(), [{"input_ids": ids(2, 12)[1:]}], heads)
    assert found.cost == pytest.approx(audit.importance.removable.cost, abs=1e-12)
    assert len(heads) == next(one for one in audit.findings if one.code == "REMOVABLE").evidence["heads"]


def found(code, costs, exact):
    """Return the finding of a code with and without costs, which the heads have in turn."""
    heads = []
    for number, head in enumerate(records.encoder().heads):
        cost = costs[number % len(costs)]
        known = HeadImportance(exact=cost) if exact else HeadImportance(estimate=cost)
        heads.append(head.model_copy(update={"importance": known, "removal_cost": cost}))
    sink = {"max_token_mass": 0.97, "tokens": 64.0, "sources": 64.0, "full_rank": 64.0}
    heads[0] = heads[0].model_copy(update=sink)
    twins = {
        "nearest_head_distance": 0.01,
        "nearest_head": heads[2].head,
        "max_token_mass": 0.1,
        "tokens": 64.0,
    }
    heads[1] = heads[1].model_copy(update={**twins, "sources": 64.0})
    known, unknown = diagnose(heads, [], [], importance_record()), diagnose(heads, [], [])
    return [next(one for one in some if one.code == code) for some in (known, unknown)]


CHANGES, ESTIMATE = "; without it the loss changes by", "; the estimated cost of removal is"


@pytest.mark.parametrize(
    ("cost", "exact", "meaning", "remedy"),
    [
        (
            0.002,
            True,
            f"{CHANGES} +0.10% (nats per token 2 → 2.002, exact)",
            "choose heads again and remove them: `rw.compress.*",
        ),
        (0.3, True, f"{CHANGES} +15.0%", "No action recommended: the model needs.*"),
        (0.0, True, f"{CHANGES} +0.00%", "No action recommended: the loss does not depend on it"),
        (-0.3, False, f"{ESTIMATE} -15.0%.", '.*importance="exact".*'),
        (0.3, False, f"{ESTIMATE} +15.0%. Such estimates sort heads", '.*importance="exact".*'),
    ],
)
def test_a_sink_can_be_removed_if_its_exact_cost_is_small(cost, exact, meaning, remedy):
    known, unknown = found("SINK", [cost], exact=exact)
    assert meaning in known.meaning
    assert re.fullmatch(remedy, records.advice(known), re.DOTALL)
    assert (CHANGES in known.meaning) == exact
    assert known.evidence["removal_cost"] == cost
    assert "loss" not in unknown.meaning
    assert "removal_cost" not in unknown.evidence


@pytest.mark.parametrize("changes", [{"max_token_mass": 0.97}, {"stable_rank": 1.0, "row_spread": 0.1}])
@pytest.mark.parametrize(("parameters", "acts"), [(10_000, True), (100_000, False)])
def test_a_cheap_head_that_saves_too_little_is_not_an_action(changes, parameters, acts):
    usual = {"head_dim": 16, "max_token_mass": 0.1, "tokens": 64.0, "sources": 64.0, "full_rank": 64.0}
    other = records.encoder().heads[0].model_copy(update={**usual, "head": 1})  # it stays
    one = records.encoder().heads[0].model_copy(update={**usual, **changes})
    one = one.model_copy(update={"importance": HeadImportance(exact=0.002), "removal_cost": 0.002})
    states = [records.token_state(0, 0.9, stack=one.stack, hidden_size=16)]
    about = records.provenance(parameters=parameters)
    (finding,) = (
        x for x in diagnose([one, other], states, [], importance_record(), about) if x.severity == "warning"
    )
    assert ("the savings are too small" in finding.remedy.no_action) == (not acts)
    assert finding.remedy.code == 'rw.compress(model, batches, parts="heads", tolerance=0.01)'
    assert (finding.remedy.saves >= 0.05) == acts
    assert finding.remedy.costs == importance_record().share(0.002)


@pytest.mark.parametrize("parameters", [10_000, 100_000])
def test_exact_costs_are_an_action_only_if_they_can_lead_to_one(parameters):
    """The exact audit of the same head has an action if the estimated one has."""
    sink = {"head_dim": 16, "max_token_mass": 0.97, "tokens": 64.0, "sources": 64.0, "full_rank": 64.0}
    one = records.encoder().heads[0].model_copy(update=sink)
    other = one.model_copy(update={"head": 1, "max_token_mass": 0.1})  # it stays
    states = [records.token_state(0, 0.9, stack=one.stack, hidden_size=16)]
    about, acts = records.provenance(parameters=parameters), []
    for known in (HeadImportance(estimate=0.3), HeadImportance(exact=0.002)):
        head = one.model_copy(update={"importance": known, "removal_cost": known.cost})
        found = diagnose([head, other], states, [], importance_record(), about)
        (finding,) = (finding for finding in found if finding.code == "SINK")
        acts.append(not finding.remedy.no_action)
    assert acts == [parameters == 10_000] * 2


def test_estimated_costs_have_a_caution_and_exact_costs_have_none():
    def words(heads, blocks):
        named = {Address(head=number): head for number, head in enumerate(heads)}
        blocks = [BlockImportance(stack="h", layer=0, site="h.0", **block) for block in blocks]
        return estimate_words(named, importance_record(blocks=blocks))

    assert words([HeadImportance(estimate=1.0)], []) == [("Estimated costs of heads", HEAD_CAUTION)]
    assert words([], [{"estimate": 1.0}]) == [("Estimated costs of blocks", BLOCK_CAUTION)]
    assert words([HeadImportance(exact=1.0)], []) == []


def test_the_report_states_how_well_estimates_agree_with_exact_costs(audit):
    costs = pd.DataFrame([(head.importance.estimate, head.importance.exact) for head in audit.heads])
    rank = costs.corr("spearman").loc[0, 1]
    worst = audit.heads[(costs[0] - costs[1]).abs().idxmax()]
    said = dict(estimate_words({head.id: head.importance for head in audit.heads}, audit.importance))
    text = said["Estimates on this model"]
    assert text.startswith(f"Spearman {rank:.2f} with exact costs over 8 heads; largest miss {worst.id}: ")
    assert f"exact {audit.importance.share(worst.importance.exact):+.2%}" in text
    assert "Estimates on this model" in page_text(audit_document(audit))


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-9, 9)), min_size=3, max_size=30))
def test_spearman_is_the_correlation_of_mean_ranks(pairs):
    first, second = np.array(pairs).T
    wanted = pd.DataFrame(np.array(pairs)).corr("spearman").loc[0, 1]
    assert spearman(first, second) == pytest.approx(wanted, nan_ok=True, abs=1e-12)


def test_the_command_measures_importance(tmp_path):
    source = tmp_path / "model.py"
    source.write_text(
        "import torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
        "def build():\n    torch.manual_seed(0)\n"
        "    sizes = {'n_embd': 16, 'n_layer': 1, 'n_head': 2, 'bos_token_id': 1, 'eos_token_id': 2}\n"
        "    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, **sizes))\n"
    )
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 40)
    chosen = ["--text", str(text), "--tokens", "24", "--sequences", "2", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["audit", f"{source}:build", *chosen, "--importance"])
    assert done.exit_code == 0, done.output
    audit = rw.Audit.load(tmp_path / "out")
    assert audit.importance.loss == "next tokens, causal"
    assert audit.heads[0].importance.method == "exact"
    assert "takes about 2 forward passes per batch" in audit.importance.choice
    alone = CliRunner().invoke(app, ["audit", f"{source}:build", *chosen, "--importance-tokens", "7"])
    assert "--importance-tokens: expected --importance next to it" in str(alone.exception)
    both = ["audit", f"{source}:build", *chosen, "--importance", "--importance-tokens", "7"]
    assert CliRunner().invoke(app, both).exit_code == 0
    assert rw.Audit.load(tmp_path / "out").importance.tokens == 7
    wrong = CliRunner().invoke(app, ["audit", f"{source}:build", *chosen, "--importance=exactly"])
    assert "did you mean exact" in str(wrong.exception).lower()
