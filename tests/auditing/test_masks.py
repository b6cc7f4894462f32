"""Masks are named and their barrier is found block by block, as from the whole mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rankwise as rw
from rankwise.auditing import reference_ranks
from rankwise.auditing.reference_ranks import Mask, hardmax_rank, masks_of
from rankwise.errors import ShapeError
from rankwise.operators import DenseMixing
from rankwise.theory import rank_barrier_of_rows


def operator(mask: Tensor) -> DenseMixing:
    return DenseMixing(torch.ones(mask.shape), mask)


def band(tokens: int, sources: int, low: int, high: int) -> Tensor:
    offset = torch.arange(sources) - torch.arange(tokens)[:, None]
    return (offset >= low) & (offset <= high)


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [
        (band(6, 6, -6, 6), Mask("full")),
        (band(6, 4, -6, 6), Mask("full")),
        (band(6, 6, -6, 0), Mask("causal")),
        (band(4, 9, -9, 5), Mask("causal")),  # the rows are the last of more columns
        (band(6, 6, -2, 0), Mask("window", "causal", 3)),
        (band(6, 6, -2, 2), Mask("window", "full", 3)),
        (band(6, 6, -1, 2), Mask("window", "", 2)),
        (band(6, 6, 1, 9), Mask("window", "", 0)),
        (torch.zeros(3, 3).bool(), Mask("other")),
        (band(6, 6, -6, 0) & (torch.arange(6) != 2), Mask("other")),
        (torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]]).bool(), Mask("other")),
    ],
)
@pytest.mark.parametrize("entries", [1, 10, 10**6])
def test_names(monkeypatch, mask, pattern, entries):
    monkeypatch.setattr(reference_ranks, "BLOCK_ENTRIES", entries)
    assert masks_of(operator(mask[None, None])) == [[pattern]]


@settings(max_examples=60)
@given(
    size=st.tuples(*(st.integers(1, top) for top in (2, 3, 7, 7))),
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
    entries=st.integers(1, 60),
)
def test_the_barrier_is_that_of_the_whole_mask(size, seed, share, entries):
    seen = torch.rand(size, generator=torch.Generator().manual_seed(seed)) <= share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_ranks, "BLOCK_ENTRIES", entries)
        got = hardmax_rank(operator(seen))
    torch.testing.assert_close(got, rw.theory.rank_barrier(size[2], mask=seen), rtol=1e-12, atol=1e-12)


def test_heads_may_see_differently():
    both = torch.stack([band(5, 5, -5, 0), band(5, 5, -5, 5)])[None]
    assert masks_of(operator(both)) == [[Mask("causal"), Mask("full")]]
    assert hardmax_rank(operator(both)).tolist()[0] == pytest.approx([3.0, rw.theory.rank_barrier(5)])


def test_no_rows_are_refused():
    with pytest.raises(ShapeError, match="at least one block"):
        rank_barrier_of_rows([])
