"""Narrow queries and keys first, then narrow keys and values out of one latent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compression.compression_cases import bigcode, gpt2, ids, in_steps, llama, neox, opt, output
from torch import nn

import rankwise as rw
from rankwise.compression.kv_find import find_cached_layers, full_latents
from rankwise.compression.kv_modules import LatentCache, LatentProjection, latent_layers
from rankwise.compression.part import Job, solve_part
from rankwise.compression.qk_modules import narrow_projections
from rankwise.errors import CompressionError

CLOSE = torch.finfo(torch.float32).eps ** 0.5
"""Of the largest logit: what `keep_passing` allows two ways to compute one model."""
LOW = 16 * torch.finfo(torch.bfloat16).eps
FAMILIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (gpt2, "qk"), "opt": (opt, "qk"), "bigcode": (bigcode, "qk"),
    "llama": (llama, "rotary"), "neox": (neox, "rotary"),
}  # fmt: skip


def off(after: torch.Tensor, before: torch.Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_all_channels_in_another_basis_and_a_full_latent_are_the_model(family: str) -> None:
    make, part = FAMILIES[family]
    model, batch = make(), ids(3, 14)
    before = output(model, batch)
    narrowed = solve_part(part, Job(model, [ids(8, 30)], [ids(4, 30, 1)], keep=1.0)).change
    narrowed.apply()
    layers, reasons = find_cached_layers(model, batch)
    assert not reasons
    assert all(layer.key.endswith(".narrow") for layer in layers)
    latents = full_latents(model, layers, seed=3)
    latents.apply()
    assert off(output(model, batch), before) < CLOSE
    stepped, cache = in_steps(model, batch)
    assert off(stepped, before) < CLOSE
    assert all(isinstance(one, LatentCache) for one in cache.layers)
    latents.undo()
    narrowed.undo()
    assert torch.equal(output(model, batch), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_the_latent_reads_the_channels_that_are_left_and_no_others(family: str) -> None:
    make, part = FAMILIES[family]
    model: Any = make()
    done = rw.compress(model, [ids(8, 30)], keep={part: 0.5, "kv": 0.5})
    narrow, latents = dict(narrow_projections(model)), latent_layers(model)
    assert any(layer.key_width for layer in latents)
    for layer in latents:
        projection = narrow[layer.path(layer.key).removesuffix(".narrow")]
        assert isinstance(projection.narrow, LatentProjection)
        places = sum(count for _, count in layer.key_places) or layer.full // 2
        assert places == sum(head.width for head in done.heads if head.site == layer.module)
        with pytest.raises(CompressionError, match="read out of a latent"):
            projection.widened()
    cache = in_steps(model, ids(2, 12))[1]
    assert all(isinstance(one, LatentCache) for one in cache.layers)
    assert [one.keys.shape[-1] for one in cache.layers] == [one.rank for one in done.latents]
