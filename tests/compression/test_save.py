"""Saved models: loading by transformers, plain modules, and folders that are refused."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.compression.compression_cases import (
    GPT,
    SIZES,
    gpt2,
    ids,
    llama,
    made,
    narrow_projections,
    output,
    siglip,
    t5,
)
from tests.compression.test_blocks import gemma3
from tests.compression.test_evaluate import TwoWidths
from tests.compression.test_heads_uniform import FAMILIES as UNIFORM
from tests.support.modules import Attention
from tests.support.untouched import untouched
from torch import nn
from torch.nn.utils import parametrizations

import rankwise as rw
from rankwise import models
from rankwise.cli.load_model import load_model
from rankwise.compression import save_compressed
from rankwise.compression.save import KEY, NAME, loading_line, note_structure, structure_of
from rankwise.compression.width_modules import NarrowProjection
from rankwise.errors import CompressionError, InputError


@pytest.mark.parametrize("family", [t5, siglip])
def test_families_that_initialize_projections_by_name_are_loaded(family: Any, tmp_path: Path) -> None:
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model, batch = family(), ids() if family is t5 else {"pixel_values": pixels}
    rw.compress(model, [batch], keep=3 / 8)
    save_compressed(model, tmp_path / "one")
    loaded = rw.load_compressed(tmp_path / "one")
    assert torch.equal(output(loaded, batch), output(model, batch))
    narrow = [one for one in loaded.modules() if isinstance(one, NarrowProjection)]
    assert len(narrow) == 4
    for one in narrow:  # code that computes with this weight fails
        with pytest.raises(RuntimeError):
            nn.functional.linear(torch.ones(3, 32), one.weight, one.bias)


def saved_gpt2(folder: Path, keep: dict[str, float]) -> Any:
    model = gpt2()
    rw.compress(model, [ids()], keep=keep)
    save_compressed(model, folder)
    return model


def test_saved_weights_have_the_mode_of_other_files(tmp_path: Path) -> None:
    saved_gpt2(tmp_path / "one", {"width": 0.5})
    assert len({path.stat().st_mode for path in (tmp_path / "one").iterdir()}) == 1


TOST = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("name", ["ToSTModel", "ToSTForCausalLM", "ToSTForSequenceClassification"])
def test_models_of_this_package_are_loaded(name: str, tmp_path: Path) -> None:
    model = getattr(models, name)(models.ToSTConfig(**TOST, layer_types=["softmax"] * 2)).eval()
    rw.compress(model, [ids()], keep=0.5)
    save_compressed(model, tmp_path / "one")
    assert loading_line(model, "one", "") == 'model = rankwise.load_compressed("one")'
    loaded = rw.load_compressed(tmp_path / "one")
    assert type(loaded) is type(model)
    assert torch.equal(output(loaded, ids()), output(model, ids()))


CODE = """
from transformers import BertConfig, BertModel
class OwnConfig(BertConfig):
    model_type = "own-of-a-test"
class OwnModel(BertModel):
    config_class = OwnConfig
"""


def test_a_model_with_its_own_code_is_loaded_if_the_code_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "own.py").write_text(CODE)
    content = {**SIZES, "model_type": "own-of-a-test", "architectures": ["OwnModel"]}
    content["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (tmp_path / "first" / "config.json").write_text(json.dumps(content))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "first", trust_remote_code=True)
    model = transformers.AutoModel.from_config(config, trust_remote_code=True)
    model.save_pretrained(tmp_path / "second")
    shutil.copy(tmp_path / "first" / "own.py", tmp_path / "second")
    model = transformers.AutoModel.from_pretrained(tmp_path / "second", trust_remote_code=True).eval()
    rw.compress(model, [ids()], keep=0.5)
    save_compressed(model, tmp_path / "one")
    with pytest.raises(CompressionError, match="with `trust_remote_code=True`"):
        rw.load_compressed(tmp_path / "one")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "one", trust_remote_code=True)
    assert torch.equal(output(loaded, ids()), output(model, ids()))
    own = type("Own", (transformers.BertModel,), {})(transformers.BertConfig(**SIZES)).eval()
    rw.compress(own, [ids()], keep=0.5)
    save_compressed(own, tmp_path / "own")
    assert "Own.from_pretrained(" in loading_line(own, str(tmp_path / "own"), "")
    assert torch.equal(output(type(own).from_pretrained(tmp_path / "own"), ids()), output(own, ids()))


@pytest.mark.parametrize("keep", [{"width": 0.5}, {"width": 0.5, "kv": 0.5}, {"heads": 0.5}])
def test_a_model_inside_another_module_is_saved_alone_and_with_it(
    keep: dict[str, float], tmp_path: Path
) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.config, self.can_generate = inner, inner.config, inner.can_generate

        def forward(self, **batch: Any) -> Any:
            return self.inner(**batch)

    make = llama if "kv" in keep else gpt2
    model = Wrapper(make())
    rw.compress(model, [ids(8, 30)], keep=keep)
    expected = output(model, ids())
    model.inner.save_pretrained(tmp_path / "inner")
    assert torch.equal(output(rw.load_compressed(tmp_path / "inner"), ids()), expected)
    save_compressed(model, tmp_path / "one")  # also with tied weights
    assert torch.equal(output(rw.load_compressed(tmp_path / "one", Wrapper(make())), ids()), expected)


def test_a_loaded_model_is_not_marked_as_quantized(tmp_path: Path) -> None:
    """Otherwise, Trainer and peft refuse to train it."""
    saved_gpt2(tmp_path / "one", {"width": 0.5})
    loaded: Any = rw.load_compressed(tmp_path / "one")
    assert not loaded.is_quantized
    assert not hasattr(loaded, "hf_quantizer")
    assert not hasattr(loaded, "quantization_method")
    configs = [module.config for module in loaded.modules() if hasattr(module, "config")]
    assert not any(getattr(config, "_is_quantized", False) for config in configs)


def test_heads_are_built_before_widths_and_latents(tmp_path: Path) -> None:
    model = saved_gpt2(tmp_path / "one", {"heads": 0.5, "width": 0.5, "kv": 0.5})
    kinds = [change.kind for change in structure_of(model).changes]
    assert kinds == sorted(kinds, key=["heads", "narrow", "keys", "latent"].index)
    assert set(kinds) == {"heads", "narrow", "keys", "latent"}
    assert torch.equal(output(rw.load_compressed(tmp_path / "one"), ids()), output(model, ids()))


def test_the_structure_in_a_configuration_follows_the_model() -> None:
    model: Any = gpt2()
    rw.compress(model, [ids()], keep=0.5)
    changed = getattr(model.config, KEY)
    plain: Any = gpt2()
    setattr(plain.config, KEY, changed)
    note_structure(plain)
    assert not hasattr(plain.config, KEY)
    other = {"quant_method": "other"}
    setattr(plain.config, KEY, other)
    note_structure(plain)
    assert getattr(plain.config, KEY) == other


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({KEY: None}, "got one without a compression"),
        ({"architectures": None}, "got a configuration without `architectures`"),
        ({"architectures": ["OwnModel"]}, r"got OwnModel. Import .* `OwnModel.from_pretrained"),
        (
            {KEY: {"quant_method": NAME, "structure": {"format": 1, "changes": []}}},
            "format: Input should be 3. Save the model again",
        ),
    ],
    ids=["plain", "no class", "class", "structure"],
)
def test_folders_that_hold_something_else_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    saved_gpt2(tmp_path / "one", {"width": 0.5})
    file = tmp_path / "one" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CompressionError, match=said):
        rw.load_compressed(tmp_path / "one")
    file.write_text("{")
    with pytest.raises(InputError, match="expected JSON of a compressed model"):
        rw.load_compressed(tmp_path / "one")
    file.unlink()
    with pytest.raises(InputError, match=r"got no such file\. Check the folder"):
        rw.load_compressed(tmp_path / "one")


def test_missing_and_broken_weights_are_refused(tmp_path: Path) -> None:
    saved_gpt2(tmp_path / "one", {"width": 0.5})
    for name in ("README.md", "generation_config.json"):  # no part of the model
        (tmp_path / "one" / name).unlink()
        rw.load_compressed(tmp_path / "one")
    weights = tmp_path / "one" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(InputError, match="weights that `save_compressed` wrote"):
        rw.load_compressed(tmp_path / "one")
    weights.unlink()
    with pytest.raises(InputError, match="weights that `save_compressed` wrote"):
        rw.load_compressed(tmp_path / "one")


def test_a_folder_without_some_weights_is_refused(tmp_path: Path) -> None:
    model: Any = llama()
    parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    rw.compress(model, [ids(8, 30)], keep={"kv": 0.5})
    model.save_pretrained(tmp_path / "one")
    with pytest.raises(
        CompressionError, match=r"all weights of the compressed model, got no 'model.*q_proj.weight'"
    ):
        rw.load_compressed(tmp_path / "one")
    saved_gpt2(tmp_path / "two", {"width": 0.5})
    weights = tmp_path / "two" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["transformer.h.1.attn.c_attn.narrow.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(CompressionError, match=r"got no 'transformer\.h\.1\.attn\.c_attn\.narrow\.weight'"):
        rw.load_compressed(tmp_path / "two")
    with pytest.raises(CompressionError, match=r"got no 'transformer\.h\.1\.attn\.c_attn\.narrow\.weight'"):
        load_model(str(tmp_path / "two"))


def test_weights_that_a_new_model_lacks_are_not_saved(tmp_path: Path) -> None:
    model = gpt2()
    rw.add_lambda_skip(model, example=ids())
    rw.compress(model, [ids()], keep=0.5)
    with pytest.raises(CompressionError, match=r"more, such as 'transformer.h.0.*save_skips"):
        save_compressed(model, tmp_path / "one")
    assert not (tmp_path / "one").exists()


def with_object(model: Any) -> Any:
    model.config.own = nn.Identity()
    return model


def sampling(model: Any) -> Any:
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, False
    model.generation_config.num_beams, model.generation_config.num_return_sequences = 1, 3
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: made("GPT2", "LMHeadModel", **GPT, output_attentions=True),
            "`output_attentions`.* set it to 'eager'",
        ),
        (lambda: with_object(gpt2()), "not JSON serializable"),
        (lambda: sampling(gpt2()), "num_return_sequences"),
    ],
)
def test_a_model_that_cannot_be_saved_is_refused_before_the_work(make: Any, said: str) -> None:
    model, steps = make().eval(), []
    with (
        untouched(model),
        pytest.raises(CompressionError, match=f"a configuration that can be saved, got .*{said}") as error,
    ):
        rw.compress(model, [ids()], keep=0.5, on_progress=lambda step, _: steps.append(step))
    assert not steps
    assert "\n" not in str(error.value)


class Nano(nn.Module):
    """A decoder whose output layer shares the weight of the embedding."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(61, 32), nn.Linear(32, 61, bias=False)
        self.output.weight = self.embedding.weight
        layer = Attention(32, 4)
        self.layers = nn.ModuleList([layer, layer if shared else Attention(32, 4)])

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.output(x[:, [-1]]), None


@pytest.mark.parametrize("shared", [False, True])
def test_shared_weights_of_a_plain_module_are_saved(shared: bool, tmp_path: Path) -> None:
    model, tokens = Nano(shared).eval(), ids(8, 20)["input_ids"]
    done = rw.compress(model, [tokens], keep=0.5)
    assert done.tokens == 160
    save_compressed(model, tmp_path / "one")
    again = rw.load_compressed(tmp_path / "one", Nano(shared))
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    assert again.output.weight is again.embedding.weight
    other = Nano(shared)
    other.output.weight = nn.Parameter(torch.randn(61, 32))
    with pytest.raises(CompressionError, match=r'of the same sizes, got .*Missing key.*"output\.weight"'):
        rw.load_compressed(tmp_path / "one", other)


@pytest.mark.parametrize("part", ["heads", "blocks"])
def test_nothing_to_save_is_explained(part: str, tmp_path: Path) -> None:
    model = gpt2()
    rw.compress(model, [ids()], keep=0.99, parts=part)
    with pytest.raises(CompressionError, match="nothing was changed at these targets: lower `keep`"):
        save_compressed(model, tmp_path / "one")


PROCESS = """
import sys
from functools import partial
from pathlib import Path
sys.modules["rankwise"] = None  # any import of it fails
import torch, transformers
cases = list(zip(sys.argv[1::2], sys.argv[2::2]))
for name, folder in cases:
    load = getattr(transformers, name).from_pretrained
    if Path(folder, "README.md").exists():
        for refused in (transformers.AutoModel.from_pretrained, load):
            try:
                refused(folder)
            except RuntimeError as error:
                assert "mismatched" in str(error), error
            else:
                sys.exit(f"{name} was loaded")
        continue
    model, (ids, expected) = load(folder), torch.load(folder + "/expected.pt")
    assert torch.equal(model(ids).logits, expected)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    texts = [model.generate(ids, use_cache=cached, **options) for cached in (True, False)]
    assert texts[0].shape[1] > ids.shape[1] and torch.equal(*texts)
del sys.modules["rankwise"]
from rankwise.compression import load_compressed
for name, folder in cases:
    getattr(transformers, name).from_pretrained(folder)
"""
PLAIN: list[tuple[Any, dict[str, Any]]] = [
    (partial(llama, 4), {"remove": 2}),
    (gemma3, {"remove": 2}),
    *(
        (UNIFORM[family][0], {"keep": UNIFORM[family][1], "parts": "heads", "uniform": True})
        for family in ("llama", "queries", "one key head")
    ),
    (UNIFORM["llama"][0], {"keep": 0.25, "parts": "key-heads"}),
]


def test_transformers_alone_loads_plain_folders_and_refuses_others(tmp_path: Path) -> None:
    """After the import that the message names, transformers loads the others, too."""
    others: list[tuple[Any, dict[str, Any]]] = [
        (gpt2, {"keep": {"heads": 0.3}}),
        (gpt2, {"keep": {"width": 0.9, "kv": 0.9}}),
        (t5, {"keep": {"width": 0.9}}),
    ]
    command = [sys.executable, "-c", PROCESS]
    for number, (make, options) in enumerate(PLAIN + others):
        model, folder = make(), tmp_path / str(number)
        save_compressed(model, folder, rw.compress(model, [ids(8, 30)], **options))
        command += [type(model).__name__, str(folder)]
        if number < len(PLAIN):
            files = {"config.json", "generation_config.json", "model.safetensors", "compression.json"}
            assert {path.name for path in folder.iterdir()} == files
            assert "rankwise" not in (folder / "config.json").read_text()
            batch = ids(2, 12)
            torch.save((batch["input_ids"], output(model, batch)), folder / "expected.pt")
    readme = (folder / "README.md").read_text()
    assert "rankwise.load_compressed(folder)" in readme
    assert "Do not set `ignore_mismatched_sizes=True`" in readme
    assert "rankwise.load_compressed(folder)" in (folder / "config.json").read_text()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "got rankwise, after `from rankwise.compression import load_compressed`" in done.stderr


def test_a_plain_module_is_loaded_into_a_new_one_of_its_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = TwoWidths().eval(), torch.randn(6, 30, 32)
    rw.compress(model, [x], keep=0.5)
    save_compressed(model, tmp_path / "one")
    (tmp_path / "one" / "README.md").unlink()  # no part of the model
    assert torch.equal(rw.load_compressed(tmp_path / "one", TwoWidths())(x), model(x))
    small, wide, other = TwoWidths(), TwoWidths(), nn.Linear(2, 2)
    small.layers[0] = small.layers[1]
    wide.layers[1].o = nn.Linear(32, 40)
    for model, said in (
        (small, "a linear layer with 16 channels"),
        (wide, r"of the same sizes, got .*size mismatch for layers\.1\.o\.weight"),
        (other, r"a module 'layers\.0\.q', which was compressed, got none. Load it into the class"),
    ):
        with pytest.raises(CompressionError, match=said):
            rw.load_compressed(tmp_path / "one", model)
        assert not narrow_projections(model)
    model = TwoWidths()
    (tmp_path / "one" / "model.safetensors").write_bytes(b"short")
    with untouched(model), pytest.raises(InputError, match="weights that `save_compressed` wrote"):
        rw.load_compressed(tmp_path / "one", model)
