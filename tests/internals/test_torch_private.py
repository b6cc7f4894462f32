"""Private names of torch still do what `rankwise._internals.torch_private` takes them for.

Needs nothing but torch and pytest. `make torch TORCH=2.9.0` runs it against a version of torch.
"""

import importlib
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rankwise._internals import torch_private as torch_private


class Seen(TorchFunctionMode):
    """Counts the functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_without_torch_function() -> None:
    with Seen() as mode:
        torch.ones(2).exp()
        before = mode.count
        with torch_private.without_torch_function():
            torch.ones(2).exp()
        assert before > 0, "function modes see no functions any more"
        assert mode.count == before, "torch._C.DisableTorchFunction no longer hides functions from modes"


def test_in_function_mode() -> None:
    assert not torch_private.in_function_mode()
    with Seen(), torch.no_grad():
        assert torch_private.in_function_mode(), "an active function mode is not seen"
        with torch_private.without_torch_function():
            torch.ones(2).exp()
    assert not torch_private.in_function_mode()


def test_pop_mode_and_push_mode() -> None:
    """Of three modes, the middle one is removed and returns to its place."""
    with Seen() as below, Seen() as mode, Seen() as above:
        depth = torch_private.pop_mode(mode)
        torch.ones(2).exp()
        assert depth == 1, "the stack of function modes is counted or popped otherwise"
        assert (mode.count, below.count > 0, above.count > 0) == (0, True, True), (
            "the wrong mode was taken off"
        )
        assert torch_private.pop_mode(mode) is None, "a mode that is not on the stack was found there"
        torch_private.push_mode(mode, depth)
        torch.ones(2).exp()
        assert mode.count > 0, "torch.overrides._push_mode no longer puts a mode on the stack"
    assert torch_private.pop_mode(mode) is None


def test_in_backward() -> None:
    told = []

    def watched(x):
        told.append(torch_private.in_backward())
        return x.sin()

    checkpoint(watched, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert told == [False, True], "torch._C._current_graph_task_id no longer tells a backward pass"


def test_changes_in_place() -> None:
    tensor = torch.zeros(2)
    before = torch_private.changes_in_place(tensor)
    tensor.add_(1)
    assert torch_private.changes_in_place(tensor) == before + 1, "Tensor._version no longer counts changes"


def test_base_of() -> None:
    tensor = torch.zeros(2, 3)
    assert torch_private.base_of(tensor) is tensor
    assert torch_private.base_of(tensor.view(6)[1:]) is tensor, "Tensor._base no longer tells views"


def test_outside_transforms() -> None:
    def watched(x):
        with torch_private.outside_transforms():
            assert not torch_private.in_function_transform()
            torch.randn(2)  # vmap refuses random numbers
        assert torch_private.in_function_transform()
        return x.sum()

    torch.vmap(watched)(torch.ones(2, 2))
    torch.vmap(torch.vmap(watched))(torch.ones(2, 2, 2))


def test_in_function_transform() -> None:
    told = []

    def watched(x):
        told.append(torch_private.in_function_transform())
        return x.sum()

    watched(torch.ones(2))
    torch.func.grad(watched)(torch.ones(2))
    torch.vmap(watched)(torch.ones(2, 2))
    assert told == [False, True, True], "torch._C._are_functorch_transforms_active no longer tells transforms"


def test_is_profiled() -> None:
    assert not torch_private.is_profiled()
    with torch.autograd.profiler.profile():
        assert torch_private.is_profiled(), "torch.autograd._profiler_enabled no longer tells a profiler"


def test_in_dispatch_mode() -> None:
    assert not torch_private.in_dispatch_mode()
    with Dispatched():
        assert torch_private.in_dispatch_mode(), "is_in_torch_dispatch_mode no longer tells a mode"


def test_is_zero_tensor() -> None:
    assert not torch_private.is_zero_tensor(torch.zeros(2))
    assert torch_private.is_zero_tensor(torch._efficientzerotensor(2)), "Tensor._is_zerotensor changed"


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_is_compiled_and_original_of(how) -> None:
    module = nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    assert torch_private.original_of(module) is module
    if how == "Module.compile":
        module.compile(backend="eager")
        assert torch_private.is_compiled(module), "Module._compiled_call_impl no longer tells Module.compile"
    else:
        compiled = torch.compile(module, backend="eager")
        assert torch_private.is_compiled(compiled), "what torch.compile gives is no OptimizedModule any more"
        assert torch_private.original_of(compiled) is module, "OptimizedModule._orig_mod is no longer it"


def test_runs_compiled_eagerly() -> None:
    assert not torch_private.runs_compiled_eagerly()
    with torch.compiler.set_stance("force_eager"):
        assert torch_private.runs_compiled_eagerly(), "torch._dynamo.eval_frame._stance no longer tells it"
    assert not torch_private.runs_compiled_eagerly()


def test_compiled_prefix() -> None:
    names = torch.compile(nn.Linear(2, 2), backend="eager").state_dict()
    assert set(names) == {f"{torch_private.COMPILED_PREFIX}{name}" for name in ("weight", "bias")}, (
        "torch.compile puts something else before the names of weights"
    )


def test_original_name() -> None:
    layer = nn.Linear(2, 2)
    for wrapper in (torch.compile(layer, backend="eager"), checkpoint_wrapper(layer)):
        inner = next(name for name, module in wrapper.named_modules() if module is layer)
        assert torch_private.original_name(f"0.{inner}.weight") == "0.weight", "a wrapper has another name"


def test_constant_when_traced() -> None:
    """A function that no compiler can trace, such as an import by name, is called once."""
    calls = []

    @torch_private.constant_when_traced
    def answer() -> int:
        calls.append(importlib.import_module("string"))
        return 3

    def asks(x):
        return x + answer()

    compiled = torch.compile(asks, backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item(), compiled(torch.ones(1)).item()] == [4, 4]
    assert len(calls) == 1, "_dynamo_marked_constant no longer marks a function as constant"


def test_drops() -> None:
    layers = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    shares = [torch_private.dropout_rate(layer(0.25)) for layer in layers]
    assert shares == [0.25] * 6, "dropout layers have no common base _DropoutNd any more"
    assert torch_private.dropout_rate(nn.Linear(2, 2)) == 0.0


def test_forget_global_hook() -> None:
    def hook(module, args, kwargs, output):
        return None

    handle = nn.modules.module.register_module_forward_hook(hook, with_kwargs=True)
    handle.remove()
    torch_private.forget_global_hook(handle)
    assert not nn.modules.module._global_forward_hooks_with_kwargs, "the note of a global hook stays"


def hooked() -> tuple[nn.Module, list[str], list[object]]:
    """Return a module, the list in which its hooks note their calls, and the hooks that should be removed."""
    module, told = nn.Linear(2, 2), []

    def named(name):
        def hook(*given):
            told.append(name)

        return hook

    hooks = [named(name) for name in ("before", "before too", "after", "after too")]
    module.register_forward_pre_hook(hooks[0], with_kwargs=True)
    module.register_forward_pre_hook(hooks[1])
    module.register_forward_hook(hooks[2], with_kwargs=True, always_call=True)
    module.register_forward_hook(hooks[3])
    return module, told, [hooks[0], hooks[2]]


def test_forward_hooks() -> None:
    module = nn.Linear(2, 2)
    assert torch_private.forward_hooks(module) == []

    def first(*_: object) -> None: ...
    def second(*_: object) -> None: ...
    def after(*_: object) -> None: ...

    module.register_forward_hook(after)
    handle = module.register_forward_pre_hook(first)
    module.register_forward_pre_hook(second)
    assert torch_private.forward_hooks(module) == [first, second, after], "hooks are kept elsewhere"
    handle.remove()
    assert torch_private.forward_hooks(module) == [second, after]


def test_remove_forward_hooks() -> None:
    module, told, goes = hooked()
    torch_private.remove_forward_hooks(module, goes.__contains__)
    module(torch.ones(2))
    assert told == ["before too", "after too"], (
        "hooks of a module are kept elsewhere, or not all were removed"
    )
    stores = [name for name in vars(module) if name.startswith("_forward") and "hooks" in name]
    left = {name: len(getattr(module, name)) for name in stores if getattr(module, name)}
    assert left == {"_forward_pre_hooks": 1, "_forward_hooks": 1}, "a note of a removed hook stays"


def test_without_forward_hooks() -> None:
    module, told, goes = hooked()
    with torch_private.without_forward_hooks(module, goes.__contains__):
        module(torch.ones(2))
    assert told == ["before too", "after too"], "hooks of a module are kept elsewhere"
    module(torch.ones(2))
    assert told[2:] == ["before", "before too", "after", "after too"], (
        "hooks did not come back in their order"
    )


def test_preserve_state() -> None:
    module = nn.Module()
    module.register_buffer("none", None)
    module.register_buffer("kept", torch.ones(1), persistent=False)
    module.register_buffer("same", module.kept)
    module.plain, module.count, module.weight = module.kept, 1, nn.Parameter(torch.ones(1))
    kept, weight = module.kept, module.weight
    with torch_private.preserve_state(module):
        assert module.weight is weight
        assert module.kept is module.same is module.plain is not kept
        module.kept.data += 1
        module.none, module.kept, module.plain = torch.ones(1), torch.zeros(1), None
        module.count += 1
        module.more = 3
        module.register_buffer("added", torch.ones(1))
    assert module.none is None, "buffers are kept elsewhere"
    assert module.kept is module.same is module.plain is kept
    assert (kept.item(), module.count) == (1, 1)
    assert not hasattr(module, "added")
    assert not hasattr(module, "more")
    assert list(module.state_dict()) == ["weight", "same"], "what a state dict leaves out is kept elsewhere"


def test_containers_and_hooks_are_restored_together() -> None:
    """A first run that builds something and sets a flag leaves neither, whatever container holds it."""
    module = nn.Sequential(nn.ReLU())
    module.ordered, module.counts = OrderedDict(a=1), defaultdict(int)
    module.names, module.last = {"a"}, deque([1, 2], maxlen=2)
    handle = module[0].register_forward_hook(lambda *_: None)
    before = [list(store) for store in (module.ordered, module.counts, module.names, module.last)]
    for _ in range(2):
        with torch_private.preserve_state(module):
            assert not hasattr(module, "built")
            module.built = True
            module[0].register_forward_hook(lambda *_: None, with_kwargs=True)
            module[0].register_forward_pre_hook(lambda *_: None)
            module.ordered.move_to_end("a"), module.ordered.update(b=2)
            module.counts["x"] += 1
            module.names.add("b")
            module.last.append(3)
    after = [list(store) for store in (module.ordered, module.counts, module.names, module.last)]
    assert before == after
    assert len(torch_private.forward_hooks(module[0])) == 1, "torch keeps hooks elsewhere"
    with torch_private.preserve_state(module):
        handle.remove()
    assert not torch_private.forward_hooks(module[0]), "a hook that removes itself would come back"
    assert not module[0]._forward_hooks_with_kwargs


def test_views_of_buffers_stay_views_and_generators_begin_again() -> None:
    module = nn.Module()
    module.register_buffer("rows", torch.zeros(2, 3))
    module.views, module.other = [*module.rows.unbind(0)], module.rows.T
    module.drawn, module.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
    drawn = []
    for _ in range(2):
        with torch_private.preserve_state(module):
            module.rows.add_(1)
            assert (torch.stack(module.views) == 1).all()
            assert (module.other == 1).all()
            drawn.append((torch.rand(1, generator=module.drawn).item(), module.numpy.random()))
    assert not module.rows.any()
    assert module.views[1].data_ptr() == module.rows[1].data_ptr()
    assert drawn[0] == drawn[1]


def test_data_of_a_model_is_not_walked() -> None:
    module, nested = nn.Module(), []
    for _ in range(2000):
        nested = [nested]
    module.nested, module.words = nested, [*range(torch_private.LONGEST + 1)]
    with torch_private.preserve_state(module):
        module.words.append(0)
    assert len(module.words) == torch_private.LONGEST + 2


def test_reset() -> None:
    attention = nn.MultiheadAttention(2, 1)
    nn.init.constant_(attention.in_proj_weight, 7.0)
    getattr(attention, torch_private.RESET)()
    assert not (attention.in_proj_weight == 7).any(), "MultiheadAttention draws its weights by another method"


def test_is_mapped() -> None:
    x, seen = torch.randn(2, 3), []
    torch.vmap(lambda row: seen.append(torch_private.is_mapped(row)) or row)(x)
    assert seen == [True], "torch._C._functorch.is_batchedtensor no longer tells tensors inside vmap apart"
    assert not torch_private.is_mapped(x)


def test_values_known() -> None:
    known, mask = torch_private.values_known, torch.tensor([[True], [False]])
    found = [known(mask, None), known(mask.to("meta"))]
    torch.vmap(lambda row: found.append(known(row)) or row)(mask)
    per_row = torch.vmap(torch.func.grad(lambda x: found.append(known(x)) or x.sum()))
    per_row(torch.ones(2, 2))
    torch.func.grad(lambda x: found.append(known(x)) or x.sum())(torch.ones(2))
    with FakeTensorMode():
        found.append(known(torch.ones(2)))
    torch.compile(lambda x: found.append(known(x)) or x, backend="eager")(torch.ones(2))
    wanted = [True, False, False, False, True, False, False]
    assert found == wanted, "torch._C._functorch unwraps tensors differently"


def test_in_grad_transform() -> None:
    found = []

    def watched(x):
        found.append(torch_private.in_grad_transform())
        return x.sum()

    watched(torch.ones(2))
    torch.vmap(watched)(torch.ones(1, 2))
    torch.func.jvp(watched, (torch.ones(2),), (torch.ones(2),))
    torch.func.grad(watched)(torch.ones(2))
    torch.vmap(torch.func.grad(watched))(torch.ones(1, 2))
    torch.func.grad(lambda x: torch.vmap(watched)(x).sum())(torch.ones(1, 2))
    wanted = [False, False, False, True, True, True]
    assert found == wanted, "torch._C._functorch no longer lists the active transforms"


def test_function_modes_see_flex_attention() -> None:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    names = []

    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **kwargs or {})

    x = torch.randn(1, 1, 4, 8)
    with Names(), torch.no_grad(), torch_private.uncompiled():
        flex.flex_attention(x, x, x)
    assert torch.ops.higher_order.flex_attention in names, "flex_attention is no function that modes see"


def test_uncompiled_runs_compiled_functions_step_by_step() -> None:
    ran = []
    twice = torch.compile(lambda x: ran.append(1) or 2 * x, backend="eager")
    with torch_private.uncompiled():
        twice(torch.ones(1))
        twice(torch.ones(1))
    assert ran == [1, 1], "torch.compiler.set_stance no longer runs compiled functions"
