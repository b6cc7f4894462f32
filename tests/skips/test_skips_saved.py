"""Saved λ-skips: loading restores the same numbers, and refuses broken files and other models."""

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, hugging_face, text_inputs
from safetensors.torch import load_file, save_file
from tests.skips.cases import FOUND, outputs, same
from tests.support.torch_names import checkpoint_wrapper
from tests.support.untouched import untouched
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import rankwise as rw
from rankwise.compression import save_compressed
from rankwise.errors import InputError
from rankwise.skips import (
    SkipError,
    add_lambda_skip,
    load_skips,
    save_skips,
    skips_of,
)

bert = hugging_face("BertModel", **BERT)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a folder with the λ-skips of a BERT."""
    save_skips_of(bert(), tmp_path)
    return tmp_path


def save_skips_of(model: nn.Module, folder: Path, **arguments: Any) -> None:
    add_lambda_skip(model, init=0.5, **arguments)
    save_skips(model, folder)


def test_skips_of_a_compressed_model_are_saved_in_the_documented_order(tmp_path: Path) -> None:
    model, batch = bert(), {"input_ids": torch.arange(96).reshape(4, 24) % 50}
    rw.compress(model, [batch], keep=0.5)
    save_skips_of(model, tmp_path / "skips")
    with pytest.raises(rw.RankwiseError, match="λ-skips by `save_skips` and `remove_lambda_skip`"):
        save_compressed(model, tmp_path / "folder")
    rw.remove_lambda_skip(model)
    save_compressed(model, tmp_path / "folder")
    load_skips(model, tmp_path / "skips")
    save_skips(model, tmp_path / "folder")
    again = rw.load_compressed(tmp_path / "folder")
    assert len(load_skips(again, tmp_path / "folder")) == 3
    assert same(outputs(again, batch), outputs(model, batch))


def test_skips_are_loaded_after_the_weights_of_a_saved_model(tmp_path: Path) -> None:
    model = bert()
    save_skips_of(model, tmp_path)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert not skips_of(again)
    load_skips(again, tmp_path)
    assert same(outputs(again, text_inputs()), outputs(model, text_inputs()))


@pytest.mark.parametrize(
    ("name", "per"), [("BERT", "layer"), ("T5", "channel"), ("ALBERT", "layer"), ("Mamba-2", "channel")]
)
def test_saved_skips_are_loaded(name: str, per: str, tmp_path: Path) -> None:
    model, batch = FOUND[name][0]()
    skips = add_lambda_skip(model, per=per, learnable=False, example=batch)
    for at, parameter in enumerate(skips.values()):
        parameter.requires_grad_(at > 0).data.copy_(torch.rand(parameter.shape))
    numbers, facts = save_skips(model, tmp_path / "deep" / "er", made={"steps": 3})
    assert numbers.parent == facts.parent
    (tmp_path / "plain").touch()  # has the mode of the umask
    assert {path.stat().st_mode for path in (numbers, facts)} == {(tmp_path / "plain").stat().st_mode}
    assert json.loads(facts.read_text())["made"] == {"steps": 3}
    other, _ = FOUND[name][0]()
    loaded = load_skips(other, numbers.parent, example=batch)
    assert list(loaded) == list(skips)
    assert all(torch.equal(loaded[name], skips[name]) for name in skips)
    assert [one.requires_grad for one in loaded.values()] == [at > 0 for at in range(len(skips))]
    assert same(outputs(other, batch), outputs(model, batch))


def test_some_of_the_sites_can_be_saved(tmp_path: Path) -> None:
    save_skips_of(bert(), tmp_path, sites="encoder.layer.[02]")
    assert list(load_skips(bert(), tmp_path)) == [
        f"encoder.layer.{at}.attention.output.dropout" for at in (0, 2)
    ]


def test_a_folder_without_skips_changes_nothing(saved: Path, tmp_path: Path) -> None:
    model = bert()
    with untouched(model):
        assert not load_skips(model, tmp_path / "empty", missing_ok=True)
        assert not load_skips(model, "some/name-on-the-hub", missing_ok=True)
    assert len(load_skips(model, saved, missing_ok=True)) == 3


def test_the_skips_of_a_model_are_not_replaced(saved: Path) -> None:
    model = bert()
    add_lambda_skip(model, init=3.0, learnable=False, sites="encoder.layer.1")
    with untouched(model), pytest.raises(SkipError, match="expected a model without λ-skips, got one with 1"):
        load_skips(model, saved)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(nn.DataParallel(model))


def by_block(wrap: Any) -> Any:
    """Return a function that wraps each block of a BERT, and the model too."""

    def wrapped(model: nn.Module) -> nn.Module:
        model.encoder.layer = nn.ModuleList(map(wrap, model.encoder.layer))
        return wrap(model)

    return wrapped


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel, averaged, nn.Sequential, partial(torch.compile, backend="eager"),
        by_block(partial(torch.compile, backend="eager")), by_block(checkpoint_wrapper),
    ],
)  # fmt: skip
def test_skips_of_a_wrapped_model_are_saved_for_the_model(wrap: Any, saved: Path) -> None:
    model = bert()
    add_lambda_skip(model, init=3.0, sites="encoder.layer.1")
    save_skips(wrap(model), saved)
    assert [value.item() for value in load_skips(bert(), saved).values()] == [3.0]


def with_adapter(model: nn.Module) -> nn.Module:
    """Replace a module as LoRA does, which keeps the original as `base_layer`."""
    model.pooler.dense.base_layer = nn.Linear(2, 2)
    return model


def renamed(model: nn.Module) -> nn.Module:
    """Give the blocks another name."""
    model.encoder.blocks = model.encoder.layer
    del model.encoder.layer
    return model


@pytest.mark.parametrize("wrap", [nn.DataParallel, averaged])
def test_loading_into_a_wrapper_names_the_model_inside(wrap: Any, saved: Path) -> None:
    wrapped = wrap(bert())
    with pytest.raises(SkipError, match=r"Pass the model inside, `(model\.[a-z_.]*)`, before") as raised:
        load_skips(wrapped, saved, example=text_inputs())
    inside = str(raised.value).split("`")[1].removeprefix("model.")
    assert len(load_skips(wrapped.get_submodule(inside), saved)) == 3


def doubled(model: nn.Module) -> nn.Module:
    return nn.Sequential(model, copy.deepcopy(model))


def part(model: nn.Module) -> nn.Module:
    return model.encoder


@pytest.mark.parametrize("change", [with_adapter, renamed, doubled, part])
def test_skips_of_a_changed_model_are_not_saved(change: Any, tmp_path: Path) -> None:
    model = bert()
    add_lambda_skip(model)
    with pytest.raises(SkipError, match="expected the model that λ was added to, or a wrapper"):
        save_skips(change(model), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_weights_and_dtypes_are_the_same_model(saved: Path) -> None:
    other = bert().to(torch.bfloat16)
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    assert len(load_skips(other, saved)) == 3


# --- other models ----------------------------------------------------------------------------------------


def test_skips_of_another_model_are_refused(saved: Path) -> None:
    others = [hugging_face("BertModel", **BERT | {"num_hidden_layers": layers})() for layers in (2, 4)]
    for other in (FOUND["GPT-2"][0]()[0], *others):
        with pytest.raises(SkipError, match=rf"skips in {re.escape(str(saved))}: expected λ of a"):
            load_skips(other, saved)
        assert not skips_of(other)
    save_skips_of(hugging_face("BertModel", **BERT | {"hidden_size": 48})(), saved, per="channel")
    with pytest.raises(SkipError, match="λ of one whose parameters have other names or shapes"):
        load_skips(bert(), saved)


# --- broken files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_lambdas_that_are_not_finite_are_not_saved(value: float, tmp_path: Path) -> None:
    model = bert()
    next(iter(add_lambda_skip(model).values())).data.fill_(value)
    with pytest.raises(SkipError, match="expected finite numbers, got NaN or infinity"):
        save_skips(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [
        (torch.float32, float("nan"), "expected finite numbers, got NaN or infinity"),
        (torch.float64, 1e300, "NaN or infinity"),  # finite in the file, but not in float32
    ],
)
def test_numbers_that_lambda_cannot_have_are_refused(
    dtype: torch.dtype, size: float, message: str, saved: Path
) -> None:
    path, plain = saved / "skips.safetensors", bert()
    save_file({name: (one.double() * size).to(dtype) for name, one in load_file(path).items()}, path)
    with untouched(plain), pytest.raises(SkipError, match=message):
        load_skips(plain, saved)


BROKEN = {
    "no tensors": ("skips.safetensors", "no tensors"),
    "no fields": ("skips.json", "{}"),
    "another version": ("skips.json", '{"format": 1}'),
    "nested lists": ("skips.json", "[" * 100_000),
    "nested field": ("skips.json", '{"sites": ' + "[" * 990 + "]" * 990 + "}"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(name: str, saved: Path) -> None:
    file, content = BROKEN[name]
    (saved / file).write_text(content)
    with pytest.raises(SkipError, match=rf"skips .*{file}: expected a file that `save_skips` wrote"):
        load_skips(bert(), saved)


def test_files_that_do_not_belong_together_or_are_missing_are_refused(saved: Path) -> None:
    numbers = load_file(saved / "skips.safetensors")
    first = next(iter(numbers))
    save_file({first: numbers[first]}, saved / "skips.safetensors")
    with pytest.raises(SkipError, match="that name the same sites"):
        load_skips(bert(), saved)
    with pytest.raises(SkipError, match="got no such file"):
        load_skips(bert(), saved / "nowhere")


def test_a_model_without_skips_and_a_folder_that_is_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SkipError, match="expected a model with λ-skips, got one without"):
        save_skips(bert(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="skips"):
        save_skips_of(bert(), tmp_path / "file")


def test_a_full_disk_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (saved / "skips.safetensors").read_bytes()

    def full(path: Path, content: bytes) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match=r"skips .*safetensors: expected a file.*No space left on device"):
        save_skips_of(bert(), saved)
    assert (saved / "skips.safetensors").read_bytes() == before
    assert sorted(path.name for path in saved.iterdir()) == ["skips.json", "skips.safetensors"]


# --- computed and shared λ --------------------------------------------------------------------------------


def plain(model: nn.Module) -> nn.Module:
    add_lambda_skip(model, init=0.5)
    return model


@pytest.mark.parametrize("change", [weight_norm, prune.identity])
@pytest.mark.parametrize(
    "call", [skips_of, rw.remove_lambda_skip, partial(rw.certify_skip, batch=text_inputs())]
)
def test_a_lambda_that_is_computed_from_others_is_refused(change: Any, call: Any) -> None:
    model = bert()
    for site in add_lambda_skip(model).places.values():
        change(model.get_submodule(site.module), site.parameter)
    with pytest.raises(SkipError, match="expected a parameter of its module, got one that is computed"):
        call(model)


def test_a_shared_lambda_is_one_parameter(tmp_path: Path) -> None:
    model = plain(bert())
    first, *others = [model.get_submodule(name) for name in skips_of(model)]
    for other in others:
        other.lambda_skip = first.lambda_skip
    assert len(skips_of(model).parameters()) == 1
    save_skips(model, tmp_path)
    assert [value.item() for value in load_skips(bert(), tmp_path).values()] == [0.5] * 3
