"""The causal language model: its cache, generation, padding, training and files."""

import copy

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.unchecked import unchecked
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from tost_cases import LIMIT, VARIANTS, config, stirred, texts
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.pytorch_utils import Conv1D

from rankwise.errors import InputError
from rankwise.models import (
    MixerCache,
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForSequenceClassification,
    ToSTModel,
    parameter_groups,
)

# float64 models of two layers, logits of order 10: rounding stays under 1e-10
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
EVERY = pytest.mark.parametrize("variant", sorted(VARIANTS))


def model(variant: str = "tssa", **changes) -> ToSTForCausalLM:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(**{**VARIANTS[variant], **changes}))
    return stirred(made.double())


def left_padded(ids: torch.Tensor, pads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows whose first tokens are replaced by padding, and their mask."""
    out = ids.clone()
    for row, count in enumerate(pads):
        out[row, :count] = 0
    return out, (out != 0).long()


@EVERY
def test_a_cache_changes_nothing_however_the_text_is_cut(variant: str) -> None:
    lm, ids = model(variant), texts(2, 11)
    whole = lm(ids).logits
    for cuts in ([4, 7], [1] * 11, [10, 1]):
        cache, pieces = None, []
        for piece in ids.split(cuts, 1):
            output = lm(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            pieces.append(output.logits)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)
        assert cache.get_seq_length() == 11


@EVERY
def test_left_padded_rows_equal_the_rows_alone(variant: str) -> None:
    lm = model(variant)
    ids, mask = left_padded(texts(3, 9), [4, 0, 8])
    logits = lm(ids, attention_mask=mask).logits
    for row, start in enumerate([4, 0, 8]):
        alone = lm(ids[row : row + 1, start:]).logits
        torch.testing.assert_close(logits[row : row + 1, start:], alone, **CLOSE)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("variant", "how"), [*((variant, "beam") for variant in sorted(VARIANTS)), ("hybrid", "sampling")]
)
def test_generation_with_the_cache_equals_generation_without(variant: str, how: str) -> None:
    lm, ids = model(variant), texts(2, 5)
    asked = {
        "sampling": {"do_sample": True, "top_k": 8, "num_return_sequences": 2},
        "beam": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    }[how]
    found = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        found.append(lm.generate(ids, max_new_tokens=9, use_cache=use_cache, pad_token_id=0, **asked))
    assert torch.equal(*found)
    assert found[0].shape == (2 * len(ids), 14)


@pytest.mark.parametrize(
    ("variant", "beams"), [*((variant, 1) for variant in sorted(VARIANTS)), ("hybrid", 3), ("scanned", 3)]
)
def test_generation_from_a_left_padded_batch_equals_generation_from_each_row(
    variant: str, beams: int
) -> None:
    lm = model(variant)
    ids, mask = left_padded(texts(3, 8), [3, 0, 7])
    asked = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    batch = lm.generate(ids, attention_mask=mask, **asked)
    for row, start in enumerate([3, 0, 7]):
        alone = lm.generate(ids[row : row + 1, start:], **asked)
        assert batch[row, start:].tolist() == alone[0].tolist()


@pytest.mark.parametrize("variant", sorted({*VARIANTS} - {"softmax", "hybrid"}))
def test_the_cache_is_constant_without_softmax(variant: str) -> None:
    lm, rows = model(variant), 2
    sizes = [lm(texts(rows, count), use_cache=True).past_key_values.numel() for count in (1, 5, LIMIT)]
    stated = sum(layer.mixer.state_size(1) for layer in lm.model.layers)
    assert sizes == [rows * stated] * 3


@pytest.mark.parametrize("variant", ["unbounded", "mamba", "softmax"])
def test_an_unbounded_model_reads_past_any_limit(variant: str) -> None:
    """As the error about the length advises; other mixers than TSSA have no bias by position."""
    lm = model(
        variant, position_embeddings="none", **({"position_bias": False} if variant == "unbounded" else {})
    )
    assert lm(texts(1, 3 * LIMIT)).logits.isfinite().all()
    out = lm.generate(texts(1, LIMIT), max_new_tokens=LIMIT, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 2 * LIMIT)


@pytest.mark.parametrize("variant", ["tssa", "hybrid"])
def test_a_text_that_is_too_long_is_refused(variant: str) -> None:
    lm = model(variant)
    with pytest.raises(
        InputError, match=rf"expected at most max_position_embeddings = {LIMIT} tokens, got 25"
    ):
        lm(texts(1, LIMIT + 1))
    cache = lm(texts(1, LIMIT), use_cache=True).past_key_values
    with pytest.raises(InputError, match="length of the text"):
        lm(texts(1, 1), past_key_values=cache)


def test_padding_does_not_count_as_length() -> None:
    lm, ids = model(), torch.cat([torch.zeros(1, 4, dtype=torch.long), texts(1, LIMIT)], 1)
    logits = lm(ids, attention_mask=(ids != 0).long()).logits
    torch.testing.assert_close(logits[:, 4:], lm(ids[:, 4:]).logits, **CLOSE)


@torch.no_grad()
def test_cache_rows() -> None:
    lm, ids = model("hybrid"), texts(3, 6)
    cache = lm(ids, use_cache=True).past_key_values
    order = torch.tensor([2, 0, 0])
    chosen = copy.deepcopy(cache)
    chosen.reorder_cache(order)
    token = texts(3, 1, seed=9)
    expected = lm(torch.cat([ids[order], token], 1)).logits[:, -1:]
    torch.testing.assert_close(lm(token, past_key_values=chosen).logits, expected, **CLOSE)
    twice = copy.deepcopy(cache)
    twice.batch_repeat_interleave(2)
    assert twice.numel() == 2 * cache.numel()
    assert (len(cache), cache.get_max_length(), cache.is_initialized) == (2, -1, True)
    assert not cache.is_compileable  # its states are not updated in place
    assert repr(cache) == f"MixerCache(layers=2, length=6, numel={cache.numel()})"
    cache.reset()
    assert (cache.numel(), cache.get_seq_length(), cache.is_initialized) == (0, 0, False)


@pytest.mark.parametrize("variant", ["hybrid", "scanned", "mamba2", "unbounded"])
def test_generation_continues_from_a_cache(variant: str) -> None:
    lm, ids = model(variant), texts(2, 5)
    asked = {"do_sample": False, "max_new_tokens": 4}
    first = lm.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **asked)
    longer = torch.cat([first.sequences, texts(2, 3, seed=4)], 1)
    mask = torch.ones_like(longer)
    on = lm.generate(longer, attention_mask=mask, past_key_values=first.past_key_values, **asked)
    assert torch.equal(on, lm.generate(longer, attention_mask=mask, **asked))


@pytest.mark.parametrize("variant", ["hybrid", "gated"])
def test_gradient_checkpointing_recomputes_and_changes_no_gradient(variant: str) -> None:
    lm, ids = model(variant).train(), texts(2, 8)
    calls = []
    lm.model.layers[0].mixer.register_forward_hook(lambda *_: calls.append(1))
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            lm.gradient_checkpointing_enable()
        lm.zero_grad()
        lm(ids, labels=ids, use_cache=True).loss.backward()
        found.append([p.grad.clone() for p in lm.parameters()])
    assert len(calls) == 3  # once without; twice with
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain, **CLOSE)


@EVERY
def test_saved_and_loaded(variant: str, tmp_path) -> None:
    lm, ids = model(variant), texts(2, 6)
    lm.save_pretrained(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is ToSTForCausalLM
    assert torch.equal(again(ids).logits, lm(ids).logits)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == again.config.to_dict()
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is ToSTModel
    assert torch.equal(base(ids).last_hidden_state, lm.model(ids).last_hidden_state)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("made", [ToSTForCausalLM, ToSTForSequenceClassification])
def test_a_shared_skip_is_one_weight(made: type, tied: bool, tmp_path) -> None:
    lm = made(config(skip="shared", skip_init=-1.0, num_hidden_layers=3, tie_word_embeddings=tied))
    with torch.no_grad():
        lm.model.layers[2].skip.weight.fill_(0.5)
    lm.save_pretrained(tmp_path)
    for one in (lm, made.from_pretrained(tmp_path), copy.deepcopy(lm), copy.deepcopy(lm).to(torch.float64)):
        skips = [layer.skip.weight for layer in one.model.layers]
        assert all(skip is skips[0] for skip in skips)
        assert skips[0].item() == 0.5
        assert sum("skip" in name for name, _ in one.named_parameters()) == 1
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sum("skip" in name for name in file.keys()) == 1  # noqa: SIM118  (the file is not a dict)


def test_weights_with_a_skip_per_layer_are_not_read_as_a_shared_skip(tmp_path) -> None:
    lm = ToSTForCausalLM(config(skip="learned"))
    with torch.no_grad():
        lm.model.layers[1].skip.weight.fill_(0.5)
    lm.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"expected one λ for all layers.* one λ per layer: [^ ]+, 0\.5\."):
        ToSTForCausalLM.from_pretrained(tmp_path, skip="shared")


@EVERY
def test_weights_that_multiply_decay_and_no_others(variant: str) -> None:
    lm = model(variant)
    lm.model.norm.requires_grad_(False)
    decayed, others = parameter_groups(lm, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(weight): name for name, weight in lm.named_parameters()}
    trained = [name for name, weight in lm.named_parameters() if weight.requires_grad]
    found = [[names[id(weight)] for weight in group["params"]] for group in (decayed, others)]
    assert sorted(found[0] + found[1]) == sorted(trained)  # each once, a shared λ too
    multiply = tuple(f"{end}.weight" for end in ("proj", "gate", "tokens", "positions", "convolution"))
    assert set(found[0]) == {name for name in trained if name.endswith(multiply)}


def _tied() -> nn.Module:
    """The second module is not a layer that torch knows."""
    made = nn.Sequential(nn.Linear(3, 3), nn.Module())
    made[1].register_parameter("gain", made[0].weight)
    return made


class Experts(nn.Module):
    """Weights of experts as transformers holds them, a scale and a marked matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj, self.down_proj_bias = (
            nn.Parameter(torch.ones(2, 3, 4)),
            nn.Parameter(torch.ones(2, 4)),
        )
        self.weight_scale, self.A_log = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3, 4))
        self.marked_weight = nn.Parameter(torch.ones(2, 2))
        vars(self.marked_weight)["_no_weight_decay"] = True


class GainNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))  # a gain per head


DECAYED = {
    "transformers' Conv1D": (lambda: Conv1D(2, 3), ["weight"]),
    "3-D convolution": (lambda: nn.Conv3d(1, 2, 3), ["weight"]),
    "transposed convolution": (lambda: nn.ConvTranspose1d(2, 2, 3), ["weight"]),
    "bag of embeddings": (lambda: nn.EmbeddingBag(5, 2), ["weight"]),
    "bilinear": (lambda: nn.Bilinear(2, 3, 4), ["weight"]),
    "LSTM": (
        lambda: nn.LSTM(2, 4, proj_size=3, bidirectional=True),
        [f"weight_{kind}_l0{end}" for end in ("", "_reverse") for kind in ("ih", "hh", "hr")],
    ),
    "GRU": (lambda: nn.GRU(2, 4), ["weight_ih_l0", "weight_hh_l0"]),
    "GRU cell": (lambda: nn.GRUCell(2, 4), ["weight_ih", "weight_hh"]),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
        ["in_proj_weight", "out_proj.weight"],
    ),
    "attention of three widths": (
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
        ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
    ),
    "weight norm": (
        lambda: weight_norm(nn.Linear(2, 3)),
        ["parametrizations.weight.original1"],  # the other is the length of each row
    ),
    "spectral norm": (lambda: spectral_norm(nn.Conv2d(1, 2, 3)), ["parametrizations.weight.original"]),
    "a parametrized λ": (
        lambda: weight_norm(ToSTModel(config(skip="channel")).layers[0].skip, dim=None),
        [],
    ),
    "experts": (Experts, ["down_proj"]),
    "norms": (
        lambda: nn.Sequential(
            nn.LayerNorm([2, 3]), nn.RMSNorm([2, 3]), nn.GroupNorm(1, 4), nn.BatchNorm2d(4)
        ),
        [],
    ),
    "a norm of one's own": (GainNorm, []),
    "PReLU": (lambda: nn.PReLU(4), []),
    "one weight in two modules": (_tied, ["0.weight"]),
}


@pytest.mark.parametrize("case", DECAYED)
def test_matrices_of_every_kind_of_layer_decay(case: str) -> None:
    build, decayed = DECAYED[case]
    module = build()
    groups = parameter_groups(module, 0.1)
    names = {id(weight): name for name, weight in module.named_parameters()}
    found = [[names[id(weight)] for weight in group["params"]] for group in groups]
    assert sorted(found[0]) == sorted(decayed)
    assert sorted(found[0] + found[1]) == sorted(names.values())
    torch.optim.AdamW(groups)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "x", None], ids=str)
def test_a_weight_decay_that_cannot_be_is_refused(wrong: object) -> None:
    with unchecked(), pytest.raises(InputError, match=r"`weight_decay`: expected a number in \[0, ∞\), got"):
        parameter_groups(nn.Linear(2, 2), wrong)
    with (
        unchecked(),
        pytest.raises(InputError, match=r"`model`: expected a torch\.nn\.Module, got generator"),
    ):
        parameter_groups(nn.Linear(2, 2).parameters(), 0.1)


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel, ToSTForSequenceClassification])
def test_a_file_without_some_weights_is_refused(auto: type, tmp_path) -> None:
    """A head is new: the classifier is."""
    ToSTForCausalLM(config()).save_pretrained(tmp_path)
    assert auto.from_pretrained(tmp_path).config.num_hidden_layers == 2
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mixer.out_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        InputError, match=r"got 1 missing, such as '(model\.)?layers\.1\.mixer\.out_proj\.weight'"
    ):
        auto.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="got 1 missing"):
        auto.from_pretrained(tmp_path, use_cache=False, dropout=0.1, skip="channel")
    (tmp_path / "inside").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).rename(tmp_path / "inside" / name)
    with pytest.raises(InputError, match="got 1 missing"):
        auto.from_pretrained(tmp_path, subfolder="inside", use_cache=False)


@pytest.mark.parametrize(
    ("mixer", "options", "expected"),
    [
        ("tssa", {"features": 2.0}, "a whole number"),
        ("tssa", {"features": True}, "a whole number"),
        ("tssa", None, "a dict"),
        ("mamba", {"expand": 1.5}, "a whole number"),
        ("mamba2", {"groups": 0}, "a whole number"),
    ],
)
def test_options_of_mixers_of_another_type_are_refused(mixer, options, expected) -> None:
    wanted = rf"mixer_options\['{mixer}'\].*expected {expected}"
    with unchecked(), pytest.raises(InputError, match=wanted):
        ToSTModel(config(layer_types=mixer, mixer_options={mixer: options}))


def test_weights_missing_in_a_file_start_as_in_a_new_model(tmp_path) -> None:
    """Parameters outside of layers are initialized, too."""
    ToSTForCausalLM(config()).save_pretrained(tmp_path)
    changed = {"skip": "channel", "skip_init": -1.0, "layer_scale": 0.25, "num_hidden_layers": 3}
    wanted = ToSTConfig.from_pretrained(tmp_path)
    wanted = ToSTConfig(**{**wanted.to_dict(), **changed, "mixers": "tssa"})
    lm = ToSTForCausalLM.from_pretrained(tmp_path, config=wanted)
    new = lm.model.layers[2]
    assert (new.mixer.temperature == 1).all()
    assert (new.mixer.position_bias == 0).all()
    assert (new.skip.weight == -1).all()
    assert (new.mlp_scale.weight == 0.25).all()
    assert 0 < new.mixer.out_proj.weight.std() < 0.02


def test_the_start_is_gpt2s() -> None:
    torch.manual_seed(0)
    lm = ToSTForCausalLM(config(hidden_size=96, num_hidden_layers=8))
    block = lm.model.layers[3]
    # 9,216 draws and more: the deviation of the deviation is under 1 %
    assert block.mixer.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for last in (block.mixer.out_proj, block.mlp.out_proj):
        assert last.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert (lm.model.embed_tokens.weight[0] == 0).all()


def test_outputs_as_asked() -> None:
    lm, ids = model(), texts(1, 6)
    full = lm(ids, output_hidden_states=True)
    assert len(full.hidden_states) == 3
    torch.testing.assert_close(lm.lm_head(full.hidden_states[-1]), full.logits, **CLOSE)
    torch.testing.assert_close(lm(ids, logits_to_keep=2).logits, full.logits[:, -2:], **CLOSE)
    chosen = lm(ids, logits_to_keep=torch.tensor([0, 3])).logits
    torch.testing.assert_close(chosen, full.logits[:, [0, 3]], **CLOSE)
    assert torch.equal(lm(ids, return_dict=False, use_cache=False)[0], full.logits)
    assert lm(ids, use_cache=False).past_key_values is None
    embedded = lm(inputs_embeds=lm.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(embedded, full.logits, **CLOSE)


def test_resized_embeddings_stay_tied() -> None:
    lm = model()
    lm.resize_token_embeddings(31)
    assert lm(texts(1, 4)).logits.shape == (1, 4, 31)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight


@pytest.mark.parametrize("variant", ["hybrid", "scanned", "linear", "s4d", "mamba", "mamba2"])
def test_half_precision_and_autocast(variant: str) -> None:
    lm, ids = model(variant).float(), texts(2, 8)
    exact = lm(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        near = lm(ids).logits.float()
    # bfloat16 keeps 8 bits; a few roundings in a row stay under 10 % of the largest logit
    assert (near - exact).abs().max() < 0.1 * exact.abs().max()
    low = copy.deepcopy(lm).bfloat16()
    assert low(ids).logits.dtype == torch.bfloat16
    assert (low(ids).logits.float() - exact).abs().max() < 0.1 * exact.abs().max()
    out = low.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (2, 12)


def test_it_compiles_as_one_graph() -> None:
    """Also if a text of the largest length is followed by padding."""
    lm, ids = model("hybrid"), torch.cat([texts(1, LIMIT), torch.zeros(1, 4, dtype=torch.long)], 1)
    mask = (ids != 0).long()
    with unchecked():
        compiled = torch.compile(lm, backend="aot_eager", fullgraph=True)
        logits = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits, lm(ids, attention_mask=mask).logits, **CLOSE)


REFUSED = {
    "no tokens": ({"input_ids": None}, "expected input_ids or inputs_embeds, got neither"),
    "two inputs": ({"inputs_embeds": torch.zeros(2, 5, 12)}, "input_ids or inputs_embeds, got both"),
    "a short mask": (
        {"attention_mask": torch.ones(2, 4)},
        r"`attention_mask`: expected \(2, 5\), got \(2, 4\)",
    ),
    "another cache": ({"past_key_values": DynamicCache()}, "MixerCache of 2 layers .* got a DynamicCache"),
    "a cache of 3 layers": ({"past_key_values": MixerCache(3)}, "got a MixerCache of 3"),
    "a misspelt mask": ({"atention_mask": torch.ones(2, 5)}, "`atention_mask`.* Did you mean attention_mask"),
    "packed texts": (
        {"cu_seq_lens_q": torch.tensor([0, 2, 5])},
        "`cu_seq_lens_q`.* The mixers do not read where",
    ),
    "another order": ({"is_causal": False}, "`is_causal`: expected an argument of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused(case: str) -> None:
    given, match = REFUSED[case]
    lm = model()
    for made in (lm, lm.model):
        with unchecked(), pytest.raises(InputError, match=match):
            made(**{"input_ids": texts(2, 5)} | given)


def test_a_model_that_looks_ahead_has_no_cache_and_no_next_token() -> None:
    wrong = config(causal=False)
    with pytest.raises(InputError, match="ToSTForCausalLM: expected causal=True"):
        ToSTForCausalLM(wrong)
    with pytest.raises(InputError, match="`past_key_values`: expected None, got a MixerCache"):
        ToSTModel(wrong)(texts(1, 3), past_key_values=MixerCache(2))


def test_a_cache_cannot_be_cropped() -> None:
    with pytest.raises(InputError, match=r"`MixerCache.crop`: expected no removal of tokens, got -1"):
        MixerCache(2).crop(-1)


def test_assisted_generation_is_refused() -> None:
    for assistant in ({"assistant_model": model()}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            model().generate(texts(1, 5), max_new_tokens=4, do_sample=False, **assistant)


@pytest.mark.parametrize("kind", ["static", "quantized", "offloaded"])
def test_generation_refuses_another_cache(kind: str) -> None:
    with pytest.raises(InputError, match=f"`cache_implementation`: expected None, got '{kind}'"):
        model().generate(texts(1, 3), max_new_tokens=2, do_sample=False, cache_implementation=kind)


def test_a_mask_is_of_this_call_or_of_all_tokens_so_far() -> None:
    lm, ids = model(), texts(2, 8)
    ids[0, :3] = 0
    mask = (ids != 0).long()
    whole = lm(ids, attention_mask=mask).logits
    for later in (mask, mask[:, 5:]):
        cache = lm(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
        found = lm(ids[:, 5:], attention_mask=later, past_key_values=cache).logits
        torch.testing.assert_close(found, whole[:, 5:], **CLOSE)
    cache = lm(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(InputError, match=r"expected \(2, 3\) or \(2, 8\), got \(2, 4\)"):
        lm(ids[:, 5:], attention_mask=mask[:, 4:], past_key_values=cache)
    with pytest.raises(InputError, match=r"expected \(2, 5\), got \(2, 8\)"):
        lm(ids[:, :5], attention_mask=mask)


@pytest.mark.parametrize("values", [[0.0, -1e9], [1.0, float("nan")], [0.5, 1.0], [2, 1]], ids=str)
def test_a_mask_holds_zeros_and_ones(values: list[float]) -> None:
    with pytest.raises(InputError, match=r"`attention_mask`: expected 1 .or true. for real tokens"):
        model()(texts(1, 4), attention_mask=torch.tensor([[*values, 1, 1]]))


def test_a_mask_is_of_any_dtype() -> None:
    lm, ids, mask = model(), texts(1, 4), torch.tensor([[False, True, True, True]])
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.float64):
        assert torch.equal(lm(ids, attention_mask=mask.to(dtype)).logits, lm(ids, attention_mask=mask).logits)


def test_arguments_of_transformers_are_accepted() -> None:
    lm, ids = model(), texts(2, 4)
    given = {"output_attentions": True, "cache_position": torch.arange(4), "token_type_ids": ids * 0}
    assert torch.equal(lm(ids, is_causal=None, **given).logits, lm(ids).logits)
    summed = lm(ids, labels=ids, num_items_in_batch=3).loss
    torch.testing.assert_close(summed, lm(ids, labels=ids).loss * 6 / 3)


@pytest.mark.parametrize("variant", ["tssa", "unbounded"])
def test_positions_only_count(variant: str) -> None:
    lm, ids = model(variant), texts(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    counted = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    found = lm(ids, attention_mask=mask, position_ids=counted).logits
    torch.testing.assert_close(found[:, 2:], lm(ids, attention_mask=mask).logits[:, 2:], **CLOSE)
    for plain in (torch.arange(6), torch.arange(6)[None]):
        torch.testing.assert_close(lm(ids, position_ids=plain).logits, lm(ids).logits, **CLOSE)
    cache = lm(ids[:, :4], use_cache=True).past_key_values
    on = lm(ids[:, 4:], position_ids=torch.tensor([[4, 5]]), past_key_values=cache).logits
    torch.testing.assert_close(on, lm(ids).logits[:, 4:], **CLOSE)
    for other in ([0, 1, 2, 0, 1, 2], [1, 2, 3, 4, 5, 6], [0, 1, 2]):
        with pytest.raises(
            InputError, match=r"`position_ids`.* The mixers do not read where packed texts end"
        ):
            lm(ids, position_ids=torch.tensor([other]))


def test_a_copied_cache_is_cut_from_the_graph() -> None:
    lm, ids = model("hybrid"), texts(2, 5)
    cache = lm(ids, use_cache=True).past_key_values
    first, second = copy.deepcopy([cache, cache])
    assert first is second
    for new, old in zip(first.states, cache.states, strict=True):
        assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(new, old, strict=True))
        assert any(tensor.requires_grad for tensor in old)
    lm(texts(2, 1, seed=3), past_key_values=first)
    assert (first.length, cache.length) == (6, 5)
