"""The part `key-heads`: fewer key heads, merged in aligned bases, as a plain checkpoint."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.compression_cases import (
    SIZES,
    Make,
    bert,
    glm,
    gpt2,
    ids,
    in_steps,
    llama,
    made,
    output,
    phi3,
    qwen3,
    sharpened,
    smollm3,
)
from tests.compression.test_heads import own_words
from tests.support.documents import compression_document
from tests.support.untouched import untouched
from torch import Tensor, nn

from rankwise.compression import compress, save_compressed
from rankwise.compression.key_heads_find import Merge, find, merging
from rankwise.compression.key_heads_solve import HeadMoments, collect_moments
from rankwise.compression.trials import Job
from rankwise.errors import CompressionError
from rankwise.tracing import record_calls

EPS = torch.finfo(torch.float32).eps
BATCH = ids(2, 12)


def own(**more: Any) -> nn.Module:
    """Own keys for each of 4 heads, with biases."""
    return made("Llama", **SIZES | {"attention_bias": True} | more)


FAMILIES: dict[str, Make] = {
    "llama": own,
    "qwen2": partial(made, "Qwen2", **SIZES, num_key_value_heads=2),  # biases, 2 query heads per key head
    "phi3": partial(phi3, 4),  # queries, keys and values in one projection
    "glm": glm,  # half of the channels rotated, neighbors
    "smollm3": smollm3,  # one layer without rotation
    "cohere": partial(made, "Cohere", **SIZES, num_key_value_heads=4),
}


def repeated(model: nn.Module, parts: int, seed: int = 0) -> nn.Module:
    """Keys and values of `parts` adjacent heads that differ only by bases, which the outputs do not show.

    Keys of each head are the first head's, with each rotary pair turned and scaled. Values are the first
    head's times a matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    count, width = config.num_key_value_heads, config.head_dim
    with torch.no_grad():
        for layer in model.model.layers:  # type: ignore[union-attr]
            attention: Any = layer.self_attn
            for side in (attention.k_proj, attention.v_proj):
                heads = [x.view(count, width, -1) for x in (side.weight, side.bias) if x is not None]
                for head in range(count):
                    if side is attention.v_proj:
                        factor = torch.randn(width, width, generator=generator)
                    else:
                        scale, angle = torch.rand(2, width // 2, generator=generator)
                        cos, sin = ((0.5 + scale) * f(6 * angle) for f in (torch.cos, torch.sin))
                        factor = torch.cat(
                            [torch.cat([x.diag() for x in row], 1) for row in ((cos, -sin), (sin, cos))]
                        )
                    for values in heads:
                        values[head] = factor @ values[head - head % parts]
    return model


@pytest.mark.parametrize(("keep", "parts"), [(0.5, 2), (0.25, 4)])
def test_heads_that_differ_by_a_basis_are_merged_without_loss(keep: float, parts: int) -> None:
    """float32 weights are rounded once: errors are near 1e-6; the test demands a thousandth."""
    model = repeated(own(), parts)
    before = output(model, BATCH)
    done = compress(model, [ids(8, 24)], keep=keep, parts="key-heads")
    after = output(model, BATCH)
    assert float((after - before).norm() / before.norm()) < 1e-3
    assert [(layer.before, layer.after) for layer in done.merged] == [(4, 4 // parts)] * 2
    assert f"4 key heads per layer merged to {4 // parts}" in repr(compression_document(done))
    assert done.kept_cache.after == keep * done.kept_cache.before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_class_reads_merged_heads_with_a_cache(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    config: Any = model.config
    heads, before = config.num_key_value_heads, output(model, BATCH)
    done = compress(model, [ids(8, 24)], keep=0.5, parts="key-heads")
    whole = output(model, BATCH)
    assert (model.config.num_key_value_heads, model.config.num_attention_heads) == (heads // 2, 4)  # type: ignore[union-attr]
    assert float((whole - before).abs().max()) > 1e-3  # it was a real change
    assert done.kept_cache.after == done.kept_cache.before // 2
    assert torch.allclose(in_steps(model, BATCH)[0], whole, atol=EPS**0.5 * float(whole.abs().max()))
    save_compressed(model, tmp_path / "folder", done)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert torch.equal(output(again, BATCH), whole)


# --- least squares ---------------------------------------------------------------------------------------


def llama4() -> nn.Module:
    return made("Llama", **SIZES | {"num_hidden_layers": 1})


def moments(model: nn.Module, batch: dict[str, Tensor]) -> HeadMoments:
    return collect_moments(Job(model, find(model, batch), [batch], [batch]), find(model, batch)[0])[0]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000))
def test_no_other_factors_have_a_smaller_error(seed: int) -> None:
    """Dense oracle: with z = q̄k per pair of channels, the mean of (Re z e^iθ)² over angles θ is |z|²/2."""
    model, batch = llama4(), ids(2, 8, seed)
    merge = moments(model, batch).merge(2)
    attention: Any = model.model.layers[0].self_attn  # type: ignore[union-attr]
    projections = [f"model.layers.0.self_attn.{side}_proj" for side in "qkv"]
    with record_calls(model, projections) as calls:
        output(model, batch)
    query, key, value = (
        next(call for call in calls if call.name == name).output.double().view(16, 4, 8)
        for name in projections
    )
    columns = attention.o_proj.weight.detach().double().view(-1, 4, 8)

    def together(side: Tensor, factors: Tensor) -> Tensor:
        """New heads: sums over pairs of adjacent heads, once for each old head."""
        heads = torch.einsum("thk,hkr->thr", side, factors)
        return heads.unflatten(1, (2, 2)).sum(2).repeat_interleave(2, 1)

    def logits(q: Tensor, k: Tensor) -> Tensor:
        q, k = (torch.complex(x[..., :4], x[..., 4:]) for x in (q, k))
        return torch.einsum("thp,shp->tshp", q.conj(), k)

    def errors(merge: Merge) -> list[float]:
        new = logits(torch.einsum("thk,hkr->thr", query, merge.query), together(key, merge.key))
        left = value - torch.einsum("thr,hrv->thv", together(value, merge.value), merge.output)
        return [
            float((new - logits(query, key)).abs().square().sum()),
            float(torch.einsum("thv,ohv->tho", left, columns).square().sum()),
        ]

    best, generator = errors(merge), torch.Generator().manual_seed(seed)
    for name in ("key", "query", "value", "output"):
        old = getattr(merge, name)
        change = torch.randn(old.shape, generator=generator, dtype=torch.float64)
        if name in ("key", "query"):  # one complex number for each rotary pair
            real, imaginary = (change[:, row, :4].diag_embed() for row in (0, 1))
            change = torch.cat([torch.cat([real, imaginary], 2), torch.cat([-imaginary, real], 2)], 1)
        other = replace(merge, **{name: old + 0.05 * old.norm() * change / change.norm()})
        assert all(new >= least * (1 - 1e-6) for new, least in zip(errors(other), best, strict=True))


def test_least_squares_bring_the_outputs_closer() -> None:
    """On the calibration data, the fitted output layer is at least as close as the merged one."""
    model, original, batch = llama4(), llama4(), ids(8, 24)
    before, least = output(original, batch), moments(original, batch)
    with merging(original, {least.layer: least.merge(2)}):
        merged = output(original, batch)
    compress(model, [batch], keep=0.5, parts="key-heads")
    assert float((output(model, batch) - before).norm()) < float((merged - before).norm())


# --- requests --------------------------------------------------------------------------------------------


def test_uniform_heads_and_key_heads_combine() -> None:
    model = own()
    done = compress(model, [ids(8, 24)], keep={"heads": 0.5, "key-heads": 0.5}, uniform=True)
    config: Any = model.config
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)
    assert [(layer.before, layer.after) for layer in done.merged] == [(2, 1)] * 2


def test_a_tolerance_takes_the_fewest_heads_within_it() -> None:
    model = repeated(own(), 4)
    done = compress(model, [own_words(model, ids(8, 24))], tolerance=1e-3, parts="key-heads")
    assert [layer.after for layer in done.merged] == [1, 1]
    data = own_words(own(), ids(8, 24))
    costs = [compress(own(), [data], keep, parts="key-heads").worst.relative for keep in (0.5, 0.25)]
    assert 0 < costs[0] < costs[1]
    for tolerance, left in ((0.9 * costs[0], 4), (1.1 * costs[0], 2), (1.1 * costs[1], 1)):
        done = compress(own(), [data], tolerance=tolerance, parts="key-heads")
        assert [layer.after for layer in done.merged] == ([left] * 2 if left < 4 else [])


def test_a_tolerance_needs_a_loss() -> None:
    model = made("Llama", "Model", **SIZES)
    with pytest.raises(CompressionError, match="expected a loss of labels or of next tokens"):
        compress(model, [ids(8, 24)], tolerance=10, parts="key-heads")


@pytest.mark.parametrize(("part", "uniform"), [("key-heads", False), ("heads", True)])
def test_a_held_out_cost_above_the_tolerance_is_noted(part: str, uniform: bool) -> None:
    data, held_out = ids(8, 24) | {"labels": ids(8, 24, 7)["input_ids"]}, [own_words(own(), ids(8, 24, 1))]
    done = compress(own(), [data], tolerance=0.1, parts=part, uniform=uniform, held_out=held_out)
    said = f"{part}: the cost on held-out data is {done.worst.relative:.3g}, above the tolerance 0.1."
    assert said in done.notes


@pytest.mark.parametrize(
    ("make", "keep", "said"),
    [
        (partial(made, "Gemma", **SIZES, num_key_value_heads=1), 0.5, "it has one key head, which all query"),
        (qwen3, 0.5, "q_norm', which is of class Qwen3RMSNorm"),
        (bert, 0.5, r"its class builds 'encoder.*key.weight' with \(32, 32\) instead of \(16, 32\)"),
        (gpt2, 0.5, r"its class builds '.*c_attn.weight' with \(32, 96\) instead of"),
        (
            own,
            0.75,
            r"at most 0.5: a number of key heads must divide 4, got 0.75. `keep` can be 0.5 or 0.25",
        ),
        (llama, 0.4, None),
    ],
)
def test_models_and_shares_that_do_not_fit_are_refused(make: Make, keep: float, said: str | None) -> None:
    model = make()
    if said is None:  # 2 key heads: a share of 0.4 is rounded up, and the note says so
        done = compress(model, [ids(8, 24)], keep=keep, parts="key-heads")
        assert done.notes[0] == "Key heads: 1 of 2 remain in every layer, a share of 0.5."
        return
    with untouched(model, but="config"), pytest.raises(CompressionError, match=said):
        compress(model, [ids(8, 24)], keep=keep, parts="key-heads")


def test_layers_with_different_numbers_are_refused() -> None:
    model = sharpened(own())
    with pytest.raises(CompressionError, match=r"numbers of key heads that differ: \d, 4"):
        compress(model, [ids(8, 24)], keep={"heads": 0.8, "key-heads": 0.5})
