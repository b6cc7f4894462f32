"""Simulated caches of few bits."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compression.compression_cases import CACHED, gpt2, ids, made, output, windowed
from tests.support.untouched import untouched
from transformers import DynamicCache, QuantizedCache

from rankwise.compression.quantized_cache import GROUP, quantize, quantized_cache


@given(st.integers(2, 8), st.integers(1, 2 * GROUP + 3), st.integers(0, 99))
def test_rounding_is_bounded_by_half_a_step_of_the_group(bits: int, size: int, seed: int) -> None:
    values = torch.randn(3, size, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rounded = quantize(values, bits, dim=1)
    for before, after in zip(values.split(GROUP, 1), rounded.split(GROUP, 1), strict=True):
        low, high = before.amin(1, keepdim=True), before.amax(1, keepdim=True)
        # float16 rounds the lowest level and the step, which is counted up to 2^bits − 1 times
        half = 2.0**-11 * (low.abs() + high - low) + 2.0**-24 * 2**bits
        bound = (high - low) / (2**bits - 1) / 2 + half
        assert bool(((after - before).abs() <= bound * (1 + 1e-9)).all())
    assert torch.equal(quantize(values.transpose(0, 1), bits, dim=0), rounded.transpose(0, 1))


class ByHand(DynamicCache):
    """Cache that rounds keys by channel over 64 tokens, and values by token over 64 channels of all heads.

    A window is not rounded.
    """

    def update(self, keys: Any, values: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
        keys, values = keys.clone(), values.clone()
        for sequence in range(0 if self.is_sliding[layer_idx] else len(keys)):
            for channel in range(keys.shape[1] * keys.shape[3]):
                row = keys[sequence, channel // keys.shape[3], :, channel % keys.shape[3]]
                row.copy_(rounded(row))
            for token in range(keys.shape[2]):
                row = values[sequence, :, token]
                row.copy_(rounded(row.flatten()).view_as(row))
        return super().update(keys, values, layer_idx, *more, **named)


def rounded(row: torch.Tensor, bits: int = 4) -> torch.Tensor:
    found = []
    for part in row.split(64):
        low = part.min().half().float()
        step = ((part.max() - part.min()) / (2**bits - 1)).half().float()
        found.append(((part - part.min().half().float()) / step).round().clamp(0, 2**bits - 1) * step + low)
    return torch.cat(found)


@pytest.mark.parametrize("make", [CACHED["llama"], gpt2, windowed])
def test_attention_reads_a_quantized_cache(make: Any) -> None:
    model, batch = make(), ids(2, 20)
    with torch.no_grad():
        expected = model(**batch, past_key_values=ByHand(config=model.config), use_cache=True)[0]
    plain = output(model, batch)
    with untouched(model), quantized_cache(model, 4):
        after = output(model, batch)
    assert torch.allclose(after, expected, atol=1e-4 * float(plain.abs().max()))
    assert not torch.allclose(after, plain, atol=1e-3 * float(plain.abs().max()))


@pytest.mark.extra
@pytest.mark.parametrize("backend", ["hqq", "quanto"])
def test_the_simulated_error_equals_the_error_of_a_public_quantized_cache(backend: str) -> None:
    """One layer: keys and values do not depend on the cache, and 64 tokens and channels form one group."""
    pytest.importorskip("hqq" if backend == "hqq" else "optimum.quanto")
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model, batch = made("Llama", vocab_size=61, **sizes), ids(16, 65)
    axes = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {"axis_key": -1, "axis_value": -1}
    cache = QuantizedCache(backend, model.config, nbits=4, q_group_size=64, **axes)
    with torch.no_grad():
        exact = model(**batch).logits[:, -1]
        model(batch["input_ids"][:, :-1], past_key_values=cache, use_cache=True)
        public = model(batch["input_ids"][:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    with quantized_cache(model, 4):
        ours = output(model, batch)[:, -1]
    errors = [float((logits - exact).norm()) for logits in (ours, public)]
    assert 0.5 < errors[0] / errors[1] < 2
