"""TSSA inside torch: gradcheck, operator registration, torch.compile, autocast, dtypes."""

import re
import warnings

import pytest
import torch
from tests.support.torch_names import (
    FakeTensor,
    FakeTensorMode,
    Operations,
    lazy_negation,
    tree_leaves,
    zero_tensor,
)
from tests.unchecked import unchecked
from tssa_cases import Case, outputs

from rankwise.errors import InputError
from rankwise.ops import TSSAState, dispatch, half_lives, tssa
from rankwise.ops.arguments import decay_rates
from rankwise.ops.reference import running_sum

causalities = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
impls = pytest.mark.parametrize("impl", ["reference", "cpu"])


@impls
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("kind", ["bidirectional", "literal", "decayed"])
def test_gradcheck(impl, masked, kind):
    in_order = kind != "bidirectional"
    case = Case(
        (2, 3, 2, 2),
        causal=in_order,
        masked=masked,
        decayed=kind == "decayed",
        stated=in_order,
        biased=in_order,
    )
    if masked:
        case.options["mask"][:, 0] = True

    def run(w, temperature, *rest):
        options = dict(case.options)
        if in_order:
            options |= {"bias": rest[0], "state": TSSAState(*rest[1:], case.options["state"].seen)}
        return tuple(outputs(tssa(w, temperature, impl=impl, **options)).values())

    inputs = [x.clone().requires_grad_() for x in case.inputs().values()]
    assert torch.autograd.gradcheck(run, inputs, atol=1e-6)


@pytest.mark.parametrize(
    ("masked", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["whole", "masked"]
)
@pytest.mark.parametrize("keep", [False, True], ids=["plain", "gradient"])
@causalities
def test_operators_are_registered_as_they_behave(is_causal, keep, masked, dtype):
    """Without a mask: rows without a state; with a mask: decaying sums with states."""
    stated = is_causal and masked
    case = Case((2, 5, 2, 3), is_causal, masked, decayed=stated, stated=stated, dtype=dtype)
    w, temperature = case.w.requires_grad_(keep), case.temperature.requires_grad_(keep)
    sums = [part.requires_grad_(keep) for part in case.options["state"][:3]] if stated else [None] * 3
    offset = torch.randn(2, 5, 2, requires_grad=keep) if stated else None
    rate = decay_rates(case.options["half_life"], w.device) if stated else None
    arguments = (w, temperature, offset, case.options["mask"], *sums, rate, is_causal, "cpu", keep)
    torch.library.opcheck(dispatch.tssa_forward, arguments)


@pytest.mark.parametrize("kind", ["bidirectional", "literal", "decayed"])
def test_outputs_do_not_change_if_a_gradient_is_required(kind):
    """Without a gradient, memberships are written over the scores."""
    in_order = kind != "bidirectional"
    case = Case((2, 70, 3, 5), causal=in_order, masked=True, decayed=kind == "decayed", stated=in_order)
    plain = outputs(case.run("cpu"))
    case.w.requires_grad_()
    for name, part in outputs(case.run("cpu")).items():
        assert torch.equal(part, plain[name]), name


seen: list = []


def looked_at(w: torch.Tensor, is_causal: bool) -> None:
    with Operations() as operations:
        tssa(w, torch.ones(3), is_causal)
    seen.extend(operations.functions)


def traced(w: torch.Tensor, is_causal: bool) -> None:
    graph = torch.jit.trace(lambda x: tssa(x, torch.ones(3), is_causal).output, w).graph
    seen.extend(node.kind() for node in graph.nodes())


def profiled(w: torch.Tensor, is_causal: bool) -> None:
    with torch.profiler.profile() as profile:
        tssa(w, torch.ones(3), is_causal)
    seen.extend(event.key for event in profile.key_averages())


def with_a_gradient(w: torch.Tensor, is_causal: bool) -> None:
    seen.append(type(tssa(w.requires_grad_(), torch.ones(3), is_causal).output.grad_fn))


@causalities
@pytest.mark.parametrize("watched", [looked_at, traced, profiled, with_a_gradient])
def test_modes_tracers_profilers_and_gradients_see_the_operator(watched, is_causal):
    seen.clear()
    watched(torch.randn(1, 4, 3, 5), is_causal)
    assert any(re.search(r"rankwise(::|\.|_)tssa", str(thing)) for thing in seen)


@causalities
def test_tensors_without_numbers_and_zeros_reach_no_kernel(is_causal):
    w, temperature = torch.randn(1, 4, 3, 5), torch.ones(3)
    fake = FakeTensorMode().from_tensor
    assert isinstance(tssa(fake(w), fake(temperature), is_causal).output, FakeTensor)
    found = tssa(w.to("meta"), temperature.to("meta"), is_causal)
    assert found.output.shape == w.shape
    assert found.membership.is_meta
    assert not tssa(zero_tensor(1, 4, 3, 5), temperature, is_causal).output.any()


@causalities
@pytest.mark.parametrize("lazy", [lazy_negation, lambda x: torch.complex(x, -x).conj().imag])
def test_lazy_negation_is_applied(lazy, is_causal):
    w, temperature = torch.randn(1, 4, 3, 5), torch.full((3,), -2.0)
    late, late_temperature = lazy(w), lazy_negation(temperature)
    assert late.is_neg()
    for given in ((late, temperature), (w, late_temperature), (late.requires_grad_(), late_temperature)):
        found = tssa(*given, is_causal).output
        wanted = tssa(*(x.detach().resolve_neg() for x in given), is_causal).output
        torch.testing.assert_close(found, wanted)


@causalities
def test_infinities_that_cancel_do_not_warn(is_causal):
    w, temperature = torch.randn(1, 40, 3, 5, requires_grad=True), torch.ones(3, requires_grad=True)
    given = torch.zeros(1, 40, 3)
    given[0, 5, 0], given[0, 30, 0] = torch.inf, -torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = torch.autograd.grad(tssa(w, temperature, is_causal).membership, (w, temperature), given)
    assert back[1].isnan().any()


@causalities
def test_the_bare_kernel_runs_if_nothing_observes_torch(monkeypatch, is_causal):
    monkeypatch.setattr(dispatch, "tssa_forward", None)
    w, parameter = torch.randn(1, 4, 3, 5), torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        found = tssa(w, parameter, is_causal)
    torch.testing.assert_close(found.output, tssa(w, torch.ones(3), is_causal, impl="reference").output)
    with pytest.raises(TypeError):
        tssa(w, parameter, is_causal)


def test_it_compiles_into_one_graph():
    case = Case((2, 6, 3, 4), True, masked=True, decayed=True, stated=True, biased=True, dtype=torch.float32)

    def outputs_and_gradient(function):
        found = function(case.w, case.temperature)
        return [*found, *torch.autograd.grad(found[0].square().sum(), (case.w, case.temperature))]

    def layer(w, temperature):
        return tuple(outputs(tssa(w.sin(), temperature, **case.options)).values())

    case.w.requires_grad_()
    case.temperature.requires_grad_()
    with unchecked():
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        compiled = outputs_and_gradient(fast)
        with torch.no_grad():
            torch.testing.assert_close(fast(case.w, case.temperature), tuple(compiled[:-2]))
    torch.testing.assert_close(compiled, outputs_and_gradient(layer))


def refuse_float64_elsewhere(function, args, output):
    """Refuse float64 off the CPU, as some devices do; here the meta device takes their place."""
    for x in tree_leaves(output):
        if isinstance(x, torch.Tensor) and x.dtype == torch.float64 and x.device.type != "cpu":
            raise TypeError(f"{function} made float64 on {x.device}")


def test_decay_makes_no_float64_on_the_device_of_w():
    x, start = torch.empty(2, 70, 3, 4, device="meta"), torch.empty(2, 3, 4, device="meta")
    with Operations(refuse_float64_elsewhere):
        rate = decay_rates(half_lives(3), x.device)
        found = running_sum(x, start, rate, None)
        with pytest.raises(TypeError, match="made float64 on meta"):
            x.double()
    assert (rate.device.type, found.device.type) == ("cpu", "meta")
    assert found.shape == x.shape


@impls
@causalities
def test_autocast_changes_nothing(impl, is_causal):
    case = Case((2, 70, 3, 8), causal=is_causal, decayed=is_causal, biased=is_causal, dtype=torch.float32)
    plain = outputs(case.run(impl))
    with torch.autocast("cpu", torch.bfloat16):
        cast = outputs(case.run(impl))
    assert all(torch.equal(cast[name], x) for name, x in plain.items())


@impls
@causalities
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_output_in_the_dtype_of_w_and_sums_at_least_in_float32(impl, is_causal, dtype):
    case = Case((1, 9, 2, 4), causal=is_causal, dtype=dtype)
    case.w.requires_grad_()
    found = case.run(impl)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.output.dtype == dtype
    assert found.membership.dtype == exact
    if is_causal:
        assert {part.dtype for part in found.state[:3]} == {exact}
        assert found.state.seen.dtype == torch.int64
    found.output.sum().backward()
    assert case.w.grad.dtype == dtype


@causalities
def test_nothing_of_the_size_of_w_is_kept_for_the_backward_pass_but_w(is_causal):
    case = Case((1, 512, 4, 32), causal=is_causal, decayed=is_causal, biased=is_causal)
    case.w.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        case.run("cpu")
    large = [x for x in kept if x.numel() >= case.w.numel() // 8]
    assert [x.data_ptr() for x in large] == [case.w.data_ptr()]


def test_a_second_derivative_through_the_cpu_kernels_is_an_error():
    case = Case((1, 5, 2, 3))
    case.w.requires_grad_()
    (first,) = torch.autograd.grad(case.run("cpu").output.square().sum(), case.w, create_graph=True)
    with pytest.raises(InputError, match=r'second derivatives of TSSA.* Pass impl="reference"'):
        torch.autograd.grad(first.sum(), case.w)
    (first,) = torch.autograd.grad(case.run("reference").output.square().sum(), case.w, create_graph=True)
    assert torch.autograd.grad(first.sum(), case.w)[0].abs().max() > 0


@causalities
def test_vmap_changes_neither_outputs_nor_gradients(is_causal):
    case = Case((3, 7, 2, 3), causal=is_causal)
    w = case.w.clone().requires_grad_()
    batched = torch.vmap(lambda x: tssa(x[None], case.temperature, is_causal).output)
    found = batched(w)[:, 0], tssa(w, case.temperature, is_causal).output
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), w)[0] for y in found))
    with torch.no_grad():
        torch.testing.assert_close(batched(w)[:, 0], found[1])


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda w: f(w).square().sum()),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda row: f(row[None]).square().sum())),
    "hessian": lambda f: torch.func.hessian(lambda w: f(w).square().sum()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@causalities
def test_transforms_of_functions_use_the_reference(name, is_causal):
    case = Case((2, 5, 2, 3), causal=is_causal, masked=False)

    def by(impl):
        return TRANSFORMS[name](lambda w: tssa(w, case.temperature, is_causal, impl=impl).output)(case.w)

    torch.testing.assert_close(by("auto"), by("reference"), rtol=0, atol=0)
    with pytest.raises(
        InputError, match=r'impl=.cpu.: expected derivatives by .backward.* Pass impl="reference"'
    ):
        by("cpu")


def test_forward_mode_derivatives_are_refused_not_dropped():
    case = Case((1, 5, 2, 3))

    def loss(w, impl):
        return tssa(w, case.temperature, impl=impl).output.square().sum()

    ones = torch.ones_like(case.w)
    _, slope = torch.func.jvp(lambda w: loss(w, "reference"), (case.w,), (ones,))
    assert slope != 0
    with pytest.raises(InputError, match=r'forward-mode.*impl="reference"'):
        torch.func.jvp(lambda w: loss(w, "cpu"), (case.w,), (ones,))
