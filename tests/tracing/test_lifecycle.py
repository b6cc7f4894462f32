"""Capture leaves nothing behind, however it ends, and keeps nothing that was not requested."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial
from threading import Thread

import pytest
import torch
from capture_zoo import (
    TOKENS,
    WIDTH,
    Attention,
    Block,
    Stack,
    attention_block,
    fused,
    hidden,
    kind,
    plain,
    seen,
    stack_of,
    torch_encoder,
)
from experiments.zoo.transformers import nano_gpt
from tests.support.torch_names import function_modes, left_behind
from torch import nn
from torch.overrides import TorchFunctionMode

import rankwise as rw
from rankwise.errors import CaptureError


def places(records):
    return [(record.forward_pass, record.layer) for record in records]


MODELS = {"written": partial(stack_of, plain), "fused": partial(stack_of, fused), "torch": torch_encoder}
every_error = pytest.mark.parametrize(
    "error", [RuntimeError("here"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


class Bomb(nn.Module):
    """Raises in the middle of a model."""

    def __init__(self, error):
        super().__init__()
        self.error, self.armed = error, True

    def forward(self, x):
        if self.armed:
            raise self.error
        return x


@every_model
def test_success_leaves_nothing(make):
    model = make()
    with rw.capture(model):
        assert left_behind(model)
        model(hidden())
    assert left_behind(model) == []


@pytest.mark.parametrize("where", ["model", "on_mixer", "on_state"])
@pytest.mark.parametrize(
    ("make", "error"),
    [*((make, KeyboardInterrupt()) for make in MODELS.values()), (stack_of, RuntimeError())],
)
def test_an_error_leaves_nothing(make, error, where):
    model = nn.Sequential(make(), Bomb(error))
    model[1].armed = where == "model"
    with pytest.raises(type(error)), rw.capture(model, **({} if where == "model" else {where: Bomb(error)})):
        model(hidden())
    assert left_behind(model) == []


def test_an_interrupt_inside_pytorchs_layer_leaves_nothing():
    model = torch_encoder().train()  # in training, the layer calls its parts as modules
    model.layers[1].dropout1 = Bomb(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), rw.capture(model):
        model(hidden())
    assert left_behind(model) == []


@every_error
@every_model
def test_a_capture_continues_after_a_failed_call(make, error):
    model = nn.Sequential(make(), Bomb(error), nn.LayerNorm(WIDTH))
    x = hidden()
    with torch.no_grad(), rw.capture(model) as trace:
        with pytest.raises(type(error)):
            model(x)
        model[1].armed = False
        model(x)
    with torch.no_grad(), rw.capture(model) as alone:
        model(x)
    again = [site for site in trace.mixers if site.forward_pass == 1]
    assert [(site.name, site.layer) for site in again] == [(site.name, site.layer) for site in alone.mixers]
    states = [state for state in trace.states if state.forward_pass == 1]
    for one, other in zip(states, alone.states, strict=True):
        assert torch.equal(one.tokens, other.tokens)
    assert left_behind(model) == []


def test_a_model_may_catch_its_own_error():
    def forward(self, x):
        try:
            return self.risky(x)
        except ValueError:
            return self.safe(x)

    risky = nn.Sequential(stack_of(depth=1), Bomb(ValueError()))
    model = kind(forward, risky=lambda: risky, safe=lambda: stack_of(depth=2))().eval()
    trace = seen(model, hidden())
    safe = [site for site in trace.mixers if site.name.startswith("safe")]
    assert [site.layer for site in safe] == [0, 1]
    assert len([state for state in trace.states if state.name.startswith("safe")]) == 3


def test_the_error_of_the_model_is_not_replaced_by_an_error_of_capture():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Bomb(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError), rw.capture(model):
        model(hidden())


def test_a_failure_on_entry_leaves_nothing(monkeypatch):
    model, before = stack_of(), nn.Module.register_forward_hook

    def fail(self, *args, **kwargs):
        if self is model.norm:
            raise RuntimeError("full")
        return before(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_forward_hook", fail)
    with pytest.raises(RuntimeError, match="full"), rw.capture(model):
        pass
    assert left_behind(model) == []


# --- several captures ---------------------------------------------------------------------------------------


@every_model
def test_captures_of_one_model_can_be_nested(make):
    model, x = make(), hidden()
    with torch.no_grad():
        alone = model(x)
        with rw.capture(model) as outer, rw.capture(model) as inner:
            captured = model(x)
    assert torch.equal(alone, captured)
    assert len(outer.mixers) == (2 if make is torch_encoder else 3)
    for one, other in zip(outer.mixers, inner.mixers, strict=True):
        assert torch.equal(one.operator.dense(), other.operator.dense())
    assert len(outer.states) == len(inner.states)
    assert left_behind(model) == []


def test_captures_may_end_in_any_order():
    model, x = torch_encoder(), hidden()
    first, second = rw.capture(model), rw.capture(model)
    one, other = first.__enter__(), second.__enter__()
    with torch.no_grad():
        model(x)
        first.__exit__(None, None, None)
        model(x)
    second.__exit__(None, None, None)
    assert (len(one.mixers), len(other.mixers)) == (2, 4)
    assert left_behind(model) == []


def test_two_models_can_be_captured_at_once():
    a, b = stack_of(depth=2), torch_encoder()
    with torch.no_grad(), rw.capture(a) as one, rw.capture(b) as other:
        b(a(hidden()))
    assert {site.stack for site in one.mixers} == {"blocks"}
    assert {site.stack for site in other.mixers} == {"layers"}


def test_a_part_of_a_captured_model_can_be_captured_separately():
    model = nn.Sequential(stack_of(depth=2), stack_of(depth=2)).eval()
    with torch.no_grad(), rw.capture(model) as whole, rw.capture(model[1]) as part:
        model(hidden())
    assert len(whole.mixers) == 4
    assert [site.name for site in part.mixers] == ["blocks.0.attention", "blocks.1.attention"]


def test_computations_of_a_callback_are_not_captured():
    model, outer = stack_of(depth=2), []

    def measure(site):
        values = torch.randn(*site.operator.shape[:-2], site.operator.shape[-1], 4)
        soft = rw.operators.SoftmaxMixing(values, values)
        _ = soft @ values, torch.softmax(values @ values.mT, -1) @ values

    with torch.no_grad(), rw.capture(model, on_mixer=outer.append), rw.capture(model, on_mixer=measure):
        model(hidden())
    assert len(outer) == 2


@pytest.mark.parametrize("which", ["on_mixer", "on_state"])
def test_calls_of_the_model_by_a_callback_are_not_captured(which):
    model, x = stack_of(fused), hidden()
    with torch.no_grad(), rw.capture(model) as alone:
        model(x)
    kept = {"on_mixer": [], "on_state": []}

    def look(site):
        kept[which].append(site)
        model.blocks[-1](x)  # a whole block with its hooks

    callbacks = {name: sites.append for name, sites in kept.items()} | {which: look}
    with torch.no_grad(), rw.capture(model, **callbacks) as trace:
        model(x)
    assert [len(sites) for sites in kept.values()] == [len(alone.mixers), len(alone.states)]
    assert (trace.notes, trace.uncaptured) == (alone.notes, alone.uncaptured)


def test_callbacks_run_without_gradients_and_autocast():
    model, modes = stack_of(depth=1), []

    def look(site):
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu", torch.bfloat16), rw.capture(model, on_mixer=look, on_state=look):
        model(hidden())
    assert modes == [(False, False)] * 3


def test_a_capture_is_used_once():
    model, x = stack_of(), hidden()
    capture = rw.capture(model)
    with capture:
        model(x)
        with pytest.raises(CaptureError, match="started before"), capture:
            pass
    with pytest.raises(CaptureError, match="one `with` block for each"), capture:
        pass
    assert left_behind(model) == []


class Passes(TorchFunctionMode):
    """Counts the functions that it sees."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@every_model
def test_other_function_modes_keep_their_order(make):
    model, x = make(), hidden()
    with torch.no_grad(), Passes(), torch.device("cpu"), rw.capture(model) as trace, Passes() as inner:
        before = [id(mode) for mode in function_modes()]
        model(x)
        after = [id(mode) for mode in function_modes()]
    assert len(before) == 4
    assert before == after
    assert inner.calls
    assert len(trace.mixers) >= 2
    assert left_behind(model) == []


# --- forward passes -----------------------------------------------------------------------------------------


def test_each_call_of_the_model_is_a_forward_pass():
    model = stack_of(depth=2)
    with torch.no_grad(), rw.capture(model) as trace:
        for tokens in (3, 4, 5):
            model(hidden(tokens=tokens))
    assert places(trace.mixers) == [(run, layer) for run in range(3) for layer in range(2)]
    assert [site.operator.shape[-1] for site in trace.mixers] == [3, 3, 4, 4, 5, 5]
    assert places(trace.states) == [(run, at) for run in range(3) for at in range(3)]


def test_calls_of_the_parts_make_a_forward_pass():
    model = nano_gpt()
    ids = torch.randint(0, 60, (2, 6))
    with torch.no_grad(), rw.capture(model) as trace:
        for _ in range(2):
            x = model.transformer["wte"](ids)
            for block in model.transformer["h"]:
                x = block(x)
    for records, count in ((trace.mixers, 3), (trace.states, 4)):
        assert places(records) == [(run, at) for run in (0, 1) for at in range(count)]
    assert torch.equal(trace.states[-1].tokens, x)


def test_one_part_may_be_called_alone():
    model, x = stack_of(), hidden()
    with torch.no_grad(), rw.capture(model) as trace:
        y = model.blocks[1](x)
    assert [(site.name, site.layer) for site in trace.mixers] == [("blocks.1.attention", 0)]
    assert [state.layer for state in trace.states] == [0, 1]
    assert torch.equal(trace.states[1].tokens, y)
    assert {module.name for module in trace.uncaptured} == {"blocks.0.attention", "blocks.2.attention"}
    assert {module.reason for module in trace.uncaptured} == {"never called in this capture"}


@every_model
def test_a_copy_made_during_capture_has_no_hooks(make):
    model, x, file = make(), hidden(), io.BytesIO()
    with torch.no_grad(), rw.capture(model) as trace:
        copies = [copy.deepcopy(model)]
        torch.save(model, file)
        model(x)
        count = len(trace.mixers)
        copies[0](x)
        assert len(trace.mixers) == count
    file.seek(0)
    copies += [pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    with torch.no_grad():
        assert all(torch.equal(other(x), model(x)) for other in copies)


# --- streaming ----------------------------------------------------------------------------------------------


@every_model
def test_with_callbacks_nothing_is_kept(make):
    """Each matrix is freed once it has mixed: neither function mode nor trace keeps it alive."""
    gc.collect()
    gc.freeze()  # so that the searches below find only objects of this test
    model, refs, states, alive, matrices = make(), [], [], [], []

    def mixer(site):
        operator = site.operator
        dense = isinstance(operator, rw.operators.DenseMixing)
        refs.append(weakref.ref(operator.matrix if dense else operator.query))
        del site, operator
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dim() == 4]
        square = [one for one in tensors if one.shape[-2:] == (TOKENS, TOKENS)]
        matrices.append(len({one.untyped_storage().data_ptr() for one in square}))

    def state(site):
        states.append(weakref.ref(site.tokens))

    with torch.no_grad(), rw.capture(model, on_mixer=mixer, on_state=state) as trace:
        model(hidden())
        gc.collect()
        assert not any(ref() is not None for ref in refs)
    assert trace.mixers == trace.states == []
    assert not any(ref() is not None for ref in states)
    assert max(alive) == 1  # one mixer per block
    assert matrices[0] == matrices[-1]
    assert len(refs) >= 2


def test_each_mixer_is_passed_on_before_the_next_block_runs():
    order = []

    class Loud(Block):
        def forward(self, x):
            order.append("block")
            return super().forward(x)

    model = Stack(lambda: Loud(Attention())).eval()
    with torch.no_grad(), rw.capture(model, on_mixer=lambda site: order.append(site.layer)):
        model(hidden())
    assert order == ["block", 0, "block", 1, "block", 2]


def test_values_are_kept_only_if_requested():
    model = stack_of()
    with torch.no_grad(), rw.capture(model) as trace:
        model(hidden())
    assert all(site.values is None and site.output is None for site in trace.mixers)
    assert repr(trace) == "Trace(3 mixers, 4 states, 0 uncaptured)"


def test_capture_does_not_change_gradients():
    model, x = stack_of(), hidden()
    model(x).sum().backward()
    alone = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with rw.capture(model) as trace:
        model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), alone, strict=True))
    assert not any(site.operator.dense().requires_grad for site in trace.mixers)
    assert not any(state.tokens.requires_grad for state in trace.states)


def test_mixers_in_calls_that_raised_are_not_a_capture():
    model = Stack(lambda: nn.Sequential(Block(Attention()), Bomb(ValueError("here"))))
    nothing, own = "got mixers only in calls that raised", pytest.raises(ValueError, match="here")
    with pytest.raises(CaptureError, match=nothing), rw.capture(model), own:
        model(hidden())


def test_tensors_without_storage_are_passed_on():
    def forward(self, x, other):
        for block in self.blocks:
            x = block(x)
        return self.after(other, x)

    model, x = type("Graph", (Stack,), {"forward": forward})(attention_block).eval(), hidden()
    model.after = kind(lambda self, other, x: x + other.to_dense())()
    assert len(seen(model, x, x.to_sparse()).mixers) == 3


def in_thread(call):
    thread = Thread(target=call)
    thread.start()
    thread.join()


def test_calls_in_other_threads_are_reported_and_unchanged():
    model, x = stack_of(depth=2), hidden()
    with rw.capture(model) as trace:
        model(x)
        in_thread(lambda: model(x))
    assert len(trace.mixers) == 2
    assert [note for note in trace.notes if "another thread" in note]
    with pytest.raises(CaptureError, match="got calls in another thread only"), rw.capture(model):
        in_thread(lambda: model(x))
