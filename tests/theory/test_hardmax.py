"""The rank of a hardmax matrix: against the matrix itself."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.theory import hardmax_rank
from rankwise.theory.hardmax import wins


@st.composite
def scores_and_masks(draw):
    tokens, sources = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(tokens, sources, generator=generator)
    mask = torch.rand(tokens, sources, generator=generator) < draw(st.sampled_from([0.2, 0.5, 1.1]))
    return scores, mask


def by_hand(scores, mask):
    matrix = torch.zeros(scores.shape)
    for i, row in enumerate(scores.tolist()):
        seen = [(score, j) for j, score in enumerate(row) if mask[i, j]]
        if seen:
            matrix[i, max(seen)[1]] = 1
    return matrix


@given(case=scores_and_masks())
def test_it_is_the_rank_of_the_matrix(case):
    scores, mask = case
    matrix = by_hand(scores, mask)
    assert hardmax_rank(scores, mask) == torch.linalg.matrix_rank(matrix)
    assert torch.equal(wins(scores, mask), matrix.sum(0))
    # its singular values are square roots of whole numbers, so that δ ≤ 1 changes nothing
    sigma = torch.linalg.svdvals(matrix)
    assert hardmax_rank(scores, mask) == (sigma > 0.999).sum()


@given(case=scores_and_masks(), scale=st.floats(0.01, 100))
def test_temperature_has_no_part(case, scale):
    scores, mask = case
    assert hardmax_rank(scores * scale, mask) == hardmax_rank(scores, mask)
    assert hardmax_rank(scores) == hardmax_rank(scores, torch.ones_like(mask))


def test_batches_and_masks_that_broadcast():
    scores = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(5, 6, dtype=torch.bool).tril()
    got = hardmax_rank(scores, mask)
    assert got.shape == (2, 3)
    assert got[1, 2] == hardmax_rank(scores[1, 2], mask)
    columns = torch.zeros(6, dtype=torch.bool)
    columns[4] = True
    assert (hardmax_rank(scores, columns) == 1).all()
    assert (hardmax_rank(scores, torch.zeros(6, dtype=torch.bool)) == 0).all()


def test_of_equal_scores_one_wins():
    assert hardmax_rank(torch.zeros(4, 4)) == 1
    assert hardmax_rank(torch.full((4, 4), -torch.inf)) == 1
