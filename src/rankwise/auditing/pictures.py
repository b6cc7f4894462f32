"""Pictures of matrices: of two sequences, at most 128×128, longer ones averaged block by block."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankwise._internals.forward import Batch, tensors_of
from rankwise.auditing.records import MAP_SIDE, AttentionMap, Finding, HeadRecord
from rankwise.auditing.token_names import TokenNames, sides
from rankwise.errors import InputError
from rankwise.operators import IndexedMixing, MixingOperator
from rankwise.tracing import MixerSite

PICTURES_BYTES = 2**28
"""Of all pictures of a running audit, packed: 43 KiB each at most. Heads after that have none."""
SEQUENCES = 2
"""Of which heads keep a picture: what is alike in both is less likely to be of the words alone."""

Matrices = str | Iterable[tuple[int, int]]
"""Which heads keep a picture: "flagged", "all", "3:7,5:0", or pairs (layer, head)."""
WANTED = '"flagged", "all", or heads by layer and number, such as "3:7,5:0"'


class NoSuchHeadsError(InputError):
    """Of the heads whose matrices are wanted the model has none."""


@dataclass(frozen=True)
class Chosen:
    """The heads whose matrix is kept: those with a finding of their own, all, or some by name."""

    heads: frozenset[tuple[int, int]] = frozenset()
    flagged: bool = False

    def may_have(self, layer: int, head: int) -> bool:
        """Whether a head can be among them, before findings are known."""
        return not self.heads or (layer, head) in self.heads

    def kept(self, heads: Sequence[HeadRecord], findings: Sequence[Finding]) -> list[HeadRecord]:
        """The records, without the pictures that are not asked for."""
        if not self.flagged:
            return list(heads)
        flagged = {key for finding in findings for key in _heads_of(finding)}
        return [
            head
            if (head.stack, head.layer, head.site, head.head) in flagged
            else head.model_copy(update={"attention_map": None, "second_attention_map": None})
            for head in heads
        ]


def _heads_of(finding: Finding) -> list[tuple[str, int | None, str, int]]:
    """Return the head of a finding, and all duplicates that it names."""
    where = finding.where
    if where.head is None:
        return []
    heads = {where.head, *(finding.heads if finding.code == "DUPLICATE_HEADS" else ())}
    return [(where.stack, where.layer, where.site, head) for head in heads]


def chosen_heads(matrices: Any) -> Chosen | None:
    """Read which heads keep a picture of their matrix.

    Args:
        matrices: "flagged" (heads with a finding), "all", heads as "layer:head,layer:head", pairs of numbers,
            or None.

    Returns:
        The heads; None where no picture is asked for.

    Raises:
        InputError: where it is none of these.

    Examples:
        >>> sorted(chosen_heads("3:7, 5:0").heads)
        [(3, 7), (5, 0)]
    """
    if matrices is None:
        return None
    if isinstance(matrices, str):
        word = matrices.strip().lower()
        if word in ("flagged", "all"):
            return Chosen(flagged=word == "flagged")
        parts = [part.strip() for part in matrices.split(",")]
        if not all(re.fullmatch(r"\d{1,9}:\d{1,9}", part) for part in parts):
            raise _unreadable(repr(matrices))
        pairs = [(int(layer), int(head)) for layer, head in (part.split(":") for part in parts)]
    else:
        try:
            pairs = [(int(layer), int(head)) for layer, head in matrices]
        except (TypeError, ValueError):
            raise _unreadable(repr(matrices)) from None
    if not pairs:
        raise _unreadable("no heads")
    return Chosen(frozenset(pairs))


def _unreadable(got: str) -> InputError:
    fix = 'Counted from 0: `matrices="3:7"` keeps head 7 of layer 3.'
    return InputError("`matrices`", expected=WANTED, got=got, fix=fix)


def _names(heads: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{layer}:{head}" for layer, head in sorted(heads))


def block_averages(operator: MixingOperator, side: int = MAP_SIDE) -> Float[Tensor, "*batch R C"]:
    """The matrix as a picture: means over blocks of rows and columns, as equal as they can be.

    Formula: Eᵀ M F, where the columns of E and F are 1/n on the n rows or columns of a block. M itself is
    not formed: M F is one product with ``side`` columns.

    Range: that of the entries; the entries themselves where T and S are at most ``side``.
    Cost: one product with ``side`` columns, a head at a time: O(T S side) time and O(T side + S side) memory
    for attention, less for what is applied in less than T S time.

    Args:
        operator: of shape (..., T, S).
        side: rows and columns at most.

    Examples:
        >>> import torch
        >>> from rankwise.operators import DenseMixing
        >>> block_averages(DenseMixing(torch.arange(16.0).reshape(4, 4)), side=2).tolist()
        [[2.5, 4.5], [10.5, 12.5]]
    """
    tokens, sources = operator.shape[-2:]
    rows, columns = min(tokens, side), min(sources, side)
    if (rows, columns) == (tokens, sources):
        return operator.dense()
    dtype = torch.float64 if operator.dtype == torch.float64 else torch.float32
    across = _averaging(sources, columns, dtype, operator.device)
    down = _averaging(tokens, rows, dtype, operator.device)
    return down.mT @ (operator @ across)


def _averaging(size: int, blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    block = torch.arange(size, device=device) * blocks // size
    member = torch.zeros(size, blocks, dtype=dtype, device=device)
    member[torch.arange(size, device=device), block] = 1
    return member / member.sum(0)


def picture_size(batch: Batch | None) -> tuple[int, int] | None:
    """Height and width of the pictures in a batch, (B, C, H, W), if it has any.

    Args:
        batch: what the model was given.
    """
    for tensor in tensors_of(batch).values() if batch is not None else ():
        if tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.shape[2], tensor.shape[3]
    return None


class PictureTaker:
    """Takes the pictures of one audit.

    Args:
        chosen: which heads may have one.
        names: what tokens are called.
    """

    def __init__(self, chosen: Chosen, names: TokenNames) -> None:
        self.chosen, self.names = chosen, names
        self.texts: dict[str, list[str]] = {}
        """Tokens of the sequences, by the name of the input; of the second with its number."""
        self.notes: list[str] = []
        self._room = PICTURES_BYTES

    def take(
        self, site: MixerSite, channels: Sequence[int], batch: Batch | None, before: int = 0
    ) -> list[dict[int, AttentionMap]]:
        """Pictures of the first sequences of a mixer, each by the place of the head.

        Args:
            site: the mixer.
            channels: the numbers of its heads.
            batch: what the model was given.
            before: sequences of which pictures were taken in earlier batches.
        """
        wanted = [place for place, head in enumerate(channels) if self.chosen.may_have(site.layer, head)]
        here = range(min(site.sequences, SEQUENCES - before))
        return [self._of(site, at, wanted, batch, before + at) for at in here]

    def _of(
        self, site: MixerSite, at: int, wanted: Sequence[int], batch: Batch | None, sequence: int
    ) -> dict[int, AttentionMap]:
        """Of one sequence: of its first window, where it has several."""
        row = at * (site.operator.shape[0] // max(site.sequences, 1))
        rows, columns = site.valid_tokens[row], site.valid_sources[row]
        if not (wanted and rows.any() and columns.any()):
            return {}
        alone = site.operator[row : row + 1]
        whole = bool(rows.all() and columns.all())
        part = alone if whole else IndexedMixing(alone, rows, columns)
        tokens, sources = part.shape[-2:]
        kept: dict[int, AttentionMap] = {}
        for place in wanted:
            if self._room <= 0:
                self.notes = [
                    f"pictures of matrices end at {PICTURES_BYTES >> 20} MiB: name the heads to see others"
                ]
                break
            with torch.no_grad():
                picture = block_averages(part[:, place : place + 1])[0, 0].float().cpu().numpy()
            kept[place] = AttentionMap.of(picture, tokens, sources, *self._texts(site, batch, row, sequence))
            self._room -= len(kept[place].values)
        return kept

    def check(self, heads: Iterable[tuple[int, int]]) -> None:
        """Refuse a choice of which no head is there.

        Args:
            heads: layers and numbers of those that the first batch has shown.

        Raises:
            NoSuchHeadsError: where there are none of them.
        """
        there = set(heads)
        if self.chosen.heads and not self.chosen.heads & there:
            layers = [layer for layer, _ in there]
            numbers = [head for _, head in there]
            raise NoSuchHeadsError(
                "`matrices`",
                expected=f"heads of layers {min(layers)}–{max(layers)}, "
                f"numbers {min(numbers)}–{max(numbers)}",
                got=_names(self.chosen.heads),
                fix='Counted from 0: "0:0" is head 0 of layer 0; "all" or "flagged" choose by themselves.',
            )

    def missing(self, heads: Sequence[HeadRecord]) -> list[str]:
        """Notes on pictures that were asked for and are not there.

        Args:
            heads: all heads of the audit.
        """
        there = {(head.layer, head.head) for head in heads}
        absent = sorted(self.chosen.heads - there)
        return [*self.notes, *([f"no such head to keep the matrix of: {_names(absent)}"] if absent else [])]

    def _texts(self, site: MixerSite, batch: Batch | None, row: int, sequence: int) -> list[str]:
        """The names of the inputs of rows and columns, once their tokens are noted."""
        found = []
        for ids, valid in zip(sides(site, batch), (site.valid_tokens, site.valid_sources), strict=True):
            said = [] if ids is None else self.names.texts(ids.ids[row][valid[row].to(ids.ids.device)])
            name = "" if ids is None else ids.name + (f" of sequence {sequence + 1}" if sequence else "")
            fits = bool(name) and self.texts.setdefault(name, said) == said
            found.append(name if fits else "")
        return found
