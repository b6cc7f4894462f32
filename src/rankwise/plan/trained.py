"""What the heads of a trained model use of their width: measured, not inferred from random weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import run_model
from rankwise.measures import effective_rank
from rankwise.measures.logits import logit_bases
from rankwise.operators import SoftmaxMixing
from rankwise.plan.records import HeadDimPlan, TrainedHead
from rankwise.tracing import MixerSite, capture

EPS = 1e-30
NAMED = 6
"""Heads that a note names at most; the record has all."""


def trained_widths(model: nn.Module, batches: Iterable[Any], tolerance: float = 0.01) -> list[TrainedHead]:
    """Least query/key width that each softmax head needs on these tokens, and its effective rank.

    Formula: over all tokens given, the best logits of width r (`rankwise.measures.logits.logit_bases`).
    Needed is the least r for which the mean KL(M‖M_r) over rows is at most the tolerance, found by bisection.
    Queries and keys are taken as the attention gets them, after rotary positions.
    Range: [1, K]. It is the need on the tokens it was fitted to: other text can need more.
    Cost: one run of the model, and about log₂ K + 1 dense softmaxes for each head and sequence.

    Args:
        model: any module.
        batches: dicts or tensors the model takes.
        tolerance: nats.

    Returns:
        One record for each head of each site with softmax attention of a sequence with itself; none where
        the model has none.
    """
    found: dict[tuple[str, int, str], list[MixerSite]] = {}
    for batch in batches:
        with torch.no_grad(), capture(model) as trace:
            run_model(model, batch)
        for site in trace.mixers:
            if isinstance(site.operator, SoftmaxMixing) and not site.cross:
                found.setdefault((site.stack, site.layer, site.name), []).append(site)
    return [
        _head(stack, layer, head, sites, tolerance)
        for (stack, layer, _), sites in found.items()
        for head in range(sites[0].operator.shape[-3])
    ]


def with_trained(plan: HeadDimPlan, model: nn.Module, batches: Iterable[Any]) -> HeadDimPlan:
    """Add what the heads of a trained model use, and say where it contradicts the random ones.

    Args:
        plan: the plan; its tolerance is taken in nats.
        model: the model.
        batches: what it takes.
    """
    heads = trained_widths(model, batches, plan.tolerance)
    if not heads:
        note = "The model has no softmax attention that could be seen: what its heads use is not known."
    else:
        width = plan.recommended.get("head_dim", plan.head_dim)
        wider = [head for head in heads if head.needed > width]
        mean = sum(head.needed for head in heads) / len(heads)
        note = (
            f"{len(wider)} of {len(heads)} trained heads need more than {width} of their width to keep their "
            f"attention within {plan.tolerance:g} nats, {mean:.1f} on average: "
            + (
                "random weights do not speak for them. Train both widths before you decide."
                if wider
                else "random weights promise no less than they use."
            )
        )
    spare = [_less_needed(heads, plan.tolerance)] if heads else []
    return plan.model_copy(update={"trained": heads, "notes": [*plan.notes, note, *spare]})


def _less_needed(heads: list[TrainedHead], tolerance: float) -> str:
    """Name the heads that need less width than they have; all of them are in the record."""
    less = sorted(
        (head for head in heads if head.needed < head.width), key=lambda head: head.needed / head.width
    )
    if not less:
        return f"Every trained head needs all of its width at {tolerance:g} nats on these tokens."
    named = ", ".join(
        f"{head.stack} layer {head.layer} head {head.head} ({head.needed} of {head.width})".strip()
        for head in less[:NAMED]
    )
    return (
        f"{len(less)} of {len(heads)} trained heads need less width than they have at {tolerance:g} nats on "
        f"these tokens{', those with the most to spare' if len(less) > NAMED else ''}: {named}."
    )


def _head(stack: str, layer: int, head: int, sites: list[MixerSite], tolerance: float) -> TrainedHead:
    parts = [(matrix, rows) for site in sites for matrix, rows in _sequences(site, head)]
    query = torch.cat([part.query[0, rows].double() for part, rows in parts])
    key = torch.cat([part.key[0, rows].double() for part, rows in parts])
    width = query.shape[-1]
    bases = logit_bases(query.mT @ query, key.mT @ key)
    whole = [part.dense()[0].double()[rows] for part, rows in parts]

    def loss(rank: int) -> float:
        change = bases.query[:, :rank] @ bases.key[:, :rank].mT
        total = 0.0
        for (part, rows), before in zip(parts, whole, strict=True):
            narrow = SoftmaxMixing(
                part.query.double() @ change, part.key.double(), part.mask, part.is_causal, part.scale
            )
            after = narrow.dense()[0][rows]
            total += float((before * ((before + EPS).log() - (after + EPS).log())).sum())
        return total / sum(len(before) for before in whole)

    low, high = 1, width
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if loss(middle) <= tolerance else (middle + 1, high)
    ranks = [float(effective_rank(matrix)) for matrix in whole]
    return TrainedHead(
        stack=stack,
        layer=layer,
        head=head,
        width=width,
        needed=low,
        effective_rank=sum(ranks) / len(ranks),
        tokens=sum(map(len, whole)) / len(whole),
    )


def _sequences(site: MixerSite, head: int) -> list[tuple[SoftmaxMixing, Tensor]]:
    """One head of each sequence, with the places of its real tokens."""
    operator = site.operator
    assert isinstance(operator, SoftmaxMixing)
    matrices = [operator[b, head : head + 1] for b in range(operator.shape[0])]
    return [
        (part, site.valid_tokens[b]) for b, part in enumerate(matrices) if bool(site.valid_tokens[b].any())
    ]
