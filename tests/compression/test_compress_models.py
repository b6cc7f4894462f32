"""Compressed models of several families at work."""

from typing import Any

import pytest
import torch
from tests.compression.compression_cases import bert, deberta, gpt2, ids, llama, output

import rankwise as rw
from rankwise.compression import save_compressed
from rankwise.compression.qk_modules import NarrowProjection
from rankwise.errors import CompressionError, InputError


def test_queries_of_low_rank_lose_nothing() -> None:
    model = bert()
    with torch.no_grad():
        for layer in model.encoder.layer:
            query = layer.attention.self.query
            for head in range(4):
                rows = slice(8 * head, 8 * head + 8)
                basis = torch.linalg.qr(torch.randn(8, 3)).Q
                query.weight[rows] = basis @ basis.mT @ query.weight[rows]
                query.bias[rows] = basis @ basis.mT @ query.bias[rows]
    batch = ids()
    before = output(model, batch)
    rw.compress(model, [batch], keep=3 / 8)
    assert {
        one.narrow.out_features for _, one in model.named_modules() if isinstance(one, NarrowProjection)
    } == {12}
    assert torch.allclose(
        output(model, batch), before, atol=2e-3
    )  # a ridge of 1e-9: 3e-5 of logits of up to 50


def test_ctrl_c_while_calibrating_keeps_what_is_done() -> None:
    def stop(what: str) -> None:
        if "layer.1" in what and what.endswith("10 of 30"):
            raise KeyboardInterrupt

    model = bert()
    done = rw.compress(model, [ids()], keep=3 / 8, calibrate=30, on_step=stop)
    assert not done.complete
    assert any("Ctrl-C" in note for note in done.notes)
    assert done.mean_width == 3
    assert bool(output(model, ids()).isfinite().all())


def test_a_tolerance_is_kept_and_tighter_ones_cost_more() -> None:
    widths = []
    for tolerance in (0.3, 0.03, 0.003):
        done = rw.compress(bert(), [ids(8, 30)], tolerance=tolerance)
        assert sum(head.kl for head in done.heads) / len(done.heads) <= tolerance * 1.001
        widths.append(done.mean_width)
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_models_and_data_that_cannot_be_used_stay_as_they_are() -> None:
    model, batch = llama(), ids()
    before = output(model, batch)
    with pytest.raises(CompressionError, match="positions are rotated in"):
        rw.compress(model, [batch], keep=3 / 8)
    assert torch.equal(output(model, batch), before)
    with pytest.raises(CompressionError, match="plus terms that all sequences share"):
        rw.compress(deberta(), [batch], keep=3 / 8)
    model = bert()
    with pytest.raises(InputError, match="at least one batch"):
        rw.compress(model, [], keep=3 / 8)
    with pytest.raises(CompressionError, match="Compress it first"):
        save_compressed(bert(), "nowhere")


def test_written_and_fused_attention_give_the_same_factors() -> None:
    fused, written = bert(), bert(attn_implementation="eager")
    assert written.config._attn_implementation == "eager"
    batch = ids(6, 30)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][::2, 20:] = 0
    one, other = (rw.compress(model, [batch], keep=3 / 8) for model in (fused, written))
    assert [head.width for head in one.heads] == [head.width for head in other.heads]
    assert one.kl == pytest.approx(other.kl, rel=1e-3)


def test_half_precision_is_narrowed_too() -> None:
    model, batch = bert().to(torch.bfloat16), ids(8, 30)
    done = rw.compress(model, [batch], keep=3 / 8)
    whole = rw.compress(bert(), [batch], keep=3 / 8)
    assert done.kl == pytest.approx(whole.kl, rel=0.2)  # rounding of 2⁻⁸ of logits of some units
    assert next(model.parameters()).dtype == torch.bfloat16


def test_a_layer_without_memory_is_named_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(layer: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("rankwise.compression.qk_solve.head_curves", full)
    model, batch = bert(), ids()
    before = output(model, batch)
    with pytest.raises(CompressionError, match=r"encoder\.layer\.0\.attention\.self.*the model is unchanged"):
        rw.compress(model, [batch], keep=3 / 8)
    assert torch.equal(output(model, batch), before)


def test_what_fails_after_the_change_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("rankwise.compression.run.evaluate", stopped)
    model, batch = gpt2(), ids()
    before = output(model, batch)
    with pytest.raises(KeyboardInterrupt):
        rw.compress(model, [batch], keep=3 / 8)
    assert torch.equal(output(model, batch), before)
    assert not any(isinstance(one, NarrowProjection) for one in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
