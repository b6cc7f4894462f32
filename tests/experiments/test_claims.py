"""Kept reports of studies support the claims of their pages."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.coverage import architectures
from experiments.rank import compress_cache, compress_minilm, compress_real, initial_ranks
from experiments.registry import EXPERIMENTS
from experiments.render import mean_std
from experiments.skips import bound_search, collapse_rule
from experiments.tost import train_demo
from tests.support.documents import plan_document

from rankwise.plan import plan_head_dim

ROOT = Path(__file__).parents[2]

KQ_BOUNDS = {
    "closed form, one width": {"16": 0.050, "8": 0.185, "4": 0.58},
    "closed form, widths per head": {"16": 0.036, "8": 0.112, "4": 0.293},
    "calibrated": {"16": 0.031, "8": 0.093, "4": 0.23},
}
"""Attention KL that a prototype reached on other draws of reviews."""


def test_fresh_ranks_are_far_below_two_nulls_and_far_above_the_third() -> None:
    report = initial_ranks.STUDY.kept()
    for row in report["rows"]:
        assert 4 < row["winners"] / row["fresh"] < row["random"] / row["fresh"] < 7
        assert row["uniform"] < row["fresh"] / 10
        assert row["fresh_std"] < 1
    assert sum(row["beyond_nulls"] for row in report["rows"]) == 0
    assert sum(row["above"] + row["below"] for row in report["rows"]) > 0.9 * report["heads"]


def test_half_and_a_quarter_of_the_cache_keep_the_loss() -> None:
    report = compress_cache.STUDY.kept()
    assert report["settings"] == json.loads(json.dumps(asdict(compress_cache.Recipe())))
    assert len(report["splits"]) == 3
    for split in report["splits"]:
        for keep, allowed in (("0.5", 0.0005), ("0.25", 0.017)):
            own = split["keeps"][keep]
            assert own["cache_bytes_after"] <= float(keep) * own["cache_bytes_before"]
            assert own["loss_after"] - own["loss_before"] <= allowed


def test_a_plan_states_the_losses_of_recorded_training_runs() -> None:
    said = plan_document(plan_head_dim(64, trials=2)).verdict.no_action
    images, text = (EXPERIMENTS[name].table() for name in ("saturation-images", "language"))
    full, *narrow = rows = [images[f"D ≠ HK, K={width}"] for width in (16, 8, 1)]
    rows += [text["softmax-rotary"], text["softmax-rotary, K=12"]]
    assert all(row.mean("loss") - full.mean("loss") < row.std("loss") for row in narrow)
    assert rows[-1].mean("loss") - rows[-2].mean("loss") < rows[-1].std("loss")
    assert {run["settings"]["heads"] for row in rows for run in row.runs} == {4}
    assert {len(row.runs) for row in rows} == {3}
    assert "the bundled demo (K* = 12) and in all-MiniLM-L6-v2 (K* = 13)" in said
    assert plan_head_dim(256, "causal", "rope").head_dim == 12
    assert plan_head_dim(192).head_dim == 13  # tokens of all-MiniLM-L6-v2 on this text
    saved = rows[-2].mean("parameters") - rows[-1].mean("parameters")
    assert saved == 4 * 2 * (128 + 1) * 4 * (32 - 12)  # 4 layers, weights and biases of queries and keys


def test_narrow_queries_and_keys_are_within_bounds_and_better_than_every_null() -> None:
    splits = compress_minilm.STUDY.kept()["splits"]

    def numbers(way: str, width: str) -> list[float]:
        return [
            one["widths"][width]["calibrated"] if way == "calibrated" else one["curves"][way][width]
            for one in splits
        ]

    for way, bounds in KQ_BOUNDS.items():
        for width, bound in bounds.items():
            assert mean(numbers(way, width)) - stdev(numbers(way, width)) <= bound, (way, width)
    for one in splits:
        ours = one["curves"]["closed form, one width"]
        nulls = [curve for method, curve in one["curves"].items() if "closed" not in method]
        assert all(ours[width] < curve[width] for curve in nulls for width in ("16", "8", "4"))


def test_no_bound_was_violated() -> None:
    report: dict[str, Any] = bound_search.STUDY.kept()
    found = [one for one in report["searches"] if one["bound"] != "theorem"]
    assert sum(one["evaluations"] for one in found) >= 50_000
    assert {one["norm"] for one in found} == {"LayerNorm", "RMSNorm"}
    assert (min(one["eps"] for one in found), max(one["eps"] for one in found)) == (0, 1)
    for one in report["searches"]:
        assert one["worst"] < 1e-9
        assert one["speaking"] >= one["evaluations"] / 10
    scales = [layer for layers in report["least_scales"].values() for layer in layers]
    assert all(0 < layer["both"] <= layer["rows"] for layer in scales)


def test_losses_on_the_page_of_tost_equal_the_losses_of_the_bundled_models() -> None:
    page = (ROOT / "docs" / "how-to" / "tost.md").read_text(encoding="utf-8")
    for study in train_demo.STUDIES:
        loss = study.kept()["scores"]["validation_loss"]
        assert f" | {loss:.2f} | `python -m experiments run {study.name}` |" in page


def numbers_of_the_readme() -> Iterator[str]:
    entries = [one for one in architectures.STUDY.kept()["entries"].values() if one["ran"]]
    yield f"{sum(one['identical'] for one in entries)} of {len(entries)} | "
    page = (EVIDENCE / "real-decoder.md").read_text(encoding="utf-8")
    for row, words in (
        ("| Gemma 3 270M, bfloat16 | wikitext-2 | 72 |", "72 heads of Gemma 3 270M"),
        ("| all-mpnet-base-v2 | IMDB | 144 |", "144 of all-mpnet-base-v2"),
    ):
        [cells] = [line.split(" | ") for line in page.splitlines() if line.startswith(row)]
        yield f"{cells[7]} ({words})"
    yield f" | {collapse_rule.COLLAPSED_FAILED} of {collapse_rule.COLLAPSED_RUNS} | "
    cache = [one["keeps"]["0.25"] for one in compress_cache.STUDY.kept()["splits"]]
    yield f" | {mean_std([one['loss_after'] - one['loss_before'] for one in cache])} | "
    added: dict[str, float] = {}
    for row in compress_real.STUDY.kept()[compress_real.GEMMA.name]:
        added.setdefault(row["way"], row.get("added", 0.0))
    ways = "kv, 0.69", "simulated, 4 bits", "hqq by token, 8 bits"
    yield f" | {', '.join(f'{added[way]:.3f}' for way in ways)} | "


def test_numbers_of_the_readme_equal_the_numbers_of_the_kept_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [words for words in numbers_of_the_readme() if words not in text] == []


EVIDENCE = ROOT / "docs" / "evidence"
NUMBER = re.compile(r"\d+ of \d+|\d+\.\d+")


def generated(page: Path) -> str:
    """Return the lines of a page that its template does not have: those filled from kept results."""
    template = ROOT / "experiments" / "pages" / page.relative_to(EVIDENCE.parent)
    if not template.exists():
        template = ROOT / "experiments" / "pages" / page.relative_to(EVIDENCE)
    own = set(template.read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in page.read_text(encoding="utf-8").splitlines() if line not in own)


def is_in(number: str, text: str) -> bool:
    """Return if a text has a number, perhaps with more digits; `N of M` must match exactly."""
    if " of " in number:
        return re.search(rf"\b{number}\b", text) is not None
    digits = len(number.partition(".")[2])
    return any(f"{float(one):.{digits}f}" == number for one in re.findall(r"\d+\.\d+", text))


def measured_by_benchmarks() -> Iterator[str]:
    """Yield the numbers from kept benchmarks on the page of evidence."""
    kept = {
        path.stem: json.loads(path.read_text())["rows"] for path in (ROOT / "benchmarks/results").glob("*")
    }
    [causal] = [row["times_ours"] for row in kept["tssa"] if row.get("causal") and not row["backward"]]
    yield "eager formulas take {:.0f} times as long".format(causal["eager"][0])
    yield "fused softmax attention {:.0f} times as long".format(causal["sdpa"][0])
    estimate, exact = (row for row in kept["estimate_cost"] if row["tokens"] == 4096)
    yield "{:.1f} core seconds against {:.1f}".format(estimate["core_seconds"], exact["core_seconds"])
    yield "memory is {:.0f} MiB against {:.0f}".format(estimate["mib"], exact["mib"])
    errors = [abs(row["effective_rank_error"]) for row in kept["estimate"] if row["part"] == "accuracy"]
    yield f"Effective rank of {len(errors)} heads at 2,048 tokens: within {max(errors):.2%}".replace(
        "%", " %"
    )
    slower = kept["ranks_1024"][0]["results"]["svdvals float64"]["times_ours"][0]
    yield f"causal heads of 1,024 tokens takes {slower:.1f} times as long"
    shares = [f"{row['audit'][0]:.2%}".replace("%", " %") for row in kept["monitor"]]
    yield "takes {} of the time of a model of the demo's size, and {} of six layers".format(*shares)


def counted_by_studies() -> Iterator[str]:
    yield f"{bound_search.STUDY.kept()['evaluations']:,} evaluations"
    entries = list(architectures.STUDY.kept()["entries"].values())
    ran = [one for one in entries if one["ran"]]
    mixing = [one for one in ran if one["there"] or one["silent"]]
    whole = sum(one["captured"] == one["there"] and not one["silent"] for one in mixing)
    yield f"Of {len(mixing)} model types with a mixer, every mixer is captured in {whole}"
    yield f"{len(entries) - len(ran)} types were not built"
    yield f"{sum(one['identical'] for one in ran)} of {len(ran)} model types have bit-identical outputs"
    taking = [bool(one["no_op"]) for one in ran if one["skips"]]
    yield f"at λ = 1 they stay so in all {sum(taking)} types"
    assert all(taking)


def test_the_page_of_evidence_has_the_numbers_of_kept_results() -> None:
    text = (EVIDENCE / "index.md").read_text(encoding="utf-8")
    words = " ".join(text.split())
    known = [*measured_by_benchmarks(), *counted_by_studies()]
    assert [one for one in known if one not in words] == []
    wrong, seen = [], 0
    rows = re.findall(r"^\| (?!Claim|---)(.*) \|$", text, re.MULTILINE)
    for row in rows:
        links = re.findall(r"\]\(([\w/-]+\.md)", row)
        held = "\n".join([*known, *(generated(EVIDENCE / link) for link in links)])
        said = re.sub(r"`[^`]*`|\]\([^)]*\)", "", row)
        numbers = NUMBER.findall(said)
        wrong += [f"{number}: {said}" for number in numbers if not is_in(number, held)]
        seen += len(numbers)
        assert "`python -m " in row, row
    assert seen > 70
    assert wrong == []
