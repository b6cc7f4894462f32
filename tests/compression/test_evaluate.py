"""Costs in the record of a compression: loss, KL and error of the outputs."""

import math
from typing import Any

import pytest
import torch
import transformers
from tests.compression.compression_cases import BART, SIZES, bert, gpt2, ids, made, opt
from tests.compression.test_heads import own_words
from tests.support.documents import compression_document
from tests.support.modules import Attention
from torch import nn

import rankwise as rw
from rankwise.cli.load_model import demo_model, demo_text


def test_without_labels_and_logits_no_loss_and_no_output_kl_is_measured() -> None:
    done = rw.compress(bert(), [ids(6, 30)], keep=2 / 8)
    assert math.isnan(done.worst.loss_before)
    assert math.isnan(done.worst.output_kl)


@pytest.mark.parametrize(
    ("keep", "reverse"), [({"kv": 0.4}, False), ({"width": 0.5}, True), ({"heads": 0.5}, False)]
)
def test_costs_of_each_length_equal_the_costs_of_plain_passes(keep: dict[str, float], reverse: bool) -> None:
    """Losses, their spread, KL and errors of the first token and of the others, in any order of batches."""
    batches = [ids(10, 12, 1), ids(3, 12, 2), ids(9, 12, 3), ids(3, 40, 4), ids(2, 38, 5)]
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 9:] = 0
    batches = batches[::-1] if reverse else batches
    model, original = gpt2(), gpt2()
    done = rw.compress(model, [ids(8, 30)], keep=keep, held_out=batches)
    assert [(cost.tokens, cost.windows) for cost in done.costs] == [(12, 22), (40, 5)]
    assert done.worst in done.costs
    for cost in done.costs:
        added, whole, tokens, kls, squares, left = [], 0.0, [], [], torch.zeros(2, 2), 16
        for batch in [batch for batch in batches if (batch["input_ids"].shape[1] > 12) == (cost.tokens > 12)]:
            real, texts = batch["attention_mask"].bool(), batch["input_ids"]
            with torch.no_grad():
                before, after = (m(**batch).logits.double() for m in (original, model))
            for row, text in enumerate(texts):
                text, old, new = (values[real[row]] for values in (text, before[row], after[row]))
                losses = [nn.functional.cross_entropy(x[:-1], text[1:], reduction="sum") for x in (old, new)]
                added.append(float(losses[1] - losses[0]))
                whole, tokens = whole + float(losses[0]), [*tokens, len(text) - 1]
                if left:
                    left -= 1
                    log_p, log_q = old.log_softmax(-1), new.log_softmax(-1)
                    kls += (log_p.exp() * (log_p - log_q)).sum(-1).tolist()
                    parts = ((new - old).square().sum(-1), old.square().sum(-1))
                    squares += torch.tensor([[float(x[0]), float(x[1:].sum())] for x in parts])
        mean = sum(added) / sum(tokens)
        residual = sum((x - mean * n) ** 2 for x, n in zip(added, tokens, strict=True))
        spread = math.sqrt(residual * len(tokens) / (len(tokens) - 1)) / sum(tokens)
        close: Any = {"rel": 1e-4, "abs": 1e-7}  # losses of the model are read in float32
        assert cost.loss_before == pytest.approx(whole / sum(tokens), **close)
        assert (cost.loss_added, cost.spread) == pytest.approx((mean, spread), **close)
        assert cost.output_kl == pytest.approx(sum(kls) / len(kls), rel=1e-6)
        errors = (squares[0] / squares[1]).sqrt().tolist()
        assert (cost.first_error, cost.other_error) == pytest.approx(errors, rel=1e-5)
        assert cost.output_error == pytest.approx(
            float((squares[0].sum() / squares[1].sum()).sqrt()), rel=1e-5
        )


def test_the_printed_cost_of_the_demo_equals_the_cost_in_a_loop_by_hand() -> None:
    """Within twice the spread on held-out windows of the demo's text, and within rounding of the print."""
    model, original = (
        transformers.AutoModelForCausalLM.from_pretrained(demo_model()).eval() for _ in range(2)
    )
    tokens = torch.tensor([byte + 3 for byte in demo_text().read_bytes()[: 12 * 256]]).view(12, 256)
    held_out = [{"input_ids": tokens[8:]}, {"input_ids": tokens[8:, :64]}]
    done = rw.compress(model, [{"input_ids": tokens[:8]}], keep={"kv": 0.25}, held_out=held_out)
    printed = compression_document(done).sections[0].tables[0]
    for row, batch in zip(printed.rows, reversed(held_out), strict=True):
        added = []
        for text in batch["input_ids"]:
            with torch.no_grad():
                losses = [m(input_ids=text[None], labels=text[None]).loss for m in (original, model)]
            added.append(float(losses[1] - losses[0]))
        cells = dict(zip(printed.columns, row, strict=True))
        by_hand, spread = sum(added) / len(added), float(torch.tensor(added).std()) / len(added) ** 0.5
        assert float(cells["loss added"]) == pytest.approx(by_hand, abs=min(2 * spread, 6e-5))
        assert float(cells["±"]) == pytest.approx(spread, abs=6e-5)


def test_one_window_has_no_spread_and_a_cost_within_twice_its_spread_is_noted() -> None:
    done = rw.compress(gpt2(), [ids(8, 30)], keep={"kv": 0.5}, held_out=[ids(1, 30, 3)])
    assert math.isnan(done.worst.spread)
    assert not any("its spread over" in note for note in done.notes)
    done = rw.compress(gpt2(), [ids(8, 30)], tolerance={"kv": 1e-5}, held_out=[ids(8, 30, 3)])
    assert abs(done.worst.loss_added) < 2 * done.worst.spread
    assert any("is within twice its spread over 8 windows" in note for note in done.notes)
    assert any(note.startswith("kv: the tolerance 1e-05 is below the spread") for note in done.notes)
    own = own_words(gpt2(), ids(8, 30))  # every change costs loss
    done = rw.compress(gpt2(), [own], keep={"heads": 0.25}, held_out=[own])
    assert done.worst.loss_added > 2 * done.worst.spread
    assert not any("its spread over" in note for note in done.notes)


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
    assert done.worst.output_error == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
    before, after = before.log_softmax(-1), after.log_softmax(-1)
    assert done.worst.output_kl == pytest.approx(
        float((before.exp() * (before - after)).sum(-1).mean()), rel=1e-4
    )


@pytest.mark.parametrize("keep", [{"heads": 0.75, "width": 0.5}, {"kv": 0.5, "width": 0.75}])
def test_each_part_has_its_own_target_and_all_have_one_cost(keep: dict[str, float]) -> None:
    batch = ids(6, 30)
    model, original = opt(), opt()
    done = rw.compress(model, [batch], keep=keep)
    assert done.parts == [name for name in rw.compression.PARTS if name in keep]
    with torch.no_grad():
        before, after = (m(**batch).logits.double().log_softmax(-1) for m in (original, model))
    expected = (before.exp() * (before - after)).sum(-1).mean()
    assert done.worst.output_kl == pytest.approx(float(expected), rel=1e-6)
    narrow = [head.width / head.before for head in done.heads if head.part == "width"]
    assert sum(narrow) / len(narrow) == pytest.approx(keep["width"], abs=0.02)
    if "heads" in keep:
        left = [head.width > 0 for head in done.heads if head.part == "heads"]
        assert sum(left) / len(left) == keep["heads"]
    if "kv" in keep:
        assert done.kept_cache.after <= keep["kv"] * done.kept_cache.before


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
