"""Copies of models at initialization: weights are drawn by methods of the model, or the copy is refused."""

import copy

import pytest
import torch
from experiments.zoo.transformers import BERT, FAMILIES, hugging_face, nano_gpt
from tests.support.untouched import untouched
from torch import nn

from rankwise.auditing import InitializationError, reinitialized


class Positions(nn.Module):
    """Has a weight that no method draws."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 8))
        self.linear = nn.Linear(8, 8)


class Drawn(Positions):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.5)


class Applied(Positions):
    """One method draws the weights of all modules, through `apply` as in nanoGPT."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Positions):
            nn.init.constant_(module.table, 3.0)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=7.0)


class Wrapped(nn.Module):
    """Transformers model inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = hugging_face("BertModel", **BERT)()
        self.head = nn.Linear(4, 2)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


MODELS = {
    "encoder of torch": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ),
    "transformer of torch": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "own reset": Drawn,
    "for apply": Applied,
    "transformers": hugging_face("BertModel", **BERT),
    "transformers inside": Wrapped,
    "nanoGPT": nano_gpt,
}


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_drawn_by_the_seed_and_the_model_is_untouched(name: str) -> None:
    model = MODELS[name]()
    before = state(model)
    with untouched(model):
        drawn, again, other = (reinitialized(model, seed=seed) for seed in (1, 1, 2))
    assert equal(state(drawn), state(again))
    assert not equal(state(drawn), state(other))
    for at, weight in drawn.named_parameters():
        assert bool(weight.isfinite().all()), at
        if weight.dim() > 1:
            assert not torch.equal(weight, before[at]), at
    assert not {one.data_ptr() for one in model.parameters()} & {one.data_ptr() for one in drawn.parameters()}


def test_drawn_weights_do_not_depend_on_trained_weights() -> None:
    model, trained = (MODELS["encoder of torch"]() for _ in range(2))
    with torch.no_grad():
        for weight in trained.parameters():
            weight.mul_(5).add_(1)
    assert equal(state(reinitialized(model, seed=1)), state(reinitialized(trained, seed=1)))


def test_the_method_of_the_model_is_called_last() -> None:
    fresh = reinitialized(Applied())
    assert bool((fresh.table == 3).all())
    assert float(fresh.linear.weight.detach().std()) > 3


class Sharded(nn.Linear):
    """Cannot be copied."""

    def __deepcopy__(self, memo: object) -> None:
        raise AssertionError("FSDP does not support deepcopy")


def more() -> nn.Module:
    model = Positions()
    model.more = nn.Parameter(torch.zeros(2))
    return model


def other_configuration() -> nn.Module:
    model = MODELS["transformers"]()
    model.encoder.layer[0].attention.register_parameter("skip", nn.Parameter(torch.ones(1)))
    return model


def integers() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Sharded(2, 2), r"can be copied, got .*deepcopy.*factory=build"),
        (Positions, r"'table'.*factory=build"),
        (more, r"'table'.*factory=build"),
        (other_configuration, r"no weight|'encoder.layer.0.attention.skip'"),
        (integers, "int8"),
    ],
)
def test_a_model_with_weights_that_cannot_be_drawn_is_refused(build, message: str) -> None:
    with pytest.raises(InitializationError, match=message):
        reinitialized(build())


def test_a_factory_draws_weights_by_the_seed() -> None:
    model = Positions()
    one, again, other = (reinitialized(model, seed, Positions) for seed in (1, 1, 2))
    assert equal(state(one), state(again))
    assert not equal(state(one), state(other))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: nn.Linear(8, 8), "'table' of shape"),
        (lambda: nn.Sequential(Positions()), "table"),
        (lambda: "a model", "expected a module, got str"),
    ],
)
def test_a_factory_of_another_model_is_refused(factory, message: str) -> None:
    with pytest.raises(InitializationError, match=message):
        reinitialized(Positions(), factory=factory)


def test_dtypes_modes_and_shared_weights_stay() -> None:
    model = hugging_face("GPT2LMHeadModel", "GPT2Config", n_embd=8, n_head=2, n_layer=1, vocab_size=64)()
    model.transformer.h[0].bfloat16().train()
    fresh = reinitialized(model)
    for (name, old), new in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert old.dtype == new.dtype, name
    assert [one.training for one in model.modules()] == [one.training for one in fresh.modules()]
    assert fresh.lm_head.weight is fresh.transformer.wte.weight


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_reinitialized_and_runs(family) -> None:
    model = family.build(family.implementations[0])
    fresh = reinitialized(copy.deepcopy(model), seed=0)
    with torch.no_grad():
        fresh(**family.inputs())
