"""Narrow queries and keys first, then narrow keys and values out of one latent."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compression.compression_cases import bigcode, gpt2, ids, llama, opt
from tests.compression.test_latents import in_steps, logits, neox
from torch import nn

import rankwise as rw
from rankwise.compression import save_compressed
from rankwise.compression.kv_find import find_cached_layers, full_latents
from rankwise.compression.kv_modules import LatentCache, LatentProjection, latent_layers
from rankwise.compression.part import Job, Solution, solve_part
from rankwise.compression.qk_modules import NarrowProjection, narrow_projections
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


def job(model: nn.Module) -> Job:
    return Job(model, [ids(8, 30)], [ids(4, 30, 1)], keep=0.5)


def applied(part: str, model: nn.Module) -> Solution:
    solution = solve_part(part, job(model))
    solution.change.apply()
    return solution


@pytest.mark.parametrize("family", FAMILIES)
def test_all_channels_in_another_basis_and_a_full_latent_are_the_model(family: str) -> None:
    make, part = FAMILIES[family]
    model, batch = make(), ids(3, 14)
    before = logits(model, batch)
    narrowed = solve_part(part, replace(job(model), keep=1.0)).change
    narrowed.apply()
    layers, reasons = find_cached_layers(model, batch)
    assert not reasons
    assert all(layer.key.endswith(".narrow") for layer in layers)
    latents = full_latents(model, layers, seed=3)
    latents.apply()
    assert off(logits(model, batch), before) < CLOSE
    stepped, cache = in_steps(model, batch)
    assert off(stepped, before) < CLOSE
    assert all(isinstance(one, LatentCache) for one in cache.layers)
    latents.undo()
    narrowed.undo()
    assert torch.equal(logits(model, batch), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_the_cache_keeps_the_latent_of_narrow_keys(family: str, tmp_path: Path) -> None:
    make, part = FAMILIES[family]
    model, batch = make(), ids(2, 12)
    before = logits(model, batch)
    narrowed, ours = (applied(name, model) for name in (part, "kv"))
    assert not narrowed.skipped
    assert not ours.skipped
    narrow, latents = dict(narrow_projections(model)), latent_layers(model)
    assert any(layer.key_width for layer in latents)
    for layer in latents:  # of the channels that are left, no others
        assert isinstance(narrow[layer.path(layer.key).removesuffix(".narrow")].narrow, LatentProjection)
        places = sum(count for _, count in layer.key_places) or layer.full // 2
        assert places == sum(head.width for head in narrowed.heads if head.site == layer.module)
    whole = logits(model, batch)
    assert not torch.allclose(whole, before, atol=1e-2)
    stepped, cache = in_steps(model, batch)
    assert off(stepped, whole) < CLOSE
    assert [one.keys.shape[-1] for one in cache.layers] == [one.rank for one in ours.latents]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    generate: Any = model.generate
    greedy = generate(batch["input_ids"], **options)
    assert torch.equal(greedy, generate(batch["input_ids"], use_cache=False, **options))
    assert torch.equal(in_steps(copy.deepcopy(model), batch)[0], stepped)
    ours.change.undo()
    narrowed.change.undo()
    assert torch.equal(logits(model, batch), before)
    narrowed.change.apply()
    ours.change.apply()
    again, cache = in_steps(model, batch)
    assert torch.equal(again, stepped)
    assert all(isinstance(one, LatentCache) for one in cache.layers)
    save_compressed(model, tmp_path / "one")
    first: Any = rw.load_compressed(tmp_path / "one")
    first.save_pretrained(tmp_path / "two")
    second = rw.load_compressed(tmp_path / "two")
    assert torch.equal(logits(second, batch), whole)
    assert torch.equal(in_steps(second, batch)[0], stepped)
    half = rw.load_compressed(tmp_path / "two", dtype=torch.bfloat16)
    low = in_steps(half, batch)[0].float()
    assert float((low - logits(half, batch).float()).norm() / low.norm()) < LOW


def test_it_trains_on_and_is_not_widened() -> None:
    model, batch = gpt2(), ids(2, 12)
    for part in ("qk", "kv"):
        applied(part, model)
    model.train()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    projections = [one for one in model.modules() if isinstance(one, LatentProjection)]
    assert projections
    slopes = [weight.grad for one in projections for weight in one.parameters() if weight.dim() > 1]
    assert all(slope is not None and bool(slope.any()) for slope in slopes)
    narrow = next(one for one in model.modules() if isinstance(one, NarrowProjection))
    with pytest.raises(CompressionError, match="read out of a latent"):
        narrow.widened()


def test_half_precision_is_narrowed_and_factored_as_it_is() -> None:
    model, batch = opt().to(torch.bfloat16), ids(2, 12)
    for part in ("qk", "kv"):
        assert not applied(part, model).skipped
    whole, stepped = logits(model, batch).float(), in_steps(model, batch)[0].float()
    assert float((stepped - whole).norm() / whole.norm()) < LOW
