"""The part `width`: factors, attention KL, widths and rotary pairs against dense oracles."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.compression_cases import (
    ROTARY,
    SIZES,
    bert,
    bigcode,
    ids,
    made,
    narrow_projections,
    output,
)

import rankwise as rw
from rankwise.compression.width_factors import (
    Order,
    divergence,
    greedy,
    kept_factors,
    layer_divergence,
    rows_of,
    units_of,
    whole_factors,
)
from rankwise.compression.width_find import check_statistics, collect_statistics, find_layers
from rankwise.compression.width_modules import Factors, narrow_layers, narrow_linear, replace_cache_layer
from rankwise.compression.width_solve import (
    allocate_widths,
    hull_steps,
    widths_for_tolerance,
    widths_under_budget,
)
from rankwise.errors import CompressionError
from rankwise.measures.required_width import logit_bases

EPS = torch.finfo(torch.float64).eps


def head(tokens: int = 40, width: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys whose directions differ in size and are not centred."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(2, 0.1, width, dtype=torch.float64)
    q, k = (torch.randn(tokens, width, generator=generator, dtype=torch.float64) * scale + 0.3 for _ in "qk")
    return q, k.flip(-1)


@pytest.mark.parametrize("rank", [1, 3, 7, 8])
def test_the_closed_form_has_the_least_error_of_its_rank(rank: int) -> None:
    q, k = head()
    bases = logit_bases(q.mT @ q, k.mT @ k)
    logits = q @ k.mT
    error = (logits - (q @ bases.query[:, :rank]) @ (k @ bases.key[:, :rank]).mT).norm()
    best = torch.linalg.svdvals(logits)[rank:].norm()  # Eckart–Young
    # the ridge of 1e-9 adds about its root; nothing is left at full width
    assert error == pytest.approx(float(best), rel=1e-6, abs=1e-7)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(-40, 40))
def test_divergence_equals_dense_kl_and_ignores_shifts_of_a_row(seed: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, change = (torch.randn(3, 6, 7, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    logits[..., 5] = -torch.inf  # masked
    matrix = logits.softmax(-1)
    other = (logits + change).softmax(-1)
    terms = torch.where(matrix > 0, matrix * (matrix.log() - other.log()), 0)
    found = divergence(matrix, change)
    assert torch.allclose(found, terms.sum(-1), atol=1e-12)  # logits of 10: 1e3 roundings
    assert torch.allclose(divergence(matrix, change + shift), found, atol=1e-12)
    assert bool((divergence(matrix, 1e-9 * change) >= 0).all())  # true values of 1e-18: rounding alone
    assert bool((divergence(matrix, torch.zeros_like(change)) < 1e-14).all())


def test_divergence_holds_where_exponentials_overflow() -> None:
    matrix = torch.tensor([[0.5, 0.5, 0.0]])
    assert divergence(matrix, torch.tensor([[300.0, -300.0, 9e9]])).item() == pytest.approx(
        300 - 0.6931, rel=1e-5
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(0, 9), min_size=5, max_size=5), min_size=1, max_size=5), st.data())
def test_widths_sum_to_the_budget_and_are_optimal_for_convex_curves(
    drawn: list[list[float]], data: st.DataObject
) -> None:
    widths = [1, 2, 3, 4, 5]
    curves = [(widths, [sum(sorted(one)[: 5 - at]) for at in range(5)]) for one in drawn]  # convex, falling
    budget = data.draw(st.integers(len(curves), 5 * len(curves)))
    taken = widths_under_budget(curves, budget)
    assert sum(taken) == min(budget, len(curves) + len(hull_steps(curves)))
    loss = sum(losses[width - 1] for width, (_, losses) in zip(taken, curves, strict=True))
    best = {0: 0.0}  # by dynamic programming over heads
    for _, losses in curves:
        best = {
            room: min(best[room - w] + losses[w - 1] for w in widths if room - w in best)
            for room in range(budget + 1)
            if any(room - w in best for w in widths)
        }
    assert loss == pytest.approx(min(best.values()), abs=1e-9)
    tolerance = loss / len(curves)
    assert sum(widths_for_tolerance(curves, tolerance + 1e-9)) <= sum(taken)


def test_a_budget_below_the_least_widths_is_refused() -> None:
    with pytest.raises(CompressionError, match="at least 1 on average"):
        widths_under_budget([([1, 2], [1.0, 0.0])] * 3, 2)


@pytest.mark.parametrize("bias", [True, False])
def test_a_narrow_projection_has_factored_channels_and_zeros(bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 12, bias=bias).double()
    channels = torch.arange(4, 12).reshape(2, 4)  # the first four channels are no head's
    factors = [torch.randn(4, 1, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)]
    places = [head[: factor.shape[1]] for head, factor in zip(channels, factors, strict=True)]
    narrow = narrow_linear(layer, zip(channels, factors, places, strict=True))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    whole, got = layer(x), narrow(x)
    assert torch.allclose(got[..., :4], whole[..., :4], atol=64 * EPS * 6)
    for own, factor in zip(channels, factors, strict=True):
        width = factor.shape[1]
        assert torch.allclose(got[..., own[:width]], whole[..., own] @ factor, atol=64 * EPS * 6)
        assert not bool(got[..., own[width:]].any())
    assert narrow.narrow.out_features == 8


def test_keys_repeated_for_a_mask_are_counted_once() -> None:
    """Multi-query attention repeats its keys for each query head as soon as the batch has a mask."""
    plain = ids(6, 30)
    masked = {**plain, "attention_mask": torch.ones(6, 30, dtype=torch.long)}
    one, other = (rw.compress(bigcode(), [batch], keep=4 / 8) for batch in (plain, masked))
    assert not other.left_out
    assert [head.width for head in one.heads] == [head.width for head in other.heads]
    assert [head.kl for head in other.heads] == pytest.approx([head.kl for head in one.heads], rel=1e-3)
    assert other.attention_kl == pytest.approx(one.attention_kl, rel=1e-3)


def test_narrow_weights_in_half_precision_are_rounded_once() -> None:
    layer = torch.nn.Linear(6, 8).bfloat16()
    factor = torch.randn(8, 3, dtype=torch.float64) * torch.tensor([1e-3, 1, 1e3])
    narrow = narrow_linear(layer, [(torch.arange(8), factor, torch.arange(3))]).narrow
    for got, exact in zip(narrow.parameters(), layer.parameters(), strict=True):
        assert torch.equal(got, (factor.mT @ exact.double()).bfloat16())


@pytest.mark.parametrize("make", [bert, bigcode])
def test_narrow_queries_and_keys_are_equally_large(make: Any) -> None:
    """Otherwise, half precision would lose the smaller ones."""
    model = make()
    layer = collect_statistics(model, find_layers(model, ids())[0][:1], [ids()])[0]
    factors = whole_factors(layer)
    groups = layer.projections.groups
    for head, (P, S) in enumerate(zip(layer.query_moments, layer.key_moments, strict=True)):
        a, b = factors.query[head * groups], factors.key[head]
        sizes = (a * (P @ a)).sum(0) / groups, (b * (S @ b)).sum(0)
        assert torch.allclose(*sizes, rtol=1e-6)


def test_only_an_empty_growing_cache_layer_is_replaced() -> None:
    from transformers import BertConfig, DynamicCache, EncoderDecoderCache, StaticCache

    def kept(cache: object, at: int = 0) -> list[str]:
        attention = torch.nn.Module()
        attention.layer_idx = at
        replace_cache_layer(attention, (), {"past_key_values": cache}, lambda: "new")
        layers = getattr(cache, "self_attention_cache", cache).layers
        return [one if isinstance(one, str) else type(one).__name__ for one in layers]

    assert kept(DynamicCache()) == ["new"]
    assert kept(DynamicCache(), at=1) == []  # the layer before it has no place yet
    config = BertConfig(num_hidden_layers=2)
    assert kept(DynamicCache(config=config), at=1) == ["DynamicLayer", "new"]
    both = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert kept(both) == ["new"]
    assert not both.cross_attention_cache.layers
    full = DynamicCache()
    full.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert kept(full) == ["DynamicLayer"]
    assert kept(StaticCache(config=config, max_cache_len=4)) == ["StaticLayer"] * 2


def test_widths_of_pairs_are_widths_of_curves() -> None:
    curves = [[([2, 4, 6], [0.3, 0.1, 0.0]), ([2, 4, 6], [0.2, 0.1, 0.0])]]
    assert allocate_widths(curves, 0.5, None) == [[4, 2]]
    assert allocate_widths(curves, 0.45, None) == [[2, 2]]  # 5 channels: 3 and 2
    assert allocate_widths(curves, None, 0.2) == [[4, 2]]  # with 3 channels, the hull is at 0.2
    assert allocate_widths(curves, None, 1.0) == [[2, 2]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(0, 9), min_size=6, max_size=6), min_size=1, max_size=4), st.floats(0, 9))
def test_widths_for_a_tolerance_keep_it(drawn: list[list[float]], tolerance: float) -> None:
    curves = [([1, 2, 3, 4, 5, 6, 7], [*losses, 0.0]) for losses in drawn]  # curves of any shape
    widths = widths_for_tolerance(curves, tolerance)
    mean = sum(losses[width - 1] for width, (_, losses) in zip(widths, curves, strict=True)) / len(curves)
    assert mean <= tolerance + 1e-8  # 9 times 1e-9


def test_calibration_without_gain_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(layer: Any, start: Factors, *_: Any) -> Factors:
        return Factors(start.query * (layer.projections.layer == 1), start.key, start.kept)

    monkeypatch.setattr("rankwise.compression.width_solve.calibrate", worse)
    plain = rw.compress(bert(), [ids()], keep=0.5)
    done = rw.compress(bert(), [ids()], keep=0.5, calibrate=3)
    assert done.attention_kl == plain.attention_kl
    assert [head.kl_calibrated for head in done.heads] == [head.kl for head in plain.heads]


def test_each_call_of_a_shared_layer_has_its_own_sample() -> None:
    moments = []
    for attention in ("sdpa", "eager"):  # shown by fused attention, and read off the linear layers
        model = made("Albert", "Model", **SIZES, embedding_size=16, attn_implementation=attention)
        (found,), reasons = find_layers(model, ids())
        assert not reasons
        (layer,) = collect_statistics(model, [found], [ids()])
        assert (len(layer.samples), layer.tokens) == (2, 2 * 4 * 24)
        assert not torch.allclose(*(sample.query for sample in layer.samples))
        moments.append(torch.stack([layer.query_moments, layer.key_moments]))
    assert torch.allclose(*moments, rtol=1e-4, atol=1e-4 * float(moments[0].abs().max()))


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
    assert {projection.narrow.out_features for projection in narrow_projections(model).values()} == {12}
    # a ridge of 1e-9: 3e-5 of logits of up to 50
    assert torch.allclose(output(model, batch), before, atol=2e-3)


def test_written_and_fused_attention_give_the_same_factors() -> None:
    fused, written = bert(), bert(attn_implementation="eager")
    assert written.config._attn_implementation == "eager"
    batch = ids(6, 30)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][::2, 20:] = 0
    one, other = (rw.compress(model, [batch], keep=3 / 8) for model in (fused, written))
    assert [head.width for head in one.heads] == [head.width for head in other.heads]
    assert one.attention_kl == pytest.approx(other.attention_kl, rel=1e-3)


# --- rotary pairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ROTARY)
def test_at_full_width_nothing_changes(family: str) -> None:
    model, batch = ROTARY[family](), ids(2, 12)
    before = output(model, batch)
    found, _ = find_layers(model, batch)
    assert len(found) == 2
    layers = collect_statistics(model, found, [batch])
    swap = narrow_layers(model, [(layer.projections, whole_factors(layer)) for layer in layers])
    swap.apply()
    # unrotated channels are in another basis, scaled by roots of moments down to a ridge of 1e-9
    assert torch.allclose(
        output(model, batch), before, atol=1e5 * torch.finfo(torch.float32).eps * float(before.abs().max())
    )
    swap.undo()
    assert torch.equal(output(model, batch), before)


def test_greedy_is_the_best_first_step_and_its_curve_is_measured() -> None:
    model, batch = ROTARY["llama"](), ids(2, 12)
    found, _ = find_layers(model, batch)
    layer = collect_statistics(model, found[:1], [batch])[0]
    whole, units = whole_factors(layer), units_of(layer)
    rows = rows_of(layer.samples, 1, whole, units, seed=0)
    order = greedy(rows, units)
    assert order.widths == [2, 4, 6, 8]
    assert order.losses[-1] == 0
    other = greedy(rows_of(layer.samples, 0, whole, units, 0), units)

    def measured(units: list[int], width: int) -> float:
        # all rows were drawn: there are 12 of each sequence, and 48 at most
        orders = [other, Order(units, order.widths, order.losses)]
        each = layer_divergence(layer.samples, kept_factors(layer, whole, orders, [8, width]))
        assert each[:2].abs().max() < 1e-6
        return float(each[2:].mean())

    for width, loss in zip(order.widths, order.losses, strict=True):
        assert measured(order.units, width) == pytest.approx(loss, rel=1e-4, abs=1e-6)
    for first in range(4):
        rest = [unit for unit in range(4) if unit != first]
        assert measured([first, *rest], 6) >= order.losses[-2] - 1e-6


def test_nan_in_later_batches_is_named() -> None:
    model = ROTARY["llama"]()
    found, _ = find_layers(model, ids(2, 12))
    layers = collect_statistics(model, found, [ids(4, 24)])
    check_statistics(layers)
    layers[1].key_moments[1, 0, 0] = torch.nan
    with pytest.raises(CompressionError, match=rf"'{found[1].name}': expected finite .* in key head 1"):
        check_statistics(layers)


def with_large_biases(dtype: torch.dtype) -> torch.nn.Module:
    """Return a Qwen2 whose slowly rotating channels of queries and keys are dominated by a bias."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(vocab_size=64, num_hidden_layers=2, initializer_range=0.2, **sizes)
    model = transformers.Qwen2ForCausalLM(config).eval()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.bias.data.zero_().view(-1, 16)[:, [6, 7, 14, 15]] = 100.0
    return model.to(dtype)


@pytest.mark.parametrize("part", ["width", "kv", "heads"])
def test_layers_are_the_same_in_half_precision(part: str) -> None:
    """A rotation that a bias hides, or a wrong change of attention to one token, is as small as rounding."""
    records = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = with_large_biases(dtype)
        weights = {name: weight.data_ptr() for name, weight in model.named_parameters()}
        record = rw.compress(model, [ids()], keep=0.75, parts=part)
        kept = [name for name, weight in model.named_parameters() if weights.get(name) == weight.data_ptr()]
        assert "model.embed_tokens.weight" in kept
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        records.append([layer.site for layer in record.layers])
    wide, *half = records
    assert half == [wide] * 2
