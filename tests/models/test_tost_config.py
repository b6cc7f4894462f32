"""Configurations: defaults, refusals, and the released sizes."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.unchecked import unchecked
from tost_cases import config
from transformers import PreTrainedConfig

from rankwise.errors import InputError
from rankwise.models import (
    MIXERS,
    PRESETS,
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForImageClassification,
    ToSTModel,
    preset,
)
from rankwise.ops import half_lives

REFUSED = {
    "norm": ({"norm": "batch"}, r"`norm`: expected one of layer, rms, none, got 'batch'"),
    "skip": ({"skip": "fixd"}, r"`skip`.*Did you mean fixed\?"),
    "pooling": ({"pooling": "cls"}, r"`pooling`: expected one of last, mean"),
    "heads": (
        {"num_attention_heads": 0},
        r"`num_attention_heads`: expected a whole number of at least 1, got 0",
    ),
    "too many heads": ({"num_attention_heads": 13}, r"heads: .* divides the width 12, got 13"),
    "odd width": ({"hidden_size": 13}, r"heads: expected a number that divides the width 13, got 3"),
    "no head width": ({"head_dim": 0}, r"`head_dim`: expected a whole number of at least 1, got 0"),
    "dropout": ({"dropout": 2.0}, r"`dropout`: expected a number in \[0, 1\], got 2.0"),
    "scale": ({"layer_scale": float("nan")}, r"`layer_scale`: expected a number in \(-∞, ∞\), got nan"),
    "λ": ({"skip_init": float("inf")}, r"`skip_init`: expected a number in \(-∞, ∞\), got inf"),
    "gate of text": ({"gate": "false"}, r"`gate`: expected true or false, got 'false'"),
    "activation": ({"hidden_act": "gleu"}, r"`hidden_act`.* Did you mean .*gelu"),
    "options": ({"mixer_options": {"tsa": {}}}, r"`mixer_options`: .* got 'tsa'. Did you mean tssa"),
    "options of tensors": (
        {"mixer_options": {"tssa": {"half_life": half_lives(3)}}},
        r"`mixer_options`: expected numbers, names and lists.* by `tolist\(\)`",
    ),
    "keyword": ({"hal_life": 3.0}, r"`hal_life`: expected a known field.* Did you mean half_life\?"),
    "layers": ({"layer_types": ["tssa"]}, r"`layer_types`: expected one name for each of 2 layers, got 1"),
    "half-life 0": ({"half_life": 0.0}, r"`half_life`.* numbers of tokens above 0"),
    "half-life of text": ({"half_life": "4"}, r"`half_life`.* numbers of tokens above 0.*, '4'"),
    "half-lives of text": ({"half_life": [1.0, "4", 2.0]}, r"`half_life`.* \[1\.0, '4', 2\.0\]"),
    "half-lives": ({"half_life": [1.0, 2.0]}, r"`half_life`.* one for each of 3 heads"),
    "no order": ({"half_life": 2.0, "causal": False}, r"`half_life`: expected causal=True"),
    "bias": ({"position_bias": True, "causal": False}, r"`position_bias`: expected a causal model"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_wrong_fields_are_refused(case: str) -> None:
    changes, match = REFUSED[case]
    with unchecked(), pytest.raises(InputError, match=match):
        config(**changes)


def test_a_mixer_that_does_not_exist_is_refused_when_it_is_built() -> None:
    wrong = config(layer_types=["tssa", "sofmax"])
    match = r"`layer_types\[1\]`: expected one of tssa, .*, got 'sofmax'. Did you mean softmax\?"
    with pytest.raises(InputError, match=match):
        ToSTModel(wrong)


def test_transformers_own_fields_pass() -> None:
    made = config(sep_token_id=3, mask_token_id=4, num_labels=7, architectures=["A"], of_another_package=1)
    assert (made.sep_token_id, made.num_labels, made.of_another_package) == (3, 7, 1)
    assert ToSTConfig(**made.to_dict()).num_labels == 7


def test_options_that_a_mixer_does_not_take_are_refused() -> None:
    wrong = config(mixer_options={"tssa": {"imp": "cpu"}})
    with pytest.raises(InputError, match=r"`mixer_options\['tssa'\]`.* got 'imp'. Did you mean impl"):
        ToSTModel(wrong)
    narrow = ToSTModel(config(mixer_options={"tssa": {"head_dim": 2}}))
    assert narrow.layers[0].mixer.head_dim == 2


def test_a_value_changed_later_is_refused_when_it_is_saved(tmp_path) -> None:
    changed = config()
    changed.norm = "none?"
    with pytest.raises(InputError, match="`norm`"):
        changed.save_pretrained(tmp_path)


def test_defaults_that_depend_on_others() -> None:
    causal, bidirectional = config(), config(causal=False)
    assert (causal.position_bias, causal.pooling, causal.head_dim) == (True, "last", 4)
    assert (bidirectional.position_bias, bidirectional.pooling) == (False, "mean")
    assert not config(half_life=3.0).position_bias
    assert config(half_life=3.0, position_bias=True).position_bias
    assert config(half_life=3).half_life == [3.0, 3.0, 3.0]
    assert config(half_life=half_lives(3, 2, 8)).half_life == [2.0, 4.0, 8.0]  # as the error advises
    assert config(intermediate_size=0).intermediate_size == 0


def test_a_ladder_of_half_lives_survives_json(tmp_path) -> None:
    ladder = [*half_lives(2, shortest=2.0, longest=8.0).tolist(), float("inf")]
    made = config(half_life=ladder, num_labels=5, mixer_options={"softmax": {"query_dim": 2}})
    made.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "Infinity" not in text
    assert json.loads(text)["half_life"] == [2.0, 8.0, None]
    again = ToSTConfig.from_pretrained(tmp_path)
    assert again.num_labels == 5
    keys = set(made.to_dict()) - {"_name_or_path"}
    assert {key: again.to_dict()[key] for key in keys} == {key: made.to_dict()[key] for key in keys}
    mixer = ToSTModel(again).layers[0].mixer
    assert mixer.half_life == (2.0, 8.0, float("inf"))


def test_a_config_in_a_file_is_read_without_its_class(tmp_path) -> None:
    made = config(num_hidden_layers=2, layer_types=["tssa", "softmax"])
    made.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content.pop("mixers") == ["tssa", "softmax"]
    PreTrainedConfig.from_json_file(tmp_path / "config.json")  # as a Trainer does that resumes
    assert ToSTConfig.from_pretrained(tmp_path).layer_types == ["tssa", "softmax"]
    before = ToSTConfig.from_dict({**content, "layer_types": ["tssa", "softmax"]})
    assert before.layer_types == ["tssa", "softmax"], "files written before"


def test_options_reach_their_mixer() -> None:
    made = ToSTModel(config(layer_types=["softmax", "tssa"], mixer_options={"softmax": {"query_dim": 2}}))
    assert made.layers[0].mixer.q_proj.out_features == 2 * 3
    assert [type(layer.mixer) for layer in made.layers] == [MIXERS["softmax"], MIXERS["tssa"]]


PARAMETERS = {
    "tost-base": 110_467_728, "tost-medium": 304_933_248, "tost-large": 656_863_440,
    "tost-t12-p16": 5_769_328, "tost-t12-p8": 5_759_560,
    "tost-s12-p16": 22_589_944, "tost-s12-p8": 22_549_672,
    "tost-m24-p16": 71_481_064, "tost-m24-p8": 71_408_936,
    "tost-l24-p16": 160_286_920, "tost-l24-p8": 160_123_432,
}  # fmt: skip
README = {"tost-base": 110e6, "tost-medium": 304e6, "tost-large": 655e6}
"""What the released README says; its code leaves the position embedding out of the count."""
HEAD_DIM = {"t12": 48, "s12": 48, "m24": 64, "l24": 48}


def empty(made: ToSTConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return (ToSTForCausalLM if made.causal else ToSTForImageClassification)(made)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_released_sizes(name: str) -> None:
    made = preset(name)
    count = empty(made).num_parameters()
    assert count == PARAMETERS[name] == by_hand(made)
    if made.causal:
        counted = count - made.max_position_embeddings * made.hidden_size
        assert counted == pytest.approx(README[name], abs=0.6e6)  # whole millions; 655.55 became 655
        assert made.head_dim == 64
    else:
        assert made.head_dim == HEAD_DIM[name.split("-")[1]]
        assert (made.num_labels, made.layer_scale) == (1000, 1.0 if "12" in name else 1e-5)


def by_hand(made: ToSTConfig) -> int:
    """Weights and biases of linear maps, norms, scales and the rest, added up from the sizes."""
    D, H, L, P = (
        made.hidden_size, made.num_attention_heads, made.num_hidden_layers, made.max_position_embeddings,
    )  # fmt: skip
    mlp, norms_and_scales = 2 * 4 * D * D + 5 * D, 4 * D + 2 * D
    block = 2 * (D * D + D) + H + mlp + norms_and_scales
    if made.causal:
        return (made.vocab_size + P) * D + L * (block + H * P) + 2 * D
    class_block = 3 * D * D + 3 * D + D * D + D + mlp + norms_and_scales
    halvings = {16: 4, 8: 3}[made.patch_size]
    widths = [3] + [D // 2**i for i in reversed(range(halvings))]
    patches = sum(9 * a * b + 2 * b for a, b in pairwise(widths))
    ends = 64 * D + D + D + 2 * D + 1000 * D + 1000  # positions, class token, norm, head
    return L * block + 2 * class_block + patches + ends


def test_presets() -> None:
    assert set(PRESETS) == set(PARAMETERS)
    assert preset("tost-base", half_life=8.0, layer_scale=None).layer_scale is None
    assert preset("tost-t12-p16", num_labels=10).num_labels == 10
    with pytest.raises(InputError, match=r"preset: expected .* got 'tost-bse'. Did you mean tost-base"):
        preset("tost-bse")


def test_the_page_lists_the_tested_sizes() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/tost.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| `tost-")]
    numbers = [int(n.replace(",", "")) for row in rows for n in re.findall(r"\d{1,3}(?:,\d{3})+", row)]
    assert numbers == [PARAMETERS[name] for name in PRESETS]
