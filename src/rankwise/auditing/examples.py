"""What records show of single sequences: mask, spectrum, memberships, names of tokens, attention maps."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.auditing.records import AttentionMap, HeadRecord

if TYPE_CHECKING:
    from torch import Tensor

    from rankwise._internals.forward import Batch
    from rankwise.tracing import MixerSite

TOKENS_KEPT = 16
"""Names per kind that a record keeps of the tokens at the peak of a head: a sink has one, or a few."""


@dataclass
class Examples:
    """What is shown of the heads of one mixer call; each list has one item per head."""

    longest: list[float]
    """Tokens of the longest sequence; the mask is that of it, 0 if no sequence has tokens."""
    masks: list[str]
    spectra: list[list[float]]
    """Singular values of the first sequence; empty if they were not computed."""
    memberships: list[list[float]]
    """Memberships of the tokens of the first sequence; empty if the mixer has none."""
    grids: list[tuple[int, int] | None]
    """Rows and columns of these tokens if they are patches of an image."""
    named: list[int]
    """Sequences whose token at the peak has a name."""
    names: list[list[Counter[str]]] | None
    """Sequences per name, by the kinds of names that `peak_name` returns; None in files that hold none."""
    attention_maps: list[list[AttentionMap]] = field(default_factory=list)
    """Maps of the first two sequences."""

    @classmethod
    def empty(cls, heads: int) -> "Examples":
        """Return the examples of no sequences."""
        return cls(
            longest=[0.0] * heads,
            masks=["full"] * heads,
            spectra=[[] for _ in range(heads)],
            memberships=[[] for _ in range(heads)],
            grids=[None] * heads,
            named=[0] * heads,
            names=[[] for _ in range(heads)],
            attention_maps=[[] for _ in range(heads)],
        )

    @classmethod
    def from_records(cls, records: Sequence[HeadRecord]) -> "Examples":
        """Return what the records of one mixer call show."""
        held = [record.merging for record in records]
        names = [[Counter(kind) for kind in data.names] for data in held if data is not None]
        return cls(
            longest=[
                0.0 if not record.sequences else record.tokens if data is None else float(data.longest)
                for record, data in zip(records, held, strict=True)
            ],
            masks=[record.mask for record in records],
            spectra=[record.spectrum for record in records],
            memberships=[record.membership_map for record in records],
            grids=[record.membership_grid for record in records],
            named=[0 if data is None else data.named for data in held],
            names=names if len(names) == len(records) else None,
            attention_maps=[
                [kept for kept in (record.attention_map, record.second_attention_map) if kept is not None]
                for record in records
            ],
        )

    def see_length(self, tokens: float, masks: Sequence[str]) -> None:
        """Take the masks of another sequence if it is longer; of equal lengths the first name counts."""
        for head, mask in enumerate(masks):
            if tokens > self.longest[head]:
                self.longest[head], self.masks[head] = tokens, mask
            elif tokens == self.longest[head] and tokens:
                self.masks[head] = min(self.masks[head], mask)

    def add_names(self, sequences: Sequence[Sequence[Sequence[str]]]) -> None:
        """Count the names of the tokens at the peak, (sequences, heads, kinds); empty if there is none."""
        assert self.names is not None
        for heads in sequences:
            for head, kinds in enumerate(heads):
                self.named[head] += bool(kinds)
                _count(self.names[head], [{name: 1} for name in kinds])

    def merge(self, other: "Examples", *, attention_maps: bool = True) -> None:
        """Add the examples of other sequences, which follow.

        Args:
            other: examples of the same heads.
            attention_maps: False if the maps are of another audit, whose tokens have other names.
        """
        if self.names is None or other.names is None:
            self.names = None
        else:
            for mine, others in zip(self.names, other.names, strict=True):
                _count(mine, others)
        for head in range(len(self.longest)):
            if other.longest[head] > self.longest[head]:
                self.longest[head], self.masks[head] = other.longest[head], other.masks[head]
            elif other.longest[head] == self.longest[head] > 0:
                self.masks[head] = min(self.masks[head], other.masks[head])
            if not self.memberships[head]:
                self.memberships[head], self.grids[head] = other.memberships[head], other.grids[head]
            self.spectra[head] = self.spectra[head] or other.spectra[head]
            self.named[head] += other.named[head]
            if attention_maps:
                self.attention_maps[head] = (self.attention_maps[head] + other.attention_maps[head])[:2]

    def peak(self, head: int) -> tuple[str, int]:
        """Return the name that most sequences share and how many do; an empty name below half of them.

        Of names that are equally frequent, the more telling kind counts.

        Examples:
            >>> examples = Examples.empty(1)
            >>> examples.add_names([[["[SEP], token 9", "token 9", "[SEP]"]]])
            >>> examples.add_names([[["[SEP], token 3", "token 3", "[SEP]"]]])
            >>> examples.peak(0)
            ('[SEP]', 2)
        """
        best = ("", 0)
        for kind in self.names[head] if self.names is not None else []:
            name, count = min(kind.items(), key=lambda item: (-item[1], item[0]), default=best)
            best = (name, count) if count > best[1] and 2 * count >= self.named[head] else best
        return best

    def grid(self, head: int) -> tuple[int, int] | None:
        """Return the grid of a whole membership map; the first tokens of a longer sequence are no image."""
        return self.grids[head] if len(self.memberships[head]) == self.longest[head] else None


def _count(counts: list[Counter[str]], more: Sequence[Mapping[str, int]]) -> None:
    counts += [Counter() for _ in more[len(counts) :]]
    for kind, added in zip(counts, more, strict=False):
        kind.update(added)


def most_common(counts: Sequence[Mapping[str, int]], number: int = TOKENS_KEPT) -> list[dict[str, int]]:
    """Return the most frequent names of each kind; of equally frequent ones, in alphabetical order.

    Examples:
        >>> most_common([{"b": 2, "a": 2, "c": 3}])
        [{'c': 3, 'a': 2, 'b': 2}]
    """
    ordered = (sorted(kind.items(), key=lambda item: (-item[1], item[0])) for kind in counts)
    return [dict(names[:number]) for names in ordered]


def patch_grid(tokens: int, image: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return rows and columns of patches of the shape of their image; None if no grid has so many tokens.

    Args:
        tokens: number of patches.
        image: height and width of the image.
    """
    if image is None:
        return None
    height, width = image
    rows = math.isqrt(tokens * height // width)
    whole = rows > 0 and tokens % rows == 0 and rows * rows * width == tokens * height
    return (rows, tokens // rows) if whole else None


READ, WRITTEN = "input_ids", "decoder_input_ids"


class TokenIds(NamedTuple):
    """The token ids of the rows or columns of a mixer."""

    name: str
    """Name of the input."""
    ids: "Tensor"
    """(B, T), with padding."""


class TokenNames:
    """Names tokens by their text, or by their id if there is no tokenizer with ``decode``.

    Examples:
        >>> TokenNames().text(101)
        'id 101'
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer if callable(getattr(tokenizer, "decode", None)) else None
        self._known: dict[int, str] = {}

    def text(self, number: int) -> str:
        """Return the text of a token id, without the spaces that tokenizers add."""
        if number not in self._known:
            text = "" if self._tokenizer is None else str(self._tokenizer.decode([number]))
            self._known[number] = text.replace("\n", "↵").strip() or ("␣" if text else f"id {number}")
        return self._known[number]

    def texts(self, numbers: "Tensor") -> list[str]:
        """Return the texts of a row of token ids."""
        return [self.text(number) for number in numbers.tolist()]

    def peaks(
        self, site: "MixerSite", batch: "Batch | None", columns: Sequence[Sequence[int]]
    ) -> list[list[list[str]]]:
        """Name the tokens in the given columns, by sequence, head and kind, as `peak_name` does.

        Args:
            site: mixer call.
            batch: input of the model.
            columns: column per sequence and head, padding not counted; −1 for none.
        """
        _, read = token_ids(site, batch)
        real = [valid.nonzero()[:, 0] for valid in site.valid_sources.cpu()]
        ids = [None if read is None else read.ids.cpu()[at][places] for at, places in enumerate(real)]
        return [
            [[] if at < 0 else peak_name(self, ids[number], at, len(real[number])) for at in heads]
            for number, heads in enumerate(columns)
        ]


def token_ids(site: "MixerSite", batch: "Batch | None") -> "tuple[TokenIds | None, TokenIds | None]":
    """Return the token ids of the rows and columns of a mixer; None if its tokens are others.

    Rows of a decoder are the decoder's input; columns of cross-attention are the encoder's input.
    """
    from rankwise._internals.forward import tensors_of

    found = {
        name: TokenIds(name, tensor)
        for name, tensor in ({} if batch is None else tensors_of(batch)).items()
        if tensor.dim() == 2 and str(tensor.dtype) in ("torch.int64", "torch.int32")
    }
    if READ not in found and "0" in found:  # a tensor, or the first item of a tuple
        found[READ] = TokenIds(READ, found["0"].ids)
    written = found.get(WRITTEN) if site.cross or "decoder" in site.stack else None
    rows = written if written is not None else found.get(READ)
    columns = found.get(READ) if site.cross else rows
    fits = [
        ids if ids is not None and ids.ids.shape == valid.shape else None
        for ids, valid in ((rows, site.valid_tokens), (columns, site.valid_sources))
    ]
    return fits[0], fits[1]


def peak_name(names: TokenNames, ids: "Tensor | None", at: int, sources: int) -> list[str]:
    """Name the token in a column by text and place, by place, and by text, in this order.

    Args:
        names: names of tokens.
        ids: token ids of the columns without padding; None if unknown.
        at: the column.
        sources: number of columns.

    Examples:
        >>> peak_name(TokenNames(), None, 0, 9)
        ['the first token', 'the first token', 'token 0']
    """
    place = {0: "the first token", sources - 1: "the last token"}.get(at, f"token {at}")
    text = f"token {at}" if ids is None else names.text(int(ids[at]))
    both = place if ids is None else f"{text}, {place}"
    return [both, place, text]


def image_size(batch: "Batch | None") -> tuple[int, int] | None:
    """Return height and width of the images (B, C, H, W) in a batch; None if it has none."""
    from rankwise._internals.forward import tensors_of

    for tensor in tensors_of(batch).values() if batch is not None else ():
        if tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.shape[2], tensor.shape[3]
    return None
