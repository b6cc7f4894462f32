"""From what worth measures to the records of an audit."""

from dataclasses import replace
from typing import Any, Literal

from rankwise.auditing.importance_records import (
    BlockImportance,
    HeadImportance,
    ImportanceRecord,
    Removable,
)
from rankwise.auditing.merge_importance import ImportanceStatistics
from rankwise.errors import InputError
from rankwise.importance import HeadPlace, Importance, ImportanceSettings, Joint
from rankwise.importance.results import Estimates
from rankwise.tracing.head_id import HeadId

ImportanceWanted = bool | Literal["exact"] | ImportanceSettings


def check_importance(wanted: ImportanceWanted, tokenizer: Any = None) -> ImportanceSettings | None:
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
        wanted = ImportanceSettings(exact=wanted == "exact")
    if isinstance(wanted, ImportanceSettings):
        known = wanted.mask_token is not None
        mask = wanted.mask_token if known else getattr(tokenizer, "mask_token_id", None)
        return replace(wanted, mask_token=mask)
    raise InputError(
        "`importance`", expected='True, False, "exact" or ImportanceSettings', got=repr(wanted),
        fix="See `rankwise.importance.ImportanceSettings` for what can be set.",
    )  # fmt: skip


def importance_statistics(importance: Importance) -> ImportanceStatistics:
    """Return the importance of all heads and blocks as records."""
    heads = {
        head_id(site.place(head)): HeadImportance(
            **_estimates(site.estimates, head),
            exact=float(site.exact[head]),
            cosine=float(site.cosine[head]),
            why_not=site.why_not,
        )
        for site in importance.sites
        for head in range(site.estimates.heads)
    }
    return ImportanceStatistics(importance_record(importance), heads)


def head_id(place: HeadPlace) -> HeadId:
    """Return the address of a head."""
    return HeadId(place.stack, place.layer, place.site, place.occurrence, place.head)


def importance_record(importance: Importance) -> ImportanceRecord:
    """What is said of all heads together.

    Args:
        worth: as measured.
    """
    blocks = [
        BlockImportance(
            stack=block.stack,
            layer=block.layer,
            site=block.site,
            exact=block.exact,
            why_not=block.why_not,
            **_estimates(block.estimates, 0),
        )
        for block in importance.blocks
    ]
    return ImportanceRecord(
        loss=importance.loss,
        unit=importance.unit,
        value=importance.value,
        reference=importance.reference,
        reference_name=importance.reference_name,
        sequences=importance.sequences,
        nonfinite=importance.nonfinite,
        counted=importance.counted,
        removal="mean" if importance.removal == "mean" else "zero",
        probes=importance.probes,
        seed=importance.seed,
        spearman=importance.spearman,
        blocks=blocks,
        removable=None if importance.joint is None else _removable(importance.joint),
        forward=importance.forward,
        backward=importance.backward,
        notes=importance.notes,
    )


def _removable(joint: Joint) -> Removable:
    gone = joint.removal
    return Removable(
        heads=[head_id(place) for place in gone.heads],
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
