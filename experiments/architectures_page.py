"""Tables of docs/architectures.md."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.render import markdown_table

HEADINGS = (
    "model type",
    "operators",
    "mixers captured",
    "of `output_attentions`",
    "outputs bit-identical",
    "λ-skips: no-op, undone",
)
Entry = Mapping[str, Any]


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the sums, the table, and what was not captured or did not run, with reasons."""
    entries, versions = report["entries"], report["versions"]
    ran = {name: entry for name, entry in sorted(entries.items()) if entry["ran"]}
    failed = {name: entry["why"] for name, entry in sorted(entries.items()) if not entry["ran"]}
    return {
        "where": f"transformers {versions['transformers']}, torch {versions['torch']}, "
        f"Python {versions['python']}, {versions['machine']}",
        "sums": _sums(ran, failed, report["model_types"]),
        "unseen": _uncaptured(ran),
        "silent": _silent(ran),
        "skips": _skips(ran),
        "failed": _failed(failed),
        "table": markdown_table(HEADINGS, list(map(_row, ran.items()))),
    }


def _sums(ran: Mapping[str, Entry], failed: Mapping[str, str], types: int) -> str:
    captured, there = (sum(entry[key] for entry in ran.values()) for key in ("captured", "there"))
    told = [entry for entry in ran.values() if entry["told"]]
    skipped = [entry for entry in ran.values() if entry["skips"]]
    mixing = [entry for entry in ran.values() if entry["there"] or entry["silent"]]
    rows = (
        ("model types that `AutoModel` builds", types),
        ("built tiny and ran", len(ran)),
        ("outputs bit-identical under capture", sum(entry["identical"] for entry in ran.values())),
        ("model types with a mixer", len(mixing)),
        ("of these, every called mixer captured", sum(_whole(entry) for entry in mixing)),
        ("called mixers captured", f"{captured:,} of {there:,}"),
        (
            "classes that look like mixers, were called, and are not mentioned",
            len(_silences(ran)),
        ),
        (
            "matrices of `output_attentions` found among the captured",
            f"{sum(entry['equal'] for entry in told):,} of {sum(entry['told'] for entry in told):,}",
        ),
        ("model types that take λ-skips", len(skipped)),
        ("of these, no-op at λ = 1", sum(entry["no_op"] for entry in skipped)),
        ("of these, undone", sum(entry["undone"] for entry in skipped)),
        ("did not build, or took no input that was tried", len(failed)),
        ("not tried yet", types - len(ran) - len(failed)),
    )
    return markdown_table(("", "number"), ((name, str(value)) for name, value in rows))


def _whole(entry: Entry) -> bool:
    return entry["captured"] == entry["there"] and not entry["silent"]


def _row(item: tuple[str, Entry]) -> tuple[str, ...]:
    name, entry = item
    if entry["told"] is None:
        told = "not offered"
    else:
        told = f"{entry['equal']} of {entry['told']}" if entry["told"] else "none given"
    skips = "none" if not entry["skips"] else f"{_yes(entry['no_op'])}, {_yes(entry['undone'])}"
    kinds = ", ".join(entry["kinds"]) or "none"
    return name, kinds, f"{entry['captured']} of {entry['there']}", told, _yes(entry["identical"]), skips


def _uncaptured(ran: Mapping[str, Entry]) -> str:
    """Called mixers that were not captured: reason, classes, model types."""
    reasons: dict[str, tuple[list[str], list[str]]] = {}
    for name, entry in ran.items():
        for kind, reason in entry["uncaptured"].items():
            classes, types = reasons.setdefault(reason, ([], []))
            classes.append(kind)
            types.append(name)
    rows = (
        (reason, _some(classes, code=True), _some(types))
        for reason, (classes, types) in sorted(reasons.items(), key=lambda item: -len(item[1][1]))
    )
    return markdown_table(("reason in `uncaptured`", "classes", "model types"), rows)


def _silences(ran: Mapping[str, Entry]) -> dict[str, list[str]]:
    classes: dict[str, list[str]] = {}
    for name, entry in ran.items():
        for kind in entry["silent"]:
            classes.setdefault(kind, []).append(name)
    return classes


def _silent(ran: Mapping[str, Entry]) -> str:
    classes = _silences(ran)
    if not classes:
        return "None."
    rows = ((f"`{kind}`", _some(types)) for kind, types in classes.items())
    return markdown_table(("class", "model types"), rows)


def _skips(ran: Mapping[str, Entry]) -> str:
    whys = Counter(_short(entry["skips_why"]) for entry in ran.values() if "skips_why" in entry)
    rows = ((why, str(count)) for why, count in whys.most_common())
    return markdown_table(("why no λ-skip was put in", "model types"), rows)


def _failed(failed: Mapping[str, str]) -> str:
    return markdown_table(("model type", "first error"), ((name, _cell(why)) for name, why in failed.items()))


def _short(why: str) -> str:
    """An error without the names and numbers of one model."""
    _, _, got = why.partition("expected residual connections around mixers, got ")
    said = re.sub(r"^\d+", "some", got.split(".")[0].split(", in ")[0]) if got else why[:110]
    return _cell(said)


def _some(names: Iterable[str], code: bool = False) -> str:
    distinct = sorted(set(names))
    shown = [f"`{name}`" if code else name for name in distinct[:12]]
    return ", ".join(shown) + (f" and {len(distinct) - 12} more" if len(distinct) > 12 else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;").replace("\n", " ")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
