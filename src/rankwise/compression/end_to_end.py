"""How far attention itself has moved in a compressed model, whichever part was done."""

from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import device_of, first_sequences, run_model, to_device
from rankwise.compression.records import HeadWidth
from rankwise.operators import MixingOperator
from rankwise.tracing import MixerSite, capture

SEQUENCES = 2
"""On which attention is compared, at most."""


def softmax_sites(model: nn.Module, batch: Any) -> dict[str, list[MixerSite]]:
    """Softmax attention of the first sequences, by name, in the order of calls.

    Args:
        model: in evaluation mode.
        batch: what it takes.
    """
    found: dict[str, list[MixerSite]] = {}

    def keep(site: MixerSite) -> None:
        if site.kind == "softmax":
            found.setdefault(site.name, []).append(site)

    with torch.no_grad(), capture(model, on_mixer=keep):
        run_model(model, to_device(first_sequences(batch, SEQUENCES), device_of(model)))
    return found


def attention_moves(
    before: dict[str, list[MixerSite]], after: dict[str, list[MixerSite]], heads: list[HeadWidth]
) -> dict[str, float]:
    """Mean KL(M‖M') over rows of real tokens, then over the heads that are left, by layer.

    M is what the original gave, M' what the compressed model gives, both from the same tokens: what layers
    before did to the states counts, too.

    Args:
        before: of the original.
        after: of the compressed model.
        heads: what was done; removed heads of the part ``heads`` have width 0.
    """
    moves: dict[str, float] = {}
    for name, sites in before.items():
        own = [head for head in heads if head.part == "heads" and head.site == name]
        left = [head.head for head in own if head.width] if own else None
        if left == [] or len(after.get(name, [])) != len(sites):
            continue
        pairs = [_move(old, new, left) for old, new in zip(sites, after[name], strict=True)]
        moves[name] = sum(pairs) / len(pairs)
    return moves


def _move(old: MixerSite, new: MixerSite, left: list[int] | None) -> float:
    count = new.operator.shape[1]
    left = list(range(count)) if left is None else left
    total = 0.0
    for at, head in enumerate(left):
        matrix, moved_to = _matrix(old.operator, head), _matrix(new.operator, at)
        floor = torch.finfo(matrix.dtype).tiny
        logs = matrix.clamp(min=floor).log() - moved_to.clamp(min=floor).log()
        terms = matrix * logs - matrix + moved_to  # rows sum to 1 but for rounding: no term is below 0
        total += float(terms.sum(-1)[old.valid_tokens].mean())
    return total / len(left)


def _matrix(operator: MixingOperator, head: int) -> Tensor:
    return operator[:, head : head + 1].dense()[:, 0].double()
