"""The part `kv`: laws of the factors, and decoders with caches of latents."""

import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.compression.compression_cases import (
    CACHED,
    SIZES,
    Make,
    bigcode,
    cache_bytes,
    cohere,
    gpt2,
    ids,
    in_steps,
    latent_layers,
    llama,
    made,
    neox,
    opt,
    output,
    qwen3,
    windowed,
)
from tests.support.torch_names import hooks_of
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.cli.load_model import demo_model, demo_text
from rankwise.compression.kv_find import find_cached_layers, full_latents
from rankwise.compression.kv_modules import (
    LatentCache,
    LatentProjection,
    LatentState,
)
from rankwise.compression.kv_solve import (
    SecondMoments,
    collect_moments,
    largest_ranks,
    ranks_for_tolerance,
    weighted_svd,
)
from rankwise.compression.trials import find_part
from rankwise.compression.width_find import random_bases
from rankwise.compression.width_modules import narrow_layers
from rankwise.errors import CompressionError

QUICK: dict[str, Any] = {"parts": ("kv",)}
CLOSE = torch.finfo(torch.float32).eps ** 0.5
"""Of the largest logit: what a trial allows two ways to compute one model."""


# --- laws -----------------------------------------------------------------------------------------------


def moments(size: int) -> torch.Tensor:
    """Second moments with eigenvalues over four decades."""
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    return basis * torch.logspace(0, -4, size, dtype=torch.float64) @ basis.mT


def cost(gap: torch.Tensor, tokens: torch.Tensor, gradients: torch.Tensor) -> float:
    return float((gradients @ gap @ tokens @ gap.mT).trace() / 2)


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_factors_have_the_least_weighted_error_of_their_rank(rank: int) -> None:
    weight, tokens, gradients = torch.randn(12, 9, dtype=torch.float64), moments(9), moments(12)
    found = weighted_svd(weight, tokens, gradients)
    down, up = found.factors(rank)
    least = cost(weight - up @ down, tokens, gradients)
    # the ridges add at most 1e-6 of G's mean eigenvalue and 1e-9 of A's mean eigenvalue in each direction
    assert least == pytest.approx(float(found.nats[rank:].sum()), rel=1e-3)
    assert torch.allclose(down @ down.mT, torch.eye(rank, dtype=torch.float64), atol=1e-12)
    plain_down, plain_up = weighted_svd(weight).factors(rank)
    assert cost(weight - plain_up @ plain_down, tokens, gradients) > least
    for size in (1e-3, 1e-1, 1.0):
        for _ in range(10):
            near_down, near_up = (factor + size * torch.randn_like(factor) for factor in (down, up))
            assert cost(weight - near_up @ near_down, tokens, gradients) >= least * (1 - 1e-3)
    other_down, other_up = weighted_svd(weight, 7 * tokens, 0.01 * gradients).factors(rank)
    assert torch.allclose(other_up @ other_down, up @ down, atol=1e-6)  # the scale of moments has no effect
    down, up = found.factors(9)
    assert torch.allclose(up @ down, weight, atol=1e-6)


def test_the_weight_of_the_first_token_does_not_depend_on_the_length_of_windows() -> None:
    """All later tokens read the first: its squared gradient grows with the window, as its share falls."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    weight, first, rotated = normal(12, 9), normal(9) / 4, normal(9, 8)
    errors, plain = [], []
    for tokens in (64, 1024):
        moment = SecondMoments(*(torch.zeros(size, size, dtype=torch.float64) for size in (9, 12)), weight)
        alike = torch.zeros_like(moment.tokens), torch.zeros_like(moment.gradients)  # the factors of K-FAC
        for _ in range(8192 // tokens):
            x = torch.cat([first[None], normal(tokens - 1, 8) @ rotated.mT])
            g = torch.cat([normal(1, 12) * 4 * tokens**0.5, normal(tokens - 1, 12)])
            moment.add(x, g)
            alike = alike[0] + x.mT @ x, alike[1] + g.mT @ g
        moment.finish()
        assert float(moment.tokens.trace() * moment.gradients.trace()) == pytest.approx(moment.sizes / 8192)
        for found, given in ((errors, (moment.tokens, moment.gradients)), (plain, alike)):
            down, up = weighted_svd(weight, *given).factors(3)
            found.append(float(((weight - up @ down) @ first).norm() / (weight @ first).norm()))
    assert max(errors) < 1.25 * min(errors)
    assert plain[1] > 1.5 * plain[0] > 1.5 * max(errors)


def test_bytes_are_spent_on_the_largest_directions() -> None:
    nats = [torch.tensor(one).double() for one in ([4.0, 3.0, 0.2, 0.1], [2.0, 0.5, 0.3, 0.0])]
    assert largest_ranks(nats, 4) == [2, 2]
    assert largest_ranks(nats, 2) == [1, 1]
    for tolerance, ranks in ((0.61, [2, 2]), (1.11, [2, 1]), (99, [1, 1])):
        assert ranks_for_tolerance(nats, tolerance) == ranks
        assert sum(float(worth[rank:].sum()) for worth, rank in zip(nats, ranks, strict=True)) <= tolerance


def test_a_share_counts_windows_and_a_share_that_is_out_of_reach_is_refused_before_the_work() -> None:
    """The advice works: the least share of the message is accepted, and met."""
    steps: list[str] = []
    with pytest.raises(CompressionError, match="belong to layers without latents") as error:
        rw.compress(
            windowed(), [ids(8, 30)], keep={"kv": 0.1}, on_progress=lambda step, _: steps.append(step)
        )
    assert steps == ["the parts that the model allows"]
    [least] = re.findall(r"at least (\S+) of the cache of 64 tokens", str(error.value))
    model = windowed()
    done = rw.compress(model, [ids(8, 30)], keep={"kv": 1.01 * float(least)})
    assert [latent.rank for latent in done.latents] == [1]
    [size] = done.cache
    assert size.after <= 1.01 * float(least) * size.before
    assert cache_bytes(in_steps(model, ids(1, 64))[1]) == size.after
    assert cache_bytes(in_steps(windowed(), ids(1, 64))[1]) == size.before


def test_the_order_of_sequences_and_padding_do_not_change_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(), ids(6, 12)
    layers = find_cached_layers(model, batch)[0]
    said: list[str] = []

    def say(step: str, share: float) -> None:
        said.append(step)

    frozen = model.lm_head.weight.requires_grad_(False)
    one = collect_moments(model, layers, [batch], 0, say)[0]
    padded = {
        "input_ids": torch.cat([batch["input_ids"], torch.ones(6, 5, dtype=torch.long)], 1),
        "attention_mask": torch.cat([torch.ones(6, 12), torch.zeros(6, 5)], 1).long(),
    }
    other = collect_moments(model, layers, [padded], 0, say)[0]
    assert other.count == one.count == 72
    assert torch.allclose(other.tokens, one.tokens, rtol=1e-5, atol=1e-6 * float(one.tokens.abs().max()))
    assert [weight for weight in model.parameters() if not weight.requires_grad] == [frozen]
    assert all(parameter.grad is None for parameter in model.parameters())
    scale = float(one.gradients.abs().max())  # the same draws: padding comes after all tokens
    assert torch.allclose(other.gradients, one.gradients, rtol=1e-3, atol=1e-4 * scale)

    def least_likely(_loss: Any, out: Any, _batch: Any, _generator: torch.Generator) -> torch.Tensor:
        logits = out.of_rows(out.states.flatten(0, 1))  # labels without draws, which depend on the order
        return -logits.log_softmax(-1).amin(-1).sum(0, keepdim=True)

    monkeypatch.setattr("rankwise.importance.losses.DivergenceLoss.probe", least_likely)
    one = collect_moments(model, layers, [batch], 0, say)[0]
    flipped = [{"input_ids": part} for part in batch["input_ids"].flip(0).split(4)]
    other = collect_moments(model, layers, flipped, 0, say)[0]
    for before, after in ((one.tokens, other.tokens), (one.gradients, other.gradients)):
        assert torch.allclose(after, before, rtol=1e-4, atol=1e-5 * float(before.abs().max()))


def latent_model(make: Make, kept: int) -> Any:
    """Model with latents whose caches keep at most this many bytes of keys per layer."""
    model = make()
    rw.compress(model, [ids(8, 30)], keep=0.4, **QUICK)
    for module in model.modules():
        if isinstance(module, LatentProjection):
            module.state.kept_bytes = kept
    return model


# --- models ---------------------------------------------------------------------------------------------


NARROW: dict[str, Make] = {"gpt2": gpt2, "opt": opt, "bigcode": bigcode, "llama": llama, "neox": neox}


@pytest.mark.parametrize(
    ("narrow", "make"),
    [*((False, make) for make in CACHED.values()), *((True, make) for make in NARROW.values())],
)
def test_a_full_latent_in_any_basis_does_not_change_outputs(narrow: bool, make: Make) -> None:
    """Also a latent of keys that were narrowed before, with all channels in another basis."""
    model, batch = make(), ids(3, 14)
    mask = torch.ones(3, 14, dtype=torch.long)
    mask[0, :4] = mask[1, :1] = 0
    batch["attention_mask"] = mask
    if not narrow:
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    before = output(model, batch)
    changes = []
    if narrow:
        layers, _ = find_part("width", model, batch)
        changes.append(narrow_layers(model, [(layer, random_bases(layer)) for layer in layers]))
        changes[0].apply()
    layers, reasons = find_cached_layers(model, ids(2, 9))
    assert not reasons
    assert all(layer.key.endswith(".narrow") == narrow for layer in layers)
    if not narrow:  # factors within rounding of 1 are 1
        assert {layer.key_factor for layer in layers} == {layer.value_factor for layer in layers} == {1.0}
    changes.append(full_latents(model, layers, seed=3))
    changes[-1].apply()
    stepped, cache = in_steps(model, batch)
    for after in (output(model, batch), stepped):
        assert float((after - before)[mask.bool()].abs().max()) < CLOSE * float(before.abs().max())
    assert all(isinstance(one, LatentCache) for one in cache.layers)
    assert [one.keys.shape[-1] for one in cache.layers] == [one.rank for one in layers]
    for change in reversed(changes):
        change.undo()
    assert torch.equal(output(model, batch), before)
    assert not hooks_of(model)


def test_latents_keep_the_mode_and_the_frozen_weights_of_each_layer() -> None:
    for keep in ({"kv": 0.5}, {"width": 0.5, "kv": 0.5}):
        model: Any = llama(2).train()
        first, second = (layer.self_attn for layer in model.model.layers)
        first.eval()
        first.k_proj.requires_grad_(False)
        rw.compress(model, [ids(8, 30)], keep=keep)
        assert not first.k_proj.training
        for projection, trained in ((first.k_proj, False), (first.v_proj, True), (second.k_proj, True)):
            assert all(module.training == projection.training for module in projection.modules())
            assert {weight.requires_grad for weight in projection.parameters()} == {trained}
        assert second.k_proj.training


def test_the_demo_keeps_its_loss_at_a_quarter_of_its_cache(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model()).eval()
    tokens = torch.tensor([byte + 3 for byte in demo_text().read_bytes()[: 32 * 128]]).view(32, 128)
    batches = [{"input_ids": part} for part in tokens.split(20)]
    done = rw.compress(model, batches[:1], keep=0.25, parts=("kv",), held_out=batches[1:])
    assert done.kept_cache.after * 4 == done.kept_cache.before == 4096 * done.kept_cache.tokens
    assert done.worst.loss_after <= done.worst.loss_before + 0.017
    with torch.no_grad():
        cache = model(tokens[:2].view(1, -1), use_cache=True).past_key_values
    assert done.kept_cache.tokens == cache.get_seq_length() == 256
    assert done.kept_cache.kept_keys == sum(layer.kept.nbytes for layer in cache.layers)
    page = done.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "75.0% fewer bytes of cache at" in page
    assert "rank that loses nothing" in page
    assert "Attention KL" not in page  # `kv` does not measure it
    assert (
        0.5 < done.worst.output_kl / sum(layer.output_kl for layer in done.latents) < 2.5
    )  # to second order


def test_a_cached_prompt_is_copied_and_refused_by_another_model() -> None:
    model, batch = llama(), ids(2, 12)
    rw.compress(model, [ids(8, 30)], keep=0.4, **QUICK)
    whole, tail = output(model, batch), batch["input_ids"][:, 6:]
    with torch.no_grad():
        cache = model(batch["input_ids"][:, :6], use_cache=True).past_key_values
        for _ in range(2):  # the prompt is unchanged
            again = model(tail, past_key_values=copy.deepcopy(cache), use_cache=True).logits
            assert torch.allclose(again, whole[:, 6:], atol=1e-4 * float(whole.abs().max()))
        assert cache.get_seq_length() == 6
        assert copy.deepcopy(cache).layers[0].state is cache.layers[0].state
        with pytest.raises(CompressionError, match="this model filled"):
            copy.deepcopy(model)(tail, past_key_values=cache, use_cache=True)


def test_a_cache_of_latents_is_cropped_and_its_first_update_returns_its_input() -> None:
    for family in ("llama", "gpt2"):  # with positions in the cache, and without
        model, batch = CACHED[family](), ids(2, 12)
        rw.compress(model, [ids(8, 30)], keep=0.4, **QUICK)
        whole = output(model, batch)
        with torch.no_grad():
            first = model(**batch, use_cache=True)
            assert torch.equal(first.logits, model(**batch, use_cache=False).logits)  # nothing is decoded
            cache = first.past_key_values
            assert {one.values.dtype for one in cache.layers} == {torch.int32}
            assert {one.values.shape for one in cache.layers} == {(2, 1, 12, int(family == "llama"))}
            cache.crop(-5)
            again = model(batch["input_ids"][:, 7:], past_key_values=cache, use_cache=True).logits
        assert torch.allclose(again, whole[:, 7:], rtol=0, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("kept", [0, 700, LatentState.kept_bytes])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_any_history_of_a_cache_leads_to_the_outputs_without_a_cache(family: str, kept: int) -> None:
    """Caches are continued by one token or several, cropped, reordered, repeated and copied, in each mode."""
    model, chance = latent_model(CACHED[family], kept), random.Random(kept)
    caches: list[tuple[torch.Tensor, Any]] = [(torch.empty(2, 0, dtype=torch.long), None)]
    modes = torch.no_grad, torch.inference_mode if kept else torch.enable_grad
    for step in range(25):
        text, cache = chance.choice(caches[-3:])
        change = chance.choice(["none", "none", "crop", "reorder", "repeat", "deep copy", "copy"])
        if cache is not None and cache.get_seq_length() > 3:
            if change in ("deep copy", "copy", "repeat"):
                layers = [copy.copy(layer) for layer in cache.layers]
                cache = copy.deepcopy(cache) if change == "deep copy" else copy.copy(cache)
                cache.layers = cache.layers if change == "deep copy" else layers
            with torch.inference_mode():
                if change == "crop":
                    cache.crop(-2)
                    caches = [entry for entry in caches if entry[1] is not cache]
                    text = text[:, :-2]
                elif change == "reorder":
                    cache.reorder_cache(torch.tensor([1, 0, *range(2, len(text))]))
                    caches = [entry for entry in caches if entry[1] is not cache]
                    text = text[[1, 0, *range(2, len(text))]]
                elif change == "repeat" and len(text) < 4:
                    cache.batch_repeat_interleave(2)
                    text = text.repeat_interleave(2, 0)
        count = chance.choice([1, 1, 1, 3, 7])
        if text.shape[1] + count > 60:
            continue
        new = ids(len(text), count, seed=step)["input_ids"]
        caches = [entry for entry in caches if entry[1] is not cache]
        with chance.choice(modes)():
            out = model(new, past_key_values=cache, use_cache=True)
        caches.append((torch.cat([text, new], 1), out.past_key_values))
        whole = output(model, {"input_ids": caches[-1][0]})
        error = (out.logits.detach() - whole[:, -count:]).abs().max()
        assert float(error) < 1e-4 * float(whole.abs().max()), (step, change, count)


@pytest.mark.parametrize("family", ["gpt2", "neox"])
def test_long_texts_are_decoded_in_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.compression.kv_modules.BLOCK", 1)  # 32 tokens
    model = latent_model(CACHED[family], kept=700)
    text = ids(2, 60)
    whole, sizes = output(model, text), []
    right = LatentState.decode_keys

    def counted(self: LatentState, latent: torch.Tensor, positions: Any) -> torch.Tensor:
        sizes.append(latent.shape[1])
        return right(self, latent, positions)

    monkeypatch.setattr(LatentState, "decode_keys", counted)
    torch.testing.assert_close(in_steps(model, text)[0], whole, rtol=0, atol=1e-4 * float(whole.abs().max()))
    if family == "gpt2":  # queries read latents in place of keys
        assert not sizes
    else:
        assert max(sizes) == 32


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_attention_that_reads_keys_itself_gets_them(family: str) -> None:
    """Attention by hand, captures and gradients through a cache agree with a pass without a cache."""
    model, batch = latent_model(CACHED[family], kept=700), ids(2, 12)
    whole, (stepped, cache) = output(model, batch), in_steps(model, batch)
    close = {"rtol": 0, "atol": 1e-4 * float(whole.abs().max())}
    cache.crop(-1)
    last = {"input_ids": batch["input_ids"][:, -1:], "past_key_values": cache}
    with rw.capture(model) as every:
        model(**batch)
    with rw.capture(model) as trace:
        model(**last)
    for read, full in zip(trace.mixers, every.mixers, strict=True):
        torch.testing.assert_close(read.operator.dense(), full.operator.dense()[..., -1:, :])
    model.set_attn_implementation("eager")
    torch.testing.assert_close(in_steps(model, batch)[0], stepped, **close)
    model.set_attn_implementation("sdpa")
    grads = []
    for cached in (False, True):
        model.zero_grad()
        if cached:
            cache = model(batch["input_ids"][:, :8], use_cache=True).past_key_values
            for at in (8, 9):
                out = model(batch["input_ids"][:, at : at + 1], past_key_values=cache, use_cache=True)
        else:
            out = model(batch["input_ids"][:, :10])
        out.logits[:, -1].square().sum().backward()
        grads.append(
            {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
        )
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()))


def test_a_cache_holds_latents_and_no_other_memory() -> None:
    for kept in (0, 512):
        model = latent_model(llama, kept)
        with torch.no_grad():
            cache = model(**ids(2, 48), use_cache=True).past_key_values
            model(ids(2, 1)["input_ids"], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            tensors = {id(own.untyped_storage()): own for own in vars(layer).values() if torch.is_tensor(own)}
            held = sum({own.data_ptr(): own.untyped_storage().nbytes() for own in tensors.values()}.values())
            assert held <= layer.keys.nbytes * 17 / 16 + layer.values.nbytes + kept * 17 / 16 + 256


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
def test_generation_with_any_cache_is_that_without(implementation: str) -> None:
    model, beams = latent_model(llama, kept=0), 3 if implementation == "dynamic" else 1
    options: Any = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    cached = model.generate(**ids(2, 12), cache_implementation=implementation, **options)
    assert torch.equal(cached, model.generate(**ids(2, 12), use_cache=False, **options))


def test_the_latent_is_computed_once_per_call_and_dropped_after_it() -> None:
    model, batch = llama(), ids(2, 12)
    rw.compress(model, [ids(8, 30)], keep=0.4, **QUICK)
    attention = model.model.layers[0].self_attn
    key, value = attention.k_proj, attention.v_proj
    read, twins = [], []
    counter = key.down.register_forward_hook(lambda _module, given, _out: read.append(given[0]))
    copier = value.register_forward_pre_hook(lambda *_: twins.append(copy.deepcopy(model)))
    whole = output(model, batch)
    copier.remove()
    assert len(read) == 1
    other = torch.randn_like(read[0])
    alone, (left, right) = value(other), (value(read[0]), value(read[0]))
    assert len(read) == 4  # outside a call each projection computes its own latent
    assert torch.equal(left, right)
    assert not torch.equal(alone, left)
    counter.remove()
    copied = twins[0].model.layers[0].self_attn.k_proj.state
    assert key.state is value.state
    assert copied is not key.state
    for state in (key.state, copied):  # also in a copy made during a call
        assert not state.in_call
        assert state.tokens is state.latent is state.positions is None
    assert torch.equal(output(twins[0], batch), whole)


def test_low_rank_adapters_train_and_merge() -> None:
    peft = pytest.importorskip("peft")
    model, batch = qwen3(), ids(2, 12)
    rw.compress(model, [ids(8, 30)], keep=0.4, **QUICK)
    before = output(model, batch)
    options = peft.LoraConfig(target_modules=["down", "up"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, options).eval()
    whole = output(adapted, batch)
    close = {"rtol": 0, "atol": 1e-4 * float(whole.abs().max())}
    assert not torch.allclose(whole, before, **close)
    assert torch.allclose(in_steps(adapted, batch)[0], whole, **close)  # the cache reads through the adapters
    assert torch.allclose(output(adapted.merge_and_unload(), batch), whole, **close)


def test_an_adapter_of_a_replaced_layer_is_refused_with_the_names_to_use() -> None:
    peft = pytest.importorskip("peft")
    for keep, names in (({"kv": 0.4}, ["q_proj"]), ({"width": 0.5, "kv": 0.4}, ["q_proj.narrow"])):
        model = llama()
        rw.compress(model, [ids(8, 30)], keep=keep)
        with pytest.raises(ValueError, match="replace its name by 'down', 'up'") as error:
            peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj"]))
        assert "\n" not in str(error.value)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj", "down", "up", *names]))
        assert torch.allclose(in_steps(adapted, ids(2, 12))[0], output(adapted, ids(2, 12)), atol=1e-4)


def test_it_compiles() -> None:
    model = latent_model(llama, kept=0)
    whole = model(**ids(2, 6)).logits
    with unchecked():
        stepped, cache = in_steps(torch.compile(model, backend="eager"), ids(2, 6))
    assert {type(layer).__name__ for layer in cache.layers} == {"LatentCache"}
    torch.testing.assert_close(stepped, whole)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    **DYNAMIC, "rope_type": "longrope", "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "(dynamic) changes with the length": ("Llama", "ForCausalLM", {"rope_parameters": DYNAMIC}),
    "(longrope) changes with the length": ("Llama", "ForCausalLM", {"rope_parameters": LONG}),
    "a window of fixed length": ("Mistral", "ForCausalLM", {"sliding_window": 8, "num_key_value_heads": 2}),
    "does not generate": ("Bert", "Model", {}),
    "encoder-decoder": ("Bart", "ForConditionalGeneration", {"d_model": 32, "decoder_layers": 1}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_models_without_full_caches_are_refused(said: str) -> None:
    name, ending, more = REFUSED[said]
    model = made(name, ending, **SIZES, **more)
    with pytest.raises(CompressionError, match=re.escape(said)):
        rw.compress(model, [ids(8, 30)], keep=0.5, **QUICK)
    assert not latent_layers(model)


def test_the_innermost_module_with_a_cache_is_the_layer() -> None:
    model: Any = llama(2)
    for number, block in enumerate(model.model.layers):
        block.layer_idx = number  # the block receives the cache and has a number, too
    layers, reasons = find_cached_layers(model, ids(2, 9))
    assert [layer.module for layer in layers] == [f"model.layers.{number}.self_attn" for number in range(2)]
    assert not reasons


def test_shared_projections_and_different_tokens_are_refused() -> None:
    model: Any = llama(2)
    first, second = (block.self_attn for block in model.model.layers)
    first.v_proj.register_forward_pre_hook(lambda _module, given: (2 * given[0],))
    layers, reasons = find_cached_layers(model, ids(2, 9))
    assert [layer.module for layer in layers] == ["model.layers.1.self_attn"]
    said = "its keys and its values are made from different tokens"
    assert reasons == {"model.layers.0.self_attn": said}
    second.k_proj = first.k_proj
    layers, reasons = find_cached_layers(model, ids(2, 9))
    assert not layers
    assert len(reasons) == 2


@pytest.mark.parametrize(("make", "rotation"), [(cohere, "pairs"), (llama, "halves")])
def test_the_closer_of_two_fitting_rotations_is_taken(
    make: Make, rotation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tiny angle for all channels fits both pairings within rounding."""

    def tiny(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = 2e-7 * position_ids[..., None].expand(-1, -1, 8)
        return angles.cos(), angles.sin()

    model: Any = make()
    monkeypatch.setattr(model.model.rotary_emb, "forward", tiny)
    layers, reasons = find_cached_layers(model, ids(2, 9))
    assert not reasons
    assert {layer.rotation for layer in layers} == {rotation}


def test_a_layer_whose_decoding_from_the_cache_is_wrong_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LatentState.decode_values

    def wrong(self: LatentState, latent: torch.Tensor) -> torch.Tensor:
        return right(self, latent) * (1.01 if self.layer.module.endswith("0.self_attn") else 1)

    monkeypatch.setattr(LatentState, "decode_values", wrong)
    mask = torch.ones(8, 30, dtype=torch.long)
    mask[::2, :5] = 0  # outputs of padding are not compared
    done = rw.compress(qwen3(), [{**ids(8, 30), "attention_mask": mask}], keep=0.75, **QUICK)
    assert set(done.left_out) == {"model.layers.0.self_attn"}
    assert [one.site for one in done.latents] == ["model.layers.1.self_attn"]
