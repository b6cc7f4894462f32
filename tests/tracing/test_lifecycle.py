"""Capture leaves nothing behind, however it ends, and keeps nothing it was not asked to keep."""

import copy
import gc
import io
import pickle
import weakref
from threading import Thread

import pytest
import torch
from capture_zoo import WIDTH, Attention, Block, Stack, fused, hidden, plain, scores, seen, stack_of
from experiments.families import nano_gpt
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import rankwise as rw
from rankwise.errors import CaptureError

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_backward_hooks",
)
OWN_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def left_behind(model) -> list[str]:
    """Everything a capture could forget."""
    found = [name for name in GLOBAL_HOOKS if getattr(nn.modules.module, name)]
    found += [
        f"{name}{hooks}"
        for name, module in model.named_modules()
        for hooks in OWN_HOOKS
        if getattr(module, hooks)
    ]
    return found + [repr(mode) for mode in _get_current_function_mode_stack()]


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


MODELS = {"written": lambda: stack_of(plain), "fused": lambda: stack_of(fused), "stock": encoder}
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
def test_nothing_is_left_after_success(make):
    model = make()
    with rw.capture(model):
        assert left_behind(model)
        model(hidden())
    assert left_behind(model) == []


@every_model
@every_error
def test_nothing_is_left_after_an_error_in_the_model(make, error):
    model = nn.Sequential(make(), Bomb(error))
    with pytest.raises(type(error)), rw.capture(model):
        model(hidden())
    assert left_behind(model) == []


@every_model
@pytest.mark.parametrize("which", ["on_mixer", "on_state"])
@every_error
def test_nothing_is_left_after_an_error_in_a_callback(make, which, error):
    model = make()

    def fail(site):
        raise error

    with pytest.raises(type(error)), rw.capture(model, **{which: fail}):
        model(hidden())
    assert left_behind(model) == []


def test_an_interrupt_inside_a_stock_layer_leaves_nothing():
    model = encoder().train()  # where the layer calls its parts as modules
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
    assert len(states) == len(alone.states)
    assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(states, alone.states, strict=True))
    assert left_behind(model) == []


def test_an_error_the_model_catches_itself():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.risky, self.safe = nn.Sequential(stack_of(depth=1), Bomb(ValueError())), stack_of(depth=2)

        def forward(self, x):
            try:
                return self.risky(x)
            except ValueError:
                return self.safe(x)

    model = Careful().eval()
    with torch.no_grad(), rw.capture(model) as trace:
        model(hidden())
    safe = [site for site in trace.mixers if site.name.startswith("safe")]
    assert [site.layer for site in safe] == [0, 1]
    assert len([state for state in trace.states if state.name.startswith("safe")]) == 3


def test_the_error_of_the_model_is_not_covered_by_ours():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Bomb(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError), rw.capture(model):
        model(hidden())


def test_a_failure_on_entry_leaves_nothing():
    model = stack_of()
    before = nn.Module.register_forward_hook

    def fail(self, *args, **kwargs):
        if self is model.norm:
            raise RuntimeError("full")
        return before(self, *args, **kwargs)

    nn.Module.register_forward_hook = fail
    try:
        with pytest.raises(RuntimeError, match="full"), rw.capture(model):
            pass
    finally:
        nn.Module.register_forward_hook = before
    assert left_behind(model) == []


# --- more than one ------------------------------------------------------------------------------------------


@every_model
def test_captures_of_one_model_can_be_nested(make):
    model, x = make(), hidden()
    with torch.no_grad():
        alone = model(x)
        with rw.capture(model) as outer, rw.capture(model) as inner:
            watched = model(x)
    assert torch.equal(alone, watched)
    blocks = model.blocks if hasattr(model, "blocks") else model.layers
    assert len(outer.mixers) == len(inner.mixers) == len(blocks)
    for one, other in zip(outer.mixers, inner.mixers, strict=True):
        assert torch.equal(one.operator.dense(), other.operator.dense())
    assert len(outer.states) == len(inner.states)
    assert left_behind(model) == []


def test_captures_may_end_in_any_order():
    model, x = encoder(), hidden()
    first, second = rw.capture(model), rw.capture(model)
    one, other = first.__enter__(), second.__enter__()
    with torch.no_grad():
        model(x)
    first.__exit__(None, None, None)
    with torch.no_grad():
        model(x)
    second.__exit__(None, None, None)
    assert len(one.mixers) == 2
    assert len(other.mixers) == 4
    assert left_behind(model) == []


def test_two_models_at_once():
    a, b = stack_of(depth=2), encoder()
    with torch.no_grad(), rw.capture(a) as one, rw.capture(b) as other:
        b(a(hidden()))
    assert {site.stack for site in one.mixers} == {"blocks"}
    assert {site.stack for site in other.mixers} == {"layers"}


def test_a_part_of_a_captured_model_can_be_captured_apart():
    model = nn.Sequential(stack_of(depth=2), stack_of(depth=2)).eval()
    with torch.no_grad(), rw.capture(model) as whole, rw.capture(model[1]) as part:
        model(hidden())
    assert len(whole.mixers) == 4
    assert [site.name for site in part.mixers] == ["blocks.0.attention", "blocks.1.attention"]


def test_measuring_inside_a_callback_is_not_captured():
    model, outer = stack_of(depth=2), []

    def measure(site):
        values = torch.randn(*site.operator.shape[:-2], site.operator.shape[-1], 4)
        soft = rw.operators.SoftmaxMixing(values, values)
        _ = soft @ values, torch.softmax(values @ values.mT, -1) @ values

    with torch.no_grad(), rw.capture(model, on_mixer=outer.append), rw.capture(model, on_mixer=measure):
        model(hidden())
    assert len(outer) == 2


def test_callbacks_run_apart_from_the_model():
    model, seen = stack_of(depth=1), []

    def look(site):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu", torch.bfloat16), rw.capture(model, on_mixer=look, on_state=look):
        model(hidden())
    assert seen == [(False, False)] * 3


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


def test_other_function_modes_stay_on_the_stack():
    class Other(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    for make in MODELS.values():
        calls: list = []
        model, x = make(), hidden()
        with torch.no_grad(), Other() as outer, rw.capture(model) as trace, Other() as inner:
            model(x)
            assert inner in _get_current_function_mode_stack()
            assert outer in _get_current_function_mode_stack()
            assert len(_get_current_function_mode_stack()) == 3
        assert len(trace.mixers) >= 2
        assert calls
        assert left_behind(model) == []


# --- runs ---------------------------------------------------------------------------------------------------


def test_calls_of_the_model_are_runs():
    model = stack_of(depth=2)
    with torch.no_grad(), rw.capture(model) as trace:
        for tokens in (3, 4, 5):
            model(hidden(tokens=tokens))
    assert [(site.forward_pass, site.layer, site.operator.shape[-1]) for site in trace.mixers] == [
        (run, layer, run + 3) for run in range(3) for layer in range(2)
    ]
    assert [(state.forward_pass, state.layer) for state in trace.states] == [
        (r, at) for r in range(3) for at in range(3)
    ]


def test_parts_called_by_hand_make_a_forward_pass():
    model = nano_gpt()
    ids = torch.randint(0, 60, (2, 6))
    with torch.no_grad(), rw.capture(model) as trace:
        for _ in range(2):
            x = model.transformer["wte"](ids)
            for block in model.transformer["h"]:
                x = block(x)
    for records, count in ((trace.mixers, 3), (trace.states, 4)):
        places = [(record.forward_pass, record.layer) for record in records]
        assert places == [(run, at) for run in (0, 1) for at in range(count)]
    assert torch.equal(trace.states[-1].tokens, x)


def test_one_part_called_alone():
    model = stack_of()
    x = hidden()
    with torch.no_grad(), rw.capture(model) as trace:
        y = model.blocks[1](x)
    assert [(site.name, site.layer) for site in trace.mixers] == [("blocks.1.attention", 0)]
    assert [state.layer for state in trace.states] == [0, 1]
    assert torch.equal(trace.states[1].tokens, y)
    assert {module.name for module in trace.uncaptured} == {"blocks.0.attention", "blocks.2.attention"}
    assert {module.reason for module in trace.uncaptured} == {"never called in this capture"}


# --- copies -------------------------------------------------------------------------------------------------


@every_model
def test_a_copy_made_during_capture_is_free_of_it(make):
    model, x = make(), hidden()
    with torch.no_grad(), rw.capture(model) as trace:
        twin = copy.deepcopy(model)
        read = io.BytesIO()
        torch.save(model, read)
        model(x)
        seen = len(trace.mixers)
        twin(x)
        assert len(trace.mixers) == seen
    read.seek(0)
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for other in (twin, again, torch.load(read, weights_only=False)):
            assert torch.equal(other(x), model(x))


# --- streaming ----------------------------------------------------------------------------------------------


@every_model
def test_with_callbacks_nothing_is_kept(make):
    model, refs, states, alive = make(), [], [], []

    def tensor_of(operator):
        return operator.matrix if isinstance(operator, rw.operators.DenseMixing) else operator.query

    def mixer(site):
        refs.append(weakref.ref(tensor_of(site.operator)))
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))

    def state(site):
        states.append(weakref.ref(site.tokens))

    with torch.no_grad(), rw.capture(model, on_mixer=mixer, on_state=state) as trace:
        model(hidden())
        gc.collect()
        assert not any(ref() is not None for ref in refs)
    assert trace.mixers == []
    assert trace.states == []
    assert not any(ref() is not None for ref in states)
    assert max(alive) == 1  # one mixer a block
    assert len(refs) >= 2


def test_operators_come_block_by_block():
    """Each mixer is handed on before the next block runs."""
    order = []

    class Loud(Block):
        def forward(self, x):
            order.append("block")
            return super().forward(x)

    model = Stack(lambda: Loud(Attention(plain))).eval()
    with torch.no_grad(), rw.capture(model, on_mixer=lambda site: order.append(site.layer)):
        model(hidden())
    assert order == ["block", 0, "block", 1, "block", 2]


def test_values_are_kept_only_if_asked_for():
    model = stack_of()
    with torch.no_grad(), rw.capture(model) as trace:
        model(hidden())
    assert all(site.values is None and site.output is None for site in trace.mixers)


def test_gradients_are_those_without_capture():
    model, x = stack_of(), hidden()
    model(x).sum().backward()
    alone = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with rw.capture(model) as trace:
        model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), alone, strict=True))
    assert not any(site.operator.dense().requires_grad for site in trace.mixers)
    assert not any(state.tokens.requires_grad for state in trace.states)


def test_the_trace_has_a_summary():
    model = stack_of()
    with torch.no_grad(), rw.capture(model) as trace:
        model(hidden())
    assert repr(trace) == "Trace(3 mixers, 4 states, 0 uncaptured)"


@pytest.mark.parametrize("which", ["on_mixer", "on_state"])
def test_a_callback_may_run_parts_of_the_model_unseen(which) -> None:
    model, x = stack_of(fused), hidden()
    with torch.no_grad(), rw.capture(model) as alone:
        model(x)
    seen = {"on_mixer": [], "on_state": []}

    def look(site) -> None:
        seen[which].append(site)
        model.blocks[-1](x)  # a whole block, hooks and all

    callbacks = {name: kept.append for name, kept in seen.items()} | {which: look}
    with torch.no_grad(), rw.capture(model, **callbacks) as trace:
        model(x)
    assert [len(kept) for kept in seen.values()] == [len(alone.mixers), len(alone.states)]
    assert (trace.notes, trace.uncaptured) == (alone.notes, alone.uncaptured)


def test_mixers_in_calls_that_raised_are_not_a_capture():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("here")

    model = Stack(
        lambda: nn.Sequential(Block(Attention(lambda q, k, v: scores(q, k).softmax(-1) @ v)), Raises())
    )
    nothing, own = "got mixers only in calls that raised", pytest.raises(ValueError, match="here")
    with pytest.raises(CaptureError, match=nothing), rw.capture(model), own:
        model(hidden())


def test_tensors_without_storage_pass_through():
    class Graph(Stack):
        def forward(self, x, adjacency):
            return self.norm(super().forward(x) + adjacency.to_dense().sum())

    model = Graph(lambda: Block(Attention(lambda q, k, v: scores(q, k).softmax(-1) @ v)), 2).eval()

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, adjacency):
            return self.inner(x, adjacency)

    assert len(seen(Takes().eval(), hidden(tokens=7), torch.eye(7).to_sparse()).mixers) == 2


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


class Passes(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_the_tap_comes_back_to_its_place_among_other_modes():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True).eval()
    with torch.no_grad(), Passes(), torch.device("cpu"), rw.capture(layer), Passes():
        before = _get_current_function_mode_stack()
        layer(hidden())
        after = _get_current_function_mode_stack()
    assert len(before) == 4
    assert [id(mode) for mode in before] == [id(mode) for mode in after]
