"""`EffectiveRank` and `RowMoments`: the rank of all rows at once, whatever batches, processes and units."""

import math
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measures.measure_cases import normal
from tests.unchecked import unchecked

from rankwise import measures
from rankwise.errors import InputError, ShapeError
from rankwise.measures import effective_rank
from rankwise.measures.row_moments import RowMoments

D = 12


def metric(*batches: torch.Tensor, **options: Any) -> Any:
    """Return the metric of torchmetrics after an update per batch."""
    pytest.importorskip("torchmetrics")
    rank = measures.EffectiveRank(D, **options)
    for batch in batches:
        rank.update(batch)
    return rank


def embeddings(count: int = 40, seed: int = 0) -> torch.Tensor:
    """Return embeddings whose singular values fall by 100, so that the rank is far from both ends."""
    return normal(count, D, seed=seed) * torch.logspace(0, -2, D, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(0, 99))
def test_any_batches_have_the_rank_of_all_rows_at_once(sizes: list[int], seed: int) -> None:
    rows = embeddings(sum(sizes), seed)
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    expected = effective_rank(rows).item()
    got = metric(*rows[shuffled].split(sizes)).compute().item()
    # Bound of the docstring: at most D singular values below √(D·ε)·σ_1 count as 0; each moves the entropy by
    # at most p·(1 − log p); all others have a relative error below 1e-9.
    least = math.sqrt(D * 2.0**-52)
    assert got == pytest.approx(expected, rel=2 * D * least * (1 - math.log(least)))
    assert 1 <= got <= min(len(rows), D) * (1 + 1e-12)


def test_scale_rotation_and_leading_axes_do_not_change_the_rank() -> None:
    rows = embeddings()
    rotation = torch.linalg.qr(normal(D, D, seed=3)).Q
    rank = metric(rows).compute().item()
    for same in (1e-30 * rows, 1e30 * rows, rows @ rotation, rows.reshape(4, 10, D), rows.repeat(3, 1)):
        assert metric(same).compute().item() == pytest.approx(rank, rel=1e-9)


def test_one_embedding_has_rank_one_and_zeros_have_rank_zero() -> None:
    assert metric(embeddings(1)[0]).compute() == 1
    assert metric(embeddings(1).repeat(50, 1)).compute().item() == pytest.approx(1, abs=1e-5)
    assert metric(torch.zeros(3, D)).compute() == 0


def test_processes_are_added_before_the_rank_is_computed() -> None:
    rows = embeddings()
    other = metric(rows[5:])

    def gather(state: torch.Tensor, group: Any) -> list[torch.Tensor]:
        return [state, other.count if state.ndim == 0 else other.moments]

    first = metric(rows[:5], dist_sync_fn=gather, distributed_available_fn=lambda: True)
    assert first.compute().item() == pytest.approx(effective_rank(rows).item(), rel=1e-9)
    assert first.count == 5  # a further update adds to the sums of this process
    assert pickle.loads(pickle.dumps(other)).compute() == other.compute()


def test_sums_stay_in_float64_whatever_the_dtype_of_the_model() -> None:
    rank = metric(embeddings())
    before = rank.compute()
    for changed in (rank.half(), rank.to(torch.bfloat16), torch.nn.ModuleList([rank]).bfloat16()[0]):
        changed.reset()
        changed.update(embeddings().bfloat16())
        assert changed.moments.dtype == torch.float64
        assert changed.compute().item() == pytest.approx(before.item(), rel=0.02)  # bfloat16 has 8 bits


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e200])
def test_embeddings_that_are_not_finite_are_refused_and_not_counted(number: float) -> None:
    rank = metric(embeddings())
    before = rank.compute()
    with pytest.raises(InputError, match=r"embeddings of `EffectiveRank`.*finite"):
        rank.update(torch.full((2, D), number, dtype=torch.float64))
    rank._computed = None
    assert rank.compute() == before


def test_no_embedding_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="at least one embedding, got none"):
        metric(torch.zeros(0, D)).compute()
    for wrong in (torch.zeros(3, D + 1), torch.tensor(1.0), [1.0] * D):
        with unchecked(), pytest.raises(ShapeError, match=rf"\(\.\.\., {D}\)"):
            metric(wrong)
    with pytest.raises(InputError, match="num_features"):
        measures.EffectiveRank(0)


def test_padding_is_left_out() -> None:
    rows = embeddings().reshape(4, 10, D)
    real = torch.arange(10) < torch.tensor([[10], [7], [1], [0]])
    padded = RowMoments.of(rows.masked_fill(~real[..., None], math.nan), real)
    for index in range(3):
        expected = effective_rank(rows[index][real[index]])
        assert padded.effective_rank()[index].item() == pytest.approx(expected.item(), rel=1e-6)
    assert padded.effective_rank()[3].isnan()


def test_measures_are_imported_without_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    assert "EffectiveRank" not in measures.__all__
    with pytest.raises(InputError, match=r"pip install 'rankwise\[metrics\]'"):
        _ = measures.EffectiveRank
