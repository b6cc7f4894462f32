"""Names of sums do not depend on the batch size, nor on a model around the model."""

import copy

import pytest
import torch
from experiments.zoo.transformers import BERT
from tests.skips.cases import FOUND
from torch import Tensor, nn

from rankwise.skips import add_lambda_skip, certify_skip, skips_of
from rankwise.skips.observe import ObservedSkip, observe


def observed(model: nn.Module, ids: Tensor, scale: float = 0.5) -> list[ObservedSkip]:
    sites = list(skips_of(model).sites.values())
    return observe(model, {"input_ids": ids}, sites, {site.name: scale for site in sites})


def random_ids(*shape: int) -> Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2", "Bamba", "GPT-2", "ALBERT"])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 8), (1, 24), (3, 5)])
def test_sums_are_observed_in_batches_of_other_sizes(name: str, sequences: int, tokens: int) -> None:
    model, batch = FOUND[name][0]()
    skips = add_lambda_skip(model, example=batch)
    seen = observed(model, random_ids(sequences, tokens))
    assert {one.site.name for one in seen} == set(skips)
    assert len(seen) == sum(len(site.sums) for site in skips.sites.values())
    for one in seen:
        assert one.x.shape == one.branch.shape == (sequences, tokens, 32)
        assert torch.allclose(one.total, 0.5 * one.x + one.branch, atol=1e-5)


def test_sums_of_a_scan_do_not_change_the_sites() -> None:
    model, batch = FOUND["Mamba"][0]()
    add_lambda_skip(model, example=batch)
    inputs: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for one, residual in zip(observed(model, random_ids(2, 24), scale=1.0), inputs, strict=True):
        assert torch.equal(one.x, residual)
    assert len(certify_skip(model, {"input_ids": random_ids(2, 24)}).layers) == 2


class Wrapper(nn.Module):
    """Model inside another model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids).last_hidden_state


def test_sites_are_found_in_a_larger_model_and_in_a_part() -> None:
    model, batch = FOUND["BERT"][0]()
    add_lambda_skip(model, example=batch)
    ids = batch["input_ids"]
    inside = observed(Wrapper(copy.deepcopy(model)), ids)
    for one, other in zip(inside, observed(model, ids), strict=True):
        assert torch.equal(one.total, other.total)
        assert one.site.norm == f"inner.{other.site.norm}"
    (site,) = skips_of(copy.deepcopy(model.encoder.layer[1])).sites.values()
    assert len(skips_of(model)) == BERT["num_hidden_layers"]
    assert (site.block, site.norm) == ("attention.output", "attention.output.LayerNorm")
