"""λ-skips in files and in optimisers: the same numbers again, and nothing that belongs to another model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, hugging_face
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tests.skips.cases import FOUND, outputs, same
from torch import nn

from rankwise.errors import InputError
from rankwise.skips import (
    SkipError,
    add_lambda_skip,
    apply_saved_skips,
    load_skips,
    save_skips,
    skip_parameter_groups,
    skips_of,
    store,
)

bert = hugging_face("BertModel", **BERT)


@pytest.mark.parametrize("name", ["BERT", "T5", "ALBERT", "Mamba-2"])
@pytest.mark.parametrize("per", ["layer", "channel"])
def test_there_and_back(name: str, per: str, tmp_path: Path) -> None:
    model, batch = FOUND[name][0]()
    skips = add_lambda_skip(model, per=per, learnable=False, example=batch)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in skips.values():
            parameter.copy_(torch.rand(parameter.shape))
    numbers, facts = save_skips(model, tmp_path / "deep" / "er", fitted={"steps": 3})
    assert numbers.parent == facts.parent
    assert json.loads(facts.read_text())["fitted"] == {"steps": 3}
    other, _ = FOUND[name][0]()
    loaded = load_skips(other, numbers.parent, example=batch)
    assert list(loaded) == list(skips)
    assert all(torch.equal(loaded[name], skips[name]) for name in skips)
    assert not any(parameter.requires_grad for parameter in loaded.values())
    assert same(outputs(other, batch), outputs(model, batch))


def test_some_sites_only(tmp_path: Path) -> None:
    model = bert()
    add_lambda_skip(model, init=0.5, sites="encoder.layer.[02]")
    save_skips(model, tmp_path)
    assert list(load_skips(bert(), tmp_path)) == [f"encoder.layer.{at}.attention.output" for at in (0, 2)]


def test_a_folder_without_skips_changes_nothing(tmp_path: Path) -> None:
    model = bert()
    assert apply_saved_skips(model, tmp_path) is None
    assert apply_saved_skips(model, "some/name-on-the-hub") is None
    assert not skips_of(model)
    save_skips_of(bert(), tmp_path)
    assert len(apply_saved_skips(model, tmp_path) or ()) == 3


def save_skips_of(model: nn.Module, folder: Path) -> None:
    add_lambda_skip(model, init=0.5)
    save_skips(model, folder)


def test_skips_of_another_model(tmp_path: Path) -> None:
    save_skips_of(bert(), tmp_path)
    others = [hugging_face("BertModel", **BERT | {"num_hidden_layers": layers})() for layers in (2, 4)]
    for other in (FOUND["GPT-2"][0]()[0], *others):
        with pytest.raises(SkipError, match=rf"skips in {re.escape(str(tmp_path))}: expected λ of a"):
            load_skips(other, tmp_path)
        assert not skips_of(other)
    wide = hugging_face("BertModel", **BERT | {"hidden_size": 48})()
    add_lambda_skip(wide, per="channel")
    save_skips(wide, tmp_path)
    with pytest.raises(SkipError, match="λ of one whose parameters have other names or shapes"):
        load_skips(bert(), tmp_path)
    forget_parameters(tmp_path)
    with (
        pytest.warns(UserWarning, match="does not say what parameters"),
        pytest.raises(SkipError, match="sites of other names or widths"),
    ):
        load_skips(bert(), tmp_path)


def forget_parameters(folder: Path) -> None:
    """As files of older versions are."""
    facts = json.loads((folder / "skips.json").read_text())
    del facts["parameters"]
    (folder / "skips.json").write_text(json.dumps(facts))


def test_older_files_load_with_a_warning(tmp_path: Path) -> None:
    save_skips_of(bert(), tmp_path)
    forget_parameters(tmp_path)
    with pytest.warns(UserWarning, match="does not say what parameters"):
        assert len(load_skips(bert(), tmp_path)) == 3


def test_other_weights_and_dtypes_are_the_same_model(tmp_path: Path) -> None:
    save_skips_of(bert(), tmp_path)
    other = bert().to(torch.bfloat16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert len(load_skips(other, tmp_path)) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_skips_that_are_not_finite_are_not_saved(value: float, tmp_path: Path) -> None:
    model = bert()
    skips = add_lambda_skip(model)
    with torch.no_grad():
        next(iter(skips.values())).fill_(value)
    with pytest.raises(SkipError, match="expected finite numbers, got NaN or infinity"):
        save_skips(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_broken_files(tmp_path: Path) -> None:
    save_skips_of(bert(), tmp_path)
    numbers = load_file(tmp_path / "skips.safetensors")
    first = next(iter(numbers))
    save_file(numbers | {first: torch.tensor([float("nan")])}, tmp_path / "skips.safetensors")
    with pytest.raises(SkipError, match=r"expected finite numbers, got NaN or infinity"):
        load_skips(bert(), tmp_path)
    save_file({first: numbers[first]}, tmp_path / "skips.safetensors")
    with pytest.raises(SkipError, match="that name the same sites"):
        load_skips(bert(), tmp_path)
    (tmp_path / "skips.safetensors").write_bytes(b"no tensors")
    with pytest.raises(
        SkipError, match=r"skips .*skips.safetensors: expected a file that `save_skips` wrote"
    ):
        load_skips(bert(), tmp_path)
    for content in ("{}", "[" * 100_000, '{"sites": ' + "[" * 990 + "]" * 990 + "}"):
        (tmp_path / "skips.json").write_text(content)
        with pytest.raises(SkipError, match=r"skips .*skips.json: expected a file that `save_skips` wrote"):
            load_skips(bert(), tmp_path)
    with pytest.raises(SkipError, match="got no such file"):
        load_skips(bert(), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("dtype", "size", "said"),
    [
        (torch.int64, 1.0, "int64"),
        (torch.bool, 1.0, "bool"),
        (torch.complex64, 1.0, "complex64"),
        (torch.float8_e4m3fn, 1.0, "float8"),
        (torch.float64, 1e300, "NaN or infinity"),
    ],
)
def test_numbers_that_lambda_cannot_be_are_refused(
    dtype: torch.dtype, size: float, said: str, tmp_path: Path
) -> None:
    model, batch = FOUND["BERT"][0]()
    add_lambda_skip(model, example=batch)
    numbers, _ = save_skips(model, tmp_path)
    save_file({name: (one.double() * size).to(dtype) for name, one in load_file(numbers).items()}, numbers)
    plain, _ = FOUND["BERT"][0]()
    before = outputs(plain, batch)
    with pytest.raises(SkipError, match=said):
        load_skips(plain, tmp_path, example=batch)
    assert same(outputs(plain, batch), before)
    assert not skips_of(plain)


def test_nothing_to_save_and_nowhere_to(tmp_path: Path) -> None:
    with pytest.raises(SkipError, match="expected a model with λ-skips, got one without"):
        save_skips(bert(), tmp_path)
    (tmp_path / "file").write_text("")
    model = bert()
    add_lambda_skip(model)
    with pytest.raises((SkipError, InputError), match="skips"):
        save_skips(model, tmp_path / "file")


def test_groups_keep_weight_decay_off_the_skips() -> None:
    model = bert()
    skips = add_lambda_skip(model, init=2.0)
    groups = skip_parameter_groups(model, weight_decay=0.5, lr=0.1)
    assert [group["weight_decay"] for group in groups] == [0.0, 0.5]
    assert {id(one) for one in groups[0]["params"]} == {id(one) for one in skips.values()}
    everything = [one for group in groups for one in group["params"]]
    assert {id(one) for one in everything} == {id(one) for one in model.parameters()}
    assert len(everything) == len(list(model.parameters()))
    optimiser = torch.optim.AdamW(groups, lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = model.embeddings.word_embeddings.weight.norm().item()
    optimiser.step()
    assert all(parameter.item() == 2.0 for parameter in skips.values())
    assert model.embeddings.word_embeddings.weight.norm().item() < before


def test_groups_without_skips_that_learn() -> None:
    model = bert()
    with pytest.raises(SkipError, match="expected λ-skips that can learn, got none"):
        skip_parameter_groups(model)
    add_lambda_skip(model, learnable=False)
    with pytest.raises(SkipError, match="expected λ-skips that can learn, got none"):
        skip_parameter_groups(model)


def test_a_full_disk_leaves_the_old_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which safetensors raises an error of its own."""
    save_skips_of(bert(), tmp_path)
    before = (tmp_path / "skips.safetensors").read_bytes()

    def full(numbers: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(InputError, match=r"skips .*safetensors: expected a file.*No space left on device"):
        save_skips_of(bert(), tmp_path)
    assert (tmp_path / "skips.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["skips.json", "skips.safetensors"]
