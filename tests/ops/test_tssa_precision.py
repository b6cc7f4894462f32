"""How far the sums may be off: against float64, at most twice as far as the reference in the same dtype."""

import pytest
import torch
from tssa_cases import Case, double, errors, outputs, outputs_and_gradients

from rankwise.ops import TSSAState, half_lives, tssa

causalities = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def within(found, reference, truth):
    """Twice the reference's error plus one rounding of the result itself, in the dtype of each tensor."""
    ours, theirs = errors(found, truth), errors(reference, truth)
    for name, error in ours.items():
        assert error <= 2 * theirs[name] + torch.finfo(found[name].dtype).eps, name
    far, least = ((x["output"].double() - truth["output"]).abs().max() for x in (found, reference))
    last = truth["output"].abs().max() * torch.finfo(found["output"].dtype).eps
    assert far <= 2 * least + last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1e3])
@causalities
def test_outputs_and_gradients(causal, scale, dtype):
    case = Case((1, 700, 3, 48), causal=causal, dtype=dtype)
    case.w = case.w * scale
    truth = outputs_and_gradients(double(case), "reference")
    found, reference = (outputs_and_gradients(case, impl) for impl in ("cpu", "reference"))
    assert all(torch.isfinite(x).all() for x in found.values())
    within(found, reference, truth)


@pytest.mark.parametrize("scale", [1e-11, 1e-14])
@causalities
def test_a_channel_of_tiny_numbers(causal, scale):
    """Of 1e-11: Σ w² is 1e-20, whose square float32 takes for 0. Of 1e-14: it is held at 1e-24."""
    case = Case((2, 70, 3, 8), causal=causal, dtype=torch.float32)
    case.w[..., 1] *= scale
    truth = outputs_and_gradients(double(case), "reference")
    found = outputs_and_gradients(case, "cpu")
    assert all(torch.isfinite(x).all() for x in found.values())
    for part in (..., (..., 1)):  # all of them, and the tiny channel, which the others would hide
        wanted = truth["d w"][part]
        assert (found["d w"][part].double() - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("decayed", [False, True], ids=["literal", "decayed"])
def test_decay_keeps_its_precision(decayed):
    case = Case((1, 3000, 2, 16), causal=True, dtype=torch.float32)
    case.options["half_life"] = torch.tensor([1e6, 20.0]) if decayed else None
    truth = outputs(double(case).run("reference"))
    within(outputs(case.run("cpu")), outputs(case.run("reference")), truth)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@causalities
def test_65536_tokens(causal, scale):
    case = Case((1, 65_536, 2, 8), causal=causal, dtype=torch.float32)
    case.w = case.w * scale
    truth = outputs(double(case).run("reference"))
    found = outputs(case.run("cpu"))
    assert all(torch.isfinite(x).all() for x in found.values())
    within(found, outputs(case.run("reference")), truth)


STEPS = 1024


@pytest.mark.parametrize("decayed", [False, True], ids=["literal", "decayed"])
def test_a_state_carried_token_by_token_loses_a_rounding_a_step_at_most(decayed):
    """All terms are positive, so a sum of n of them, rounded n times, has a relative error of n · eps/2.

    With a temperature of 0 the only other roundings are a term's square and product, and the output's few.
    """
    w, options = Case((1, STEPS, 2, 4), dtype=torch.float32).w, {"causal": True}
    options["half_life"] = half_lives(2, 50, 5000) if decayed else None
    truth = tssa(w.double(), torch.zeros(2), impl="reference", **options)
    state, output = None, []
    for t in range(STEPS):
        step = tssa(w[:, t : t + 1], torch.zeros(2), state=state, **options)
        state = step.state
        output.append(step.output)
    eps = torch.finfo(torch.float32).eps
    for part, wanted in zip(state[:3], truth.state[:3], strict=True):
        torch.testing.assert_close(part.double(), wanted, rtol=(STEPS / 2 + 8) * eps, atol=0)
    torch.testing.assert_close(torch.cat(output, 1).double(), truth.output, rtol=(STEPS + 16) * eps, atol=0)
    assert state.seen.tolist() == [STEPS]


def test_a_sum_of_2_to_the_24_does_not_grow_by_single_steps_but_by_longer_calls():
    large = torch.full((1, 1, 1), 2.0**24)
    state = TSSAState(large, torch.zeros(1, 1, 1), large[0], torch.zeros(1).int())
    w = torch.ones(1, 64, 1, 1)
    single = state
    for t in range(64):
        single = tssa(w[:, t : t + 1], torch.ones(1), causal=True, state=single).state
    longer = tssa(w, torch.ones(1), causal=True, state=state).state
    assert (single.mass.item(), longer.mass.item()) == (2.0**24, 2.0**24 + 64)
    assert (single.energy.item(), longer.energy.item()) == (2.0**24, 2.0**24 + 64)
    assert (longer.seen.dtype, longer.seen.tolist()) == (torch.int64, [64])
