"""λ-skips of every family: λ = 1 changes nothing, other λ scale the sums, and removal is complete."""

import copy
import pickle

import pytest
import torch
from tests.skips.cases import FOUND, outputs, same
from tests.support.torch_names import hooks_of
from tests.support.untouched import state_of

from rankwise._internals.forward import tensors_in
from rankwise.skips import add_lambda_skip, remove_lambda_skip, skips_of
from rankwise.skips.find import run_with
from rankwise.skips.observe import scaled_sums, without_skips


@pytest.mark.parametrize("name", FOUND)
def test_skips_act_in_every_family(name: str) -> None:
    build, sites = FOUND[name]
    model, batch = build()
    before, keys = outputs(model, batch), list(model.state_dict())
    torch.manual_seed(0)
    state, classes = state_of(model), [type(module) for module in model.modules()]
    skips = add_lambda_skip(model, example=batch)
    assert len(skips) == sites
    assert [type(module) for module in model.modules()] == classes
    assert same(outputs(model, batch), before)

    out = tensors_in(model(**batch))[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).sin()
    gradients = torch.autograd.grad((out * weights).sum(), list(skips.values()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert set(skips.values()) <= set(model.parameters())

    twin, frozen = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for at, parameter in enumerate(skips_of(twin).values()):
        parameter.data.fill_(-0.5 - 0.1 * at)
    assert same(outputs(model, batch), before)
    assert same(outputs(frozen, batch), before)

    # at other λ, the oracle is a forward pass in which the sums are scaled directly
    values = {site: parameter.detach() for site, parameter in skips_of(twin).items()}
    with without_skips(twin):
        wanted = run_with(twin, batch, scaled_sums(list(skips_of(twin).sites.values()), values))
    for first, second in zip(wanted, outputs(twin, batch), strict=True):
        # λ·x + f has two roundings in place of one, through a few layers of float32
        assert torch.allclose(first, second, rtol=1e-3, atol=1e-4 * float(first.abs().max()))
    assert not same(wanted, before)

    for changed in (model, twin, frozen):
        remove_lambda_skip(changed)
        assert not skips_of(changed)
        assert same(outputs(changed, batch), before)
        assert list(changed.state_dict()) == keys
        assert not hooks_of(changed)
    torch.manual_seed(0)
    assert state_of(model) == state
