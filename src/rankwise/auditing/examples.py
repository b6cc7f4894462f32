"""Parts of head records that describe single sequences: masks, spectra, memberships, token names, maps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.auditing.records import AttentionMap, HeadRecord, MaskName

if TYPE_CHECKING:
    from torch import Tensor

    from rankwise._internals.batches import Batch
    from rankwise.tracing import CapturedMixer

NAMES_KEPT = 48
"""Maximum number of token names in a record; an attention sink has only one or two names."""


@dataclass
class HeadExamples:
    """Examples from single sequences for one head."""

    longest: float = 0.0
    """Number of tokens of the longest sequence, from which the mask is taken; 0 without sequences."""
    mask: MaskName = "full"
    spectrum: list[float] = field(default_factory=list)
    """Singular values of the first sequence; empty if ranks were estimated."""
    membership: list[float] = field(default_factory=list)
    """Membership (weight in the head) of each token of the first sequence; empty if the mixer has none."""
    named: int = 0
    """Number of sequences in which the most attended token has a name."""
    names: Counter[str] = field(default_factory=Counter)
    """Number of sequences by name of the most attended token; a token has several names (`peak_names`)."""
    attention_map: AttentionMap | None = None
    """Attention map of the first sequence; None if not requested."""

    @classmethod
    def from_record(cls, record: HeadRecord) -> "HeadExamples":
        """Restore examples from a saved record."""
        return cls(
            longest=float(record.merging.longest) if record.sequences else 0.0,
            mask=record.mask,
            spectrum=record.spectrum,
            membership=record.membership_map,
            named=record.merging.named,
            names=Counter(record.merging.names),
            attention_map=record.attention_map,
        )

    def see_length(self, tokens: float, mask: MaskName) -> None:
        """Keep the mask of the longest sequence; of equally long sequences, the first mask by alphabet."""
        if tokens > self.longest:
            self.longest, self.mask = tokens, mask
        elif tokens == self.longest > 0:
            self.mask = min(self.mask, mask)

    def merge(self, other: "HeadExamples") -> None:
        """Add examples of the same head from later sequences, except their attention map."""
        self.see_length(other.longest, other.mask)
        self.membership = self.membership or other.membership
        self.spectrum = self.spectrum or other.spectrum
        self.named += other.named
        self.names.update(other.names)

    @property
    def peak(self) -> tuple[str, int]:
        """Most frequent name of the most attended token, and the number of sequences with it.

        If fewer than half of the sequences share the name, it is empty and the number is 0. Of equally
        frequent names, a name with text and position is preferred.
        """
        names = self.names.items()
        name, count = min(names, key=lambda item: (-item[1], ", " not in item[0], item[0]), default=("", 0))
        return (name, count) if 2 * count >= self.named else ("", 0)


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
        """Return the names of the token in ``columns`` for each sequence and head.

        Columns are counted without padding. Column −1 has an empty set of names.
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
    """Return the token ids of rows and of columns of a mixing matrix. Unknown ids are None."""
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

    ``ids`` are the token ids of the columns without padding, or None. ``sources`` is the number of columns.
    """
    place = {0: "the first token", sources - 1: "the last token"}.get(column, f"token {column}")
    text = f"token {column}" if ids is None else names.text(int(ids[column]))
    return {place, text} | (set() if ids is None else {f"{text}, {place}"})
