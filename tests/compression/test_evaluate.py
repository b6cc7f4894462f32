"""Costs in the record of a compression: loss, KL and error of the outputs."""

import math
from typing import Any

import pytest
import torch
from tests.compression.compression_cases import BART, SIZES, bert, gpt2, ids, made, opt
from tests.support.modules import Attention
from torch import nn

import rankwise as rw


def test_without_labels_and_logits_no_loss_and_no_output_kl_is_measured() -> None:
    done = rw.compress(bert(), [ids(6, 30)], keep=2 / 8)
    assert math.isnan(done.loss_before)
    assert math.isnan(done.output_kl)


def test_output_kl_is_the_mean_over_the_real_tokens_of_all_batches_up_to_16_sequences() -> None:
    batches = [ids(10, 12, 1), ids(3, 30, 2), ids(9, 20, 3), ids(9, 20, 4)]
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 7:] = 0
    model, original = gpt2(), gpt2()
    done = rw.compress(model, batches, keep=0.5)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch, count in zip(batches, (10, 3, 3), strict=False):
            some = {name: values[:count] for name, values in batch.items()}
            real = some["attention_mask"].bool()
            before, after = (m(**some).logits[real].double().log_softmax(-1) for m in (original, model))
            total += float((before.exp() * (before - after)).sum())
            tokens += int(real.sum())
    assert done.output_kl == pytest.approx(total / tokens, rel=1e-9)


@pytest.mark.parametrize("name", ["Bart", "Bert"])
def test_the_mask_of_the_input_does_not_apply_to_other_outputs(name: str) -> None:
    """As many decoder tokens, or classes, as there are input tokens."""
    batch = {**ids(6, 24), "attention_mask": torch.ones(6, 24, dtype=torch.long)}
    batch["attention_mask"][:, 9:] = 0
    if name == "Bart":
        make: Any = lambda: made("Bart", "ForConditionalGeneration", **BART)  # noqa: E731
        batch["decoder_input_ids"] = ids(6, 24, seed=2)["input_ids"]
    else:
        make = lambda: made("Bert", "ForSequenceClassification", **SIZES, num_labels=24)  # noqa: E731
    model, original = make(), make()
    done = rw.compress(model, [batch], keep=0.25)
    with torch.no_grad():
        before, after = (m(**batch).logits.double() for m in (original, model))
    assert done.output_error == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
    before, after = before.log_softmax(-1), after.log_softmax(-1)
    assert done.output_kl == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=1e-4)


@pytest.mark.parametrize("keep", [{"width": 0.5}, {"heads": 0.75, "width": 0.5}, {"kv": 0.5, "width": 0.75}])
def test_each_part_has_its_own_target_and_all_have_one_cost(keep: dict[str, float]) -> None:
    batch = ids(6, 30)
    model, original = opt(), opt()
    done = rw.compress(model, [batch], keep=keep)
    assert done.parts == [name for name in rw.compression.PARTS if name in keep]
    with torch.no_grad():
        before, after = (m(**batch).logits.double().log_softmax(-1) for m in (original, model))
    expected = (before.exp() * (before - after)).sum(-1).mean()
    assert done.output_kl == pytest.approx(float(expected), rel=1e-6)
    narrow = [head.width / head.before for head in done.heads if head.part == "width"]
    assert sum(narrow) / len(narrow) == pytest.approx(keep["width"], abs=0.02)
    if "heads" in keep:
        left = [head.width > 0 for head in done.heads if head.part == "heads"]
        assert sum(left) / len(left) == keep["heads"]
    if "kv" in keep:
        assert done.cache_bytes_after <= keep["kv"] * done.cache_bytes_before


def test_a_part_is_the_same_alone_and_before_other_parts() -> None:
    batch = ids(6, 30)
    both = rw.compress(gpt2(), [batch], keep={"kv": 0.5}, tolerance={"width": 0.01})
    alone = rw.compress(gpt2(), [batch], tolerance={"width": 0.01})
    assert [head.width for head in both.heads] == [head.width for head in alone.heads]
    assert both.attention_kl == alone.attention_kl
    assert both.cache_bytes_after <= 0.5 * both.cache_bytes_before < alone.cache_bytes_after


class TwoWidths(nn.Module):
    """Narrow queries and keys first, then wide ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(32, 4, head_dim=width) for width in (4, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_share_counts_the_widths_of_all_layers() -> None:
    torch.manual_seed(0)
    done = rw.compress(TwoWidths().eval(), [torch.randn(6, 30, 32)], keep=0.5)
    assert sum(head.before for head in done.heads) == 4 * (4 + 16)
    assert sum(head.width for head in done.heads) == 0.5 * 4 * (4 + 16)
