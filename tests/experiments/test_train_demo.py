"""The bundled models: the seed decides a training, losses are per byte, and the files are as kept."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.tasks.text import cut
from experiments.tost.train_demo import STUDIES, Recipe, measure, split, train, training_windows
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

import rankwise as rw
from rankwise.cli.load_model import demo_model, demo_text, demo_tost_model

PLAY = "".join(f"SPEAKER {i}:\nLine {i} of a play that nobody wrote.\n\n" for i in range(120))
EOS = 1
TINY = LlamaConfig(
    vocab_size=259,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=EOS,
    tie_word_embeddings=True,
)
SMALL = {"tokens": 16, "steps": 3, "batch": 2, "warmup": 1, "excerpt_bytes": 200, "threads": 1}
KEPT = {study.name: study.kept() for study in STUDIES}
DEMO = KEPT["train_demo"]


def tiny(**changes: Any) -> Recipe:
    return Recipe(name="tiny", **{"model": TINY, **SMALL, **changes})


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.fixture(scope="module")
def trained() -> tuple[PreTrainedModel, dict[str, float]]:
    model, _, scores = train(tiny(), PLAY)
    return model, scores


@pytest.fixture(scope="module")
def one_step() -> tuple[PreTrainedModel, dict[str, float]]:
    """Return the initial model: warm-up begins at 0, so that the first step changes nothing."""
    model, _, scores = train(tiny(steps=1), PLAY)
    return model, scores


def test_only_the_seed_decides_a_training(trained: Any, one_step: Any) -> None:
    first, scores = trained
    torch.rand(3)
    again, _, scores_again = train(tiny(), PLAY)
    assert same(first, again)
    assert scores | {"minutes": 0} == scores_again | {"minutes": 0}
    assert not same(first, train(tiny(seed=1), PLAY)[0])
    assert not same(one_step[0], train(tiny(steps=1, seed=1), PLAY)[0]), "initial weights differ, too"


def test_training_lowers_the_loss(one_step: Any) -> None:
    _, _, end = train(tiny(steps=60), PLAY)
    assert end["validation_loss"] < one_step[1]["validation_loss"] - 0.5


def test_the_loss_counts_every_byte_except_the_first() -> None:
    recipe = tiny(tokens=8)
    model, tokenizer, scores = train(recipe, PLAY)
    ids = torch.tensor(tokenizer(split(PLAY, recipe)[1], add_special_tokens=False).input_ids)
    losses = []
    for start in range(0, len(ids) - 7, 7):
        logits = model(input_ids=ids[None, start : start + 8]).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[start + 1 : start + 8], reduction="none"))
    # float32 logits of size ~1 and a mean in float32: a few roundings of 6e-8 on a loss of about 5.5
    assert torch.cat(losses).mean().item() == pytest.approx(scores["validation_loss"], abs=1e-5)


@given(joined=st.sampled_from([0.0, 1.0]), tokens=st.integers(2, 20), seed=st.integers(0, 9))
def test_training_windows_are_passages_or_pairs_of_passages(joined: float, tokens: int, seed: int) -> None:
    recipe = tiny(joined=joined, tokens=tokens, seed=seed, steps=4)
    windows = [one["input_ids"] for one in training_windows(torch.arange(3, 103), recipe, EOS)]
    assert len(windows) == 4 * recipe.batch
    for window in windows:
        assert len(window) == tokens
        ends = (window == EOS).nonzero().flatten().tolist()
        assert len(ends) == (1 if joined else 0)
        end = ends[0] if ends else tokens
        for passage in (window[:end], window[end + 1 :]):
            assert (passage.diff() == 1).all()


@pytest.mark.parametrize("bundles_text", [True, False])
def test_a_study_writes_the_model_and_its_report(tmp_path: Path, trained: Any, bundles_text: bool) -> None:
    (tmp_path / "tiny_shakespeare").mkdir()
    (tmp_path / "tiny_shakespeare" / "input.txt").write_text(PLAY)
    report = measure(tiny(bundles_text=bundles_text), tmp_path / "out", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(model, trained[0])
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids == [100, 101, EOS]
    assert model.config.use_cache
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert json.loads(json.dumps(report))["settings"]["model"]["hidden_size"] == 8
    assert report["text"]["bytes"] == len(PLAY)
    passage = tmp_path / "out" / "text.txt"
    assert passage.exists() == bundles_text
    assert not bundles_text or passage.read_text() in PLAY


def test_the_three_models_had_the_same_budget() -> None:
    assert DEMO["scores"]["validation_loss"] < 1.7  # lower than a model of letter counts could reach
    for report in KEPT.values():
        assert report["parameters"] == pytest.approx(DEMO["parameters"], rel=1e-3)
        for setting in ("tokens", "steps", "batch", "learning_rate", "seed"):
            assert report["settings"][setting] == DEMO["settings"][setting]
        assert report["text"] == DEMO["text"]


@pytest.fixture(scope="module")
def loaded() -> dict[str, tuple[Any, Any]]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        return {
            f"train_{folder.name}": (
                AutoModelForCausalLM.from_pretrained(folder).eval(),
                AutoTokenizer.from_pretrained(folder),
            )
            for folder in (demo_model(), demo_tost_model())
        }


@pytest.mark.parametrize("name", ["train_demo", "train_demo_tost"])
def test_a_bundled_model_has_the_kept_loss(loaded: Any, name: str) -> None:
    model, tokenizer = loaded[name]
    assert model.num_parameters() == KEPT[name]["parameters"]
    assert len(tokenizer) == model.config.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, EOS)
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert tokenizer.decode(tokenizer("Ay, sir é").input_ids, skip_special_tokens=True) == "Ay, sir é"
    ids = torch.tensor(tokenizer(demo_text().read_text(), add_special_tokens=False, verbose=False).input_ids)
    with torch.no_grad():
        losses = [
            model(**{key: value[None] for key, value in window.items()}).loss
            for window in cut(ids.numpy(), 256, "text.txt")
        ]
    # kept with 4 decimals; another CPU's float32 moves a logit by some 1e-5 and the mean by less
    kept = KEPT[name]["scores"]["bundled_text_loss"]
    assert float(torch.stack(losses).mean()) == pytest.approx(kept, abs=2e-4)


def test_an_audit_of_the_twin_shows_its_memberships(loaded: Any) -> None:
    model, tokenizer = loaded["train_demo_tost"]
    ids = tokenizer(demo_text().read_text("utf-8")[:64], return_tensors="pt").input_ids
    audit = rw.audit(model, [{"input_ids": ids}])
    assert {head.kind for head in audit.heads} == {"diagonal"}
    for layer in range(4):
        heads = [head for head in audit.heads if head.layer == layer]
        assert sum(head.membership for head in heads) == pytest.approx(1, abs=1e-5)
        assert all(len(head.membership_map) == ids.shape[1] and head.variational_rate > 0 for head in heads)


@pytest.mark.parametrize("folder", [demo_model(), demo_tost_model()], ids=["demo", "twin"])
def test_a_bundled_folder_is_small_and_names_no_place_of_its_machine(folder: Path) -> None:
    files = list(folder.iterdir())
    assert (folder / "model.safetensors").stat().st_size < 3_000_000
    assert sum(file.stat().st_size for file in files) < 3_100_000
    assert {file.suffix for file in files} <= {".json", ".md", ".safetensors", ".txt"}
    with safe_open(folder / "model.safetensors", "pt") as weights:
        metadata = str(weights.metadata())
    written = [file.read_text() for file in files if file.suffix != ".safetensors"]
    written.append(json.dumps(KEPT[f"train_{folder.name}"]))
    for place in ("/home", "/root", "/tmp", "/work", "/Users", ":\\", "_name_or_path"):
        assert not any(place in text for text in [*written, metadata]), place


def test_the_text_is_a_passage_of_speeches() -> None:
    text = demo_text().read_text()
    assert text.isascii()
    assert 30_000 < len(text) <= DEMO["settings"]["excerpt_bytes"]
    assert text.startswith("GREMIO:\n")
    assert text.endswith("\n")
