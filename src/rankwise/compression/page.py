"""A compression as one HTML file that needs nothing else."""

from rankwise.compression.figure import curve_figure, width_map
from rankwise.compression.records import Compression
from rankwise.compression.tables import compression_tables, headline, setting_words
from rankwise.report.short_page import render_short_page

BODY = """{% extends "short.html" %}
{% block main %}
<section><h2>Price and gain</h2><div class="figures">
{% for words in tables[:2] %}
<figure class="panel"><figcaption>{{ words.title }}</figcaption>{{ table(words) }}</figure>
{% endfor %}
</div></section>
{% if map %}<section><h2>Where the width is</h2><div class="figures">
{{ figure(map, "Width left of each key head") }}
{% if curve %}
{{ figure(curve, "Attention KL against mean width; the dot is this model") }}
{% endif %}
</div></section>{% endif %}
{% for words in tables[2:] %}
<section><h2>{{ words.title }}</h2>{{ table(words) }}</section>
{% endfor %}
<section><h2>Go on, or back</h2>
<pre><code>{{ commands }}</code></pre></section>
{% endblock %}
"""


def render_page(record: Compression) -> str:
    """Render the page that `Compression.to_html` writes.

    Args:
        record: the compression.
    """
    drawn = record.curves and record.kl > 0
    return render_short_page(
        BODY,
        {
            "map": width_map(record) if record.heads else "",
            "curve": curve_figure(record.curves, (record.mean_width, record.kl)) if drawn else "",
        },
        title=f"{record.model} compressed · Rankwise",
        command="Rankwise compress",
        heading=record.model,
        record=record,
        headline=headline(record),
        setting=setting_words(record),
        tables=list(compression_tables(record)),
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
