"""Parity with the released modules: outputs and gradients of random weights, made with the authors' code."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear

from rankwise.ops import tssa

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "bidirectional_0": ("qkv", "to_out.0"),
    "bidirectional_1": ("qkv", "to_out.0"),
    "causal_0": ("c_attn", "c_proj"),
    "causal_1": ("c_attn", "c_proj"),
}


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_released_modules_do(name, impl):
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
