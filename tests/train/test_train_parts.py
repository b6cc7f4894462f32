"""Models of equal size, weights that decay, the order of examples, what is right."""

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import EvalPrediction

from rankwise.data.tasks import Task, mqar
from rankwise.errors import InputError
from rankwise.models import ToSTConfig, ToSTForCausalLM
from rankwise.train.checks import check_mixed
from rankwise.train.models import MODELS, build_model, count_parameters, model_config
from rankwise.train.optimiser import Together, make_optimiser, weights_by_treatment
from rankwise.train.recipes import recipe
from rankwise.train.recipes.language import Model as Language
from rankwise.train.recipes.long_range import Model as LongRange
from rankwise.train.scores import accuracy, right_and_asked
from rankwise.train.settings import ModelSettings, OptimiserSettings
from rankwise.train.stream import Stream


@pytest.fixture(scope="module")
def task() -> Task:
    return mqar(train=4, test=4, vocab_size=32, length=16, pairs=2)


@pytest.mark.parametrize("name", MODELS)
def test_models_get_the_size_that_is_asked_for(name: str, task: Task) -> None:
    settings = ModelSettings(name=name, width=16, layers=4, heads=2, parameters=20_000)
    model = build_model(settings, task, 16)
    count = sum(one.numel() for one in model.parameters())
    assert count == count_parameters(settings, task, 16)
    unit = 4 * 3 * 16  # a unit of feed-forward width in 4 layers has at most three rows of the model's width
    assert abs(count - 20_000) <= unit
    assert model(**task.collate([task.train[0]])).loss.isfinite()


FRAME = {"membership": "softmax", "half_life": None, "mixer_options": {}, "gate": False}
DECAYED = {"half_life": [4.0, 16.0]}  # of two heads and 16 tokens
CONTENT = {"tssa": {"conv_tokens": 4, "features": 16}}
ROTARY = {"softmax": {"rotary_base": 10_000.0}}
EVERY_FOURTH = {"layer_types": ["tssa", "tssa", "tssa", "softmax"]}
NAMED: dict[str, dict[str, Any]] = {
    "tost": {},
    "tost-decayed": DECAYED,
    "tost-uniform": {"membership": "uniform"},
    "tost-hybrid": DECAYED | EVERY_FOURTH | {"mixer_options": ROTARY},
    "tost-scan": DECAYED | {"mixer_options": CONTENT},
    "tost-scan-hybrid": DECAYED | EVERY_FOURTH | {"mixer_options": CONTENT | ROTARY},
    "softmax-rotary": {"mixer_options": ROTARY},
    **{name: {} for name in ("softmax", "linear", "s4d", "mamba", "mamba2")},
}
"""What the tables of the results say that these models are."""


@pytest.mark.parametrize("name", [name for name in MODELS if name != "transformer"])
def test_models_are_what_their_names_say(name: str, task: Task) -> None:
    config = model_config(ModelSettings(name=name, width=16, layers=4, heads=2), task, 16)
    mixer = {"layer_types": ["tssa" if name.startswith("tost") else name.split("-")[0]] * 4}
    wanted = FRAME | mixer | NAMED[name]
    assert {field: getattr(config, field) for field in wanted} == wanted


SIZED = (
    [("language", name, {"model": name}) for name in get_args(Language)]
    + [
        ("long-range", f"{task} {name}", {"model": name, "task": task})
        for name, task in product(get_args(LongRange), ("listops", "text", "image"))
    ]
    + [("vision", name, {"model": name}) for name in ("transformer", "tost")]
)


@pytest.mark.parametrize(("name", "label", "row"), SIZED, ids=[f"{name} {label}" for name, label, _ in SIZED])
@pytest.mark.parametrize("size", ["small", "paper"])
def test_every_model_of_a_recipe_can_have_the_weights_asked_for(
    task: Task, size: str, name: str, label: str, row: dict[str, Any]
) -> None:
    made = recipe(name, size=size, **row)
    kind = {"language": "language", "long-range": "sequence", "vision": "image"}[name]
    sizes: dict[str, Any] = {"vocab_size": 256, "num_labels": 10, "image_shape": (3, 32, 32)}
    read = replace(task, kind=kind, length=made.task.tokens, **sizes)
    count = count_parameters(made.model, read, made.task.tokens)
    assert made.model.parameters is None or abs(count / made.model.parameters - 1) < 0.005


def test_options_of_one_mixer_leave_those_of_another(task: Task) -> None:
    settings = ModelSettings(
        name="tost-hybrid", width=16, heads=2, options={"mixer_options": {"tssa": {"conv_tokens": 3}}}
    )
    made = model_config(settings, task, 16).mixer_options
    assert made == {"tssa": {"conv_tokens": 3}, "softmax": {"rotary_base": 10_000}}
    plain = settings.model_copy(update={"options": {"mixer_options": {"softmax": {"rotary_base": None}}}})
    assert model_config(plain, task, 16).mixer_options == {"softmax": {"rotary_base": None}}


def test_a_model_that_cannot_be_so_small_is_refused(task: Task) -> None:
    with pytest.raises(
        InputError, match=r"`model.parameters`: expected at least [\d,]+ for tost at width 16"
    ):
        build_model(ModelSettings(name="tost", width=16, parameters=10), task, 16)


def test_unknown_models_and_options_are_named(task: Task) -> None:
    with pytest.raises(InputError, match="Did you mean tost"):
        build_model(ModelSettings(name="tots"), task, 16)
    with pytest.raises(InputError, match=r"`model.options.norm_postion`.*Did you mean norm_position"):
        build_model(ModelSettings(name="tost", options={"norm_postion": "post"}), task, 16)
    with pytest.raises(InputError, match=r"`model.options.zzz`") as told:
        build_model(ModelSettings(name="transformer", width=16, heads=2, options={"zzz": 1}), task, 16)
    assert "attention_bias" in told.value.fix
    assert not [word for word in told.value.fix.replace(",", " ").split() if word.startswith("_")]


def test_a_vocabulary_too_small_for_the_task_is_refused(task: Task) -> None:
    for name in ("transformer", "tost"):
        settings = ModelSettings(name=name, width=16, layers=4, heads=2, options={"vocab_size": 31})
        with pytest.raises(InputError, match=r"vocab_size`: expected at least 32, .* got 31"):
            build_model(settings, task, 16)


def small_tost() -> ToSTForCausalLM:
    torch.manual_seed(0)
    config = ToSTConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, skip="learned",
        layer_types=["tssa", "s4d"], max_position_embeddings=8,
    )  # fmt: skip
    return ToSTForCausalLM(config)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_weights_that_multiply_decay(name: str) -> None:
    model = small_tost()
    before = {key: value.clone() for key, value in model.named_parameters()}
    settings = OptimiserSettings(name=name, weight_decay=0.5, learning_rate=0.1)
    optimiser = make_optimiser(model, settings)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    optimiser.step()
    shrunk = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    layers = (nn.Linear, nn.Embedding)
    wanted = {f"{key}.weight" for key, one in model.named_modules() if isinstance(one, layers)}
    assert shrunk == wanted & before.keys()
    assert not any("skip" in key for key in shrunk)


def test_steps_of_muon_are_as_large_as_those_of_adamw() -> None:
    """RMS 0.2 of the rate, whatever the shape; its orthogonal factors have singular values of 0.7 to 1.2."""
    model = small_tost()
    optimiser = make_optimiser(model, OptimiserSettings(name="muon", weight_decay=0.0, learning_rate=0.1))
    matrices = weights_by_treatment(model)["matrices"]
    before = [one.detach().clone() for one in matrices]
    for one in model.parameters():
        one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel()))
    optimiser.step()
    assert len({one.shape for one in matrices}) > 1
    for one, start in zip(matrices, before, strict=True):
        step = (one.detach() - start).square().mean().sqrt().item()
        assert 0.7 * 0.02 < step < 1.2 * 0.02


def test_every_weight_is_in_one_group() -> None:
    model = small_tost()
    groups = weights_by_treatment(model)
    names = [id(one) for group in groups.values() for one in group]
    assert sorted(names) == sorted(id(one) for one in model.parameters())
    assert all(one.ndim == 2 for one in groups["matrices"])
    assert id(model.lm_head.weight) not in [id(one) for one in groups["matrices"]]


def test_optimisers_together_go_on_from_what_they_kept() -> None:
    def stepped(model: nn.Module, optimiser: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for one in model.parameters():
                one.grad = torch.randn(one.shape, generator=generator)
            for group in optimiser.param_groups:
                group["lr"] = 0.1 / (1 + step)
            optimiser.step()

    settings = OptimiserSettings(name="muon")
    whole, half = small_tost(), small_tost()
    first = make_optimiser(whole, settings)
    assert isinstance(first, Together)
    stepped(whole, first, range(4))
    before = make_optimiser(half, settings)
    stepped(half, before, range(2))
    after = make_optimiser(half, settings)
    after.load_state_dict(before.state_dict())
    stepped(half, after, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), half.parameters(), strict=True))


class Drawn(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": index + torch.rand(1).double()}


def drawn(stream: Stream) -> list[float]:
    return [stream[at]["x"].item() for at in range(15)]


def test_an_example_depends_on_its_number_and_the_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    stream = Stream(Drawn(), 15, seed=2)
    once = drawn(stream)
    assert torch.equal(torch.get_rng_state(), state)
    again = Stream(Drawn(), 15, seed=2)
    assert [again[at]["x"].item() for at in reversed(range(15))] == once[::-1]
    assert drawn(Stream(Drawn(), 15, seed=3)) != once
    assert len({round(value % 1, 6) for value in once}) == 15, "drawn anew for each, in each epoch"
    for start in range(0, 15, 5):
        assert sorted(int(value) for value in once[start : start + 5]) == [0, 1, 2, 3, 4]


def test_every_seed_has_examples_of_its_own() -> None:
    seeds = [0, 1, 2**24 - 1, 2**24, 20261123, 2**32 - 1]
    drawn = {round(Stream(Drawn(), 15, seed)[4]["x"].item() % 1, 6) for seed in seeds}
    assert len(drawn) == len(seeds), "what is drawn differs, not the order alone"


def test_accuracy_is_that_of_the_task(task: Task) -> None:
    from rankwise.data import tasks

    batch = task.collate([task.test[at] for at in range(4)])
    logits = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
    logits[:2, :-1].scatter_(2, batch["labels"][:2, 1:].clamp(min=0)[..., None], 9.0)
    counts = right_and_asked((logits, None), batch["labels"])
    ours = accuracy(EvalPrediction(counts.numpy(), batch["labels"].numpy()))["accuracy"]
    assert ours == pytest.approx(tasks.accuracy(logits, batch["labels"]))
    assert 0 < ours < 1
    classes = right_and_asked(torch.eye(3), torch.tensor([0, 2, 2]))
    assert classes.tolist() == [[1, 1], [0, 1], [1, 1]]


def test_the_first_of_examples_that_are_sorted_by_class_judge_nothing() -> None:
    ordered, mixed = [0] * 250 + [1] * 250, [0, 1] * 250
    with pytest.raises(
        InputError, match=r"`evaluation.examples`.* got class 0 in 100% of the first, 50% of all"
    ):
        check_mixed(ordered, 100)
    with pytest.raises(InputError, match="class 0 in 83%"):
        check_mixed(ordered, 300)
    check_mixed(mixed, 100)
    check_mixed(ordered, 20)  # too few to tell
    draw = torch.Generator().manual_seed(0)
    for most in (1, 10, 100, 900):
        check_mixed(torch.randint(10, (1000,), generator=draw).tolist(), most)
