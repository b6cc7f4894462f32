"""A plan as one HTML file that needs nothing else."""

from importlib import resources

from rankwise.plan.figure import curve_figure, law_figure
from rankwise.plan.records import HeadDimPlan
from rankwise.plan.tables import headline, plan_tables, setting_words

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>Head width for {{ plan.tokens }} tokens · Rankwise plan</title>
<style>{{ style }}
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; } td, th { padding: 4px 12px; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; } pre { overflow-x: auto; }
</style>
</head>
<body>
<header class="page-head">
  <p class="eyebrow">Rankwise plan</p>
  <h1>Head width for {{ "{:,}".format(plan.tokens) }} tokens</h1>
  <p class="lead">{{ setting }}</p>
  {% if not plan.complete %}
  <p class="banner" role="note"><strong>Incomplete.</strong> It was stopped: see the notes.</p>
  {% endif %}
  <p><strong>{{ headline }}</strong></p>
  <p class="banner" role="note">This is a statement about random weights: what a layer can do before
  training. Trained heads can use more or less than it says.</p>
</header>
<main>
{% if plan.recommended %}
<section><h2>Recommended</h2>
<pre><code>{{ plan.recommended | tojson(indent=2) }}</code></pre>
<p>{{ plan.reason }}</p></section>
{% endif %}
<section><h2>Curves</h2><div class="figures">
<figure class="panel">{{ curve }}
<figcaption>Rank/T against width, ± one standard deviation</figcaption></figure>
{% if law %}<figure class="panel">{{ law }}
<figcaption>K* against length, with its line in ln T</figcaption></figure>
{% endif %}
</div></section>
{% for table in tables %}
<section><h2>{{ table.title }}</h2><div class="scroll"><table>
<thead><tr>{% for column in table.columns %}<th scope="col">{{ column }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody>
</table></div><p class="intro">{{ table.note }}</p></section>
{% endfor %}
<section><h2>How it was made</h2><ul>
{% for note in plan.notes %}<li>{{ note }}</li>{% endfor %}
{% for name, value in plan.about.items() %}<li>{{ name }}: {{ value }}</li>{% endfor %}
</ul></section>
</main>
</body>
</html>
"""


def render_page(plan: HeadDimPlan) -> str:
    """Render the page that `HeadDimPlan.to_html` writes.

    Args:
        plan: the plan.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    style = (resources.files("rankwise.report") / "templates" / "report.css").read_text(encoding="utf-8")
    law = plan.law if plan.law is not None and len(plan.law.points) > 2 else None
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(TEMPLATE).render(
        plan=plan,
        style=Markup(style),
        headline=headline(plan),
        setting=setting_words(plan),
        curve=Markup(curve_figure(plan)),
        law=Markup(law_figure(law)) if law else "",
        tables=list(plan_tables(plan)),
    )
