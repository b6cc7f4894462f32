"""Laws of all parts, alone and together, over families of models."""

import copy
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tests.compression.compression_cases import (
    CACHED,
    DECODERS,
    FAMILIES,
    ROTARY,
    WITH_HEADS,
    WRITTEN,
    Make,
    bert,
    cache_bytes,
    gpt2,
    ids,
    in_steps,
    llama,
    opt,
    output,
    phi3,
    smollm3,
)
from tests.compression.test_heads import decided, own_words
from tests.support.torch_names import hooks_of
from torch import Tensor, nn

import rankwise as rw
from rankwise.compression import Compression, save_compressed
from rankwise.compression.trials import Job, find_part, solve_part
from rankwise.errors import CompressionError, InputError

EPS = torch.finfo(torch.float32).eps
CLOSE = EPS**0.5
"""Of the largest logit: what a trial allows two ways to compute one model."""
LOW = 16 * torch.finfo(torch.bfloat16).eps
FOUND: dict[str, tuple[dict[str, float], dict[str, Make]]] = {
    "width": ({"width": 0.5}, {**FAMILIES, **WRITTEN, **ROTARY, "smollm3": smollm3}),
    "kv": ({"kv": 0.4}, CACHED),
    "blocks": ({"blocks": 0.5}, {"gpt2": gpt2, "bert": bert, "llama": ROTARY["llama"], "opt": opt}),
    "heads": ({"heads": 0.5}, WITH_HEADS),
    "key-heads": ({"key-heads": 0.5}, {"llama": llama, "phi3": functools.partial(phi3, 4)}),
    "width and kv": (
        {"width": 0.5, "kv": 0.5},
        {**DECODERS, "llama": ROTARY["llama"], "neox": ROTARY["neox"]},
    ),
    "blocks and kv": ({"blocks": 0.5, "kv": 0.5}, {"llama": ROTARY["llama"]}),
    "heads and width": ({"heads": 0.5, "width": 0.5}, {"gpt2": gpt2}),
}
CASES = [(part, family) for part, (_, families) in FOUND.items() for family in families]
DECODER_CASES = [(part, family) for part, family in CASES if family not in ("bert", "mpnet")]
FIRST = dict(reversed(DECODER_CASES))
PARTS = rw.compression.PARTS
SINGLE = [(part, FIRST[part]) for part in PARTS]
"""Each part, which requires a row of `FOUND`, with its first decoder."""
SOME = [*SINGLE, ("width", "llama"), ("width and kv", "gpt2")]
PLAIN_PARTS = ("blocks", "heads", "key-heads")
"""Parts that insert no modules of Rankwise."""
NARROWED = ("gpt2", "llama")
"""Families without and with rotary positions."""


class Case(NamedTuple):
    model: nn.Module
    """Compressed; tests leave it as it is."""
    before: Tensor
    """Output of the original model."""
    done: Compression


@functools.cache
def compressed(part: str, family: str) -> Case:
    keep, families = FOUND[part]
    model = families[family]()
    before = output(model, BATCH)
    return Case(model, before, rw.compress(model, [ids(8, 30)], keep=keep, held_out=[HELD_OUT]))


BATCH, HELD_OUT = ids(2, 12), ids(4, 30, 1)


def own_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that compression inserted."""
    return [one for one in model.modules() if type(one).__module__.startswith("rankwise.compression")]


def widths(done: Compression) -> list[int]:
    numbers = [head.width for head in done.heads] + [latent.rank for latent in done.latents]
    numbers += [layer.after for layer in done.merged]
    return numbers + [block.step for block in done.blocks]


def costs(done: Compression) -> list[float]:
    numbers = [head.kl for head in done.heads] + [latent.output_kl for latent in done.latents]
    return numbers + [block.cost for block in done.blocks]


def off(after: Tensor, before: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max())


@pytest.mark.parametrize(("part", "family"), CASES)
def test_the_record_describes_every_layer(part: str, family: str) -> None:
    model, before, done = compressed(part, family)
    assert not done.left_out
    assert done.parts == list(FOUND[part][0])
    assert off(output(model, BATCH), before) > 1e-3  # it was a real change
    assert done.parameters_after == sum(weight.numel() for weight in model.parameters())
    if "kv" not in part:
        assert done.parameters_after < done.parameters_before
    assert math.isnan(done.attention_kl) == ("width" not in part)  # attention is not compared there


@pytest.mark.parametrize(("part", "family"), DECODER_CASES)
def test_a_cache_changes_no_output(part: str, family: str) -> None:
    model, _, done = compressed(part, family)
    whole = output(model, BATCH)
    stepped, cache = in_steps(model, BATCH)
    assert off(stepped, whole) < CLOSE
    tokens = done.kept_cache.tokens
    assert done.kept_cache.after == cache_bytes(cache) // BATCH["input_ids"].numel() * tokens
    if part == "width":
        saved = (done.kept_cache.before - done.kept_cache.after) // tokens
        assert saved == 4 * sum(head.before - head.width for head in done.heads)
    elif "kv" in part:
        assert done.kept_cache.after <= FOUND[part][0]["kv"] * done.kept_cache.before
    assert torch.equal(in_steps(copy.deepcopy(model), BATCH)[0], stepped)
    generate: Any = model.generate
    for beams in (1, 3) if (part, family) in SOME else ():
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
        texts = [generate(BATCH["input_ids"], use_cache=cached, **options) for cached in (True, False)]
        assert texts[0].shape == (2, 18)
        assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("part", "family"),
    [
        *SOME,
        ("width", "mpnet"),
        ("width", "phi3"),
        ("kv", "gpt2"),
        ("heads and width", "gpt2"),
        ("blocks and kv", "llama"),
    ],
)
def test_a_model_is_saved_twice_and_loaded_by_each_class(part: str, family: str, tmp_path: Path) -> None:
    model, _, done = compressed(part, family)
    expected = output(model, BATCH)
    save_compressed(model, tmp_path / "one", done)
    with pytest.raises(InputError, match="new or empty"):
        save_compressed(model, tmp_path / "one")
    assert Compression.load(tmp_path / "one").model_dump_json() == done.model_dump_json()
    load: Any = (
        rw.load_compressed if hasattr(model.config, "quantization_config") else type(model).from_pretrained
    )
    load(tmp_path / "one").save_pretrained(tmp_path / "two")
    again = load(tmp_path / "two")
    assert not again.training
    assert torch.equal(output(again, BATCH), expected)
    if (part, family) in DECODER_CASES:
        # loaded weights are aligned differently in memory, for which kernels round differently
        assert off(in_steps(again, BATCH)[0], in_steps(model, BATCH)[0]) < 16 * EPS
    base = transformers.AutoModel.from_pretrained(tmp_path / "two")
    assert len(own_modules(base)) == len(own_modules(model))
    assert bool(base(**BATCH)[0].isfinite().all())
    half = load(tmp_path / "two", dtype=torch.bfloat16)
    assert output(half, BATCH).dtype == torch.bfloat16
    assert bool(output(half, BATCH).isfinite().all())


@pytest.mark.parametrize(
    ("family", "calibrate"),
    [*((family, 0) for family in FOUND["width"][1]), *((family, 10) for family in ROTARY)],
)
def test_the_record_has_the_attention_kl_of_the_first_layer(family: str, calibrate: int) -> None:
    original, matrices = FOUND["width"][1][family](), []
    if calibrate:
        model, options = FOUND["width"][1][family](), {"held_out": [HELD_OUT], "calibrate": calibrate}
        done = rw.compress(model, [ids(8, 30)], keep={"width": 0.5}, **options)
    else:
        model, _, done = compressed("width", family)
    for one in (original, model):
        with rw.capture(one) as trace, torch.no_grad():
            one(**HELD_OUT)
        matrices.append(trace.mixers[0].operator.dense())
    before, after = matrices
    terms = torch.where(before > 0, before * (before.log() - after.log()), 0).sum(-1)
    close = {"rel": 1e-3, "abs": 1e-6} if family not in ROTARY else {"rel": 1e-2, "abs": 1e-5}
    assert terms.mean().item() == pytest.approx(done.layers[0].attention_kl, **close)
    assert done.layers[0].attention_kl > 1e-4  # it was a real change
    width = sum(widths(done)) / len(done.heads)
    assert width == 4 or (family in (*ROTARY, "smollm3") and 3 <= width < 4)  # whole pairs


@pytest.mark.parametrize(("part", "family"), [*SINGLE, ("width", "llama")])
def test_padding_counts_for_nothing(part: str, family: str) -> None:
    short, mask = ids(6, 20), torch.arange(29).expand(6, 29) < 20
    batches: list[dict[str, Tensor]] = [short, {**short, "attention_mask": mask[:, :20].long()}]
    for filler in (0, 7):
        padding = torch.full((6, 9), filler)
        padded = torch.cat([short["input_ids"], padding], 1)
        batches.append({"input_ids": padded, "attention_mask": mask.long()})
    done = [rw.compress(FOUND[part][1][family](), [batch], keep={part: 0.5}) for batch in batches]
    # others draw numbers by length
    pairs = [(0, 1), (2, 3), (0, 2)] if (part, family) == ("width", "gpt2") else [(0, 1), (2, 3)]
    for one, other in ((done[at], done[to]) for at, to in pairs):
        assert one.tokens == other.tokens == 6 * 20
        assert widths(one) == widths(other)
        assert costs(one) == pytest.approx(costs(other), rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("family", NARROWED)
def test_calibration_lowers_attention_kl_on_other_tokens(family: str) -> None:
    batches, held_out = [ids(8, 30, seed) for seed in range(3)], [ids(8, 30, 9)]
    plain, done = (
        rw.compress(
            FOUND["width"][1][family](), batches, keep={"width": 0.5}, calibrate=steps, held_out=held_out
        )
        for steps in (0, 30)
    )
    assert done.attention_kl < plain.attention_kl
    assert widths(done) == widths(plain)
    assert costs(done) == pytest.approx(costs(plain))
    assert sum(head.kl_calibrated for head in done.heads) < sum(head.kl for head in done.heads)


@pytest.mark.parametrize(("part", "family"), [("width", "gpt2"), ("width", "llama"), ("kv", "llama")])
def test_a_tolerance_bounds_the_cost_and_a_tighter_one_keeps_more(part: str, family: str) -> None:
    kept = []
    for tolerance in (0.3, 0.03, 0.003):
        done = rw.compress(FOUND[part][1][family](), [ids(8, 30)], tolerance={part: tolerance})
        cost = sum(
            latent.output_kl for latent in done.latents
        )  # nats of layers add up, attention KL is a mean
        cost += sum(head.kl for head in done.heads) / max(len(done.heads), 1)
        assert cost <= tolerance * 1.001
        kept.append(sum(widths(done)))
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


@pytest.mark.parametrize("family", ["gpt2", "glm"])
def test_a_tolerance_bounds_the_cost_on_all_calibration_data(family: str) -> None:
    """The first 16 sequences cost nothing."""
    same = {"input_ids": torch.full((16, 24), 7)}
    make = FOUND["width"][1][family]
    done = rw.compress(make(), [same, ids(16, 24, 5)], tolerance={"width": 0.02})
    assert done.attention_kl <= 0.02
    assert sum(head.width for head in done.heads) < sum(head.before for head in done.heads)
    assert not any("above the tolerance" in note for note in done.notes)


@pytest.mark.parametrize(
    ("part", "tolerance", "above"),
    [("heads", 0.2, True), ("heads", 3.0, False), ("width", 0.01, True)],
)
def test_a_held_out_cost_above_the_tolerance_is_noted(part: str, tolerance: float, above: bool) -> None:
    model, same = decided(), {"input_ids": torch.full((16, 24), 7)}
    data, held_out = own_words(model, same), own_words(model, ids(16, 24, 5))
    done = rw.compress(model, [data], tolerance=tolerance, parts=part, held_out=[held_out])
    cost = done.attention_kl if part == "width" else done.worst.loss_added / done.worst.loss_before
    assert (cost > tolerance) == above
    said = f"{part}: the cost on held-out data is {cost:.3g}, above the tolerance {tolerance:g}."
    assert [note for note in done.notes if "above the tolerance" in note] == [said] * above


def test_heads_keep_their_numbers_and_removed_heads_are_listed() -> None:
    batch = {**ids(8, 30), "labels": ids(8, 30)["input_ids"]}
    done = rw.compress(llama(2), [batch], keep={"heads": 0.6, "width": 0.6})
    assert done.tokens == 240
    gone = {(head.site, head.head) for head in done.heads if not head.width}
    assert gone
    left = {(head.site, head.head // 2) for head in done.heads if head.part == "heads" and head.width}
    assert {(head.site, head.head) for head in done.heads if head.part != "heads"} == left
    [note] = [note for note in done.notes if note.startswith("Removed heads: ")]
    listed = [one.partition(" ") for one in note.removeprefix("Removed heads: ").rstrip(".").split("; ")]
    assert {(site, int(head)) for site, _, heads in listed for head in heads.split(", ")} == gone


@pytest.mark.parametrize(("part", "family"), [*SOME, ("width and kv", "neox"), ("heads", "llama")])
def test_a_change_is_undone_exactly_and_applied_again(part: str, family: str) -> None:
    keep, families = FOUND[part]
    model, changes = families[family](), []
    for name, share in keep.items():
        changes.append(
            solve_part(
                name, Job(model, find_part(name, model, BATCH), [ids(8, 30)], [ids(8, 30)], keep=share)
            ).change
        )
        changes[-1].apply()
    changed, cache = in_steps(model, BATCH)
    for change in reversed(changes):
        change.undo()
    assert torch.equal(output(model, BATCH), compressed(part, family).before)
    assert not own_modules(model)
    assert not hooks_of(model)
    for change in changes:
        change.apply()
    again, other = in_steps(model, BATCH)
    assert torch.equal(again, changed)
    assert list(map(type, other.layers)) == list(map(type, cache.layers))


@pytest.mark.parametrize(("part", "family"), SOME)
def test_compressed_models_are_trained_and_audited(part: str, family: str) -> None:
    model = copy.deepcopy(compressed(part, family).model)
    assert torch.equal(output(model, BATCH), output(compressed(part, family).model, BATCH))
    assert rw.audit(model, [BATCH]).heads
    model.train()
    model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
    inserted = [weight for one in own_modules(model) for weight in one.parameters()]
    assert bool(inserted) == (part not in PLAIN_PARTS)
    for weight in inserted or model.parameters():
        assert weight.grad is not None
        assert bool(weight.grad.any()) or weight.dim() < 2
    assert all(weight.grad is None for weight in compressed(part, family).model.parameters())


@pytest.mark.parametrize(("part", "family"), SOME)
def test_half_precision_stays_half_precision(part: str, family: str) -> None:
    keep, families = FOUND[part]
    model = families[family]().to(torch.bfloat16)
    done = rw.compress(model, [ids(8, 30)], keep=keep)
    assert not done.left_out
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    exact = compressed(part, family).done.attention_kl  # rounding of 2⁻⁸ of logits of some units
    assert part != "width" or done.attention_kl == pytest.approx(exact, rel=0.2)
    whole, stepped = output(model, BATCH).float(), in_steps(model, BATCH)[0].float()
    assert float((stepped - whole).norm() / whole.norm()) < LOW


@pytest.mark.parametrize(("part", "family"), [*SINGLE, ("kv", "qwen3")])
def test_nan_is_refused_by_name(part: str, family: str) -> None:
    model = FOUND[part][1][family]()
    name, weight = {
        name: own for name, own in model.named_parameters() if "attn" in name and own.dim() == 2
    }.popitem()
    with torch.no_grad():
        weight[3] = float("nan")
    layer, broken = name.removesuffix(".weight"), weight.shape[1]
    said = f"layer '{layer}': expected finite weights, got NaN or infinity in {broken} of"
    with pytest.raises(CompressionError, match=said):
        rw.compress(model, [ids(8, 30)], keep={part: 0.5})
    assert not own_modules(model)


@pytest.mark.parametrize(("part", "make"), [("width", gpt2), ("width", llama), ("kv", llama)])
def test_too_little_text_is_refused(part: str, make: Make) -> None:
    with pytest.raises(CompressionError, match="Give more text"):
        rw.compress(make(), [ids(1, 3)], keep={part: 0.5})


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_described_where_users_look(part: str) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/compress.md").read_text("utf-8")
    assert f"\n| `{part}`" in page
    assert f"fixed order: `{'`, `'.join(PARTS)}`." in page
    assert f"- ``{part}`` " in str(rw.compress.__doc__)
