"""Replaced attention comes back bit by bit, is captured as what it is, decodes, is saved and loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unchecked import unchecked
from torch import Tensor, nn
from transformers import BertConfig, BertModel, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import rankwise as rw
from rankwise.errors import InputError, ReplacementError
from rankwise.skips import (
    load_replaced_attention,
    replace_attention,
    replacements_of,
    restore_attention,
    save_replaced_attention,
)
from rankwise.skips.replace_store import FILE
from rankwise.skips.replaced_attention import real_tokens_of

KINDS = {"tssa": "diagonal", "linear": "linear"}
OPTIONS: dict[str, Any] = {"tssa": {"impl": "reference"}, "linear": {}}  # no loops are compiled for tests
IDS = torch.tensor([[5, 9, 3, 17, 8, 21, 30, 2, 11], [7, 7, 4, 19, 6, 28, 1, 12, 25]])


def llama(layers: int = 3, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def bert() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    return BertModel(config).eval()


def logits(model: nn.Module, ids: Tensor = IDS, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


def rounding(model: nn.Module, whole: Tensor) -> float:
    """Twice the error of the float32 model, told by the same model in float64."""
    exact = logits(model.double())
    model.float()
    return 2 * float((whole - exact).abs().max()) + 2**-20


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_undone_is_bit_identical(kind: Any) -> None:
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole, attention = logits(model), model.model.layers[1].self_attn
    replaced = replace_attention(model, [1, "model.layers.2.self_attn"], kind, **OPTIONS[kind])
    assert [(one.layer, one.kind, one.causal) for one in replaced] == [(1, kind, True), (2, kind, True)]
    assert not torch.equal(logits(model), whole)
    mixer = model.model.layers[1].self_attn.mixer
    logits_of = model(input_ids=IDS, labels=IDS)
    logits_of.loss.backward()
    assert all(parameter.grad is not None for parameter in mixer.parameters())
    assert not any(parameter is attention.q_proj.weight for parameter in model.parameters())
    assert restore_attention(model) == [one.name for one in replaced]
    assert model.model.layers[1].self_attn is attention
    assert not replacements_of(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_audits_see_the_new_kind(kind: Any) -> None:
    model = llama()
    replace_attention(model, [1], kind, **OPTIONS[kind])
    audit = rw.audit(model, [{"input_ids": IDS}])
    assert [{head.kind for head in audit.heads if head.layer == layer} for layer in range(3)] == [
        {"softmax"}, {KINDS[kind]}, {"softmax"},
    ]  # fmt: skip
    assert len(audit.heads) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_a_later_one_and_none_sees_padding(kind: Any) -> None:
    model = llama()
    replace_attention(model, [0, 1, 2], kind, **OPTIONS[kind])
    whole, other = logits(model), IDS.clone()
    other[:, 5:] = 13
    torch.testing.assert_close(logits(model, other)[:, :5], whole[:, :5], rtol=0, atol=rounding(model, whole))
    assert (logits(model, other) - whole)[:, 5:].abs().max() > 1e-4
    for padding in (IDS.new_zeros(2, 3), IDS.new_full((2, 3), 9)):
        padded = logits(
            model, torch.cat([padding, IDS], 1), attention_mask=(torch.arange(12) > 2).long().expand(2, 12)
        )
        torch.testing.assert_close(padded[:, 3:], whole, rtol=0, atol=rounding(model, whole))


@pytest.mark.parametrize(("kind", "layers"), [("tssa", [0, 2]), ("linear", [0, 1, 2])])
def test_decoding_with_a_cache_gives_what_a_whole_pass_gives(kind: Any, layers: list[int]) -> None:
    model = llama()
    replace_attention(model, layers, kind, **OPTIONS[kind])
    whole, cache, parts = logits(model), DynamicCache(), []
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        parts.append(logits(model, IDS[:, start:stop], past_key_values=cache, use_cache=True))
        assert cache.get_seq_length() == stop
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=rounding(model, whole))
    with torch.no_grad():
        written = model.generate(IDS, max_new_tokens=3, num_beams=2, do_sample=False)
        again = model.generate(IDS, max_new_tokens=3, num_beams=2, do_sample=False, use_cache=False)
    assert torch.equal(written, again)


def test_states_do_not_grow() -> None:
    model = llama(1)
    replace_attention(model, [0], "linear")
    sizes = []
    for ids in (IDS, IDS.repeat(1, 5)):
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values
        sizes.append(sum(tensor.numel() for tensor in cache.layers[0].state))
    assert sizes[0] == sizes[1] == 2 * 4 * 4 * 5  # sequences, heads, features, values and their weight


def test_projections_start_from_those_of_the_attention() -> None:
    model = llama()
    attention = [layer.self_attn for layer in model.model.layers]
    (tssa,) = replace_attention(model, [0], "tssa")
    (linear,) = replace_attention(model, [1], "linear", feature_dim=4)
    assert (tssa.copied, linear.copied) == (
        ["in_proj", "out_proj"],
        ["q_proj", "k_proj", "v_proj", "out_proj"],
    )
    mixer = model.model.layers[0].self_attn.mixer
    grouped = attention[0].v_proj.weight.view(2, 4, 16)[[0, 0, 1, 1]].flatten(0, 1)
    assert torch.equal(mixer.in_proj.weight, grouped)
    assert torch.equal(mixer.out_proj.weight, -attention[0].o_proj.weight)
    assert torch.equal(model.model.layers[1].self_attn.mixer.q_proj.weight, attention[1].q_proj.weight)
    (narrow,) = replace_attention(model, [2], "linear", feature_dim=2)
    assert narrow.copied == ["v_proj", "out_proj"]


def test_encoders_are_replaced_by_bidirectional_mixers() -> None:
    model = bert()
    (one,) = replace_attention(model, [1], "tssa", impl="reference")
    assert not one.causal
    mask = torch.ones_like(IDS)
    mask[1, 6:] = 0
    other = IDS.clone()
    other[1, 6:] = 3
    with torch.no_grad():
        first, second = (
            model(input_ids=ids, attention_mask=mask).last_hidden_state[1, :6] for ids in (IDS, other)
        )
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded_bit_by_bit(kind: Any, tmp_path: Path) -> None:
    model = llama()
    options = (
        {"half_life": [2.0, 4.0, 8.0, None], "impl": "reference"} if kind == "tssa" else {"feature_dim": 3}
    )
    replace_attention(model, [0, 2], kind, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    written = save_replaced_attention(model, tmp_path / "new")
    fresh = llama(seed=1)
    assert load_replaced_attention(fresh, written.parent) == replacements_of(model)
    assert torch.equal(logits(fresh), logits(model))
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight


def test_files_of_other_models_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model = llama()
    replace_attention(model, [0], "linear")
    save_replaced_attention(model, tmp_path)
    smaller = llama(2)
    whole = logits(smaller)
    with pytest.raises(ReplacementError, match=r"a difference in 'model\.layers\.2"):
        load_replaced_attention(smaller, tmp_path)
    assert not replacements_of(smaller)
    assert torch.equal(logits(smaller), whole)
    with pytest.raises(ReplacementError, match="LlamaForCausalLM"):
        load_replaced_attention(bert(), tmp_path)
    (tmp_path / FILE).write_bytes(b"not it")
    with pytest.raises(ReplacementError, match="Save the model again"):
        load_replaced_attention(llama(), tmp_path)
    with pytest.raises(ReplacementError, match="no such file"):
        load_replaced_attention(llama(), tmp_path / "elsewhere")
    with pytest.raises(ReplacementError, match="none replaced"):
        save_replaced_attention(llama(), tmp_path)


@pytest.mark.parametrize(
    ("layers", "kind", "options", "error", "match"),
    [
        ([7], "tssa", {}, ReplacementError, r"0 such layers.*There are: 0 \(model"),
        ([0], "tsa", {}, ReplacementError, "tssa"),
        ([0, 1], "linear", {"features": 3}, InputError, "feature_dim"),
        ([1], "tssa", {"half_life": [1.0]}, InputError, "half_life"),
        ([1, 2], "linear", {}, ReplacementError, "replaced before"),
    ],
)
def test_wrong_use_changes_nothing(
    layers: list[int], kind: Any, options: Any, error: type[Exception], match: str
) -> None:
    model = llama()
    replace_attention(model, [2], "tssa", impl="reference")
    before, whole = [id(module) for module in model.modules()], logits(model)
    with unchecked(), pytest.raises(error, match=match):
        replace_attention(model, layers, kind, **options)
    assert [id(module) for module in model.modules()] == before
    assert torch.equal(logits(model), whole)


def test_layers_of_another_form_are_refused() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with pytest.raises(ReplacementError, match="example"):
        replace_attention(layer, [0])
    with pytest.raises(ReplacementError, match="hidden_states"):
        replace_attention(layer, [0], example=torch.randn(1, 5, 8))


def test_caches_of_another_form_are_refused() -> None:
    model = llama()
    filled = DynamicCache()
    logits(model, past_key_values=filled, use_cache=True)
    replace_attention(model, [0], "tssa", impl="reference")
    for cache in (filled, StaticCache(model.config, max_cache_len=16)):
        with pytest.raises(ReplacementError, match="use_cache=False"):
            logits(model, past_key_values=cache, use_cache=True)
    own = DynamicCache()
    logits(model, past_key_values=own, use_cache=True)
    with pytest.raises(ReplacementError, match="forget 2 tokens"):
        own.layers[0].crop(-2)


@pytest.mark.parametrize("add", [False, True])
def test_masks_of_pairs_say_which_tokens_are_real(add: bool) -> None:
    real = torch.tensor([[True, True, True], [False, True, True], [True, True, False]])
    mask = torch.ones(3, 3).tril().bool() & real[:, None, None, :]
    given = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if add else mask
    assert torch.equal(real_tokens_of(given, torch.zeros(3, 3, 2)), real)
    with pytest.raises(ReplacementError, match="sdpa"):
        real_tokens_of(torch.zeros(3), torch.zeros(3, 3, 2))
