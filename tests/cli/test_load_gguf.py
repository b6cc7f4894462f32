"""GGUF files: the model, tokenizer and dtype that are in the file; broken and split files are refused."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rankwise.auditing import Audit, Remedy, remedy_text
from rankwise.cli.load_gguf import gguf_location, read_once
from rankwise.cli.load_model import load_model
from rankwise.compression import load_compressed
from rankwise.errors import InputError

MERGE = "t h"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=64, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def write(model: nn.Module) -> Callable[..., Path]:
    """Write the model as a GGUF file, with one token per byte, one merge, and an end of texts."""
    gguf: Any = pytest.importorskip("gguf")

    def characters() -> list[str]:
        """Return the character of each byte in vocabularies of GPT-2."""
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]

    def write(path: Path, kind: str = "F32", architecture: str = "qwen2", **numbers: int) -> Path:
        config: Any = model.config
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        for key, number in numbers.items():
            writer.add_uint16(key.replace("_", "."), number)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*characters(), MERGE.replace(" ", ""), "<|endoftext|>"])
        writer.add_token_types([1] * 257 + [3])
        writer.add_token_merges([MERGE])
        writer.add_eos_token_id(257)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
        for name, weight in model.state_dict().items():
            stored = gguf.GGMLQuantizationType[kind if weight.dim() == 2 else "F32"]
            data = gguf.quants.quantize(weight.numpy(), stored)
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(40)[None] * 5).logits.detach()


def test_the_model_is_the_model_in_the_file(write, model, tmp_path) -> None:
    loaded = load_model(str(write(tmp_path / "m.gguf")))
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.notes == ["measured in float32: weights of types F32 in the GGUF file were read"]
    half = load_model(str(tmp_path / "m.gguf"), dtype="bfloat16")
    assert half.notes[0].startswith("measured in bfloat16: ")


def test_quantized_weights_are_dequantized(write, model, tmp_path) -> None:
    """A block of 32 weights of Q8_0 has steps of max|w| / 127, and is rounded to half of this at most.

    The step is stored as float16, whose relative error of 2⁻¹¹ counts up to 127 times.
    """
    loaded = load_model(str(write(tmp_path / "m.gguf", "Q8_0")))
    assert loaded.notes == [
        "measured in float32: weights of types F32, Q8_0 in the GGUF file were dequantized"
    ]
    for (name, original), weight in zip(model.named_parameters(), loaded.model.parameters(), strict=True):
        error = (weight - original).detach().abs()
        if original.dim() == 1:
            assert not error.any(), name
            continue
        step = original.detach().reshape(-1, 32).abs().amax(dim=1, keepdim=True) / 127
        assert (error.reshape(-1, 32) <= step * (0.5 + 127 * 2**-11)).all(), name


def test_commands_audit_follow_and_compress_a_file(write, run, tmp_path) -> None:
    write(tmp_path / "a model.gguf", "Q8_0")
    data = ("--text", "text.txt", "--tokens", 32, "--sequences", 4)
    assert run("audit", "a model.gguf", *data, "--at-init=1", "--out", "audit").exit_code == 0
    audit = Audit.load(tmp_path / "audit" / "audit.json")
    about = audit.provenance
    assert about.arguments[0] == ["a model.gguf"]
    assert about.weights_digest
    assert audit.at_init is not None
    assert any("Q8_0" in note for note in about.notes)
    printed = remedy_text(Remedy(words="see", verb="audit", options=[["--loss"]], out="loss"), about)
    words = shlex.split(printed.split("`")[1])
    assert run(*words[1:]).exit_code == 0
    assert Audit.load(tmp_path / words[-1]).importance is not None
    smaller = ("--parts", "width", "--keep", 0.5, "--out", "small")
    assert run("compress", "a model.gguf", *data, *smaller).exit_code == 0
    assert logits(load_compressed(tmp_path / "small")).isfinite().all()
    assert run("audit", "small", *data, "--out", "again").exit_code == 0
    assert Audit.load(tmp_path / "again" / "audit.json").provenance.data_digests == about.data_digests
    assert run("skip", "a model.gguf", *data, "--lambda", 2, "--out", "skips").exit_code == 0
    assert run("audit", "skips", *data, "--out", "audit-skips").exit_code == 0


def test_the_tokenizer_is_in_the_file(write, run, tmp_path) -> None:
    from rankwise.cli.load_data import load_data

    (tmp_path / "th.txt").write_text("that thé " * 20)
    loaded = load_model(str(write(tmp_path / "m.gguf")))
    batch = next(iter(load_data(loaded, text=tmp_path / "th.txt", tokens=10, sequences=1).batches))
    assert batch["input_ids"][0].tolist() == [256, *b"at ", 256, *"é ".encode(), 256, *b"a"]


def test_every_cut_of_a_file_is_refused(write, tmp_path) -> None:
    content = write(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"

    @given(st.integers(4, len(content) - 1))
    def refused(length: int) -> None:
        cut.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"^model .*cut.gguf: expected a whole GGUF file, got"):
            load_model(str(cut))

    refused()


def test_files_that_transformers_cannot_read_are_refused_in_one_line(write, tmp_path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    original = gguf.GGUFReader
    cases = {
        "split": (
            {"split_count": 2},
            "got one of 2 parts. Join them: `llama-gguf-split --merge",
        ),
        "new": (
            {"architecture": "rwkv9"},
            "GGUF model with architecture rwkv9 is not supported yet. Pass the ",
        ),
    }
    for name, (changes, says) in cases.items():
        with pytest.raises(InputError) as told:
            load_model(str(write(tmp_path / f"{name}.gguf", **changes)))
        assert says in str(told.value)
        assert "\n" not in str(told.value)
        assert gguf.GGUFReader is original


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03")
    for package in ("gguf", "accelerate"):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, package, None)
            with pytest.raises(InputError, match=f"m.gguf: expected the package {package}.*rankwise.gguf"):
                load_model(str(path))


@pytest.mark.parametrize("content", [b"version https://git-lfs", b"", None])
def test_other_files_are_refused(content: bytes | None, tmp_path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    says = "a GGUF file, got no such file" if content is None else "a whole GGUF file, got ValueError: "
    with pytest.raises(InputError, match=f"m.gguf: expected {says}"):
        load_model(str(path))


def test_a_folder_of_files_is_refused_with_advice(tmp_path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"got a folder with GGUF files. Pass one of the files"):
        load_model(str(tmp_path))
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(InputError, match=r"folder.gguf: expected a GGUF file, got a folder"):
        load_model(str(tmp_path / "folder.gguf"))


def test_other_models_have_no_place_in_a_file() -> None:
    assert gguf_location("org/name-GGUF") == ("org/name-GGUF", {})
    with read_once("org/name-GGUF") as reader:
        assert reader is None
