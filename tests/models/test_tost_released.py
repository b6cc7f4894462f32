"""Released checkpoints: parity with the outputs of the released code, and refusals of other files."""

import argparse
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from tests.support.torch_names import COMPILED_PREFIX as COMPILED
from torch.nn import functional as F
from tost_cases import GOLDEN
from transformers import AutoModelForCausalLM, AutoModelForImageClassification
from typer.testing import CliRunner

from rankwise.cli import convert
from rankwise.errors import InputError
from rankwise.models import (
    TokenStatisticsAttention,
    ToSTForCausalLM,
    ToSTForImageClassification,
    load_released_tost,
    save_model,
)

LANGUAGE, VISION = GOLDEN / "tost_gpt_ckpt.pt", GOLDEN / "tost_vision_ckpt.pth"
CASES = json.loads((GOLDEN / "cases.json").read_text())
MODULES = sorted(name for name in CASES if name.startswith("tssa"))
OUTPUT, GRADIENT = 1e-5, 1e-4
"""Absolute error of outputs, relative error of gradients: the same sums in another order, in float32."""


def read(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def released_module(name: str) -> tuple[TokenStatisticsAttention, dict[str, torch.Tensor], dict[str, str]]:
    """A module with a case's weights, the case's tensors, and its names of our parameters."""
    held, sizes = load_file(GOLDEN / f"{name}.safetensors"), CASES[name]
    causal = "causal" in name
    into, out = ("c_attn", "c_proj") if causal else ("qkv", "to_out.0")
    names = {
        "in_proj.weight": f"{into}.weight", "in_proj.bias": f"{into}.bias", "temperature": "temp",
        "out_proj.weight": f"{out}.weight", "out_proj.bias": f"{out}.bias",
        **({"position_bias": "denom_bias"} if causal else {}),
    }  # fmt: skip
    module = TokenStatisticsAttention(
        sizes["width"], sizes["heads"], causal=causal, max_positions=sizes.get("block_size", 0)
    )
    for own, theirs in names.items():
        parameter = module.get_parameter(own)
        parameter.data.copy_(held[f"param.{theirs}"].reshape(parameter.shape))
    return module, held, names


@pytest.mark.parametrize("name", MODULES)
def test_modules_give_the_released_outputs_and_gradients(name: str) -> None:
    module, held, names = released_module(name)
    x = held["input"].requires_grad_()
    output = module(x).output
    assert (output - held["output"]).abs().max() <= OUTPUT
    output.backward(held["cotangent"])
    found = {"input": x.grad} | {theirs: module.get_parameter(own).grad for own, theirs in names.items()}
    assert {f"grad.{key}" for key in found} == {key for key in held if key.startswith("grad.")}
    for key, gradient in found.items():
        expected = held[f"grad.{key}"].reshape(gradient.shape)
        assert (gradient - expected).norm() <= GRADIENT * expected.norm(), key


def test_the_language_model_gives_the_released_logits() -> None:
    model, held = load_released_tost(LANGUAGE), load_file(GOLDEN / "tost_gpt_io.safetensors")
    assert type(model) is ToSTForCausalLM
    logits = model(held["input_ids"]).logits
    assert (logits - held["logits"]).abs().max() <= OUTPUT
    # the released loss does not shift: its caller does; it was called with the inputs as targets
    loss = F.cross_entropy(logits.flatten(0, 1), held["input_ids"].flatten())
    assert (loss - held["loss"][0]).abs() <= OUTPUT
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_vision_model_gives_the_released_logits() -> None:
    model, held = load_released_tost(VISION), load_file(GOLDEN / "tost_vision_io.safetensors")
    assert type(model) is ToSTForImageClassification
    assert (model(held["pixel_values"]).logits - held["logits"]).abs().max() <= OUTPUT
    other = load_released_tost(VISION, tokens_norm=False)
    assert (other(held["pixel_values"]).logits - held["logits"]).abs().max() > 100 * OUTPUT


def test_sizes_are_read_off_the_shapes() -> None:
    language, vision = load_released_tost(LANGUAGE).config, load_released_tost(VISION).config
    args, wanted = read(LANGUAGE)["model_args"], CASES["tost_vision"]
    assert (language.num_hidden_layers, language.hidden_size) == (args["n_layer"], args["n_embd"])
    assert (language.num_attention_heads, language.vocab_size) == (args["n_head"], args["vocab_size"])
    assert language.max_position_embeddings == args["block_size"]
    assert (language.layer_scale, language.eos_token_id) == (1e-5, None)  # 61 tokens hold no <|endoftext|>
    assert (vision.num_hidden_layers, vision.hidden_size) == (wanted["depth"], wanted["embed_dim"])
    assert (vision.num_attention_heads, vision.patch_size) == (wanted["num_heads"], wanted["patch_size"])
    assert (vision.num_labels, vision.class_attention_layers) == (wanted["num_classes"], 2)


@pytest.mark.parametrize("wrapper", [COMPILED, "module.", f"module.{COMPILED}", f"{COMPILED}module."])
def test_wrapped_names_and_bare_state_dicts_are_read(wrapper: str, tmp_path: Path) -> None:
    weights = {wrapper + name: weight for name, weight in read(LANGUAGE)["model"].items()}
    torch.save(weights, tmp_path / "bare.pt")
    again, first = load_released_tost(tmp_path / "bare.pt"), load_released_tost(LANGUAGE)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), first.parameters(), strict=True))


def test_a_file_without_biases_or_with_a_command_line_is_read(tmp_path: Path) -> None:
    weights = {n: w for n, w in read(LANGUAGE)["model"].items() if not n.endswith(".bias")}
    torch.save({"model": weights}, tmp_path / "plain.pt")
    assert load_released_tost(tmp_path / "plain.pt").model.layers[0].mixer.in_proj.bias is None
    whole = {"model": read(VISION)["model"], "args": argparse.Namespace(lr=1e-3), "epoch": 399}
    torch.save(whole, tmp_path / "vision.pth")
    assert load_released_tost(tmp_path / "vision.pth").config.num_labels == 10


class Trap:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


Change = Callable[[dict[str, torch.Tensor]], dict]


def without(name: str) -> Change:
    return lambda weights: {n: w for n, w in weights.items() if n != name}


def with_(**new: torch.Tensor) -> Change:
    return lambda weights: {**weights, **{name.replace("__", "."): w for name, w in new.items()}}


WRONG: dict[str, tuple[Change, str]] = {
    "missing": (without("transformer.ln_f.bias"), r"1 \(transformer.ln_f.bias\) missing, none unknown"),
    "stray layer": (with_(transformer__h__2000__ln_1__weight=torch.ones(48)),
        r"16 \(transformer.h.2.gamma1.*missing, 1 \(transformer.h.2000.ln_1.weight\)"),
    "1-D embedding": (with_(transformer__wte__weight=torch.ones(48)), r"wte.weight: expected 2 axes"),
    "0-D temperature": (with_(transformer__h__1__attn__temp=torch.tensor(1.0)),
        r"h.1.attn.temp: expected shape \(4,\), got \(\)"),
    "0-D first temperature": (with_(transformer__h__0__attn__temp=torch.tensor(1.0)),
        r"h.0.attn.temp: expected shape \(1,\), got \(\)"),
    "0-D feed-forward": (with_(transformer__h__0__mlp__c_fc__weight=torch.tensor(1.0)),
        r"c_fc.weight: expected 2 axes, got shape \(\)"),
    "5 heads": (with_(transformer__h__0__attn__temp=torch.ones(5, 1)),
        r"divides the width 48, got 5. No released model"),
    "sparse": (with_(transformer__ln_f__weight=torch.eye(48).to_sparse()),
        r"expected a dense tensor of floating-point numbers, got torch.float32, torch.sparse_coo"),
    "complex": (with_(transformer__ln_f__weight=torch.ones(48, dtype=torch.complex64)),
        r"expected a dense tensor of floating-point numbers, got torch.complex64"),
    "integers": (with_(transformer__ln_f__weight=torch.ones(48, dtype=torch.int64)),
        r"expected a dense tensor of floating-point numbers, got torch.int64"),
    "not a number": (with_(transformer__ln_f__weight=torch.tensor([torch.nan] + [1.0] * 47)),
        r"weight transformer.ln_f.weight: expected finite numbers, got 1 of 48 NaN or infinite"),
    "infinite half precision": (with_(transformer__h__1__ln_1__bias=torch.full((48,), -torch.inf).half()),
        r"h.1.ln_1.bias: expected finite numbers, got 48 of 48 NaN or infinite"),
    "infinite in float32": (with_(transformer__ln_f__weight=torch.full((48,), 1e300, dtype=torch.float64)),
        r"weight transformer.ln_f.weight: expected finite numbers, got 48 of 48 NaN or infinite"),
    "vision not a number": (with_(patch_embed__proj__0__1__running_var=torch.full((8,), torch.nan)),
        r"0.1.running_var: expected finite numbers, got 8 of 8 NaN or infinite"),
    "one number spread out": (with_(transformer__wpe__weight=torch.ones(1).expand(10**12)),
        r"got shape \(1000000000000,\) of 4 bytes"),
    "vision 1-D head": (with_(head__weight=torch.ones(64)), r"head.weight: expected 2 axes"),
    "vision 1-D patches": (with_(patch_embed__proj__0__0__weight=torch.ones(8)),
        r"patch_embed.proj.0.0.weight: expected 4 axes"),
    "no positions": (without("transformer.wpe.weight"),
        r"expected a weight transformer.wpe.weight, got none"),
    "unknown": (with_(extra=torch.ones(1)), r"none missing, 1 \(extra\) unknown"),
    "shape": (with_(transformer__h__1__ln_1__weight=torch.ones(5)),
        r"weight transformer.h.1.ln_1.weight: expected shape \(48,\), got \(5,\)"),
    "untied": (with_(lm_head__weight=torch.ones(61, 48)), r"lm_head.weight: expected the same numbers"),
    "gpt-2": (without("transformer.h.0.attn.temp"), r"no transformer.h.0.attn.temp: a model with another"),
    "vision missing": (without("cls_token"), r"expected the 89 weights of a released vision model"),
    "vision xcit": (without("blocks.0.attn.temp"), r"no blocks.0.attn.temp: a model with another attention"),
    "vision shape": (with_(norm__weight=torch.ones(3)), r"norm.weight: expected shape \(64,\), got \(3,\)"),
}  # fmt: skip


def wrong_file(case: str, folder: Path) -> Path:
    whole = read(VISION if case.startswith("vision") else LANGUAGE)["model"]
    torch.save({"model": WRONG[case][0](whole)}, folder / "wrong.pt")
    return folder / "wrong.pt"


@pytest.mark.parametrize("case", sorted(WRONG))
def test_wrong_weights_are_named(case: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=WRONG[case][1]):
        load_released_tost(wrong_file(case, tmp_path))


FOREIGN = {
    "another model": (
        {"encoder.weight": torch.ones(2)},
        r"expected a checkpoint of the released ToST code.*encoder",
    ),
    "no weights": ({"epoch": 3, "loss": 0.5}, r"got keys epoch, loss"),
    "a tensor": (torch.ones(3), r"got no weights"),
    "nothing": ({}, r"got no weights"),
    "numbers for names": ({0: torch.ones(2)}, r"got keys 0\."),
    "names a terminal obeys": ({"\x1b[31mred": torch.ones(2)}, r"got names such as \\x1b\[31mred\."),
}


@pytest.mark.parametrize("case", sorted(FOREIGN))
def test_files_of_other_models_are_refused(case: str, tmp_path: Path) -> None:
    held, match = FOREIGN[case]
    torch.save(held, tmp_path / "foreign.pt")
    with pytest.raises(InputError, match=match):
        load_released_tost(tmp_path / "foreign.pt")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = LANGUAGE.read_bytes()
    cut, empty, text = tmp_path / "cut.pt", tmp_path / "empty.pt", tmp_path / "text.pt"
    cut.write_bytes(whole[: len(whole) // 2])
    empty.write_bytes(b"")
    text.write_text("not a checkpoint\n")
    archive = tmp_path / "archive.pt"
    with zipfile.ZipFile(archive, "w") as other:
        other.writestr("a.txt", "b")
    for path in (cut, empty, text, archive):
        with pytest.raises(
            InputError, match=r"expected a file of torch\.save that holds tensors and plain values"
        ):
            load_released_tost(path)
    with pytest.raises(InputError, match="expected a file, got nothing there"):
        load_released_tost(tmp_path / "none.pt")
    with pytest.raises(InputError, match="expected a file, got a folder"):
        load_released_tost(str(tmp_path))


def test_no_model_is_built_before_names_and_shapes_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(
        ToSTForCausalLM, "post_init", lambda self: built.append(self.lm_head.weight.device.type)
    )
    for case in ("stray layer", "shape"):
        with pytest.raises(InputError):
            load_released_tost(wrong_file(case, tmp_path))
    assert built == ["meta"]


def test_no_code_of_a_file_runs_and_the_error_does_not_advise_it(tmp_path: Path) -> None:
    trap, mark = tmp_path / "trap.pt", tmp_path / "it-ran"
    torch.save({"model": Trap(mark)}, trap)
    with pytest.raises(InputError, match="no code from a checkpoint is ever run") as error:
        load_released_tost(trap)
    assert not mark.exists()
    text = str(error.value)
    assert "got a damaged file, or one that holds other things." in text
    assert "weights_only" not in text
    assert "\x1b" not in text
    assert error.value.__suppress_context__
    pickle.loads(pickle.dumps(Trap(mark))).close()  # the trap works
    assert mark.exists()


app = typer.Typer()
app.command(help=convert.HELP)(convert.command)


@pytest.mark.parametrize(
    ("path", "auto"),
    [(LANGUAGE, AutoModelForCausalLM), (VISION, AutoModelForImageClassification)],
    ids=["lm", "image"],
)
def test_the_command_writes_a_folder_that_auto_classes_load(path: Path, auto: type, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    result = CliRunner().invoke(app, [str(path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert {file.suffix for file in out.iterdir()} == {".json", ".safetensors"}
    lines = result.output.splitlines()
    model, first = auto.from_pretrained(out), load_released_tost(path)
    assert (
        f"2 layers, width {model.config.hidden_size}, 4 heads, {model.num_parameters():,} parameters"
        in lines[0]
    )
    assert {line.removeprefix("wrote: ") for line in lines[1:]} == {str(file) for file in out.iterdir()}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), first.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), first.buffers(), strict=True))
    (tmp_path / "plain").touch()  # has the mode of the umask
    assert (out / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_converted_image_classifier_says_how_pictures_are_prepared(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    from rankwise.cli.load_images import load_image_processor

    save_model(load_released_tost(VISION), tmp_path)
    processor, _ = load_image_processor(tmp_path)
    red = image.new("RGB", (300, 400), (255, 0, 0))
    pixels = processor(images=[red], return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 224, 224)
    expected = (torch.tensor([1.0, 0, 0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(pixels.mean((0, 2, 3)), expected, rtol=0, atol=1e-5)


def test_the_command_s_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, [str(tmp_path / "none.pt"), "--out", str(tmp_path / "a" / "b")])
    assert isinstance(result.exception, InputError)
    assert not (tmp_path / "a").exists()
    result = CliRunner().invoke(app, [str(LANGUAGE), "--out", str(tmp_path / "file")])
    assert isinstance(result.exception, InputError)
    with pytest.raises(InputError, match="expected a folder that can be written"):
        save_model(load_released_tost(LANGUAGE), tmp_path / "file")
