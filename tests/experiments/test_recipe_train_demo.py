import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from experiments import train_demo
from experiments.train_demo import Recipe, demo, excerpt, scoring_windows, split, train, training_windows
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

PLAY = "".join(f"SPEAKER {i}:\nLine {i} of a play that nobody wrote.\n\n" for i in range(120))
EOS = 1


def tiny(**changes: object) -> Recipe:
    model = LlamaConfig(
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
    small = {
        "model": model,
        "tokens": 16,
        "steps": 3,
        "batch": 2,
        "warmup": 1,
        "excerpt_bytes": 200,
        "threads": 1,
    }
    return replace(demo(), name="tiny", **{**small, **changes})


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.fixture(scope="module")
def once() -> tuple[PreTrainedModel, dict]:
    """The tiny recipe, trained, and its scores."""
    model, _, scores = train(tiny(), PLAY)
    return model, {name: score for name, score in scores.items() if name != "minutes"}


@pytest.fixture(scope="module")
def one_step() -> tuple[PreTrainedModel, dict]:
    """Warm-up begins at 0, so the first step changes nothing."""
    model, _, scores = train(tiny(steps=1), PLAY)
    return model, scores


def test_the_seed_decides_everything(once) -> None:
    first, scores = once
    torch.rand(3)  # whatever was drawn before
    again, _, scores_again = train(tiny(), PLAY)
    other, _, _ = train(tiny(seed=1), PLAY)
    assert same(first, again)
    assert not same(first, other)
    scores_again.pop("minutes")
    assert scores == scores_again
    assert set(scores) == {"train_loss", "validation_loss", "bundled_text_loss"}


def test_the_seed_decides_where_training_starts(one_step) -> None:
    assert not same(one_step[0], train(tiny(steps=1, seed=1), PLAY)[0])


def test_training_lowers_the_loss(one_step) -> None:
    _, start = one_step
    _, _, end = train(tiny(steps=60), PLAY)
    assert end["validation_loss"] < start["validation_loss"] - 0.5


def test_the_loss_is_of_every_byte_but_the_first() -> None:
    recipe = tiny(tokens=8)
    model, tokenizer, scores = train(recipe, PLAY)
    ids = torch.tensor(tokenizer(split(PLAY, recipe)[1], add_special_tokens=False).input_ids)
    losses = []
    for start in range(0, len(ids) - 7, 7):
        logits = model(input_ids=ids[None, start : start + 8]).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[start + 1 : start + 8], reduction="none"))
    # float32 logits of size ~1 and a mean in float32: a few roundings of 6e-8 on a loss of about 5.5
    assert torch.cat(losses).mean().item() == pytest.approx(scores["validation_loss"], abs=1e-5)


@given(count=st.integers(2, 200), tokens=st.integers(2, 20))
def test_scoring_windows_predict_each_byte_once(count: int, tokens: int) -> None:
    windows = scoring_windows(torch.arange(count), tokens).windows
    assert all(len(window) == tokens for window in windows)
    predicted = list(chain.from_iterable(window[1:].tolist() for window in windows))
    assert predicted == list(range(1, len(predicted) + 1))
    assert count - 1 - len(predicted) < tokens - 1


@given(joined=st.sampled_from([0.0, 1.0]), tokens=st.integers(2, 20), seed=st.integers(0, 9))
def test_training_windows_are_passages_or_two_of_them(joined: float, tokens: int, seed: int) -> None:
    recipe = tiny(joined=joined, tokens=tokens, seed=seed, steps=4)
    windows = training_windows(torch.arange(3, 103), recipe, EOS).windows
    assert len(windows) == 4 * recipe.batch
    for window in windows:
        assert len(window) == tokens
        ends = (window == EOS).nonzero().flatten().tolist()
        assert len(ends) == (1 if joined else 0)
        cut = ends[0] if ends else tokens
        for passage in (window[:cut], window[cut + 1 :]):
            assert (passage.diff() == 1).all()


@given(size=st.integers(60, 4000))
def test_the_excerpt_is_whole_speeches(size: int) -> None:
    passage = excerpt("rest of a line\n\n" + PLAY, size)
    assert len(passage) <= size
    assert PLAY.startswith(passage)
    assert passage.endswith("wrote.\n")


def test_training_and_validation_do_not_meet() -> None:
    parts = split(PLAY, tiny())
    assert "".join(parts) == PLAY
    assert len(parts[1]) == pytest.approx(0.1 * len(PLAY), abs=1)


def run_main(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> dict:
    (folder / "play.txt").write_text(PLAY)
    monkeypatch.setattr(train_demo, "RECIPES", {"tiny": lambda: tiny(**changes)})
    paths = ["--text", folder / "play.txt", "--out", folder / "out", "--results", folder / "results.json"]
    train_demo.main([*map(str, paths), "--recipe", "tiny"])
    return json.loads((folder / "results.json").read_text())


def test_the_command_writes_a_model_its_card_and_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once
) -> None:
    report = run_main(tmp_path, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert same(model, once[0])
    assert tokenizer("ab").input_ids == [100, 101, EOS]
    assert model.config.use_cache
    assert report["scores"]["validation_loss"] > 0
    assert report["settings"]["steps"] == 3
    assert report["settings"]["model"]["hidden_size"] == 8
    assert report["text"]["bytes"] == len(PLAY)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{report['scores']['validation_loss']:.3f}" in card
    assert report["text"]["sha256"] in card
    assert (tmp_path / "out" / "text.txt").read_text() in PLAY


def test_a_twin_brings_no_text_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_main(tmp_path, monkeypatch, bundles_text=False)
    assert not (tmp_path / "out" / "text.txt").exists()


def test_any_causal_model_over_bytes_can_be_trained() -> None:
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=259, hidden_size=8, state_size=4, num_hidden_layers=1, use_mambapy=False)
    model, _, scores = train(tiny(model=config, steps=1), PLAY)
    assert model.config.model_type == "mamba"
    assert scores["validation_loss"] > 0
