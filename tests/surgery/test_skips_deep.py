"""λ-skips of deep models: rounding that grows with depth is no fault, a wrong hook in one layer is."""

from functools import partial
from unittest import mock

import pytest
import torch
from recipes.tiny_models import hugging_face
from torch import Tensor, nn

from rankwise.surgery import SkipError, add_lambda_skip, skips_of
from rankwise.surgery import hooks as hooks_

DEPTH = 48
mamba = partial(hugging_face, "MambaModel", vocab_size=64, hidden_size=64, state_size=4)


def deep(depth: int = DEPTH) -> nn.Module:
    torch.manual_seed(0)
    return mamba(num_hidden_layers=depth)()


@pytest.mark.parametrize("sites", [None, "layers.0"], ids=["all", "the first"])
def test_a_deep_model_that_amplifies_rounding(sites: str | None) -> None:
    assert len(add_lambda_skip(deep(), sites=sites)) == (DEPTH if sites is None else 1)


@pytest.mark.parametrize("layer", [5])
def test_one_wrong_hook_in_a_deep_model_is_found(layer: int) -> None:
    """It corrects by a tenth too much."""
    model, right = deep(6), hooks_.corrected

    def wrong(tensor: Tensor, residual: Tensor, scale: Tensor) -> Tensor:
        return right(tensor, residual, 1 + (scale - 1) * (1.1 if scale is target() else 1.0))

    def target() -> Tensor:
        return getattr(model.layers[layer], "lambda_skip", None)

    with mock.patch.object(hooks_, "corrected", wrong), pytest.raises(SkipError, match=r"at λ ≠ 1"):
        add_lambda_skip(model)
    assert not skips_of(model)
