"""What the tokens of a batch are called: their text, where a tokenizer is known, else their ids."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise._internals.forward import Batch, tensors_of
from rankwise.errors import InputError
from rankwise.tracing import MixerSite

READ, WRITTEN = "input_ids", "decoder_input_ids"


class Ids(NamedTuple):
    """The ids that the rows or columns of a mixer stand for."""

    name: str
    """Of the input."""
    ids: Tensor
    """(B, T), padding among them."""


class TokenNames:
    """Names tokens.

    Args:
        tokenizer: names tokens if it has ``decode``, as those of transformers; None where there is none.

    Raises:
        InputError: if it is no tokenizer.

    Examples:
        >>> TokenNames(None).text(101)
        'id 101'
    """

    def __init__(self, tokenizer: Any = None) -> None:
        decodes = callable(getattr(tokenizer, "decode", None))
        if tokenizer is not None and not (decodes or callable(tokenizer)):
            raise InputError(
                "`tokenizer`",
                expected="a tokenizer, with a method decode to name tokens",
                got=type(tokenizer).__name__,
                fix="Pass what `AutoTokenizer.from_pretrained` gives, or nothing: ids are shown.",
            )
        self._tokenizer = tokenizer if decodes else None
        self._known: dict[int, str] = {}

    def text(self, number: int) -> str:
        """The text of a token: its own, without what tokenizers put in for spaces.

        Args:
            number: its id.
        """
        if number not in self._known:
            said = "" if self._tokenizer is None else str(self._tokenizer.decode([number]))
            self._known[number] = said.replace("\n", "↵").strip() or ("␣" if said else f"id {number}")
        return self._known[number]

    def peaks(
        self, site: MixerSite, batch: Batch | None, columns: Sequence[Sequence[int]]
    ) -> list[list[list[str]]]:
        """Name the tokens with the largest mean share of a row, as `peak_name` does, by sequence and head.

        Args:
            site: the mixer.
            batch: what the model was given.
            columns: the column of each sequence and head, padding not counted; −1 where there is none.
        """
        _, read = sides(site, batch)
        real = [valid.nonzero()[:, 0] for valid in site.valid_sources.cpu()]
        ids = [None if read is None else read.ids.cpu()[at][places] for at, places in enumerate(real)]
        return [
            [[] if at < 0 else peak_name(self, ids[number], at, len(real[number])) for at in heads]
            for number, heads in enumerate(columns)
        ]

    def texts(self, numbers: Tensor) -> list[str]:
        """The texts of several.

        Args:
            numbers: their ids, in one row.
        """
        return [self.text(number) for number in numbers.tolist()]


def sides(site: MixerSite, batch: Batch | None) -> tuple[Ids | None, Ids | None]:
    """The ids of the rows and of the columns of a mixer; None where its tokens are others.

    Rows of a decoder are the tokens it writes after; columns of cross-attention are those the encoder read.

    Args:
        site: the mixer.
        batch: what the model was given.
    """
    found = _ids_of(batch)
    written = found.get(WRITTEN) if site.cross or "decoder" in site.stack else None
    rows = written if written is not None else found.get(READ)
    columns = found.get(READ) if site.cross else rows
    return _fitting(rows, site.valid_tokens), _fitting(columns, site.valid_sources)


def _ids_of(batch: Batch | None) -> dict[str, Ids]:
    tensors = {} if batch is None else tensors_of(batch)
    ids = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32)
    }
    if READ not in ids and "0" in ids:  # a tensor, or the first of a tuple
        ids[READ] = ids["0"]
    return {name: Ids(name, ids[name]) for name in (READ, WRITTEN) if name in ids}


def _fitting(ids: Ids | None, valid: Tensor) -> Ids | None:
    return ids if ids is not None and ids.ids.shape == valid.shape else None


def peak_name(names: TokenNames, ids: Tensor | None, at: int, sources: int) -> list[str]:
    """Names of the token with the largest share of the rows, the most telling first: both, place, text.

    Args:
        names: of tokens.
        ids: of the columns without padding; None where they are not known.
        at: the column.
        sources: how many there are.

    Examples:
        >>> peak_name(TokenNames(None), None, 0, 9)
        ['the first token', 'the first token', 'token 0']
    """
    place = {0: "the first token", sources - 1: "the last token"}.get(at, f"token {at}")
    text = f"token {at}" if ids is None else names.text(int(ids[at]))
    both = place if ids is None else f"{text}, {place}"
    return [both, place, text]


def name_counts(named: Sequence[Sequence[str]]) -> list[Counter[str]]:
    """How many sequences share each name: a counter for each of the kinds that `peak_name` gives.

    Args:
        named: what `peak_name` gives, of each sequence.
    """
    return [Counter(kind) for kind in zip(*named, strict=True)]


def commonest(counts: Sequence[Mapping[str, int]], sequences: int) -> tuple[str, int]:
    """The name that most sequences share, and how many do; of equals the most telling. Nothing below half.

    Args:
        counts: as `name_counts` gives them.
        sequences: how many they are of.

    Examples:
        >>> named = [["[SEP], token 9", "token 9", "[SEP]"], ["[SEP], token 3", "token 3", "[SEP]"]]
        >>> commonest(name_counts(named), 2)
        ('[SEP]', 2)
    """
    best = ("", 0)
    for kind in counts:
        name, count = min(kind.items(), key=lambda item: (-item[1], item[0]), default=best)
        best = (name, count) if count > best[1] and 2 * count >= sequences else best
    return best
