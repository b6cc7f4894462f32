"""Models that users saved still load with the same outputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.tost.replaced_attention import replace_attention
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, BertModel, LlamaConfig, LlamaForCausalLM

from rankwise.models import ToSTForImageClassification, ToSTForSequenceClassification
from rankwise.skips import apply_saved_skips, load_skips

HERE = Path(__file__).parent


def check_outputs(model: nn.Module, folder: Path) -> None:
    """Compare logits and generated tokens with the file that was saved next to the model, in float32."""
    given = load_file(folder / "outputs.safetensors")
    read, expected = (
        next(given[name] for name in names if name in given)
        for names in (("input_ids", "pixel_values", "x"), ("logits", "y"))
    )
    with torch.no_grad():
        found = model.eval()(read)
    found = found if isinstance(found, Tensor) else found[0]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    if "generated" in given:
        count = given["generated"].shape[1] - read.shape[1]
        options: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        for use_cache in (True, False):
            again = model.generate(read, attention_mask=torch.ones_like(read), use_cache=use_cache, **options)  # type: ignore[operator]
            assert torch.equal(again, given["generated"])


class Attention(nn.Module):
    """Two heads of width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """The model of a user in ``compressed/module``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class PairBlock(nn.Module):
    """Two residual sums that only the block itself returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), Attention(), Attention()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.first(self.norm(x)), y + self.second(self.norm(y))


class Pair(nn.Module):
    """The model of a user in ``skips/pair``."""

    __module__ = "user_code"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PairBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            x, y = layer(x, y)
        return x + y


@pytest.mark.parametrize("name", ["skips/layer", "skips/channel", "skips/pair", "older/skips_no_digest"])
def test_saved_skips_are_added(name: str) -> None:
    folder = HERE / name
    given = load_file(folder / "outputs.safetensors")
    model: nn.Module = Pair().eval() if name == "skips/pair" else BertModel.from_pretrained(folder)
    if name == "skips/pair":
        model.load_state_dict(load_file(folder / "model.safetensors"))
    if name.startswith("older"):
        with pytest.warns(UserWarning, match="parameters"):
            skips = load_skips(model, folder)
    else:
        skips = apply_saved_skips(model, folder, example=given.get("x")) or pytest.fail("no skips")
    numbers = load_file(folder / "skips.safetensors")
    assert set(skips) == set(numbers)
    assert all(torch.equal(skips[name], numbers[name]) for name in numbers)
    learnable = json.loads((folder / "skips.json").read_text())["learnable"]
    assert all(parameter.requires_grad == learnable for parameter in skips.values())
    check_outputs(model, folder)


def test_replaced_attention_has_its_saved_outputs() -> None:
    folder = HERE / "replaced"
    path = folder / "replaced_attention.safetensors"
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    with safe_open(path, "pt") as file:
        layers = json.loads(file.metadata()["rankwise"])["layers"]
    for one in layers:
        replace_attention(model, [one["layer"]], one["kind"], **one["options"])
    model.load_state_dict(load_file(path))
    check_outputs(model, folder)


TOST = [*sorted(HERE.glob("tost/*")), HERE / "older/tost_layer_types"]
HEADS = {"bidirectional": ToSTForSequenceClassification, "vision": ToSTForImageClassification}


@pytest.mark.parametrize("folder", TOST, ids=lambda folder: folder.name)
def test_a_model_of_mixers_has_its_saved_outputs(folder: Path) -> None:
    model = HEADS.get(folder.name, AutoModelForCausalLM).from_pretrained(folder)
    assert set(model.state_dict()) >= set(load_file(folder / "model.safetensors"))
    check_outputs(model, folder)
    config = json.loads((folder / "config.json").read_text())
    again = json.loads(AutoConfig.from_pretrained(folder).to_json_string(use_diff=False))
    assert again["mixers"] == config.pop("mixers", config.pop("layer_types", None))
    for name in config.keys() - {"transformers_version", "architectures", "dtype"}:
        assert again[name] == config[name], name
