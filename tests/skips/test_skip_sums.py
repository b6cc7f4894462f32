"""Sums of a batch are those of the example, whatever its size, and in a part of the model or a larger one."""

import copy

import pytest
import torch
from experiments.zoo.transformers import BERT
from tests.skips.cases import FOUND
from torch import Tensor, nn

from rankwise.skips import add_lambda_skip, certify_skip, skips_of
from rankwise.skips.observe import ObservedSkip, observe


def watched(model: nn.Module, ids: Tensor, scale: float = 0.5) -> list[ObservedSkip]:
    sites = list(skips_of(model).sites.values())
    return observe(model, {"input_ids": ids}, sites, {site.name: scale for site in sites})


@pytest.mark.parametrize("name", ["Mamba", "Mamba-2", "Bamba", "GPT-2", "ALBERT"])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 8), (1, 24), (3, 5)])
def test_batches_of_other_sizes(name: str, sequences: int, tokens: int) -> None:
    """λ·Y + B of each site is what its norm or the next block reads."""
    model, batch = FOUND[name][0]()
    skips = add_lambda_skip(model, example=batch)
    with torch.no_grad():
        for parameter in skips.values():
            parameter.fill_(0.5)
    ids = torch.randint(3, 60, (sequences, tokens), generator=torch.Generator().manual_seed(0))
    seen = watched(model, ids)
    assert {one.site.name for one in seen} == set(skips)
    assert len(seen) == sum(len(site.sums) for site in skips.sites.values())
    for one in seen:
        assert one.x.shape == one.branch.shape == (sequences, tokens, 32)
        assert torch.allclose(one.total, 0.5 * one.x + one.branch, atol=1e-5)


def test_the_sums_of_a_scan_are_none_of_the_sites() -> None:
    """In every block, the residual is what the block was given."""
    model, batch = FOUND["Mamba"][0]()
    add_lambda_skip(model, example=batch)
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    given: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    for one, residual in zip(watched(model, ids, scale=1.0), given, strict=True):
        assert torch.equal(one.x, residual)


def test_a_certificate_for_longer_sequences() -> None:
    model, batch = FOUND["Mamba"][0]()
    add_lambda_skip(model, example=batch)
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    assert len(certify_skip(model, {"input_ids": ids}).layers) == 2


class Wrapper(nn.Module):
    """A model within another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids).last_hidden_state


def test_sites_are_found_again_in_a_larger_model() -> None:
    model, batch = FOUND["BERT"][0]()
    add_lambda_skip(model, example=batch)
    ids = batch["input_ids"]
    inside = watched(Wrapper(copy.deepcopy(model)), ids)
    for one, other in zip(inside, watched(model, ids), strict=True):
        assert torch.equal(one.total, other.total)
        assert one.site.norm == f"inner.{other.site.norm}"
    part = skips_of(copy.deepcopy(model.encoder.layer[1])).sites
    (site,) = part.values()
    assert len(skips_of(model)) == BERT["num_hidden_layers"]
    assert (site.block, site.norm) == ("attention.output", "attention.output.LayerNorm")
