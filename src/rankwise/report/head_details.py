"""Encode singular values and attention maps of heads for a page, within a byte budget."""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankwise.auditing.records import AttentionMap
from rankwise.auditing.result import Audit
from rankwise.report.format import round_for_page

SMALLEST = 1e-12
"""Ratio to the largest singular value below which values are float64 rounding noise, and are not drawn."""
NONE = 65535
"""Code for a singular value that is not drawn. The code of σᵢ is −log₁₀(σᵢ/σ₁) in steps of 12/65534."""
SPECTRA_BYTES = 200_000
"""Byte budget for the spectra of a page: with many heads, each spectrum has fewer points, but at least 16."""
MAP_BYTES = 400_000
"""Byte budget for the attention maps of a page. Above it, maps are stored at lower resolution, and maps
that still do not fit are only in audit.json."""
RESOLUTIONS = ((128, 254), (128, 126), (128, 62), (128, 30), (64, 62), (64, 30), (64, 14), (32, 30), (32, 14))
"""Resolutions to try, finest first: (maximum rows and columns of a map, number of steps of a value)."""


def pack_spectra(spectra: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the singular values of each head as codes of σᵢ/σ₁ on a logarithmic scale.

    `values` is base64 of the little-endian uint16 codes of all heads in sequence. `points` is the number of
    codes per head.
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
    places = [round(point * (len(spectrum) - 1) / max(count - 1, 1)) for point in range(count)]
    shares = np.array(spectrum, dtype=np.float64)[places] / largest
    is_drawn = np.isfinite(shares) & (shares >= SMALLEST)
    steps = np.clip(-np.log10(shares, where=is_drawn, out=np.zeros_like(shares)), 0.0, 12.0) / 12
    return np.where(is_drawn, np.round(steps * (NONE - 1)), NONE).astype(int).tolist()


def pack_attention_maps(audit: Audit, flagged: Sequence[int] = ()) -> tuple[dict[int, dict[str, Any]], int]:
    """Return encoded attention maps by head index within a byte budget, and the number of omitted maps.

    A value is encoded as the square root of its ratio to the largest magnitude, so that small weights remain
    visible. Maps of `flagged` heads are kept first.
    """
    room = MAP_BYTES
    order = list(dict.fromkeys([*flagged, *range(len(audit.heads))]))
    maps = {index: picture for index in order if (picture := audit.heads[index].attention_map) is not None}
    packed: dict[int, dict[str, Any]] = {}
    for side, steps in RESOLUTIONS:
        packed = {index: _packed(coarser(picture, side), steps) for index, picture in maps.items()}
        if sum(map(_size, packed.values())) <= room:
            break
    sizes = accumulate(map(_size, packed.values()))
    kept = {index: packed[index] for index, size in zip(packed, sizes, strict=True) if size <= room}
    return kept, len(packed) - len(kept)


def _size(picture: dict[str, Any]) -> int:
    """Return the number of characters that a map takes on the page."""
    return len(json.dumps(picture)) + 2


def coarser(picture: AttentionMap, side: int) -> AttentionMap:
    """Return a map with at most `side` rows and columns: blocks of tokens are merged and averaged.

    Blocks are weighted by their number of tokens, because sizes can differ by one token.

    Examples:
        >>> import numpy as np
        >>> round(float(coarser(AttentionMap.of(np.eye(2, dtype=np.float32), 3, 3), 1).matrix()[0, 0]), 2)
        0.56
    """
    if max(picture.rows, picture.columns) <= side:
        return picture
    matrix = picture.matrix().astype(np.float64)
    for size in (picture.tokens, picture.sources):
        matrix = _merged(matrix, size, side).T
    names = picture.row_tokens, picture.column_tokens
    return AttentionMap.of(matrix.astype(np.float32), picture.tokens, picture.sources, *names)


def _merged(matrix: NDArray[np.float64], size: int, side: int) -> NDArray[np.float64]:
    """Return at most `side` rows: weighted averages over the rows (blocks of tokens) of `matrix`."""
    rows = len(matrix)
    if rows <= side:
        return matrix
    of_row = np.bincount(np.arange(size) * rows // size, minlength=rows)
    starts = np.searchsorted(np.arange(rows) * side // rows, np.arange(side))
    sums = np.add.reduceat(matrix * of_row[:, None], starts, axis=0)
    return sums / np.add.reduceat(of_row, starts)[:, None]


def _packed(picture: AttentionMap, steps: int) -> dict[str, Any]:
    matrix = picture.matrix().astype(np.float64)
    share = matrix / (picture.largest or 1.0)
    root = np.sign(share) * np.sqrt(np.abs(share))
    signed = bool((share < 0).any())
    codes = np.round(steps / 2 * (1 + root) if signed else steps * root)
    bytes_ = np.where(np.isfinite(codes), np.clip(codes, 0, steps), 255).astype(np.uint8).tobytes()
    return {
        "values": base64.b64encode(zlib.compress(bytes_, 9)).decode(),
        "signed": signed,
        "steps": steps,
        **picture.model_dump(exclude={"values"}),
        "largest": round_for_page(picture.largest),
    }
