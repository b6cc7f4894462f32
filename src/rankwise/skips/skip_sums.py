"""What λ-skips add, seen on a batch: residuals, branches and sums, with any λ tried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch, run_model
from rankwise.errors import SkipError
from rankwise.skips.probe import probing, replacing_sums
from rankwise.skips.skips import SkipSite
from rankwise.skips.sums import SumName
from rankwise.skips.verify import scaled_sums, unhooked

MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass
class SkipSum:
    """One sum λ·Y + B, as (B, T, D)."""

    site: SkipSite
    residual: Tensor
    branch: Tensor
    total: Tensor
    mask: Tensor


def skip_sums(
    model: nn.Module, batch: Batch, sites: Sequence[SkipSite], scales: Mapping[str, Tensor | float]
) -> list[SkipSum]:
    """Run a model, its hooks off, with these λ, and see what each skip adds, in the order it runs.

    Args:
        model: the model.
        batch: what to run it on.
        sites: the sites.
        scales: λ of each site by name.

    Raises:
        SkipError: if a sequence of the batch is all padding.
    """
    seen: list[SkipSum] = []
    of_sum = {name: site for site in sites for name in site.sums}

    def note(name: SumName, residual: Tensor, branch: Tensor, total: Tensor) -> None:
        site = of_sum[name]
        if residual.shape != branch.shape or residual.shape[-1] != site.location.width:
            raise _other_sums(site)
        read, other, both = (_as_batch(value, site.location.axis) for value in (residual, branch, total))
        seen.append(SkipSum(site, read, other, both, _mask(batch, read, site)))

    scaled = scaled_sums(sites, scales, note)
    with unhooked(model), probing(model), torch.no_grad(), replacing_sums(model, scaled):
        run_model(model, batch)
    missing = {site.name for site in sites} - {added.site.name for added in seen}
    if missing:
        raise SkipError(
            f"site {min(missing)!r}",
            expected="a batch on which every residual mixer runs",
            got="one on which it does not",
            fix="Pass a batch of the kind the skips were put in with.",
        )
    return seen


def _other_sums(site: SkipSite) -> SkipError:
    return SkipError(
        f"site {site.name!r}",
        expected="a batch on which the model takes the same sums as on the example its skips were added with",
        got="other sums",
        fix="Pass `example=` a batch of this kind to `add_lambda_skip`.",
    )


def _as_batch(value: Tensor, axis: int) -> Tensor:
    value = value.detach()
    if value.dim() == 2:
        return value[None]
    return value.transpose(0, 1) if axis == 0 else value


def _mask(batch: Batch, tokens: Tensor, site: SkipSite) -> Tensor:
    """Which tokens are real, as the batch says it for a sequence of this length."""
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    decodes = "decoder" in site.name.split(".") and "decoder_input_ids" in given
    for name in reversed(MASKS) if decodes else MASKS[:1]:
        value = given.get(name)
        if isinstance(value, Tensor) and value.shape == tokens.shape[:2]:
            return value.bool()
        if decodes:
            break
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def check_tokens(batch: Batch) -> None:
    """Refuse a batch in which a sequence has no real token, or none has two.

    Args:
        batch: the batch.

    Raises:
        SkipError: if it is one.
    """
    for name in MASKS:
        value = batch.get(name) if isinstance(batch, Mapping) else None
        if not isinstance(value, Tensor) or value.dim() != 2:
            continue
        real = value.bool().sum(-1)
        if bool((real == 0).any()):
            raise SkipError(
                f"`{name}` of the batch",
                expected="a real token in every sequence",
                got=f"{int((real == 0).sum())} of {len(real)} sequences that are all padding",
                fix="Leave them out.",
            )
