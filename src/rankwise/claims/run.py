"""Check all claims on a model."""

from collections.abc import Iterable

from torch import nn

from rankwise._internals.batches import Batch, each_batch
from rankwise._internals.threads import exclusive
from rankwise.claims import heads, states  # noqa: F401 - importing them registers their claims
from rankwise.claims.evidence import CLAIMS, Evidence, NotMeasurableError
from rankwise.claims.records import CheckedClaim


@exclusive
def check(model: nn.Module, batches: Iterable[Batch]) -> list[CheckedClaim]:
    """Check claims of papers about ranks and attention on a model, and say which hold.

    A claim that the model or the data cannot show, such as a claim on queries of a state-space model, has the
    outcome "cannot be measured here" and the reason. Sequences that have fewer than 8 tokens or are not finite
    are left out. The model runs in evaluation mode and is not changed.

    Cost: four forward passes per batch, two of the first, and one of a copy at initialization; decompositions
    of each attention matrix, O(T³). Queries, keys, values and token states of all batches are kept in memory.

    Args:
        model: any `torch.nn.Module`.
        batches: batches as for `rankwise.audit`.

    Raises:
        CaptureError: if no mixer is found in the model, or there are no batches.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> outcomes = {claim.code: claim.outcome for claim in check(model, [torch.randn(2, 12, 8)])}
        >>> outcomes["layer_norm_keeps_affine_rank"], outcomes["dormant_heads"]
        ('does not hold', 'cannot be measured here')
    """
    evidence, checked = Evidence(model, [*each_batch(batches)]), []
    for measure, claim in CLAIMS.values():
        try:
            ours, holds = measure(evidence)
            result = {"ours": ours, "outcome": "holds" if holds else "does not hold"}
        except NotMeasurableError as error:
            result = dict(zip(("reason", "ours"), error.args, strict=False))
        checked.append(claim.model_copy(update=result))
    return checked
