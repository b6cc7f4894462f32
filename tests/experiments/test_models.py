"""Models of the training experiments: equal size, the mixers of their names, λ as requested."""

from typing import Any

import pytest
import torch
from experiments.registry import EXPERIMENTS
from experiments.tasks.mqar import mqar
from experiments.tasks.task import Task, collate
from experiments.training import cost
from experiments.training.config import TrainingConfig
from experiments.training.cost import weights_of
from experiments.training.models import MODELS, build_model, model_config, parameter_count
from torch import Tensor

PLACE = {"task": "mqar", "tokens": 16, "width": 16, "heads": 2}


@pytest.fixture(scope="module")
def task() -> Task:
    return mqar(train=4, test=4, vocab_size=32, length=16, pairs=2)


@pytest.mark.parametrize("name", MODELS)
def test_models_get_the_requested_size(name: str, task: Task) -> None:
    model = build_model(TrainingConfig(model=name, parameters=20_000, **PLACE), task)
    unit = 4 * 3 * 16  # a unit of feed-forward width in 4 layers has at most three rows of the model's width
    assert abs(sum(one.numel() for one in model.parameters()) - 20_000) <= unit
    assert model(**collate([task.train[0]])).loss.isfinite()


FRAME = {"half_life": None, "mixer_options": {}, "gate": False}
DECAYED = {"half_life": [4.0, 16.0]}  # two heads, 16 tokens
CONTENT = {"tssa": {"conv_tokens": 4, "features": 16}}
ROTARY = {"softmax": {"rotary_base": 10_000.0}}
EVERY_FOURTH = {"layer_types": ["tssa", "tssa", "tssa", "softmax"]}
NAMED: dict[str, dict[str, Any]] = {
    "tost-decayed": DECAYED,
    "tost-uniform": {"uniform_memberships": True, "position_bias": False},
    "tost-hybrid": DECAYED | EVERY_FOURTH | {"mixer_options": ROTARY},
    "tost-scan": DECAYED | {"mixer_options": CONTENT},
    "tost-scan-hybrid": DECAYED | EVERY_FOURTH | {"mixer_options": CONTENT | ROTARY},
    "softmax-rotary": {"mixer_options": ROTARY},
}
"""What the tables of the results say that these models are, if they are not one mixer in its plain form."""


@pytest.mark.parametrize("name", [name for name in MODELS if name != "transformer"])
def test_models_are_what_their_names_say(name: str, task: Task) -> None:
    made = model_config(TrainingConfig(model=name, **PLACE), task)
    mixer = {"layer_types": ["tssa" if name.startswith("tost") else name.split("-")[0]] * 4}
    wanted = FRAME | mixer | NAMED.get(name, {})
    assert {field: getattr(made, field) for field in wanted} == wanted


def task_of(row: TrainingConfig) -> Task:
    vocabulary = {"tokens": 1024, "listops": 16, "imdb-bytes": 259, "bytes": 259}.get(row.task, 256)
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "num_labels": 10, "image_shape": (3, 32, 32)}
    kinds = {"bytes": "language", "tokens": "language", "mqar": "language", "cifar10": "image"}
    kind: Any = kinds.get(row.task, "sequence")
    return Task(kind, row.tokens, **sizes, pad_token_id=0)


SIZED = {
    str((row.model, row.width, row.heads, row.layers, row.task, row.parameters)): row
    for experiment in EXPERIMENTS.values()
    for row in [*experiment.rows.values(), *experiment.large.values()]
    if row.parameters or row in experiment.large.values()
}


@pytest.mark.parametrize("name", sorted({row.model for row in SIZED.values()}))
def test_every_row_can_have_the_parameters_it_names(name: str) -> None:
    """Rows at the size of a paper that name none have the parameters from which their cost is estimated."""
    for row in SIZED.values():
        if row.model != name:
            continue
        count = parameter_count(model_config(row, task_of(row)), task_of(row))
        if row.parameters:
            assert abs(count / row.parameters - 1) < 0.005, row
        else:
            assert 0.75 < count / weights_of(row) < 1.55, row


def test_the_transformer_has_the_parameters_of_the_others() -> None:
    parts, language = (EXPERIMENTS[name] for name in ("language-parts", "language"))
    for rows, end in ((parts.rows, ""), (language.rows, ""), (language.large, ", paper size")):
        pair = [rows[f"{name}{end}"] for name in ("transformer", "tost")]
        counts = [parameter_count(model_config(one, task_of(one)), task_of(one)) for one in pair]
        assert abs(counts[0] / counts[1] - 1) < 0.003


STEP: dict[str, Any] = {
    "task": "bytes",
    "width": 256,
    "layers": 2,
    "heads": 4,
    "tokens": 128,
    "batch": 2,
    "steps": 1,
}


@pytest.mark.parametrize("name", ["transformer", "softmax", "tost", *cost.KEPT])
def test_the_estimate_of_memory_is_near_the_memory_that_a_step_keeps(name: str) -> None:
    row = TrainingConfig(model=name, **STEP | {"layers": 4 if name.endswith("hybrid") else 2})
    model, ids = build_model(row, task_of(row)), torch.randint(3, 259, (row.batch, row.tokens))
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    activations = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    estimated = cost.gpu_gib(row) * 2**30 - 16 * weights_of(row)
    assert 0.75 < activations / estimated < 1.35


def test_sizes_and_options_that_no_model_has_are_refused(task: Task) -> None:
    with pytest.raises(ValueError, match=r"expected at least [\d,]+ parameters"):
        build_model(TrainingConfig(model="tost", parameters=10, **PLACE), task)
    with pytest.raises(ValueError, match="expected fields of ToSTConfig, got norm_postion"):
        build_model(TrainingConfig(model="tost", model_options={"norm_postion": "post"}, **PLACE), task)


@pytest.mark.parametrize("skip", [-2, 0, 2, "learned", "channel", "shared"])
def test_skips_are_as_requested(skip: Any, task: Task) -> None:
    row = EXPERIMENTS["skips-recall"].rows[f"softmax λ={skip}"]
    kept = [layer.skip for layer in build_model(row, task).model.layers]
    x = torch.ones(1, 1, row.width)
    wanted = -1.0 if isinstance(skip, str) else float(skip)
    assert all(torch.equal(one(x, 0 * x), wanted * x) for one in kept)
    size = {"learned": 1, "shared": 1, "channel": row.width}.get(skip, 0)
    assert [0 if one.weight is None else one.weight.numel() for one in kept] == [size] * len(kept)
    assert len({id(one.weight) for one in kept}) == (2 if skip in ("learned", "channel") else 1)
