"""Passes that restart at the block of a head equal passes of the whole model, or they are not used."""

import pytest
import torch
import transformers
from importance_cases import Heads, encoder, ids, language_model
from tests.support.untouched import untouched
from torch import nn

from rankwise.importance import ImportanceSettings, measure_importance, restarts
from rankwise.models import ToSTConfig, ToSTForCausalLM

EXACT = ImportanceSettings(exact=True, estimates=False, tolerance=None)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "initializer_range": 0.3}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
GEMMA = {**SIZES, "head_dim": 8, "num_key_value_heads": 1, "sliding_window": 4, "num_hidden_layers": 4}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
VIT = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 3}
MAMBA = {"hidden_size": 4, "state_size": 2, "expand": 1, "num_hidden_layers": 3}


def of(name, config, **sizes):
    """Return a function that makes a model of transformers from its configuration."""
    words = {} if name.startswith("ViT") else {"vocab_size": 24}
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**words, **sizes))


def torch_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class Layers(nn.Module):
    """Three blocks of a user. The last may read a cache that an earlier block wrote.

    The cache is new in each pass, or a list that outlives the pass.
    """

    def __init__(self, reads=False, cache=None):
        super().__init__()
        self.blocks, self.reads = nn.ModuleList(Heads(2) for _ in range(3)), reads
        self.new_cache = (lambda: []) if cache is None else (lambda: cache)

    def forward(self, x):
        cache = self.new_cache()
        writes = self.blocks[0].out.register_forward_hook(
            lambda _, args, output: cache.__setitem__(slice(None), [output.mean((0, 1))[:4]])
        )
        for block in self.blocks:
            x = block(x + sum(cache) if self.reads and block is not self.blocks[0] else x)
        writes.remove()
        return x


def padded(sequences=2, tokens=8, **more):
    real = torch.ones(sequences, tokens, dtype=torch.long)
    real[0, 5:] = 0
    return {"input_ids": ids(sequences, tokens), "attention_mask": real, **more}


STATES = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
MODELS = {
    "GPT-2": (language_model, [padded(), {"input_ids": ids(1, 6)}]),
    "Llama": (of("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=3, **SIZES), [padded()]),
    "Gemma 3": (of("Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA, **WINDOWS), [padded()]),
    "BERT": (encoder, [padded()]),
    "T5": (of("T5ForConditionalGeneration", "T5Config", **T5), [padded(labels=ids(2, 4))]),
    "ViT": (of("ViTForImageClassification", "ViTConfig", **VIT, **SIZES), [{"pixel_values": IMAGES}]),
    "Mamba": (of("MambaForCausalLM", "MambaConfig", **MAMBA), [{"input_ids": ids(2, 6)}]),
    "ToST": (lambda: ToSTForCausalLM(ToSTConfig(vocab_size=24, num_hidden_layers=3, **SIZES)), [padded()]),
    "PyTorch": (torch_encoder, [torch.randn(2, 5, 8)]),
    "of a user": (Layers, [STATES]),
}
ALBERT = of("AlbertModel", "AlbertConfig", embedding_size=8, num_hidden_layers=2, **SIZES)
WHOLE = {
    "ALBERT": (ALBERT, [padded()], "runs several times in a pass"),
    "a cache": (lambda: Layers(reads=True), [STATES], "'blocks.1' differs if the blocks before it are"),
    "an old cache": (lambda: Layers(reads=True, cache=[]), [STATES], "'blocks.1' differs"),
}


def both_ways(model, batches, monkeypatch):
    """Return the importance from passes that may restart, and from passes of the whole model."""
    with untouched(model):
        restarted = measure_importance(model, batches, EXACT)
    monkeypatch.setattr(restarts, "SHARE", 0)
    return restarted, measure_importance(model, batches, EXACT)


def assert_same(one, other):
    assert repr(one.heads) == repr(other.heads)  # equal bit by bit, and NaN equals NaN
    assert repr(one.record.blocks) == repr(other.record.blocks)
    assert repr(one.record.removable) == repr(other.record.removable)


@pytest.mark.parametrize("name", MODELS)
def test_passes_that_restart_equal_passes_of_the_whole_model(name, monkeypatch):
    torch.manual_seed(0)
    make, batches = MODELS[name]
    model, runs = make().eval(), []
    one, other = both_ways(model, batches, monkeypatch)
    assert_same(one, other)
    assert len({repr(head.exact) for head in one.heads.values()}) > 2
    assert one.record.notes == []
    assert f"{len(batches)} of {len(batches)} batches: memory" in other.record.notes[0]
    blocks = [model.get_submodule(block.site) for block in one.record.blocks]
    monkeypatch.undo()
    for number, block in enumerate(blocks):
        inner = next(module for module in block.modules() if not any(module.children()))
        inner.register_forward_hook(lambda *_, number=number: runs.append(number))
    measure_importance(model, batches, ImportanceSettings(exact=True, estimates=False, tolerance=None))
    assert 2 * runs.count(0) < runs.count(len(blocks) - 1) + 4 * len(batches) + 4


@pytest.mark.parametrize("name", WHOLE)
def test_blocks_that_depend_on_skipped_blocks_are_found_and_nothing_is_skipped(name, monkeypatch):
    torch.manual_seed(0)
    make, batches, reason = WHOLE[name]
    one, other = both_ways(make().eval(), batches, monkeypatch)
    assert_same(one, other)
    (note,) = one.record.notes
    assert note.startswith("each exact cost took a pass of the whole model")
    assert reason in note


def test_passes_restart_if_kernels_with_gradients_round_differently():
    """The attention of T5 has another kernel for position biases that need gradients."""
    torch.manual_seed(0)
    make, batches = MODELS["T5"]
    importance = measure_importance(make().eval(), batches, ImportanceSettings(exact=True, tolerance=None))
    assert importance.record.backward > 0
    assert importance.record.notes == []
