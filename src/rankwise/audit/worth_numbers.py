"""From what worth measures to the records of an audit."""

from dataclasses import replace
from typing import Any, Literal

from rankwise.audit.site_keys import HeadKey
from rankwise.audit.worth_records import BlockWorth, HeadWorth, Removable, RemovableHead, WorthRecord
from rankwise.errors import InputError
from rankwise.worth import Joint, Worth, WorthSettings
from rankwise.worth.results import Estimates

WorthWanted = bool | Literal["exact"] | WorthSettings


def check_worth(wanted: WorthWanted, tokenizer: Any = None) -> WorthSettings | None:
    """How worth is to be measured, if it is.

    Args:
        wanted: True, False, "exact", or settings.
        tokenizer: it knows the mask token, where the settings name none.

    Raises:
        InputError: if it is none of these.
    """
    if wanted is False:
        return None
    if wanted is True or wanted == "exact":
        wanted = WorthSettings(exact=wanted == "exact")
    if isinstance(wanted, WorthSettings):
        known = wanted.mask_token is not None
        mask = wanted.mask_token if known else getattr(tokenizer, "mask_token_id", None)
        return replace(wanted, mask_token=mask)
    raise InputError(
        "`worth`", wanted='True, False, "exact" or WorthSettings', got=repr(wanted),
        fix="See `rankwise.worth.WorthSettings` for what can be set.",
    )  # fmt: skip


def head_worths(worth: Worth) -> dict[HeadKey, dict[str, Any]]:
    """The worth of every head, and the cost of its removal, as fields of the record.

    Args:
        worth: as measured.
    """
    found = {
        site.place(head): HeadWorth(
            **_estimates(site.estimates, head),
            exact=float(site.exact[head]),
            cosine=float(site.cosine[head]),
            why_not=site.why_not,
        )
        for site in worth.sites
        for head in range(site.estimates.heads)
    }
    return {place: {"worth": head, "removal_cost": head.cost} for place, head in found.items()}


def worth_record(worth: Worth) -> WorthRecord:
    """What is said of all heads together.

    Args:
        worth: as measured.
    """
    blocks = [
        BlockWorth(
            stack=block.stack,
            layer=block.layer,
            site=block.site,
            exact=block.exact,
            why_not=block.why_not,
            **_estimates(block.estimates, 0),
        )
        for block in worth.blocks
    ]
    return WorthRecord(
        loss=worth.loss,
        unit=worth.unit,
        value=worth.value,
        reference=worth.reference,
        reference_name=worth.reference_name,
        sequences=worth.sequences,
        nonfinite=worth.nonfinite,
        counted=worth.counted,
        removal="mean" if worth.removal == "mean" else "zero",
        probes=worth.probes,
        seed=worth.seed,
        spearman=worth.spearman,
        blocks=blocks,
        removable=None if worth.joint is None else _removable(worth.joint),
        forward=worth.forward,
        backward=worth.backward,
        notes=worth.notes,
    )


def _removable(joint: Joint) -> Removable:
    gone = joint.removal
    return Removable(
        heads=[RemovableHead(**place._asdict()) for place in gone.heads],
        tolerance=joint.tolerance,
        loss=gone.loss,
        cost=gone.cost,
        relative=gone.relative,
        order="exact" if joint.order == "exact" else "estimate",
        runs=joint.runs,
    )


def _estimates(estimates: Estimates, head: int) -> dict[str, float]:
    return {
        "gradient": float(estimates.gradient[head]),
        "first_order": float(estimates.first_order[head]),
        "fisher": float(estimates.fisher[head]),
        "curvature": float(estimates.curvature[head]),
        "estimate": float(estimates.removal[head]),
    }
