"""Laws of TSSA for every implementation: padding, causality, NaN, symmetry; and released outputs."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.functional import linear
from torch.testing import assert_close
from tssa_cases import Case, gradients_with_a_later_nan

from rankwise.ops import tssa

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "bidirectional_0": ("qkv", "to_out.0"),
    "bidirectional_1": ("qkv", "to_out.0"),
    "causal_0": ("c_attn", "c_proj"),
    "causal_1": ("c_attn", "c_proj"),
}
IMPLS = ["reference", "cpu"]
EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64, a hundred additions in another order
causalities = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
impls = pytest.mark.parametrize("impl", IMPLS)


def by_token(w, temperature, causal, bias=None, decay=None):
    """The formulas, one token and one head at a time."""
    tokens, heads, width = w.shape
    output, memberships = torch.zeros_like(w), w.new_zeros(tokens, heads)
    decay = [1.0] * heads if decay is None else decay
    energy, assigned, mass = w.new_zeros(heads, width), w.new_zeros(heads, width), w.new_zeros(heads)
    for t in range(tokens):
        score = w.new_zeros(heads)
        for h in range(heads):
            energy[h] = decay[h] * energy[h] + w[t, h] ** 2
            whole = (
                energy[h].clamp(min=1e-12) if causal else (w[:, h] ** 2).sum(0).sqrt().clamp(min=1e-12) ** 2
            )
            score[h] = (w[t, h] ** 2 / whole).sum() + (0 if bias is None else width * bias[h, t])
        memberships[t] = (temperature * score).softmax(0)
        for h in range(heads):
            assigned[h] = decay[h] * assigned[h] + memberships[t, h] * w[t, h] ** 2
            mass[h] = decay[h] * mass[h] + memberships[t, h]
            output[t, h] = -w[t, h] * memberships[t, h] / (1 + assigned[h] / (mass[h] + 1e-8))
    if not causal:
        output = -w * memberships[..., None] / (1 + assigned / (mass + 1e-8)[:, None])
    return output, memberships


@impls
@causalities
def test_it_is_the_formula_token_by_token(impl, causal):
    case = Case(shape=(2, 11, 3, 5), causal=causal, biased=causal)
    found = case.run(impl)
    for row in range(2):
        bias = case.options["bias"]
        output, membership = by_token(case.w[row], case.temperature, causal, bias)
        assert_close(found.output[row], output, **EXACT)
        assert_close(found.membership[row], membership, **EXACT)


@impls
def test_decay_is_the_recurrence_token_by_token(impl):
    case = Case(shape=(1, 70, 3, 4), causal=True)
    half_life = torch.tensor([0.5, 3.0, float("inf")], dtype=torch.float64)
    output, _ = by_token(case.w[0], case.temperature, True, decay=[0.25, 2 ** (-1 / 3), 1.0])
    assert_close(case.run(impl, half_life=half_life).output[0], output, **EXACT)


@impls
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_pieces_equal_the_whole(impl, data):
    tokens = data.draw(st.integers(2, 80))
    decayed, masked = data.draw(st.booleans()), data.draw(st.booleans())
    biased = data.draw(st.booleans())
    shape = (2, tokens, 2, 3)
    case = Case(shape=shape, causal=True, decayed=decayed, masked=masked, biased=biased, seed=tokens)
    whole, state, pieces = case.run(impl), None, []
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, tokens - 1), max_size=4))), tokens]
    for low, high in pairwise(cuts):
        mask = case.options["mask"]
        piece = {"mask": None if mask is None else mask[:, low:high], "state": state}
        part = tssa(case.w[:, low:high], case.temperature, impl=impl, **(case.options | piece))
        pieces.append(part)
        state = part.state
    assert_close(torch.cat([p.output for p in pieces], 1), whole.output, **EXACT)
    assert_close(torch.cat([p.membership for p in pieces], 1), whole.membership, **EXACT)
    for got, wanted in zip(state, whole.state, strict=True):
        assert_close(got, wanted, **EXACT)


@impls
@pytest.mark.parametrize("decayed", [False, True], ids=["literal", "decayed"])
def test_token_by_token_equals_the_whole_and_so_do_its_gradients(impl, decayed):
    case = Case(shape=(1, 12, 2, 3), causal=True, decayed=decayed, biased=True)
    case.w.requires_grad_()
    weight = torch.randn(1, 12, 2, 3, dtype=torch.float64)
    (whole,) = torch.autograd.grad((case.run(impl).output * weight).sum(), case.w)
    state, loss = None, 0
    for t in range(12):
        options = case.options | {"state": state}
        step = tssa(case.w[:, t : t + 1], case.temperature, impl=impl, **options)
        state, loss = step.state, loss + (step.output[:, 0] * weight[:, t]).sum()
        assert [part.shape for part in state] == [(1, 2, 3), (1, 2, 3), (1, 2), (1,)]
    (stepped,) = torch.autograd.grad(loss, case.w)
    assert_close(stepped, whole, **EXACT)


@impls
@pytest.mark.parametrize("decayed", [False, True], ids=["literal", "decayed"])
@pytest.mark.parametrize("filling", [7.0, float("inf"), float("nan")], ids=["number", "infinity", "nan"])
def test_nothing_leaks_from_the_future(filling, impl, decayed):
    case = Case(shape=(1, 130, 2, 3), causal=True, decayed=decayed)
    before = case.run(impl)
    for t in (1, 63, 64, 65, 129):
        changed = case.w.clone()
        changed[:, t:] = filling
        after = tssa(changed, case.temperature, impl=impl, **case.options)
        assert torch.equal(after.output[:, :t], before.output[:, :t])
        assert not torch.equal(after.output[:, t:], before.output[:, t:])


@impls
@causalities
@pytest.mark.parametrize("filling", [0.0, 1e6, float("nan")], ids=["zero", "large", "nan"])
def test_a_padded_row_equals_the_row_alone(impl, causal, filling):
    case = Case(shape=(1, 9, 3, 5), causal=causal, biased=causal, decayed=causal)
    alone = case.run(impl)
    rows = {
        "left": [*[0] * 4, *[1] * 9],
        "right": [*[1] * 9, *[0] * 4],
        "within": [1, 1, 0, 1, 0, 0, *[1] * 6, 0],
    }
    mask = torch.tensor(list(rows.values())).bool()
    w = torch.full((3, 13, 3, 5), filling, dtype=torch.float64)
    w[mask] = case.w.repeat(3, 1, 1, 1).flatten(0, 1)
    w.requires_grad_()
    padded = tssa(w, case.temperature, impl=impl, **(case.options | {"mask": mask}))
    for row in range(3):
        assert_close(padded.output[row, mask[row]], alone.output[0], **EXACT)
        assert_close(padded.membership[row, mask[row]], alone.membership[0], **EXACT)
    assert (padded.output[~mask] == 0).all()
    assert (padded.membership[~mask] == 0).all()
    if causal:
        assert padded.state.seen.tolist() == [9, 9, 9]
        for got, wanted in zip(padded.state, alone.state, strict=True):
            assert_close(got, wanted.expand_as(got), **EXACT)
    (gradient,) = torch.autograd.grad(padded.output.square().sum(), w)
    assert (gradient[~mask] == 0).all()
    assert torch.isfinite(gradient).all()


@impls
@causalities
def test_a_temperature_of_zero_leaves_plain_second_moments(impl, causal):
    case = Case(shape=(1, 30, 4, 3), causal=causal)
    case.temperature.zero_()
    found = case.run(impl)
    assert (found.membership == 0.25).all()
    square = case.w.square()
    count = torch.arange(1, 31, dtype=torch.float64).view(1, 30, 1, 1) if causal else 30
    total = square.cumsum(1) if causal else square.sum(1, keepdim=True)
    moment = 0.25 * total / (0.25 * count + 1e-8)
    assert_close(found.output, -0.25 * case.w / (1 + moment), **EXACT)


@impls
@causalities
def test_silence_is_not_a_number_problem(impl, causal):
    w = torch.zeros(1, 5, 2, 3, requires_grad=True)
    found = tssa(w, torch.ones(2), causal, impl=impl)
    found.output.sum().backward()
    assert (found.output == 0).all()
    assert torch.isfinite(w.grad).all()
    hidden = tssa(w, torch.ones(2), causal, mask=torch.zeros(1, 5, dtype=torch.bool), impl=impl)
    assert (hidden.output == 0).all()
    assert (hidden.membership == 0).all()


@impls
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e200], ids=["nan", "infinity", "overflow"])
@pytest.mark.parametrize("kind", ["literal", "decayed", "masked"])
def test_nan_reaches_no_gradient_of_an_earlier_token_unless_the_loss_reads_it(impl, kind, wrong):
    options = {"decayed": kind in ("decayed", "masked"), "masked": kind == "masked", "stated": True}
    case = Case(shape=(1, 130, 2, 3), causal=True, biased=True, seed=3, **options)
    if kind == "masked":
        case.options["mask"][0, 70] = True
    wanted, found, all_read = gradients_with_a_later_nan(case, impl, wrong)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, **EXACT)
    assert (found["w"][:, 60:] == 0).all()
    assert all_read[:, :60].isnan().any()


@impls
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_the_released_modules(name, impl):
    tensors = load_file(GOLDEN / f"tssa_{name}.safetensors")
    into, out_of = CASES[name]
    weights = {k.removeprefix("param."): v for k, v in tensors.items() if k.startswith("param.")}
    x = tensors["input"].requires_grad_()
    for weight in weights.values():
        weight.requires_grad_()
    w = linear(x, weights[f"{into}.weight"], weights[f"{into}.bias"])
    temperature, bias = weights["temp"].flatten(), weights.get("denom_bias")
    bias = None if bias is None else bias[..., 0]
    split = w.unflatten(-1, (len(temperature), -1))
    mixed = tssa(split, temperature, causal=name.startswith("causal"), bias=bias, impl=impl).output
    output = linear(mixed.flatten(-2), weights[f"{out_of}.weight"], weights[f"{out_of}.bias"])
    assert (output - tensors["output"]).abs().max() < 1e-5
    output.backward(tensors["cotangent"])
    found = {"input": x.grad} | {k: v.grad for k, v in weights.items()}
    wanted = {k.removeprefix("grad."): v for k, v in tensors.items() if k.startswith("grad.")}
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert (found[key] - gradient).norm() <= 1e-4 * gradient.norm(), key
    assert torch.isfinite(mixed).all()
