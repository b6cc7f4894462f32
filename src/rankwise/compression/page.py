"""A compression as one HTML file that needs nothing else."""

from importlib import resources

from rankwise.compression.figure import curve_figure, width_map
from rankwise.compression.records import Compression
from rankwise.compression.tables import compression_tables, headline, setting_words

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{{ record.model }} compressed · Rankwise</title>
<style>{{ style }}
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; } td, th { padding: 4px 8px; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; } pre { overflow-x: auto; }
</style>
</head>
<body>
<header class="page-head">
  <p class="eyebrow">Rankwise compress</p>
  <h1>{{ record.model }}</h1>
  <p class="lead">{{ setting }}</p>
  {% if not record.complete %}
  <p class="banner" role="note"><strong>Incomplete.</strong> Calibration was stopped: see the notes.</p>
  {% endif %}
  <p><strong>{{ headline }}</strong></p>
</header>
<main>
<section><h2>Price and gain</h2><div class="figures">
{% for table in tables[:2] %}
<figure class="panel"><figcaption>{{ table.title }}</figcaption>{{ show(table) }}</figure>
{% endfor %}
</div></section>
{% if map %}<section><h2>Where the width is</h2><div class="figures">
<figure class="panel">{{ map }}
<figcaption>Width left of each key head</figcaption></figure>
{% if curve %}<figure class="panel">{{ curve }}
<figcaption>Attention KL against mean width; the dot is this model, with its calibration</figcaption></figure>
{% endif %}
</div></section>{% endif %}
{% for table in tables[2:] %}
<section><h2>{{ table.title }}</h2>{{ show(table) }}</section>
{% endfor %}
<section><h2>Go on, or back</h2>
<pre><code>{{ commands }}</code></pre></section>
<section><h2>How it was made</h2><ul>
{% for note in record.notes %}<li>{{ note }}</li>{% endfor %}
{% for name, value in record.about.items() %}<li>{{ name }}: {{ value }}</li>{% endfor %}
</ul></section>
</main>
</body>
</html>
"""
TABLE = """<div class="scroll"><table>
<thead><tr>{% for column in table.columns %}<th scope="col">{{ column }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody>
</table></div><p class="intro">{{ table.note }}</p>"""


def render_page(record: Compression) -> str:
    """Render the page that `Compression.to_html` writes.

    Args:
        record: the compression.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    style = (resources.files("rankwise.report") / "templates" / "report.css").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    table = environment.from_string(TABLE)
    drawn = record.curves and record.kl > 0
    return environment.from_string(TEMPLATE).render(
        record=record,
        style=Markup(style),
        headline=headline(record),
        setting=setting_words(record),
        map=Markup(width_map(record)) if record.heads else "",
        curve=Markup(curve_figure(record.curves, (record.mean_width, record.kl))) if drawn else "",
        tables=list(compression_tables(record)),
        show=lambda record: Markup(table.render(table=record)),
        commands=next_steps(record),
    )


def next_steps(record: Compression) -> str:
    """How to use the compressed model, compare it, and go back.

    Args:
        record: the compression.
    """
    folder = record.about.get("folder", "DIR")
    model = record.about.get("source", "the original")
    return (
        f'model = rankwise.load_compressed("{folder}")\n'
        f"rankwise audit {folder} --text FILE   # then: rankwise compare BEFORE AFTER\n"
        f"# back: {model} is unchanged, load it instead"
    )
