"""Parts of head records that describe single sequences: masks, spectra, memberships, token names, maps."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.auditing.records import AttentionMap, HeadRecord

if TYPE_CHECKING:
    from torch import Tensor

    from rankwise._internals.batches import Batch
    from rankwise.tracing import CapturedMixer

NAMES_KEPT = 48
"""Number of token names that a record keeps; an attention sink has one or two."""


@dataclass
class Examples:
    """Examples from single sequences for the heads of one mixer call; each list has one item per head."""

    longest: list[float]
    """Number of tokens of the longest sequence, from which the mask is taken; 0 without sequences."""
    masks: list[str]
    spectra: list[list[float]]
    """Singular values of the first sequence; empty if ranks were estimated."""
    memberships: list[list[float]]
    """Membership (weight in the head) of each token of the first sequence; empty if the mixer has none."""
    grids: list[tuple[int, int] | None]
    """Rows and columns of patches if the tokens of ``memberships`` are patches of an image."""
    named: list[int]
    """Number of sequences in which the most attended token has a name."""
    names: list[Counter[str]]
    """Number of sequences by name of the most attended token; a token has several names (`peak_names`)."""
    attention_maps: list[AttentionMap | None]
    """Attention maps of the first sequence; None if not requested."""

    @classmethod
    def empty(cls, heads: int) -> "Examples":
        """Return examples to which no sequence has been added."""

        def lists() -> list[list[Any]]:
            return [[] for _ in range(heads)]

        return cls(
            longest=[0.0] * heads, masks=["full"] * heads, grids=[None] * heads, named=[0] * heads,
            spectra=lists(), memberships=lists(), attention_maps=[None] * heads,
            names=[Counter() for _ in range(heads)],
        )  # fmt: skip

    @classmethod
    def from_records(cls, records: Sequence[HeadRecord]) -> "Examples":
        """Restore examples from the saved records of one mixer call."""
        return cls(
            longest=[float(record.merging.longest) if record.sequences else 0.0 for record in records],
            masks=[record.mask for record in records],
            spectra=[record.spectrum for record in records],
            memberships=[record.membership_map for record in records],
            grids=[record.membership_grid for record in records],
            named=[record.merging.named for record in records],
            names=[Counter(record.merging.names) for record in records],
            attention_maps=[record.attention_map for record in records],
        )

    def see_lengths(self, tokens: Sequence[float], masks: Sequence[str]) -> None:
        """Keep for each head the mask of its longest sequence; ties go to the first mask name by alphabet."""
        for head, (length, mask) in enumerate(zip(tokens, masks, strict=True)):
            if length > self.longest[head]:
                self.longest[head], self.masks[head] = length, mask
            elif length == self.longest[head] > 0:
                self.masks[head] = min(self.masks[head], mask)

    def add_names(self, sequences: Sequence[Sequence[Collection[str]]]) -> None:
        """Count the names of most attended tokens, by sequence and head; a token without names is unknown."""
        for heads in sequences:
            for head, names in enumerate(heads):
                self.named[head] += bool(names)
                self.names[head].update(names)

    def merge(self, other: "Examples") -> None:
        """Add examples of the same heads from later sequences; attention maps are of the first alone."""
        self.see_lengths(other.longest, other.masks)
        for head in range(len(self.longest)):
            if not self.memberships[head]:
                self.memberships[head], self.grids[head] = other.memberships[head], other.grids[head]
            self.spectra[head] = self.spectra[head] or other.spectra[head]
            self.named[head] += other.named[head]
            self.names[head].update(other.names[head])

    def peak(self, head: int) -> tuple[str, int]:
        """Return the most frequent name of the most attended token, and the number of sequences with it.

        The name is empty if fewer than half of the sequences share it. If names are equally frequent, the
        longest wins, because it says most.
        """
        names = self.names[head].items()
        name, count = max(names, key=lambda item: (item[1], len(item[0]), item[0]), default=("", 0))
        return (name, count) if 2 * count >= self.named[head] else ("", 0)

    def grid(self, head: int) -> tuple[int, int] | None:
        """Return rows and columns of a membership map; None if the map has only part of the tokens."""
        return self.grids[head] if len(self.memberships[head]) == self.longest[head] else None


def patch_grid(tokens: int, image: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return rows and columns if ``tokens`` square patches tile an image (height, width); else None."""
    if image is None:
        return None
    height, width = image
    rows = math.isqrt(tokens * height // width)
    whole = rows > 0 and tokens % rows == 0 and rows * rows * width == tokens * height
    return (rows, tokens // rows) if whole else None


READ, WRITTEN = "input_ids", "decoder_input_ids"


class TokenIds(NamedTuple):
    """Name of a model input, such as ``input_ids``, and its token ids (B, T), including padding."""

    name: str
    ids: "Tensor"


class TokenNames:
    """Names of tokens: decoded text, or the id if no tokenizer with a method ``decode`` was passed."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer if callable(getattr(tokenizer, "decode", None)) else None
        self._known: dict[int, str] = {}

    def text(self, number: int) -> str:
        """Return the text of a token id, without surrounding spaces."""
        if number not in self._known:
            text = "" if self._tokenizer is None else str(self._tokenizer.decode([number]))
            self._known[number] = text.replace("\n", "↵").strip() or ("␣" if text else f"id {number}")
        return self._known[number]

    def peaks(
        self, site: "CapturedMixer", batch: "Batch | None", columns: Sequence[Sequence[int]]
    ) -> list[list[set[str]]]:
        """Return the names of the token in ``columns`` for each sequence and head; none for column −1.

        Columns are counted without padding.
        """
        _, read = token_ids(site, batch)
        real = [valid.nonzero()[:, 0] for valid in site.valid_sources.cpu()]
        ids = [None if read is None else read.ids.cpu()[row][places] for row, places in enumerate(real)]
        return [
            [
                set() if column < 0 else peak_names(self, ids[number], column, len(real[number]))
                for column in heads
            ]
            for number, heads in enumerate(columns)
        ]


def token_ids(site: "CapturedMixer", batch: "Batch | None") -> "tuple[TokenIds | None, TokenIds | None]":
    """Return the token ids of rows and of columns of a mixing matrix; None if no input has their shape."""
    from rankwise._internals.batches import tensors_of

    inputs = {
        name: TokenIds(name, tensor)
        for name, tensor in ({} if batch is None else tensors_of(batch)).items()
        if tensor.dim() == 2 and str(tensor.dtype) in ("torch.int64", "torch.int32")
    }
    if READ not in inputs and "0" in inputs:  # batch is a tensor or a tuple: the first item holds the ids
        inputs[READ] = TokenIds(READ, inputs["0"].ids)
    written = inputs.get(WRITTEN) if site.cross or "decoder" in site.stack else None
    rows = written or inputs.get(READ)
    columns = inputs.get(READ) if site.cross else rows
    fits_rows = rows is not None and rows.ids.shape == site.valid_tokens.shape
    fits_columns = columns is not None and columns.ids.shape == site.valid_sources.shape
    return rows if fits_rows else None, columns if fits_columns else None


def peak_names(names: TokenNames, ids: "Tensor | None", column: int, sources: int) -> set[str]:
    """Return the names of the token in ``column``: position, text, and both together.

    ``ids`` are the token ids of the columns without padding, None if unknown; ``sources`` counts the columns.
    """
    place = {0: "the first token", sources - 1: "the last token"}.get(column, f"token {column}")
    if ids is None:
        return {place}
    text = names.text(int(ids[column]))
    return {place, text, f"{text}, {place}"}


def image_size(batch: "Batch | None") -> tuple[int, int] | None:
    """Return height and width of the images (B, C, H, W) in a batch; None if the batch has no images."""
    from rankwise._internals.batches import tensors_of

    for tensor in tensors_of(batch).values() if batch is not None else ():
        if tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.shape[2], tensor.shape[3]
    return None
