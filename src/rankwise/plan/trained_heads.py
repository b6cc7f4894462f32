"""Measure the query/key widths that the heads of a trained model require."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rankwise._internals.forward import batch_errors, each_batch, run_model
from rankwise.measures import LogitMoments, logit_moments, required_head_dim
from rankwise.operators import SoftmaxMixing
from rankwise.plan.record import TrainedWidth
from rankwise.tracing import Address, capture


def trained_widths(model: nn.Module, batches: Iterable[Any], tolerance: float = 0.01) -> list[TrainedWidth]:
    """Return the smallest query/key width that preserves the attention of each softmax head on `batches`.

    Formula: `rankwise.measures.required_head_dim`, from second moments of queries and keys over all batches.
    Range: 0 to the width K of the head. Other tokens can require more width. Use several tokens per channel.
    Cost: one run of the model, O(T K²) per head and sequence of T tokens, and O(K³) per head.

    Args:
        model: model with softmax self-attention; without it, no record is returned.
        batches: inputs of the model, dicts or tensors.
        tolerance: allowed KL divergence of attention rows, in nats, to second order.

    Raises:
        InputError: if there are no batches, or the model does not run on one.

    Examples:
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> [head.width for head in trained_widths(model, [torch.randn(3, 10, 8)])]
        [4, 4]
    """
    moments: dict[Address, LogitMoments] = {}
    widths: dict[Address, int] = {}
    for number, batch in enumerate(each_batch(batches), 1):
        failures = batch_errors(model, batch, subject=f"`batches`, batch {number}")
        with failures, torch.no_grad(), capture(model) as trace:
            run_model(model, batch)
        for site in trace.mixers:
            op = site.operator
            if isinstance(op, SoftmaxMixing) and not site.cross:
                call = site.address()
                found = logit_moments(op, site.valid_tokens, site.valid_sources).sum_sequences()
                moments[call] = moments[call] + found if call in moments else found
                widths[call] = op.query.shape[-1]
    return [
        TrainedWidth(head=call.at(head), width=widths[call], required=required)
        for call, sums in moments.items()
        for head, required in enumerate(required_head_dim(sums, tolerance).tolist())
    ]
