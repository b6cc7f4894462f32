"""How far the sums may be off: against float64, at most twice as far as the reference in the same dtype."""

import pytest
import torch
from tssa_cases import Case, double, errors, outputs, outputs_and_gradients

causalities = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def within(found, reference, truth):
    """Twice the reference's error plus one rounding of the result itself, in the dtype of each tensor."""
    ours, theirs = errors(found, truth), errors(reference, truth)
    for name, error in ours.items():
        assert error <= 2 * theirs[name] + torch.finfo(found[name].dtype).eps, name
    far, least = ((x["output"].double() - truth["output"]).abs().max() for x in (found, reference))
    last = truth["output"].abs().max() * torch.finfo(found["output"].dtype).eps
    assert far <= 2 * least + last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@causalities
def test_outputs_and_gradients(causal, scale, dtype):
    case = Case((1, 700, 3, 48), causal=causal, dtype=dtype)
    case.w = case.w * scale
    truth = outputs_and_gradients(double(case), "reference")
    found, reference = (outputs_and_gradients(case, impl) for impl in ("cpu", "reference"))
    assert all(torch.isfinite(x).all() for x in found.values())
    within(found, reference, truth)


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
