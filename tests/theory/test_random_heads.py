"""Hardmax ranks against the matrix itself, and spectra by Gram matrices against singular values."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.theory import hardmax_rank
from rankwise.theory.random_heads import count_wins, singular_values_of_stochastic


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
    assert torch.equal(count_wins(scores, mask), matrix.sum(0))
    # its singular values are square roots of whole numbers, so that δ ≤ 1 changes nothing
    sigma = torch.linalg.svdvals(matrix)
    assert hardmax_rank(scores, mask) == (sigma > 0.999).sum()


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


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 30),
    sources=st.integers(1, 30),
    sharpness=st.sampled_from([0.1, 1.0, 10.0]),
    delta=st.sampled_from([1e-9, 1e-5, 1e-2, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_the_gram_matrix_counts_what_singular_values_count(tokens, sources, sharpness, delta, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, sources, dtype=torch.float64, generator=generator)
    matrix = (sharpness * scores).softmax(-1)
    sigma = torch.linalg.svdvals(matrix)
    # a singular value this near δ may fall on either side: rounding of the Gram matrix, n·u·‖M‖²/(2δ) twice
    slack = 30 * 2.3e-16 * float(sigma[0]) ** 2 / delta + 30 * 2.3e-16 * float(sigma[0])
    values, least = singular_values_of_stochastic(matrix, precise=False)
    if delta < least:
        values, _ = singular_values_of_stochastic(matrix, precise=True)
    count = (values >= delta).sum()
    assert (sigma >= delta + slack).sum() <= count <= (sigma >= delta - slack).sum()


def test_a_delta_that_the_gram_matrix_cannot_see():
    """Nearly uniform rows: singular values of some 1e-10, whose squares are below the rounding of 1."""
    scores = torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = (1e-9 * scores).softmax(-1)
    sigma = torch.linalg.svdvals(matrix)
    _, least = singular_values_of_stochastic(matrix, precise=False)
    for rank in (3, 6, 14):
        assert sigma[rank - 1] - sigma[rank] > 1e-12
        delta = float(sigma[rank - 1] + sigma[rank]) / 2
        assert delta < least
        values, _ = singular_values_of_stochastic(matrix, precise=True)
        assert (values >= delta).sum() == rank
