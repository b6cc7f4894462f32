"""Laws of every mixing operator, of any kind, mask and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.linear_time_cases import LINEAR_TIME
from tests.operators.mixing_laws import check, largest_tensor, near
from tests.operators.operator_cases import KINDS, case_id, normal, sizes, tolerance
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.auditing.measure_table import MIXER_KINDS
from rankwise.errors import ShapeError
from rankwise.operators.base import ROW_BLOCK

every_kind = pytest.mark.parametrize("kind", KINDS, ids=case_id)
some = settings(max_examples=6)
TIGHT = tolerance(torch.float64, 8)


@every_kind
@some
@given(size=sizes, seed=st.integers(0, 99))
def test_applying_is_multiplying_by_the_dense_matrix(kind, size, seed):
    torch.manual_seed(seed)
    op = KINDS[kind](*size)
    matrix = op.dense()
    assert matrix.shape == op.shape
    values, rows = normal(*op.shape[:-2], op.shape[-1], 3), normal(*op.shape[:-2], op.shape[-2], 3)
    assert (op @ values - matrix @ values).abs().max() < TIGHT
    assert (op.mT @ rows - matrix.mT @ rows).abs().max() < TIGHT
    assert (op.apply_transposed(rows) - matrix.mT @ rows).abs().max() < TIGHT
    # The adjoint: ⟨Aᵀu, v⟩ = ⟨u, Av⟩.
    assert ((op.mT @ rows) * values).sum() == pytest.approx(
        float((rows * (op @ values)).sum()), abs=20 * TIGHT
    )


@every_kind
@some
@given(size=sizes)
def test_the_transpose_is_an_operator(kind, size):
    op = KINDS[kind](*size)
    assert op.mT.shape == torch.Size([*op.shape[:-2], op.shape[-1], op.shape[-2]])
    assert torch.equal(op.mT.dense(), op.dense().mT)
    assert torch.equal(op.mT.mT.dense(), op.dense())
    assert torch.equal(op.mT.support(), op.support().mT)
    assert op.mT.kind == op.kind
    assert (op.mT.dtype, op.mT.device) == (op.dtype, op.device)


@every_kind
@some
@given(size=sizes, data=st.data())
def test_rows_are_rows_of_the_dense_matrix(kind, size, data):
    op = KINDS[kind](*size)
    start = data.draw(st.integers(0, op.shape[-2] - 1))
    stop = data.draw(st.integers(start + 1, op.shape[-2]))
    assert (op.rows(start, stop) - op.dense()[..., start:stop, :]).abs().max() < TIGHT
    assert torch.equal(op.support_rows(start, stop), op.support()[..., start:stop, :])
    assert op.rows(start, start).shape == (*op.shape[:-2], 0, op.shape[-1])


INDICES = [
    0,
    -1,
    (0, 1),
    (0, -1),
    slice(1, None),
    (slice(None), 1),
    (slice(None), slice(0, 3, 2)),
    (..., 2),
    (1, ...),
    None,
    (0, None),
    torch.tensor([1, 0, 1]),
    (torch.tensor([0]), torch.tensor([2])),
    (slice(None), torch.tensor([3, 1])),
]


@every_kind
def test_indexing_commutes_with_forming(kind):
    op = KINDS[kind](2, 4, 4, 5, 3)
    dense, support, values = op.dense(), op.support(), normal(*op.shape[:-2], op.shape[-1], 2)
    applied = op @ values
    for index in INDICES:
        picks = index if isinstance(index, tuple) else (index,)
        filled = picks if any(pick is Ellipsis for pick in picks) else (*picks, ...)
        place = (*filled, slice(None), slice(None))
        got = op[index]
        assert type(got) is type(op)
        assert got.shape == dense[place].shape, index
        # a matrix product may sum in another order in a batch of another size
        torch.testing.assert_close(got.dense(), dense[place], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(got @ values[place], applied[place], rtol=1e-12, atol=1e-12)
        assert torch.equal(got.support(), support[place]), index
    torch.testing.assert_close(op[0][1].dense(), op[0, 1].dense(), rtol=0, atol=0)
    with pytest.raises(IndexError, match="too many indices"):
        op[0, 0, 0]


@every_kind
@some
@given(size=sizes)
def test_entries_outside_the_support_are_zero_and_no_mask_leaves_no_column_outside(kind, size):
    op = KINDS[kind](*size)
    if "dense with a mask" in kind:
        return  # its mask is metadata: entries are as given
    assert op.support().dtype == torch.bool
    assert op.support().shape == op.shape
    assert (op.dense()[~op.support()] == 0).all()
    if not op.may_hide_columns and op.shape[-2] >= op.shape[-1]:  # a causal operator may have more columns
        assert bool(op.support().any(-2).all())


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if k.startswith("softmax") and "transposed" not in k], ids=case_id
)
@some
@given(size=sizes)
def test_rows_of_a_softmax_are_distributions_or_zero(kind, size):
    op = KINDS[kind](*size)
    matrix, sums = op.dense(), op.dense().sum(-1)
    assert (matrix >= 0).all()
    assert (((sums - 1).abs() < TIGHT) | (sums == 0)).all()
    assert torch.equal(sums == 0, ~op.support().any(-1))


@every_kind
def test_in_another_dtype_it_is_the_operator_of_the_rounded_inputs(kind):
    op = KINDS[kind](2, 2, 5, 6, 4)
    cast = op.to(torch.bfloat16)
    assert cast.dtype == torch.bfloat16
    assert cast.shape == op.shape
    matrix = cast.dense()
    assert matrix.dtype == torch.float32
    exact = cast.to(torch.float64).dense()
    assert exact.dtype == torch.float64
    assert torch.equal(cast.dense(torch.float64), exact)
    # Rows of low precision are computed in float32 from scores of size ≤ 40.
    assert (matrix - exact).abs().max() < tolerance(torch.float32, 8, 40)
    # And rounding the inputs moves scores of size ≤ 40 by at most a few ulps of that dtype.
    assert (exact - op.dense()).abs().max() < 40 * tolerance(torch.bfloat16, 1, 1)


@every_kind
def test_to_a_device(kind, device):
    op = KINDS[kind](2, 2, 4, 5, 3)
    moved = op.to(device)
    assert moved.device.type == device.type
    assert moved.to(str(device)).device.type == device.type
    values = normal(*op.shape[:-2], op.shape[-1], 2).to(device)
    assert (moved.dense().cpu() - op.dense()).abs().max() < TIGHT
    assert ((moved @ values).cpu() - op @ values.cpu()).abs().max() < TIGHT
    assert torch.equal(moved.support().cpu(), op.support())


@every_kind
def test_longer_than_one_block_of_rows(kind, monkeypatch):
    op = KINDS[kind](1, 1, 7, 6, 3)
    values, rows = normal(*op.shape[:-2], op.shape[-1], 2), normal(*op.shape[:-2], op.shape[-2], 2)
    whole = op @ values, op.mT @ rows, op.dense(), op.mT.dense()
    monkeypatch.setattr("rankwise.operators.base.ROW_BLOCK", 2)
    parts = op @ values, op.mT @ rows, op.dense(), op.mT.dense()
    for one, other in zip(whole, parts, strict=True):
        assert (one - other).abs().max() < TIGHT
    assert ROW_BLOCK == 512


@every_kind
def test_values_may_be_shared_by_sequences_and_heads_and_have_no_width(kind):
    op = KINDS[kind](2, 2, 4, 5, 3)
    for leading in ((), (1, op.shape[1]), (2, 1)):
        values, rows = normal(*leading, op.shape[-1], 2), normal(*leading, op.shape[-2], 2)
        assert (op @ values - op.dense() @ values).abs().max() < TIGHT
        assert (op.apply_transposed(rows) - op.dense().mT @ rows).abs().max() < TIGHT
        assert (op @ values[..., :0]).shape == (*op.shape[:-1], 0)
        assert op.apply_transposed(rows[..., :0]).shape == (*op.mT.shape[:-1], 0)


@pytest.mark.parametrize("kind", ["dense", "softmax, none", "softmax, causal, bool with empty rows"])
def test_it_applies_in_the_precision_of_the_values(kind):
    op = KINDS[kind](2, 2, 4, 5, 3)
    for dtype in (torch.float32, torch.bfloat16):
        assert (op @ torch.ones(2, 2, 5, 1, dtype=dtype)).dtype == dtype


def test_public_names():
    assert issubclass(rw.operators.SoftmaxMixing, rw.MixingOperator)
    assert issubclass(rw.operators.DenseMixing, rw.MixingOperator)


def tensors_of(op):
    """Floating tensors of an operator, and a function that builds it again from others."""
    found = []
    op.map_tensors(lambda tensor: found.append(tensor) or tensor)
    assert all(tensor.is_floating_point() for tensor in found)

    def build(*tensors):
        rest = iter(tensors)
        return op.map_tensors(lambda _: next(rest))

    return found, build


linear_time = pytest.mark.parametrize("kind", LINEAR_TIME, ids=case_id)
formed_by_hand = pytest.mark.parametrize(
    "kind", [name for name, case in LINEAR_TIME.items() if case.by_hand], ids=case_id
)


@formed_by_hand
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [*((tokens, torch.float64) for tokens in (63, 64, 65, 131)), (131, torch.float32)],
    ids=str,
)
def test_it_is_the_matrix_formed_by_hand(kind, tokens, dtype):
    """Both sides of a chunk, and a few chunks with a rest; fewer tokens are in the test below."""
    case = LINEAR_TIME[kind]
    check(case.make(2, 2, tokens, tokens, 3).to(dtype), case.by_hand)


@formed_by_hand
@settings(max_examples=15)
@given(size=st.tuples(*(st.integers(1, top) for top in (2, 2, 9, 9, 4))), seed=st.integers(0, 99))
def test_it_is_the_matrix_formed_by_hand_with_any_leading_axes(kind, size, seed):
    torch.manual_seed(seed)
    case = LINEAR_TIME[kind]
    op = case.make(*size)
    for index in ((), None, 0, (0, 0)):
        check(op[index], case.by_hand)


@linear_time
@pytest.mark.parametrize("size", [(1, 1, 1, 1, 1), (1, 1, 3, 4, 2), (1, 2, 4, 3, 2)], ids=str)
def test_gradients(kind, size):
    """Gradients of both products and of the rows, against differences, for every tensor held."""
    op = KINDS[kind](*size)
    tensors, build = tensors_of(op)
    v, u = normal(*op.shape[:-2], op.shape[-1], 2), normal(*op.shape[:-1], 2)
    v, u, *tensors = (tensor.requires_grad_() for tensor in (v, u, *tensors))
    assert torch.autograd.gradcheck(lambda v, *held: build(*held) @ v, (v, *tensors))
    assert torch.autograd.gradcheck(lambda u, *held: build(*held).apply_transposed(u), (u, *tensors))
    assert torch.autograd.gradcheck(lambda *held: build(*held).dense(), tensors)


@linear_time
def test_gradients_through_several_chunks(kind):
    """Too many inputs for differences: against autograd through the matrix."""
    op = KINDS[kind](1, 2, 70, 70, 3)
    tensors, build = tensors_of(op)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    op, v, weight = build(*tensors), normal(70, 2), normal(70, 2)
    for fast, slow in ((op @ v, op.dense() @ v), (op.apply_transposed(v), op.dense().mT @ v)):
        ours = torch.autograd.grad((fast * weight).sum(), tensors, retain_graph=True)
        theirs = torch.autograd.grad((slow * weight).sum(), tensors, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            # sums of some 70² terms of size 1 in another order: 1e4 roundings of 1e-16
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@linear_time
def test_its_dtype_is_the_widest_of_its_tensors(kind):
    tensors, build = tensors_of(KINDS[kind](1, 2, 3, 3, 2))
    half = [tensor.half() for tensor in tensors]
    assert build(*half).dtype == torch.float16
    for at, tensor in enumerate(tensors):
        assert build(*half[:at], tensor.float(), *half[at + 1 :]).dtype == torch.float32


@linear_time
def test_half_precision_is_summed_in_float32(kind):
    """A sum in bfloat16 would be off by some hundred roundings, not by the last alone."""
    op = KINDS[kind](1, 2, 300, 300, 4).to(torch.bfloat16)
    exact = op.to(torch.float64)
    for product, wanted in ((lambda o, v: o @ v, exact.dense()), (lambda o, v: o.mT @ v, exact.dense().mT)):
        values = normal(*op.shape[:-2], 300, 3).to(torch.bfloat16)
        got, wanted = product(op, values), wanted @ values.double()
        assert got.dtype == torch.bfloat16
        # one rounding to bfloat16, of half its eps, on top of an error of float32
        size = exact.dense().norm(dim=(-2, -1))[..., None, None] * values.double().norm(dim=-2, keepdim=True)
        near(got, wanted, wanted.abs() * 2**-8 + tolerance(torch.float32, 1, 1) * size)


@linear_time
def test_no_matrix_is_formed(kind):
    tokens = 400
    op = KINDS[kind](1, 1, tokens, tokens, 4)
    heads, v = op.shape[:-2].numel(), normal(*op.shape[:-2], tokens, 3)
    for work in (lambda: op @ v, lambda: op.mT @ v):
        assert largest_tensor(work) <= heads * LINEAR_TIME[kind].largest_tensor(tokens, 4)
    assert largest_tensor(op.dense) >= heads * tokens * tokens


@every_kind
def test_whole_numbers_and_values_of_other_tokens_are_refused(kind):
    """A row of fractions times whole numbers would be cut off to whole numbers."""
    op = KINDS[kind](2, 2, 4, 5, 3)
    for product, name, tokens in (
        (op.__matmul__, "M @ values", op.shape[-1]),
        (op.apply_transposed, "M.mT @ values", op.shape[-2]),
    ):
        name = name if "transposed" not in kind else r"M(\.mT)? @ values"  # it names the operator's product
        expected = rf"`{name}`: expected values of shape \(\.\.\., {tokens}, V\)"
        for shape in ((tokens + 1, 2), (*op.shape[:-2], tokens + 1, 2), (tokens,), (5, 1, tokens, 2)):
            with unchecked(), pytest.raises(ShapeError, match=expected):
                product(torch.zeros(shape, dtype=torch.float64))
        with unchecked(), pytest.raises(ShapeError, match=r"floating type, got torch\.int64"):
            product(torch.ones(tokens, 1, dtype=torch.int64))


def test_kinds_are_named_as_records_name_them():
    kinds = {make(1, 1, 3, 3, 2).kind for make in KINDS.values()}
    assert kinds == {
        "dense",
        "softmax",
        "linear",
        "diagonal",
        "toeplitz",
        "semiseparable",
        "selective",
        "gated delta",
        "sum",
    }
    assert set(MIXER_KINDS) <= kinds
