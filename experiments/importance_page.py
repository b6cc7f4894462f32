"""Tables and figures of `experiments.importance`."""

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.render import markdown_table
from rankwise.importance.records import HeadImportance, agreement

WIDTH, HEIGHT, LEFT, BOTTOM = 520, 320, 64, 44
NAMES = {
    "first_order": "first order, mean of abs. ∂L_i/∂ξ",
    "fisher": "empirical Fisher",
    "curvature": "curvature, 8 projections",
    "estimate": "curvature − gradient, 8 projections",
    "estimate, 1 projection": "the same with 1 projection",
    "exact on other texts": "exact costs of splits 1–2, 1–3, 2–3",
    "numerical_rank": "numerical rank share",
    "effective_rank": "effective rank",
    "stable_rank": "stable rank",
    "row_entropy": "row entropy",
    "first_token_mass": "sink mass",
    "max_token_mass": "peak mass",
}
ESTIMATES = (
    "first_order",
    "fisher",
    "curvature",
    "estimate",
    "estimate, 1 projection",
    "exact on other texts",
)

Report = dict[str, Any]


def tables(report: Report) -> dict[str, str]:
    """Return the sections of the models, and the numbers of the text."""
    recipe = report["recipe"]
    return {
        "command": "python -m experiments run importance",
        "seconds": str(report["seconds"]),
        "torch": report["versions"]["torch"],
        "splits": str(recipe["splits"]),
        "sequences": str(recipe["sequences"]),
        "models": "\n\n".join(part for model in report["models"] for part in model_parts(model)),
    }


def figures(report: Report) -> dict[str, str]:
    """Return a scatter for each model."""
    return {figure_name(model): scatter(model) for model in report["models"]}


def figure_name(model: Report) -> str:
    """The file of its scatter."""
    return "worth-" + ("demo" if "demo" in model["model"] else "minilm") + ".svg"


def model_parts(model: Report) -> Iterable[str]:
    """What is said of one model."""
    values = ", ".join(f"{value:.3f}" for value in model["values"])
    whole = f" The whole model: {values} by split." if any(model["values"]) else ""
    yield f"## {model['model']}"
    yield f"{model['data']}; {len(model['heads'])} heads; loss: {model['loss']}, {model['unit']}.{whole}"
    found = model["correlations"]
    yield "Spearman with the exact costs, by split:\n\n" + correlation_table(found, ESTIMATES)
    yield (
        "The estimate as a share of the exact cost, over heads whose removal costs anything:\n\n"
        + size_table(model)
    )
    yield "Rank and other measures against the exact costs:\n\n" + correlation_table(
        found, [name for name in found if name not in ESTIMATES]
    )
    yield f"![Cost of removal against numerical rank](images/{figure_name(model)})"
    yield "Heads that can go together at 1 %:\n\n" + set_table(model["sets"])


def correlation_table(found: Report, names: Sequence[str]) -> str:
    """One row each, a column a split."""
    known = [name for name in names if any(value is not None for value in found[name])]
    width = max(len(found[name]) for name in known)
    rows = [
        [NAMES[name], *("–" if one is None else f"{one:.2f}" for one in found[name]), *[""] * width][
            : width + 1
        ]
        for name in known
    ]
    return markdown_table(["", *(f"split {at + 1}" for at in range(width))], rows)


def size_table(model: Report) -> str:
    """How large estimates are beside exact costs: a column a split."""
    splits = [
        agreement(
            HeadImportance(estimate=estimate, exact=exact) for estimate, exact in zip(*both, strict=True)
        )
        for both in zip(model["estimates"]["estimate"], model["exact"], strict=True)
    ]
    known = [found for found in splits if found is not None]
    rows = [
        ["median of heads", *(f"{found.median:.2f}" for found in known)],
        ["the costliest head", *(f"{found.costliest:.2f}" for found in known)],
    ]
    return markdown_table(["", *(f"split {at + 1}" for at in range(len(known)))], rows)


def set_table(sets: Sequence[Report]) -> str:
    """Chosen here, run elsewhere."""
    rows = [
        [
            str(one["split"] + 1),
            one["order"],
            one["removal"],
            str(len(one["heads"])),
            f"{one['here']:+.2%}",
            ", ".join(f"{cost:+.2%}" for cost in one["elsewhere"]),
            "; ".join(f"{layer}.{head}" for layer, head in one["heads"]) or "–",
        ]
        for one in sets
    ]
    head = [
        "chosen on",
        "sorted by",
        "in their place",
        "heads",
        "cost there",
        "cost on the others",
        "layer.head",
    ]
    return markdown_table(head, rows)


def scatter(model: Report) -> str:
    """Cost of removal on the first split against the numerical rank share, a colour a layer."""
    shares, costs = model["ranks"]["numerical_rank"][0], model["exact"][0]
    top, bottom = max(costs), min(0.0, *costs)
    left, right = min(shares), max(shares)

    def x(share: float) -> float:
        return LEFT + (share - left) / max(right - left, 1e-9) * (WIDTH - LEFT - 16)

    def y(cost: float) -> float:
        return HEIGHT - BOTTOM - (cost - bottom) / max(top - bottom, 1e-9) * (HEIGHT - BOTTOM - 16)

    layers = max(layer for layer, _ in model["heads"])
    marks = [
        f'<circle cx="{x(share):.1f}" cy="{y(cost):.1f}" r="4" fill="{_colour(layer / max(layers, 1))}">'
        f"<title>layer {layer}, head {head}</title></circle>"
        for (layer, head), share, cost in zip(model["heads"], shares, costs, strict=True)
    ]
    grid = [
        f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y(at):.1f}" y2="{y(at):.1f}" stroke="#d8dde3"/>'
        f'<text x="{LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{at:.3f}</text>'
        for at in (bottom + (top - bottom) * step / 4 for step in range(5))
    ]
    ends = [
        f'<text x="{x(at):.1f}" y="{HEIGHT - 26}" text-anchor="middle">{at:.2f}</text>'
        for at in (left, (left + right) / 2, right)
    ]
    words = (
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">numerical rank share</text>'
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">'
        f"cost of removal, {model['unit']}</text>"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11" fill="#39424e">\n<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    return "\n".join([head, *grid, *ends, words, *marks, "</svg>", ""])


def _colour(share: float) -> str:
    """From light to dark with the layer."""
    light, dark = (158, 196, 224), (16, 58, 96)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(light, dark, strict=True))
