"""The page and the console show importance if it was measured."""

import pytest
from tests.importance.importance_cases import ids, language_model
from tests.support import documents
from tests.support.documents import audit_document

import rankwise as rw
from rankwise.importance import ImportanceSettings
from rankwise.report import document_text


@pytest.fixture(scope="module")
def audit():
    settings = ImportanceSettings(exact=True, probes=2, tolerance=0.5)
    return rw.audit(language_model(), [{"input_ids": ids(2, 12)}], importance=settings)


def test_the_finding_links_to_all_removable_heads_and_a_card_names_their_group(audit):
    number = [finding.code for finding in audit.findings].index("REMOVABLE")
    target = documents.data(audit)["targets"][number]
    gone = {(head.layer, head.head) for head in audit.importance.removable.heads}
    assert {(audit.heads[at].layer, audit.heads[at].head) for at in target["heads"]} == gone
    assert target["measure"] == "removal_cost"
    assert target["about"] == (f"the set of {len(gone)} heads" if len(gone) > 1 else "")


def test_the_section_names_the_loss_the_costs_and_the_removable_set(audit):
    (section,) = [one for one in audit_document(audit).sections if one.name == "importance"]
    words = dict(section.facts)
    assert words["Loss"].startswith("next tokens, causal: 4.")
    assert words["Costs of heads"] == "exact; zero in a head's place"
    assert "sequences, which were held out, and" in words["Heads that can be removed together"]
    (blocks,) = section.tables
    assert len(blocks.rows) == 2
    assert all("%" not in estimate for _, _, estimate, _ in blocks.rows)


def test_a_selected_head_has_both_costs_in_their_unit_and_as_shares(audit):
    costs = documents.data(audit)["costs"]
    assert costs["unit"] == "nats per token"
    assert costs["exact"] == pytest.approx([head.importance.exact for head in audit.heads], rel=1e-5)
    assert costs["estimate"] == pytest.approx([head.importance.estimate for head in audit.heads], rel=1e-5)
    assert costs["reference"] == pytest.approx(audit.importance.value)


def printed(audit):
    return document_text(audit_document(audit), 200, verbose=True)


def test_the_console_shows_a_column_of_costs_and_a_line_on_the_loss(audit):
    said = printed(audit)
    assert "cost of" in said
    assert "Loss: next tokens, causal" in said
    assert "costs" in said


def test_without_importance_page_and_console_do_not_mention_it():
    audit = rw.audit(language_model(), [{"input_ids": ids(2, 12)}])
    assert audit.importance is None
    assert all(head.importance is None for head in audit.heads)
    assert "cost of" not in printed(audit)
    page = documents.page(audit)
    assert 'id="importance"' not in page
    assert "removal_cost" not in page.partition('id="report-data"')[2].partition("</script>")[0]
