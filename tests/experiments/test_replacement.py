"""Replaced layers: every set was run, orders follow their guides, and replaced models mix causally."""

from typing import Any

import pytest
import torch
from experiments.tost import replacement as experiment
from experiments.tost.replaced_attention import replace_attention
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import rankwise as rw

CONTENT = experiment.STUDY.kept()


def test_every_set_was_run() -> None:
    for run in CONTENT["runs"]:
        assert len(run["sets"]) == 2 ** len(run["guides"]["importance"])
        tuned = {name: losses["tuned"] for name, losses in run["sets"].items()}
        moved = abs(tuned[""] - run["sets"][""]["distilled"])
        assert all(
            loss - tuned[""] > moved for name, loss in tuned.items() if name
        )  # more than tuning alone moves it
        for before, after in ((one["before"], one["after"]) for one in run["distillation"]):
            assert after < before


def test_layers_are_distilled_and_tuned() -> None:
    small = experiment.Settings(
        tokens=32, distil_windows=4, distil_steps=8, distil_batch=4, tune_steps=1, tune_batch=1
    )
    torch.manual_seed(0)
    reader = experiment.Reader("To be, or not to be, that is the question.\n" * 20, small.tokens, 0)
    mixers, errors = experiment.distil(small, reader.draw(4), "linear")
    assert all(one["after"] < one["before"] for one in errors)
    held_out = experiment.batches(reader.draw(2), 2)
    whole = experiment.replaced(small, (), "linear", mixers, [], held_out)
    found = experiment.replaced(small, (2,), "linear", mixers, [reader.draw(1)], held_out)
    assert whole["tuned"] == whole["distilled"]
    assert len({*found.values(), whole["tuned"]}) == 3


KINDS = {"tssa": "diagonal", "linear": "linear"}
OPTIONS: dict[str, Any] = {"tssa": {"impl": "reference"}, "linear": {}}  # no loops are compiled for tests
IDS = torch.tensor([[5, 9, 3, 17, 8, 21, 30, 2, 11], [7, 7, 4, 19, 6, 28, 1, 12, 25]])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24,
        pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def logits(model: nn.Module, ids: Tensor = IDS, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


@pytest.mark.parametrize("kind", KINDS)
def test_audits_see_the_new_kind(kind: str) -> None:
    model = llama()
    replace_attention(model, [1], kind, **OPTIONS[kind])
    audit = rw.audit(model, [{"input_ids": IDS}])
    kinds = [{head.kind for head in audit.heads if head.layer == layer} for layer in range(3)]
    assert kinds == [{"softmax"}, {KINDS[kind]}, {"softmax"}]


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_later_tokens(kind: str) -> None:
    model = llama()
    replace_attention(model, range(3), kind, **OPTIONS[kind])
    whole, other = logits(model), IDS.clone()
    exact = logits(model.double())
    model.float()
    rounding = 2 * float((whole - exact).abs().max()) + 2**-20
    other[:, 5:] = 13
    torch.testing.assert_close(logits(model, other)[:, :5], whole[:, :5], rtol=0, atol=rounding)
    assert (logits(model, other) - whole)[:, 5:].abs().max() > 1e-4


def test_a_cache_and_padding_are_refused() -> None:
    model = llama()
    replace_attention(model, [0], "tssa", impl="reference")
    for more in ({"past_key_values": DynamicCache(), "use_cache": True}, {"attention_mask": IDS.tril()}):
        with pytest.raises(ValueError, match="expected no padding and no cache"):
            logits(model, **more)
