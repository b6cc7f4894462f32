"""Record attention maps of chosen heads: block averages of mixing matrices."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from rankwise._internals.batches import Batch
from rankwise.auditing.examples import TokenNames, token_ids
from rankwise.auditing.records import MAP_SIDE, AttentionMap, Finding, HeadRecord
from rankwise.auditing.settings import ChosenHeads
from rankwise.operators import IndexedMixing, MixingOperator
from rankwise.tracing import CapturedMixer


def block_averages(operator: MixingOperator, side: int = MAP_SIDE) -> Float[Tensor, "*batch R C"]:
    """Return the mixing matrix M (..., T, S) averaged over at most ``side`` blocks of rows and of columns.

    Blocks have nearly equal sizes.

    Formula: Eᵀ M F, where column j of E (of F) is 1/n on the n rows (columns) of block j. M is not formed.

    Range: the range of the entries of M; M itself if T and S are at most ``side``.
    Cost: for attention, one product with ``side`` columns per head: O(T S side) time, O((T + S) side) memory.

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
    over_columns = _averaging(sources, columns, dtype, operator.device)
    over_rows = _averaging(tokens, rows, dtype, operator.device)
    return over_rows.mT @ (operator @ over_columns)


def _averaging(size: int, blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    block = torch.arange(size, device=device) * blocks // size
    member = torch.nn.functional.one_hot(block, blocks).to(dtype)
    return member / member.sum(0)


class AttentionMapRecorder:
    """Recorder of the attention maps of the first sequence, with the tokens of rows and columns."""

    def __init__(self, chosen: ChosenHeads, names: TokenNames) -> None:
        self.chosen, self.names = chosen, names
        self.texts: dict[str, list[str]] = {}
        """Tokens on the axes of the maps, by model input, such as ``input_ids``."""

    def record(
        self, site: CapturedMixer, heads: Sequence[int], batch: Batch | None
    ) -> dict[int, AttentionMap]:
        """Return the maps of chosen heads for the first sequence (image window), by position in ``heads``."""
        places = [place for place, head in enumerate(heads) if self.chosen.includes(site.layer, head)]
        rows, columns = site.valid_tokens[0], site.valid_sources[0]
        if not (places and rows.any() and columns.any()):
            return {}
        operator: MixingOperator = site.operator[:1]
        if not bool(rows.all() and columns.all()):
            operator = IndexedMixing(operator, rows, columns)
        tokens, sources = operator.shape[-2:]
        maps: dict[int, AttentionMap] = {}
        for place in places:
            with torch.no_grad():
                averages = block_averages(operator[:, place : place + 1])[0, 0].float().cpu().numpy()
            maps[place] = AttentionMap.of(averages, tokens, sources, *self._texts(site, batch))
        return maps

    def missing(self, heads: Iterable[tuple[int, int]]) -> list[str]:
        """Return a list with a note on chosen heads that do not exist; an empty list if all exist."""
        absent = ", ".join(f"{layer}:{head}" for layer, head in sorted(self.chosen.heads - set(heads)))
        return [f"no such head to keep the matrix of: {absent}"] if absent else []

    def _texts(self, site: CapturedMixer, batch: Batch | None) -> list[str]:
        """Return the keys in ``texts`` of row tokens and of column tokens. Unknown tokens have the key ""."""
        keys = []
        for ids, valid in zip(token_ids(site, batch), (site.valid_tokens, site.valid_sources), strict=True):
            real = [] if ids is None else ids.ids[0][valid[0].to(ids.ids.device)].tolist()
            tokens = [self.names.text(number) for number in real]
            fits = ids is not None and self.texts.setdefault(ids.name, tokens) == tokens
            keys.append(ids.name if ids is not None and fits else "")
        return keys


def only_flagged(heads: Sequence[HeadRecord], findings: Sequence[Finding]) -> list[HeadRecord]:
    """Return the records of heads, without the attention maps of heads that have no finding."""
    flagged = {replace(finding.where, call=0) for finding in findings if finding.where.head is not None}
    return [
        head if replace(head.id, call=0) in flagged else head.model_copy(update={"attention_map": None})
        for head in heads
    ]
