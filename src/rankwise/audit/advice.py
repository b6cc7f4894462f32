"""What λ would have kept the tokens of a collapsing stack apart: the certificate of its layers."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from rankwise.audit.records import Finding
from rankwise.errors import RankwiseError

KEEP = 0.5
"""The part of μ² that each layer is to keep."""


def with_scales(findings: Sequence[Finding], model: nn.Module, batch: Any) -> tuple[list[Finding], list[str]]:
    """Add to every COLLAPSE the λ that each bound asks for, and the command that puts it in.

    Cost: nothing without a COLLAPSE; else about 20 forward passes on one batch.

    Args:
        findings: of an audit.
        model: what was audited.
        batch: what it was audited on, or part of it.

    Returns:
        The findings, and notes on what could not be told.
    """
    if all(finding.code != "COLLAPSE" for finding in findings):
        return list(findings), []
    from rankwise.surgery import certify_skip

    try:
        layers = certify_skip(model, batch, KEEP).layers
    except (RankwiseError, RuntimeError) as error:
        return list(findings), [f"no λ is named for COLLAPSE: {error}"]
    return [_advised(finding, layers) if finding.code == "COLLAPSE" else finding for finding in findings], []


def _advised(finding: Finding, layers: Sequence[Any]) -> Finding:
    """With the numbers of the mixer in the block where the collapse starts, or of the last one before it."""
    inside = [layer for layer in layers if f"{layer.site}.".startswith(f"{finding.where.site}.")]
    stack = [layer for layer in layers if layer.site.startswith(f"{finding.where.stack}.")] or list(layers)
    at = (inside or stack)[-1]
    # A collapse is one of μ/‖Y‖; after a norm, where ‖Y‖ is set, the scale for μ is that for both.
    sound = at.sound_scale if at.sound_scale_relative is None else at.sound_scale_relative
    scales = {
        "lambda": at.scale,
        "lambda_sound": sound,
        "lambda_paper": at.paper_scale,
        "lambda_paper_with_floor": at.paper_scale_with_floor,
    }
    known = {name: value for name, value in scales.items() if value is not None and math.isfinite(value)}
    least = min(abs(layer.scale) for layer in stack)
    init = 1.0 if least < 1 else max(known.get("lambda_sound", 0.0), 2 * least)
    return finding.model_copy(
        update={
            "evidence": finding.evidence | known,
            "remedy": f"rankwise skip MODEL --init {init:.2g} --text TEXT --out DIR",
        }
    )
