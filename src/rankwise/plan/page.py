"""A plan as one HTML file that needs nothing else."""

from rankwise.plan.figure import curve_figure, law_figure
from rankwise.plan.records import HeadDimPlan
from rankwise.plan.tables import headline, plan_tables, setting_words
from rankwise.report.short_page import render_short_page

BODY = """{% extends "short.html" %}
{% block lead %}
  <p class="banner" role="note">This is a statement about random weights: what a layer can do before
  training. Trained heads can use more or less than it says.</p>
{% endblock %}
{% block main %}
{% if record.recommended %}
<section><h2>Recommended</h2>
<pre><code>{{ record.recommended | tojson(indent=2) }}</code></pre>
<p>{{ record.reason }}</p></section>
{% endif %}
<section><h2>Curves</h2><div class="figures">
{{ figure(curve, "Rank/T against width, ± one standard deviation") }}
{% if law %}{{ figure(law, "K* against length, with its line in ln T") }}{% endif %}
</div></section>
{% for words in tables %}
<section><h2>{{ words.title }}</h2>{{ table(words) }}</section>
{% endfor %}
{% endblock %}
"""


def render_page(plan: HeadDimPlan) -> str:
    """Render the page that `HeadDimPlan.to_html` writes.

    Args:
        plan: the plan.
    """
    law = plan.law if plan.law is not None and len(plan.law.points) > 2 else None
    return render_short_page(
        BODY,
        {"curve": curve_figure(plan), "law": law_figure(law) if law else ""},
        title=f"Head width for {plan.tokens} tokens · Rankwise plan",
        command="Rankwise plan",
        heading=f"Head width for {plan.tokens:,} tokens",
        record=plan,
        headline=headline(plan),
        setting=setting_words(plan),
        tables=list(plan_tables(plan)),
    )
