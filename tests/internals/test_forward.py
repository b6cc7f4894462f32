"""A model is called as its batch says, and whatever is changed in it is undone."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rankwise._internals.forward import (
    AddedHook,
    Change,
    batch_size,
    device_of,
    eval_mode,
    first_sequences,
    run_model,
    tensors_of,
    to_device,
)


class Pair(NamedTuple):
    x: Tensor
    bias: Tensor


TIME_FIRST, BIAS = torch.randn(9, 6, 8), torch.randn(9, 9)


@pytest.mark.parametrize(
    "batch",
    [TIME_FIRST, (TIME_FIRST, BIAS), [TIME_FIRST, 2.0], Pair(TIME_FIRST, BIAS)],
    ids=["tensor", "tuple", "list", "namedtuple"],
)
def test_a_batch_whose_axes_have_no_names_is_sampled_whole(batch: Any) -> None:
    sample = first_sequences(batch, 4)
    assert type(sample) is type(batch)
    whole, copies = ([batch], [sample]) if isinstance(batch, Tensor) else (batch, sample)
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(whole, copies, strict=True)
    )
    assert whole[0].data_ptr() != copies[0].data_ptr()


def test_of_a_dict_the_first_sequences_are_sampled_and_what_is_no_batch_is_whole() -> None:
    x, scale = torch.randn(6, 9, 8), torch.tensor(2.0)
    batch = {"scale": scale, "x": x, "bias": BIAS, "labels": torch.arange(6), "past": Pair(x, BIAS), "on": 1}
    sample = first_sequences(batch, 4)
    assert torch.equal(sample["x"], x[:4])
    assert torch.equal(sample["bias"], BIAS)
    assert torch.equal(sample["scale"], scale)
    assert sample["labels"].tolist() == [0, 1, 2, 3]
    assert [len(tensor) for tensor in sample["past"]] == [4, 9]
    assert sample["on"] == 1


class Seen(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs


def test_a_dict_a_tuple_and_a_tensor_are_passed_by_name_by_place_and_as_they_are() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    assert run_model(Seen(), {"x": x, "y": y}) == ((), {"x": x, "y": y})
    assert run_model(Seen(), (x, y)) == run_model(Seen(), [x, y]) == ((x, y), {})
    assert run_model(Seen(), x) == ((x,), {})


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_gets_its_mode_back(fails: bool) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Dropout().eval())).train()
    model[1].training = False
    modes = [module.training for module in model.modules()]
    try:
        with eval_mode(model):
            assert not any(module.training for module in model.modules())
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert [module.training for module in model.modules()] == modes


class Noting(nn.Module):
    """Notes what mode it was called to take."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.called = nn.ModuleList(inner), []

    def train(self, mode: bool = True) -> "Noting":
        self.called.append(mode)
        super().train(mode)
        return self


def test_modules_are_called_to_take_the_mode_they_were_in() -> None:
    frozen, within, beside = Noting(), Noting(), Noting()
    model = nn.Sequential(Noting(frozen, within), nn.Sequential(beside), nn.Dropout()).train()
    frozen.eval()
    modes = [module.training for module in model.modules()]
    for module in (model[0], frozen, within, beside):
        module.called.clear()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    assert model[0].called == within.called == beside.called == [False, True]
    assert frozen.called[-1] is False


def test_modes_come_back_where_a_module_fails_to_take_its_own() -> None:
    class Failing(nn.Module):
        def train(self, mode: bool = True) -> "Failing":
            super().train(mode)
            if mode:
                raise KeyError
            return self

    model = nn.Sequential(Failing(), nn.Dropout())
    with pytest.raises(KeyError), eval_mode(model):
        pass
    assert all(module.training for module in model.modules())


def test_tensors_are_found_and_moved_wherever_they_lie() -> None:
    batch = {"n": 3, "x": torch.ones(2, 3), "more": Pair(torch.ones(1), [torch.ones(1)])}
    there = to_device(batch, torch.device("meta"))
    assert (
        there["x"].device.type == there["more"].x.device.type == there["more"].bias[0].device.type == "meta"
    )
    assert (there["n"], list(tensors_of(batch)), batch_size(batch)) == (3, ["x"], 2)
    assert device_of(nn.Linear(1, 1)) == torch.device("cpu")


def doubled(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return 2 * output


def plus_one(module: nn.Module, args: tuple[Tensor], kwargs: Any) -> tuple[tuple[Tensor], Any]:
    return (args[0] + 1,), kwargs


def change_of(model: nn.Module, **more: Any) -> Change:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return Change(
        model,
        modules={"1": inner, "1.1": nn.Identity(), "0": nn.Linear(4, 4)},
        attributes={
            "": {"note": 3, "scale": None},
            "0": {"bias": None, "in_features": 5},
            "2": {"running_mean": torch.ones(4), "weight": None},
        },
        hooks=[
            AddedHook("0", "after", doubled),
            AddedHook("0", "before", plus_one, prepend=True),
            AddedHook("1", "after", doubled),
        ],
        **more,
    )


def whole_state(model: nn.Module) -> list[Any]:
    """Names and identities of all that modules hold, in order."""
    return [
        (
            name,
            id(module),
            key,
            [(k, id(v)) for k, v in value.items()] if isinstance(value, dict) else id(value),
        )
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    ]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4)).eval()
    model.scale = 2.0
    model[0].register_forward_hook(lambda *_: None)
    model[0].register_forward_pre_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("times", [1, 2])
def test_a_change_is_undone_exactly(times: int) -> None:
    model, x = small_model(), torch.randn(3, 4)
    before, output = whole_state(model), model(x)
    change = change_of(model)
    for _ in range(times):
        change.apply()
        assert (model.note, model.scale, model[0].bias, model[0].in_features) == (3, None, None, 5)
        assert isinstance(model[1][1], nn.Identity)
        expected = nn.functional.batch_norm(
            2 * model[1][0](2 * (x + 1) @ model[0].weight.mT), torch.ones(4), model[2].running_var,
            None, model[2].bias,
        )  # fmt: skip
        assert torch.allclose(model(x), expected)
        change.undo()
        assert whole_state(model) == before
        assert torch.equal(model(x), output)
    change.undo()  # nothing is left to undo
    assert whole_state(model) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"modules": {"1": nn.ReLU(), "7.x": nn.ReLU()}},
        {"attributes": {"0": {"in_features": 3, "weight": 3.0}}},
        {"attributes": {"0": {"in_features": 3}}, "hooks": [AddedHook("9", "after", doubled)]},
    ],
)
def test_a_change_is_applied_whole_or_not_at_all(wrong: dict[str, Any]) -> None:
    model = small_model()
    before = whole_state(model)
    with pytest.raises((AttributeError, TypeError)):
        Change(model, **wrong).apply()
    assert whole_state(model) == before


def test_a_change_is_undone_where_its_block_fails() -> None:
    model = small_model()
    before = whole_state(model)
    with pytest.raises(KeyError), change_of(model):
        raise KeyError
    assert whole_state(model) == before


def test_a_change_of_one_of_two_names_of_a_module_leaves_the_other() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    with Change(model, modules={"a": nn.Identity()}):
        assert model["b"] is shared
    assert model["a"] is model["b"] is shared
