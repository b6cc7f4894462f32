"""Numbers and names as people read them."""

import math
import re
import unicodedata

from rankwise.auditing.measure_table import HEAD_MEASURES, LAYER_MEASURES
from rankwise.auditing.records import Severity

SEVERITIES: dict[Severity, tuple[str, str]] = {
    "error": ("error", "errors"),
    "warning": ("warning", "warnings"),
    "info": ("note", "notes"),
}
"""Severities from the worst down, with their singular and plural."""

RANK = next(measure for measure in HEAD_MEASURES if measure.name == "numerical_rank")
"""Its value is the rank (of a matrix with signs, the relative rank) over min(T, S)."""

_TITLES = {
    "relative_spread_layer_0": "μ/‖Y‖ of the input",
    "relative_spread_lowest": "lowest μ/‖Y‖",
    "relative_spread_lowest_at_1": "lowest μ/‖Y‖ with λ = 1",
    "nonfinite": "not finite",
    "delta_low": "δ from",
    "delta_high": "δ to",
} | {measure.name: measure.label for measure in (*HEAD_MEASURES, *LAYER_MEASURES)}


def strip_control(name: str) -> str:
    r"""Replace control characters, such as escape sequences, by a visible mark.

    Examples:
        >>> strip_control("layer\x1b[31m")
        'layer�[31m'
    """
    return "".join("�" if unicodedata.category(c) in {"Cc", "Cf", "Cs"} else c for c in name)


def title(measure: str) -> str:
    """Return the name of a measure for readers.

    Examples:
        >>> title("first_token_mass"), title("relative_spread")
        ('first token mass', 'μ/‖Y‖')
    """
    return _TITLES.get(measure, measure.replace("_", " "))


def is_command(remedy: str) -> bool:
    """Return whether a remedy is a command or a call of this package, not advice in words.

    Examples:
        >>> is_command("rankwise plan --tokens 128"), is_command("prune it")
        (True, False)
    """
    return remedy.startswith(("rankwise ", "rankwise.", "rw."))


def split_code(text: str) -> list[tuple[str, bool]]:
    """Split a remedy into words and code: text in backticks, or a whole command.

    Examples:
        >>> split_code("then `rankwise compare A B`"), split_code("rankwise plan --tokens 128")
        ([('then ', False), ('rankwise compare A B', True)], [('rankwise plan --tokens 128', True)])
    """
    if is_command(text):
        return [(text, True)]
    return [(part, number % 2 == 1) for number, part in enumerate(text.split("`")) if part]


GENERIC = {"model", "models", "output", "weights", "pretrained"}
"""Folder names that do not identify a model; the name of the parent folder does."""
STATES = {"final", "best", "last"}
"""Folder names that identify one of several states of the model in the parent folder."""


def model_name(name: str) -> str:
    r"""Return the name of a model for a title: the last parts of a path, or the whole name on the Hub.

    Examples:
        >>> model_name("/me/runs/bert-a/checkpoint-500"), model_name("org/model"), model_name("./my-vit/")
        ('bert-a/checkpoint-500', 'org/model', 'my-vit')
        >>> model_name("/data/all-MiniLM/model"), model_name("C:\\m\\gpt"), model_name("code/net.py:build")
        ('all-MiniLM', 'gpt', 'net.py:build')
    """
    parts = [part for part in re.split(r"[/\\]", name) if part not in ("", ".", "..", "~")]
    is_path = name.startswith(("/", ".", "~", "\\")) or re.match(r"[A-Za-z]:[/\\]", name) or len(parts) > 2
    if not parts or not (is_path or ".py:" in name):
        return name
    last = parts[-1].lower()
    if last in GENERIC and len(parts) > 1:
        return parts[-2]
    vague = last in STATES or re.fullmatch(r"(checkpoint|step|epoch)[-_]?\d+", parts[-1])
    return "/".join(parts[-2:]) if vague else parts[-1]


def count(number: int, singular: str, many: str = "") -> str:
    """Return a count with its noun in singular or plural.

    Examples:
        >>> count(1, "head"), count(0, "head"), count(2, "entry", "entries")
        ('1 head', '0 heads', '2 entries')
    """
    return f"{number} {singular if number == 1 else many or singular + 's'}"


def round_for_page(value: float) -> float | None:
    """Return a number with the 6 significant digits that pages hold; None if it is not finite.

    Examples:
        >>> round_for_page(1 / 3), round_for_page(math.inf)
        (0.333333, None)
    """
    return float(f"{value:.6g}") if math.isfinite(value) else None
