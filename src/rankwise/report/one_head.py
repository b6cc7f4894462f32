"""What the page holds of a single head, to open it beside the map: its spectrum and its matrix."""

import base64
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankwise.audit.records import AuditRecord, HeadRecord, MatrixPicture
from rankwise.report.text import rank_share

SMALLEST = 1e-12
"""Below this share of the largest, a float64 singular value is rounding noise and is not drawn."""
NONE = 65535
"""Stands for a singular value that is not drawn; others are −log₁₀ σᵢ/σ₁ in steps of 12/65534."""
SPECTRA_BYTES = 200_000
"""Of all spectra of a page: of more heads, fewer points each, but 16."""
PICTURES_BYTES = 400_000
"""Of all matrices of a page: where they take more, their values are coarser …"""
MOST_PICTURES_BYTES = 4_000_000
"""… and where the coarsest take more than this, the rest of them is left to audit.json."""
STEPS = (254, 126, 62, 30, 14)
"""Between the smallest and the largest magnitude of a matrix."""


def pack_spectra(spectra: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Pack the singular values of heads, as shares of their largest, on a logarithmic scale.

    Args:
        spectra: those of each head, from the largest; empty where they are not known.

    Returns:
        ``values`` (base64 of little-endian uint16, one head after the other) and ``points`` (how many each
        head has; 0 where it has no spectrum).
    """
    most = min(64, max(16, SPECTRA_BYTES // (2 * max(len(spectra), 1))))
    packed = [_codes(spectrum, most) for spectrum in spectra]
    joined = np.concatenate([np.array(codes, dtype="<u2") for codes in [*packed, []]])
    return {"values": base64.b64encode(joined.tobytes()).decode(), "points": [len(codes) for codes in packed]}


def _codes(spectrum: Sequence[float], most: int) -> list[int]:
    largest = spectrum[0] if spectrum else math.nan
    if not (math.isfinite(largest) and largest > 0):
        return []
    count = min(most, len(spectrum))
    places = [round(at * (len(spectrum) - 1) / max(count - 1, 1)) for at in range(count)]
    return [_code(spectrum[at] / largest) for at in places]


def _code(share: float) -> int:
    if not (math.isfinite(share) and share >= SMALLEST):
        return NONE
    return round(min(max(-math.log10(share), 0.0), 12.0) / 12 * (NONE - 1))


def pack_pictures(audit: AuditRecord) -> tuple[dict[int, dict[str, Any]], int]:
    """Pack the matrices that heads have kept, by the index of the head.

    Values are the square roots of the shares of the largest magnitude, with their signs, in as many steps as
    there is room for: what is small beside the largest can still be seen.

    Args:
        audit: the audit.

    Returns:
        The matrices, and how many there was no room for.
    """
    kept = {index: head.picture for index, head in enumerate(audit.heads) if head.picture is not None}
    packed: dict[int, dict[str, Any]] = {}
    for steps in STEPS:
        packed = {index: _packed(picture, steps) for index, picture in kept.items()}
        if sum(len(picture["values"]) for picture in packed.values()) <= PICTURES_BYTES:
            break
    room = MOST_PICTURES_BYTES
    for index in list(packed):
        room -= len(packed[index]["values"])
        if room < 0:
            del packed[index]
    return packed, len(kept) - len(packed)


def _packed(picture: MatrixPicture, steps: int) -> dict[str, Any]:
    matrix = picture.matrix().astype(np.float64)
    share = matrix / (picture.largest or 1.0)
    root = np.sign(share) * np.sqrt(np.abs(share))
    signed = bool((share < 0).any())
    codes = np.round(steps / 2 * (1 + root) if signed else steps * root)
    known = np.where(np.isfinite(codes), np.clip(codes, 0, steps), 255).astype(np.uint8)
    return {
        "values": base64.b64encode(zlib.compress(known.tobytes(), 9)).decode(),
        "signed": signed,
        "steps": steps,
        **picture.model_dump(exclude={"values"}),
    }


def opening_head(heads: Sequence[HeadRecord], flagged: Sequence[int]) -> int | None:
    """Choose the head that is open at first: one with a matrix and a finding, a matrix, a finding, or the
    lowest rank.

    Args:
        heads: the heads of the audit.
        flagged: those with a finding, the gravest first.

    Returns:
        Its index; None where there is no head.
    """
    pictured = [at for at, head in enumerate(heads) if head.picture is not None]
    both = [at for at in flagged if heads[at].picture is not None]
    known = [at for at, head in enumerate(heads) if math.isfinite(rank_share(head))]
    lowest = sorted(known, key=lambda at: rank_share(heads[at]))
    found = [*both, *sorted(pictured, key=lambda at: _nan_last(rank_share(heads[at]))), *flagged, *lowest]
    return found[0] if found else 0 if heads else None


def _nan_last(value: float) -> float:
    return value if math.isfinite(value) else math.inf
