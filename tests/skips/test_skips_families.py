"""λ-skips in every family: found, exactly nothing at λ = 1, the right thing at others, gone after undo."""

import copy
import pickle

import pytest
import torch
from tests.skips.cases import FOUND, loss, outputs, same

from rankwise.skips import add_lambda_skip, remove_lambda_skip, skips_of
from rankwise.skips.find import run_with
from rankwise.skips.observe import scaled_sums, without_skips


@pytest.mark.parametrize("name", FOUND)
def test_family(name: str) -> None:
    build, sites = FOUND[name]
    model, batch = build()
    before, state = outputs(model, batch), {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    skips = add_lambda_skip(model, example=batch)
    assert len(skips) == sites
    assert [type(module) for module in model.modules()] == classes
    assert same(outputs(model, batch), before)

    gradients = torch.autograd.grad(loss(model, batch), list(skips.values()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert set(skips.values()) <= set(model.parameters())

    twin, frozen = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for at, parameter in enumerate(skips_of(twin).values()):
            parameter.fill_(-0.5 - 0.1 * at)
    assert same(outputs(model, batch), before)
    assert same(outputs(frozen, batch), before)

    # at other λ, the oracle is a forward pass in which the sums themselves are scaled
    values = {site: parameter.detach() for site, parameter in skips_of(twin).items()}
    with without_skips(twin):
        wanted = run_with(twin, batch, scaled_sums(list(skips_of(twin).sites.values()), values))
    for one, other in zip(wanted, outputs(twin, batch), strict=True):
        # λ·x + f by two roundings in place of one, through a few layers of float32
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
    assert not same(wanted, before)

    for changed in (model, twin, frozen):
        remove_lambda_skip(changed)
        assert not skips_of(changed)
        assert same(outputs(changed, batch), before)
        assert list(changed.state_dict()) == list(state)
        hooks = [hook for module in changed.modules() for hook in (
            *module._forward_hooks.values(), *module._forward_pre_hooks.values(),
            *module._forward_hooks_with_kwargs.values(), *module._forward_pre_hooks_with_kwargs.values(),
        )]  # fmt: skip
        assert not hooks
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
