"""`record_calls` records calls in the order of their ends; copies are safe from later changes."""

import pytest
import torch
from capture_zoo import kind
from tests.support.torch_names import hooks_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankwise.tracing import record_calls

# The second module changes its input in place, and the model changes the output of the second.
Nested = kind(
    lambda self, x: self.second(self.first(x), scale=torch.tensor(2.0)).add_(1),
    first=lambda: nn.Linear(3, 3),
    second=kind(lambda self, x, *, scale: x.mul_(scale)),
)


def test_calls_are_recorded_in_the_order_in_which_they_end():
    model, x = Nested(), torch.randn(2, 3)
    with record_calls(model, lambda name, module: True) as calls:
        model(x)
        model(x)
    assert [call.name for call in calls] == ["first", "second", ""] * 2
    assert all(call.module is model.get_submodule(call.name) for call in calls)
    assert not hooks_of(model)


def test_names_select_modules():
    model = Nested()
    with record_calls(model, ["second", "third"]) as calls:
        model(torch.randn(2, 3))
    assert [(call.name, list(call.kwargs)) for call in calls] == [("second", ["scale"])]


@pytest.mark.parametrize("copy", [True, False])
def test_only_copies_are_safe_from_changes_in_place(copy):
    model, x = Nested(), torch.randn(2, 3)
    before = model.first(x).detach()
    with torch.no_grad(), record_calls(model, {"second"}, copy=copy) as calls:
        model(x)
    assert torch.equal(calls[0].args[0], before) == copy
    assert torch.equal(calls[0].output, 2 * before) == copy


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("detach", [True, False])
def test_gradient_history_is_kept_if_asked_for(copy, detach):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with record_calls(model, {"1"}, copy=copy, detach=detach) as calls:
        model(torch.randn(2, 3))
    assert calls[0].output.requires_grad == calls[0].args[0].requires_grad == (not detach)
    if not detach:
        calls[0].output.sum().backward()
        assert model[0].weight.grad is not None


def test_containers_keep_their_form():
    model = kind(lambda self, pair, options=None: {"sum": pair[0] + pair[1], "rest": [pair, None]})()
    pair = (torch.ones(2), torch.zeros(2))
    with record_calls(model, {""}, copy=True) as calls:
        model(pair, options={"names": ("a", "b")})
    call = calls[0]
    assert isinstance(call.args[0], tuple)
    assert call.kwargs == {"options": {"names": ("a", "b")}}
    assert torch.equal(call.output["sum"], torch.ones(2))
    assert call.output["rest"][1] is None


def raise_if_positive(self, x):
    if x.sum() > 0:
        raise ValueError("positive")
    return x


def try_both_signs(self, x):
    try:
        return self.inner(x)
    except ValueError:
        return self.inner(-x)


Raises = kind(raise_if_positive)
Tries = kind(try_both_signs, inner=Raises)


@pytest.mark.parametrize("copy", [True, False])
def test_a_call_that_raises_is_not_recorded(copy):
    x = torch.ones(2)
    with record_calls(model := Tries(), {"", "inner"}, copy=copy) as calls:
        model(x)
    assert [call.name for call in calls] == ["inner", ""]
    assert [call.args[0].tolist() for call in calls] == [[-1, -1], [1, 1]]


@pytest.mark.parametrize("copy", [True, False])
def test_a_call_repeated_in_a_backward_pass_is_not_recorded(copy):
    model, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    with record_calls(model, {""}, copy=copy) as calls:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert len(calls) == 1


def test_hooks_are_removed_if_the_model_raises():
    with pytest.raises(ValueError, match="positive"), record_calls(model := Raises(), {""}, copy=True):
        model(torch.ones(2))
    assert not hooks_of(model)
