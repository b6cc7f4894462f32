"""λ-skips of deep models: rounding that grows with depth is no fault."""

import pytest
import torch
from recipes.tiny_models import hugging_face

from rankwise.surgery import add_lambda_skip

DEPTH = 48


@pytest.mark.parametrize("sites", [None, "layers.0"], ids=["all", "the first"])
def test_a_deep_model_that_amplifies_rounding(sites: str | None) -> None:
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 64, "state_size": 4}
    model = hugging_face("MambaModel", num_hidden_layers=DEPTH, **small)()
    assert len(add_lambda_skip(model, sites=sites)) == (DEPTH if sites is None else 1)
