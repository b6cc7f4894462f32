"""The benchmark's numbers as lines of text and as a picture."""

from typing import Any

from benchmarks.tssa.contenders import CLONE, COPY, EAGER, OURS, REFERENCE, SDPA
from benchmarks.tssa.run import crossover

LABELS = {
    OURS: "TSSA, Rankwise",
    EAGER: "TSSA, as released modules compute it",
    REFERENCE: "TSSA, reference",
    SDPA: "softmax attention (SDPA)",
    COPY: "limit: copy w",
    CLONE: "limit: copy w into new memory",
}


def title(row: dict[str, Any]) -> str:
    """Which of the four races a row belongs to.

    Args:
        row: from `sizes`.

    Returns:
        Words.
    """
    way = "forward and backward" if row["backward"] else "forward"
    return f"{'causal' if row['causal'] else 'bidirectional'}, {way}"


def line(row: dict[str, Any]) -> str:
    """One row as text: milliseconds of ours, and how many times that the others take.

    Args:
        row: from `sizes`.

    Returns:
        A line.
    """
    ours = row["milliseconds"][OURS]
    others = [f"{name} {x:.1f}x" for name, x in row["times_ours"].items() if name not in (OURS, COPY, CLONE)]
    text = f"{title(row):37} T={row['tokens']:<6} {ours:9.2f} ms = {row['times_copy'][OURS]:5.1f} copies, "
    text += f"{row['times_limit']:5.1f} limits; "
    text += ", ".join(others)
    text += f"; fastest readings: eager {row['fastest_times_ours'][EAGER]:.1f}x"
    if refetching := row.get("milliseconds_refetching"):
        text += f"; memory not kept: eager {refetching[EAGER] / refetching[OURS]:.1f}x"
    text += f"; error {row['error'][OURS]:.1e} (eager {row['error'][EAGER]:.1e})"
    text += "" if row["right"] else " WRONG"
    if row.get("peak_mib") and row["peak_mib"][OURS] is not None:
        peaks = {name: f"{value:.1f}" for name, value in row["peak_mib"].items()}
        text += f"; peak {peaks[OURS]} MiB (eager {peaks[EAGER]})"
    return text


def crossovers(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """The crossover with softmax attention of each of the four races.

    Args:
        rows: from `sizes`.

    Returns:
        Tokens by title.
    """
    pairs = {title(row): (row["causal"], row["backward"]) for row in rows}
    return {name: crossover(rows, *pair) for name, pair in pairs.items()}


def picture(report: dict[str, Any]) -> str:
    """A page with one panel a race: milliseconds by length, both logarithmic, with the crossover marked.

    Args:
        report: what the command writes as JSON.

    Returns:
        HTML that works offline.
    """
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    rows, cross = report["rows"], report["crossovers"]
    titles = list(cross)
    figure = make_subplots(2, 2, subplot_titles=titles, x_title="tokens", y_title="milliseconds")
    colors = ["#0b6e4f", "#c84630", "#5b5f97", "#8d8d8d", "#c9c9c9", "#d99a2b"]
    for at, name in enumerate(titles):
        place = {"row": at // 2 + 1, "col": at % 2 + 1}
        of_race = [row for row in rows if title(row) == name]
        contenders = list(dict.fromkeys(key for row in of_race for key in row["milliseconds"]))
        for color, key in zip(colors, contenders, strict=False):
            points = [(r["tokens"], r["milliseconds"][key]) for r in of_race if key in r["milliseconds"]]
            x, y = zip(*points, strict=True)
            style = {"name": LABELS.get(key, key), "legendgroup": key, "showlegend": at == 0}
            figure.add_trace(Scatter(x=x, y=y, mode="lines+markers", line={"color": color}, **style), **place)
        if cross[name] is not None:
            text = f"crossover {cross[name]:.0f}"
            figure.add_vline(x=cross[name], line_dash="dot", annotation_text=text, **place)
    figure.update_xaxes(type="log").update_yaxes(type="log")
    machine = report["machine"]
    where = (
        f"{machine['device']}, {machine['dtype']}, {machine['torch_threads']} threads, load {machine['load']}"
    )
    figure.update_layout(title=f"Token statistics attention on {where}", template="simple_white", height=900)
    return str(figure.to_html(include_plotlyjs=True))
