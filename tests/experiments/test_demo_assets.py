import json
import socket
from pathlib import Path

import pytest
import torch
from experiments.train_demo import scoring_windows
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rankwise.cli.load_model import demo_model, demo_text

RESULTS = json.loads((Path(__file__).parents[2] / "experiments" / "results" / "train_demo.json").read_text())


@pytest.fixture(scope="module")
def loaded():
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        model = AutoModelForCausalLM.from_pretrained(demo_model())
        return model.eval(), AutoTokenizer.from_pretrained(demo_model())


def test_it_is_as_small_as_promised() -> None:
    assert (demo_model() / "model.safetensors").stat().st_size < 3_000_000
    assert sum(file.stat().st_size for file in demo_model().iterdir()) < 3_100_000


def test_nothing_but_data_is_in_the_folder() -> None:
    suffixes = {file.suffix for file in demo_model().iterdir()}
    assert suffixes == {".json", ".md", ".safetensors", ".txt"}


def test_model_and_tokenizer_fit(loaded) -> None:
    model, tokenizer = loaded
    assert model.num_parameters() == RESULTS["parameters"]
    assert len(tokenizer) == model.config.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (
        model.config.pad_token_id,
        model.config.eos_token_id,
    )
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert tokenizer.decode(tokenizer("Ay, sir é").input_ids, skip_special_tokens=True) == "Ay, sir é"
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_it_has_learnt_what_is_recorded(loaded) -> None:
    model, tokenizer = loaded
    ids = torch.tensor(tokenizer(demo_text().read_text(), add_special_tokens=False, verbose=False).input_ids)
    windows = torch.stack(scoring_windows(ids, RESULTS["settings"]["tokens"]).windows)
    with torch.no_grad():
        losses = [model(input_ids=batch, labels=batch).loss for batch in windows.split(1)]
    # recorded with 4 decimals; another CPU's float32 moves a logit by some 1e-5 and the mean by less
    assert float(torch.stack(losses).mean()) == pytest.approx(
        RESULTS["scores"]["bundled_text_loss"], abs=1e-3
    )


def test_it_is_importance_showing() -> None:
    assert (
        RESULTS["scores"]["validation_loss"] < 1.7
    )  # below what a model that only counts letters could reach


def test_the_card_says_what_is_recorded() -> None:
    card = (demo_model() / "README.md").read_text()
    for name in ("train_loss", "validation_loss", "bundled_text_loss"):
        assert f"| {RESULTS['scores'][name]:.3f} |" in card
    assert RESULTS["command"] in card
    assert RESULTS["text"]["sha256"] in card


def test_no_file_names_a_place_on_the_machine_it_was_made_on() -> None:
    with safe_open(demo_model() / "model.safetensors", "pt") as weights:
        metadata = str(weights.metadata())
    files = [file for file in demo_model().iterdir() if file.suffix != ".safetensors"]
    written = [file.read_text() for file in files] + [metadata, json.dumps(RESULTS)]
    for place in ("/home", "/root", "/tmp", "/work", "/Users", ":\\", "_name_or_path"):
        assert not any(place in text for text in written), place


def test_the_text_is_a_passage_of_speeches() -> None:
    text = demo_text().read_text()
    assert text.isascii()
    assert 30_000 < len(text) <= RESULTS["settings"]["excerpt_bytes"]
    assert text.startswith("GREMIO:\n")
    assert text.endswith("\n")
