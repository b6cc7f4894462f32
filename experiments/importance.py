"""What heads are worth beside their rank, cheap estimates beside removal, and sets of heads that can go.

Claim     Michel et al., "Are Sixteen Heads Really Better than One?" (2019): the gradient of a gate on a head
          says what removing the head costs; many heads can go.
Asked     How well first order and curvature sort the heads of two real models; whether rank says anything of
          worth; whether a set of heads chosen on some texts costs as little on others.
Hardware  one CPU core, about 4 minutes
Expect    Curvature by random projections sorts heads nearly as removal does; first order less well.

    python -m experiments run importance
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

import rankwise as rw
from experiments.importance_page import figures, tables
from experiments.rank.rank_saturation import rounded
from experiments.real_models import minilm
from experiments.study import Study
from rankwise._internals.statistics import spearman
from rankwise.auditing import HeadRecord
from rankwise.auditing.measure_table import HEAD_MEASURES
from rankwise.cli.load_data import load_data
from rankwise.cli.load_model import demo_model, demo_text, load_model
from rankwise.importance import ImportanceSettings, ablation_cost, measure

ESTIMATES = ("first_order", "fisher", "curvature", "estimate")
RANKS = (
    "numerical_rank",
    "effective_rank",
    "stable_rank",
    "row_entropy",
    "first_token_mass",
    "max_token_mass",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a run."""

    splits: int = 3
    sequences: int = 8
    """Of each split."""
    tokens: int = 64
    demo_tokens: int = 128
    probes: int = 8
    tolerance: float = 0.01
    seed: int = 0


def results(recipe: Recipe, text: Path | None) -> dict[str, Any]:
    """Measure both models; MiniLM only if its weights are installed and there is a text."""
    weights, found = minilm(), []
    if weights is not None and text is not None:
        splits = batches(weights, text, recipe.tokens, recipe)
        found.append(one_model("all-MiniLM-L6-v2", f"{text.name}, {recipe.tokens} tokens", *splits, recipe))
    splits = batches(demo_model(), demo_text(), recipe.demo_tokens, recipe)
    found.append(one_model("the bundled demo", f"its text, {recipe.demo_tokens} tokens", *splits, recipe))
    return {"recipe": asdict(recipe), "models": found}


def batches(folder: Path, text: Path, tokens: int, recipe: Recipe) -> tuple[nn.Module, list[list[Any]]]:
    """The model, and one batch of sequences for each split; no sequence is in two of them."""
    subject = load_model(str(folder))
    count = recipe.sequences * recipe.splits
    size = recipe.sequences
    made = load_data(subject, text=text, tokens=tokens, sequences=count, batch_size=size).batches
    return subject.model, [[batch] for batch in made]


def one_model(
    name: str, data: str, model: nn.Module, splits: Sequence[list[Any]], recipe: Recipe
) -> dict[str, Any]:
    """Every split audited with exact worth; then sets of heads, each run on the other splits as well."""
    exactly = ImportanceSettings(
        exact=True, probes=recipe.probes, tolerance=recipe.tolerance, seed=recipe.seed
    )
    audits = [rw.audit(model, split, importance=exactly) for split in splits]
    first = audits[0].importance
    assert first is not None
    costs = [[head.removal_cost for head in audit.heads] for audit in audits]
    return {
        "model": name,
        "data": data,
        "loss": first.loss,
        "unit": first.unit,
        "values": [audit.importance.value for audit in audits if audit.importance is not None],
        "heads": [[head.layer, head.head] for head in audits[0].heads],
        "exact": costs,
        "estimates": {
            kind: [[getattr(head.importance, kind) for head in audit.heads] for audit in audits]
            for kind in ESTIMATES
        },
        "cosine": [head.importance.cosine for head in audits[0].heads if head.importance is not None],
        "ranks": {measure: [shown(audit.heads, measure) for audit in audits] for measure in RANKS},
        "one_probe": [one_probe(model, split, recipe) for split in splits],
        "sets": list(sets(model, splits, audits, recipe)),
    }


def shown(heads: Sequence[HeadRecord], name: str) -> list[float]:
    """A measure of every head as reports show it: ranks as shares."""
    measure = next(one for one in HEAD_MEASURES if one.name == name)
    return [measure.value(head) for head in heads]


def one_probe(model: nn.Module, split: list[Any], recipe: Recipe) -> list[float]:
    """The estimate with one random projection alone."""
    importance = measure(model, split, ImportanceSettings(probes=1, tolerance=None, seed=recipe.seed))
    return [head.estimate for head in importance.heads.values()]


def sets(
    model: nn.Module, splits: Sequence[list[Any]], audits: Sequence[rw.Audit], recipe: Recipe
) -> Iterable[dict[str, Any]]:
    """The heads that can go by exact and by estimated order, and with means in their place."""
    for at, (split, audit) in enumerate(zip(splits, audits, strict=True)):
        assert audit.importance is not None
        assert audit.importance.removable is not None
        yield held_out(model, splits, at, "exact", "zero", audit.importance.removable.heads)
        for removal in ("zero", "mean"):
            settings = ImportanceSettings(
                probes=recipe.probes, tolerance=recipe.tolerance, seed=recipe.seed, ablation=removal
            )
            removable = measure(model, split, settings).record.removable
            assert removable is not None
            yield held_out(model, splits, at, "estimate", removal, removable.heads)


def held_out(
    model: nn.Module, splits: Sequence[list[Any]], at: int, order: str, removal: Any, heads: Sequence[Any]
) -> dict[str, Any]:
    """What a set costs on the split it was chosen on, and on each other one."""
    settings = ImportanceSettings(ablation=removal)
    costs = [ablation_cost(model, split, heads, settings) for split in splits]
    return {
        "split": at,
        "order": order,
        "removal": removal,
        "heads": [[head.layer, head.head] for head in heads],
        "here": costs[at].relative,
        "loss": costs[at].loss,
        "elsewhere": [cost.relative for other, cost in enumerate(costs) if other != at],
    }


def correlations(model: dict[str, Any]) -> dict[str, list[float]]:
    """Spearman of estimates and ranks with the exact costs, by split; and of exact costs among splits.

    Args:
        model: of the results.
    """
    exact = numbers(model["exact"])
    pairs = [(a, b) for a in range(len(exact)) for b in range(a + 1, len(exact))]
    named = {**model["estimates"], "estimate, 1 projection": model["one_probe"], **model["ranks"]}
    by_name = {name: numbers(values) for name, values in named.items()}
    found = {
        name: [spearman(*both) for both in zip(values, exact, strict=True)]
        for name, values in by_name.items()
    }
    return {**found, "exact on other texts": [spearman(exact[a], exact[b]) for a, b in pairs]}


def numbers(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """NaN where a file holds null."""
    return [[math.nan if value is None else value for value in row] for row in rows]


def measure_models(data: Path) -> dict[str, Any]:
    """Measure both models, and how measures sort their heads."""
    report = results(Recipe(), data / "imdb" / "test.jsonl.gz")
    for model in report["models"]:
        model["correlations"] = correlations(model)
    rounded_report: dict[str, Any] = rounded(report)
    return rounded_report


STUDY = Study("importance", measure_models, "worth", tables, figures)
