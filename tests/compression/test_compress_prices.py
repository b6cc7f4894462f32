"""What a compression says it costs: accuracy of labels, and attention end to end, whichever part was done."""

import math
from typing import Any

import pytest
import torch
from tests.compression.compression_cases import VOCABULARY, bert, gpt2, ids, opt, sharpened

import rankwise as rw
from rankwise.compression.task import measure_task
from rankwise.report.compression_report import compression_document

QUICK: dict[str, Any] = {"time": False, "nulls": False}


def classifier() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return sharpened(BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=3, **sizes)))


def test_accuracy_of_labels_is_told_before_and_after() -> None:
    model, batch = classifier(), ids(12, 20, seed=5)
    with torch.no_grad():
        found = model(**batch).logits.argmax(-1)
    found[:3] = (found[:3] + 1) % 3  # three of twelve wrong
    held_out = [{**batch, "labels": found}]
    done = rw.compression.compress_qk(model, [ids(6, 30)], width=1, held_out=held_out, **QUICK)
    with torch.no_grad():
        after = (model(**batch).logits.argmax(-1) == found).float().mean()
    assert done.metric == "accuracy"
    assert done.metric_before == 0.75
    assert done.metric_after == pytest.approx(float(after))
    assert math.isfinite(done.loss_before)
    assert ["accuracy", "0.7500"] in [
        row[:2] for row in compression_document(done).sections[0].tables[0].rows
    ]


def test_accuracy_of_tokens_is_that_of_the_next_and_skips_what_has_no_label() -> None:
    model, batch = gpt2(), ids(2, 10)
    with torch.no_grad():
        best = model(**batch).logits.argmax(-1)
    labels = batch["input_ids"].clone()
    labels[:, 1:] = best[:, :-1]
    labels[0, 1:6] = (labels[0, 1:6] + 1) % VOCABULARY
    labels[1, 4:] = -100
    task = measure_task(model, [{**batch, "labels": labels}])
    assert (task.hits, task.places, task.metric) == (7, 12, "token accuracy")
    without = measure_task(model, [batch])
    assert math.isnan(without.accuracy)
    assert without.targets == 18


def test_without_labels_there_is_no_metric() -> None:
    done = rw.compression.compress_qk(bert(), [ids(6, 30)], width=2, **QUICK)
    assert done.metric == ""
    assert math.isnan(done.loss_before)


@pytest.mark.parametrize("part", ["heads", "kv", "qk"])
def test_attention_end_to_end_is_told_for_every_part(part: str) -> None:
    model, batch = opt(), ids(2, 24)
    matrices = []
    for compressing in (True, False):
        with rw.capture(model) as trace, torch.no_grad():
            model(**batch)
        matrices.append([site.operator.dense().double() for site in trace.mixers])
        if compressing:
            done = rw.compress(model, [batch], keep=0.5 if part != "kv" else 0.2, parts=(part,), **QUICK)
    expected = []
    for layer, (before, after) in enumerate(zip(*matrices, strict=True)):
        own = [head for head in done.heads if head.layer == layer and head.part == "heads"]
        before = before[:, [head.head for head in own if head.width]] if own else before
        if before.shape[1]:
            terms = torch.where(before > 0, before * (before.log() - after.log()), 0).sum(-1)
            expected.append(float(terms.mean()))
    assert done.kl_end_to_end == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert done.kl_end_to_end > 0
    assert len(done.layers) == 2
    if part == "qk":  # nothing comes before the first layer
        assert done.layers[0].kl_end_to_end == pytest.approx(done.layers[0].kl, rel=1e-3)
        assert done.layers[1].kl_end_to_end != pytest.approx(done.layers[1].kl, rel=1e-3)
