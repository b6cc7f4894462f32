"""The Triton kernels against the reference; run by `test_tssa_triton`, in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, which other tests may have done.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tssa_cases import Case, double, errors, gradients_with_a_later_nan, outputs, outputs_and_gradients

from rankwise.ops import tssa

ROUNDING = 1e-12  # float64's 2.2e-16 times a few thousand additions
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def place(device):
    """Where to run; without a GPU only the interpreter can."""
    assert device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return device


def moved(case, device):
    case.w, case.temperature = case.w.to(device), case.temperature.to(device)

    def move(x):
        if isinstance(x, tuple):
            return type(x)(*(part.to(device) for part in x))
        return x.to(device) if isinstance(x, torch.Tensor) else x

    case.options = {name: move(value) for name, value in case.options.items()}
    return case


PLAIN = [
    {"shape": (2, 17, 3, 5), "masked": True},
    {"shape": (1, 70, 2, 20)},
    {"shape": (1, 1, 1, 1)},
]
ORDERED = [
    {"stated": True},
    {"stated": True, "decayed": True},
    {"stated": True, "decayed": True, "biased": True, "masked": True},
]
PAIRS = [(0, 0), (1, 2), (2, 1)]  # every shape with a state, decayed and not
CASES = [*PLAIN, *(PLAIN[a] | ORDERED[b] | {"causal": True} for a, b in PAIRS)]


def name(options):
    return "-".join(str(value) for value in options.values()).replace(" ", "")


@pytest.mark.parametrize("options", CASES, ids=name)
def test_outputs_states_and_gradients_equal_the_reference(options, place):
    if place.type == "cuda":
        options = options | {"dtype": torch.float32}
    case = moved(Case(**options), place)
    got, wanted = outputs_and_gradients(case, "triton"), outputs_and_gradients(case, "reference")
    assert max(errors(got, wanted).values()) < (1e-5 if place.type == "cuda" else ROUNDING)


@pytest.mark.parametrize(("kind", "width"), [("bidirectional", 48), ("literal", 128), ("decayed", 48)])
def test_bfloat16_with_sums_in_float32(kind, width, place):
    causal = kind != "bidirectional"
    case = Case((1, 70, 1, width), causal=causal, decayed=kind == "decayed", dtype=torch.bfloat16)
    truth = outputs_and_gradients(moved(double(case), place), "reference")
    case = moved(case, place)
    found, reference = (outputs_and_gradients(case, impl) for impl in ("triton", "reference"))
    ours, theirs = errors(found, truth), errors(reference, truth)
    for key, error in ours.items():  # twice the reference's error, and one rounding of the result
        assert found[key].dtype == reference[key].dtype
        assert error <= 2 * theirs[key] + torch.finfo(found[key].dtype).eps, key


@pytest.mark.parametrize("kind", ["literal", "decayed"])
def test_pieces_equal_the_whole_and_nothing_leaks(kind, place):
    case = moved(Case((1, 70, 2, 8), causal=True, decayed=kind == "decayed"), place)
    whole = case.run("triton")
    first = tssa(case.w[:, :65], case.temperature, impl="triton", **case.options)
    assert torch.equal(first.output, whole.output[:, :65])
    rest = tssa(case.w[:, 65:], case.temperature, impl="triton", **(case.options | {"state": first.state}))
    torch.testing.assert_close(rest.output, whole.output[:, 65:], rtol=1e-10, atol=1e-12)
    assert rest.state.seen.item() == 70


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_padding_may_hold_anything_and_every_number_is_written(causal, place, monkeypatch):
    case = moved(Case((2, 19, 2, 5), causal=causal, masked=True), place)
    wanted = outputs(case.run("reference"))
    case.w[~case.options["mask"]] = torch.nan
    for make in ("empty", "empty_like"):
        real = getattr(torch, make)

        def poisoned(*args, real=real, **kwargs):
            out = real(*args, **kwargs)
            return out.fill_(torch.nan) if out.is_floating_point() else out

        monkeypatch.setattr(torch, make, poisoned)
    got = outputs_and_gradients(case, "triton")
    assert all(torch.isfinite(x).all() for x in got.values())
    assert errors({k: got[k] for k in wanted}, wanted)["output"] < 1e-5


@pytest.mark.parametrize("decayed", [False, True], ids=["literal", "decayed"])
def test_nan_reaches_no_gradient_of_an_earlier_token_unless_the_loss_reads_it(decayed, place):
    case = moved(Case((1, 72, 2, 3), causal=True, decayed=decayed, biased=True, stated=True), place)
    wanted, found, all_read = gradients_with_a_later_nan(case, "triton", torch.nan)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
    assert all_read[:, :60].isnan().any()


def test_a_half_life_that_remembers_nothing(place):
    case = moved(Case((1, 66, 3, 5), causal=True, masked=True, stated=True), place)
    case.options["half_life"] = torch.tensor([1e-4, 1e-300, 3.0], dtype=torch.float64)  # λ = 0, 0 and 0.8
    got, wanted = outputs_and_gradients(case, "triton"), outputs_and_gradients(case, "reference")
    assert all(torch.isfinite(x).all() for x in got.values())
    assert max(errors(got, wanted).values()) < ROUNDING


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_channel_of_tiny_numbers(causal, place):
    case = Case((1, 66, 2, 8), causal=causal, dtype=torch.float32)
    case.w[..., 1] *= 1e-11  # Σ w² is 1e-20, whose square float32 takes for 0
    truth = outputs_and_gradients(moved(double(case), place), "reference")
    found = outputs_and_gradients(moved(case, place), "triton")
    assert all(torch.isfinite(x).all() for x in found.values())
    wanted = truth["d w"][..., 1]
    assert (found["d w"][..., 1].double() - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("kind", ["bidirectional_0", "causal_0"])
def test_outputs_equal_the_released_modules(kind, place):
    tensors = {k: v.to(place) for k, v in load_file(GOLDEN / f"tssa_{kind}.safetensors").items()}
    into, out_of = ("c_attn", "c_proj") if kind.startswith("causal") else ("qkv", "to_out.0")
    bias = tensors.get("param.denom_bias")
    weights = [tensors[f"param.{layer}.{part}"] for layer in (into, out_of) for part in ("weight", "bias")]
    w = torch.nn.functional.linear(tensors["input"], *weights[:2])
    temperature = tensors["param.temp"].flatten()
    options = {"causal": kind.startswith("causal"), "bias": None if bias is None else bias[..., 0]}
    mixed = tssa(w.unflatten(-1, (len(temperature), -1)), temperature, impl="triton", **options).output
    output = torch.nn.functional.linear(mixed.flatten(-2), *weights[2:])
    assert (output - tensors["output"]).abs().max() < 1e-5
