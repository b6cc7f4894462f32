"""The page and the console show importance if it was measured."""

import io
import math

import pytest
from rich.console import Console
from tests.importance.importance_cases import ids, language_model

import rankwise as rw
from rankwise._internals.statistics import spearman
from rankwise.importance import ImportanceSettings
from rankwise.report import render_console
from rankwise.report.page import page_context, render_html


@pytest.fixture(scope="module")
def audit():
    settings = ImportanceSettings(exact=True, probes=2, tolerance=0.5)
    return rw.audit(language_model(), [{"input_ids": ids(2, 12)}], importance=settings)


def test_the_shown_correlation_is_the_correlation_of_the_drawn_columns(audit):
    data = page_context(audit)["data"]
    drawn = {column["name"]: column["values"] for column in data["columns"]}
    costs = [head.importance.exact for head in audit.heads]
    assert drawn["removal_cost"] == pytest.approx(costs, rel=1e-5)
    for name, correlation in data["scatter"]["correlations"].items():
        values = [math.nan if value is None else value for value in drawn[name]]
        wanted = spearman(values, costs)
        assert correlation == (None if math.isnan(wanted) else pytest.approx(wanted))
    assert len(data["scatter"]["correlations"]) > 5


def test_the_finding_links_to_all_removable_heads(audit):
    context = page_context(audit)
    number = [finding.code for finding in audit.findings].index("REMOVABLE")
    target = context["data"]["targets"][number]
    gone = {(head.layer, head.head) for head in audit.importance.removable.heads}
    assert {(audit.heads[at].layer, audit.heads[at].head) for at in target["heads"]} == gone
    assert target["measure"] == "removal_cost"


def test_the_section_names_the_loss_the_costs_and_the_removable_set(audit):
    words = dict(page_context(audit)["importance"]["facts"])
    assert words["Loss"].startswith("next tokens, causal: 4.")
    assert words["Costs of heads"] == "exact; zero in a head's place"
    assert "by a run without" in words["Heads that can go together"]
    assert len(page_context(audit)["importance"]["blocks"]) == 2
    assert all("%" not in estimate for _, _, estimate, _ in page_context(audit)["importance"]["blocks"])
    assert 'id="importance"' in render_html(audit)


def test_a_selected_head_has_both_costs_in_their_unit_and_as_shares(audit):
    costs = page_context(audit)["data"]["costs"]
    assert costs["unit"] == "nats per token"
    assert costs["exact"] == pytest.approx([head.importance.exact for head in audit.heads], rel=1e-5)
    assert costs["estimate"] == pytest.approx([head.importance.estimate for head in audit.heads], rel=1e-5)
    assert costs["reference"] == pytest.approx(audit.importance.value)


def test_findings_on_several_heads_say_so_if_a_single_head_is_selected(audit):
    context = page_context(audit)
    number = [finding.code for finding in audit.findings].index("REMOVABLE")
    count = len(audit.importance.removable.heads)
    assert context["data"]["targets"][number]["about"] == (f"the set of {count} heads" if count > 1 else "")


def printed(audit):
    out = io.StringIO()
    render_console(audit, Console(file=out, width=200))
    return out.getvalue()


def test_the_console_shows_a_column_of_costs_and_lines_on_the_loss_and_the_estimates(audit):
    said = printed(audit)
    assert "cost of" in said
    assert "Importance · next tokens, causal" in said
    assert "Estimated against exact, heads: Spearman" in said
    assert "estimate over exact" in said
    assert "costs" in said


def test_without_importance_page_and_console_do_not_mention_it():
    audit = rw.audit(language_model(), [{"input_ids": ids(2, 12)}])
    assert audit.importance is None
    assert all(head.importance is None for head in audit.heads)
    assert "cost of" not in printed(audit)
    page = render_html(audit)
    assert 'id="importance"' not in page
    assert "removal_cost" not in page.partition('id="report-data"')[2].partition("</script>")[0]
