"""Check all claims on a model."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from rankwise._internals.batches import Batch, each_batch
from rankwise._internals.threads import exclusive
from rankwise.claims import heads, states  # noqa: F401 - importing them registers their claims
from rankwise.claims.evidence import Evidence, NotMeasurableError
from rankwise.claims.records import CheckedClaim, ClaimTable
from rankwise.claims.registry import CLAIMS as CLAIMS
from rankwise.errors import InputError


@exclusive
def check(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    name: str = "",
    data: str = "",
    on_progress: Callable[[str], None] = lambda words: None,
) -> ClaimTable:
    """Check claims of papers about ranks and attention on a model, and say which hold.

    A claim that the model or the data cannot show, such as a claim on queries of a state-space model, is
    listed with the reason. Sequences of fewer than 8 tokens and with NaN are left out.

    Cost: one forward pass per batch of the model, one of a copy at initialization, and three to measure a
    loss without heads; decompositions of each attention matrix, O(T³). Queries, keys, values and token
    states of all batches are held in memory.

    Args:
        model: any `torch.nn.Module`; it is run in evaluation mode, and not changed.
        batches: batches as for `rankwise.audit`.
        name: name of the model in the table.
        data: description of the data in the table.
        on_progress: function that is called with a description of each step.

    Raises:
        InputError: if there are no batches.
        CaptureError: if no mixer is found in the model.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> table = check(model, [torch.randn(2, 12, 8)])
        >>> table["layer_norm_keeps_affine_rank"].outcome, table["dormant_heads"].outcome
        ('does not hold', 'cannot be measured here')
    """
    every: list[Any] = list(each_batch(batches))
    if not every:
        raise InputError("`batches`", expected="at least one batch", got="none", fix="Pass a list of batches.")
    evidence = Evidence(model, every, on_progress)
    checked = []
    for code, claim in CLAIMS.items():
        on_progress(code.replace("_", " "))
        reason, ours, holds = "", "", False
        try:
            ours, holds = claim.check(evidence)
        except NotMeasurableError as error:
            reason, ours = error.reason, error.ours
        outcome = "cannot be measured here" if reason else "holds" if holds else "does not hold"
        checked.append(
            CheckedClaim(
                code=code, statement=claim.statement, source=claim.source, theirs=claim.theirs, ours=ours,
                outcome=outcome, reason=reason, definition=claim.definition,
            )
        )  # fmt: skip
    run = evidence.trained
    return ClaimTable(model=name, data=data, sequences=run.sequences, tokens=run.tokens, claims=checked)
