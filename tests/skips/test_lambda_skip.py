"""The λ-skip of models that are built with one."""

import pytest
import torch

from rankwise.skips import LambdaSkip

WIDTH = 12
CLOSE = {"rtol": 1e-10, "atol": 1e-12}  # float64
X = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["none", "fixed", "learned", "channel", "shared"])
@pytest.mark.parametrize("init", [1.0, -2.0, 0.5])
def test_the_sum_and_its_gradient(kind: str, init: float) -> None:
    skip, update = LambdaSkip(WIDTH, kind, init).double(), torch.ones_like(X)
    expected = update if kind == "none" else init * X + update
    torch.testing.assert_close(skip(X, update), expected, **CLOSE)
    shapes = {"learned": [()], "shared": [()], "channel": [(WIDTH,)]}
    assert [tuple(p.shape) for p in skip.parameters()] == shapes.get(kind, [])
    for parameter in skip.parameters():
        skip(X, update).sum().backward()
        wanted = X.sum() if kind != "channel" else X.sum((0, 1))
        torch.testing.assert_close(parameter.grad, wanted, **CLOSE)
    assert skip.current().eq(0.0 if kind == "none" else init).all()
    assert (tuple(skip.current().shape), skip.current().requires_grad) == (shapes.get(kind, [()])[0], False)
    assert repr(skip) == f"LambdaSkip({kind}, init={init:g})"


def test_a_fixed_skip_of_one_is_the_plain_sum_bit_by_bit() -> None:
    update = torch.randn(2, 5, WIDTH)
    x = X.float()
    assert torch.equal(LambdaSkip(WIDTH)(x, update), x + update)
    learned = LambdaSkip(WIDTH, "learned")
    assert torch.equal(learned(x, update), x + update)
