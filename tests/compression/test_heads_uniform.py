"""Heads removed uniformly: as many from each layer, as a plain checkpoint."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.compression.compression_cases import (
    ONE,
    SIZES,
    Make,
    bert,
    gpt2,
    ids,
    llama,
    made,
    output,
    qwen3,
    sharpened,
)
from tests.compression.test_heads import own_words
from tests.support.untouched import untouched
from torch import nn

import rankwise as rw
from rankwise.compression import compress, heads_solve, save_compressed
from rankwise.compression.heads_find import find, zeroed
from rankwise.errors import CompressionError

EPS = torch.finfo(torch.float32).eps
BATCH = ids(2, 12)
IMAGES = {"pixel_values": torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = transformers.ViTConfig(image_size=16, patch_size=4, **sizes)
    return sharpened(transformers.ViTModel(config))


FAMILIES: dict[str, tuple[Make, float, dict[str, int]]] = {
    # make, share to keep, and numbers in the new configuration
    "llama": (partial(made, "Llama", **SIZES), 0.5, {"num_attention_heads": 2, "num_key_value_heads": 2}),
    "qwen2": (
        partial(made, "Qwen2", **SIZES, num_key_value_heads=2),
        0.5,
        {"num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "qwen3": (qwen3, 0.5, {"num_attention_heads": 2, "num_key_value_heads": 1}),
    # 6 query heads for 2 key heads: half of the key heads would be too few
    "queries": (
        partial(made, "Qwen2", **SIZES | {"num_attention_heads": 6, "head_dim": 8}, num_key_value_heads=2),
        0.6,
        {"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "one key head": (
        partial(made, "Gemma", **ONE | {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16}),
        0.5,
        {"num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "vit": (vit, 0.75, {"num_attention_heads": 3}),
}
"""Each family is a decoder of its own class, except for the last, which reads images."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_loses_as_many_heads_and_computes_the_others(family: str) -> None:
    make, keep, numbers = FAMILIES[family]
    batch, data = (IMAGES, IMAGES) if family == "vit" else (BATCH, ids(8, 24))
    model, original = make(), make()
    done = compress(model, [data], keep=keep, parts="heads", uniform=True)
    gone: dict[str, set[int]] = {}
    for head in done.heads:
        if not head.width:
            gone.setdefault(head.site, set()).add(head.head)
    config: Any = model.config
    assert {name: getattr(config, name) for name in numbers} == numbers
    heads = len(done.heads) // len(done.layers)
    assert {len(each) for each in gone.values()} == {heads - numbers["num_attention_heads"]}
    assert len(gone) == len(done.layers) == 2
    # the reference: all heads of the original, with the removed heads at zero
    layers = [replace(layer, keys_stay=family == "queries") for layer in find(original, batch)[0]]
    plan = {layer.name: {head // layer.group for head in gone[layer.name]} for layer in layers}
    if family == "queries":  # each key head lost as many query heads
        assert all(sorted(head // 3 for head in each) == [0, 1] for each in gone.values())
    with zeroed(original, layers, plan):
        expected = output(original, batch)
    got = output(model, batch)
    assert torch.allclose(got, expected, atol=1e3 * EPS * float(expected.abs().max()))


def test_the_record_says_what_uniformity_costs() -> None:
    """Both numbers are the loss of the smaller model minus the loss of the original, on held-out data."""
    make, held_out = FAMILIES["llama"][0], [ids(8, 30, 1)]
    model, free = make(), make()
    done = compress(model, [ids(8, 30)], keep=0.5, parts="heads", uniform=True, held_out=held_out)
    other = compress(free, [ids(8, 30)], keep=0.5, parts="heads", held_out=held_out)
    assert sum(not head.width for head in done.heads) == sum(not head.width for head in other.heads) == 4
    printed = [float(number) for number in re.findall(r"adds? (-?[\d.e-]+\d)", done.notes[0])]
    measured = [record.worst.loss_added for record in (done, other)]
    # printed with 4 digits; losses are float32 sums
    assert printed == pytest.approx(measured, rel=1e-3, abs=16 * EPS * done.worst.loss_before)


def test_a_tolerance_bounds_the_largest_uniform_removal() -> None:
    make = partial(made, "Qwen2", **SIZES, num_key_value_heads=4)
    data, gone = [own_words(make(), ids(8, 24))], []
    costs = [compress(make(), data, keep, parts="heads", uniform=True).worst.relative for keep in (0.75, 0.5)]
    for tolerance in (1.1 * costs[0], 1.1 * costs[1]):
        done = compress(model := make(), data, tolerance=tolerance, parts="heads", uniform=True)
        assert done.worst.relative <= tolerance
        gone.append(sum(not head.width for head in done.heads if head.layer == 0))
        assert gone[-1] == 4 - model.config.num_attention_heads
    assert gone == [1, 2]


def test_a_number_of_heads_is_tried_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, right = [], heads_solve.difference

    def counted(model: nn.Module, layers: list[Any], plan: dict[str, set[int]], *rest: Any) -> str:
        tried.append((len(layers), *map(len, plan.values())))
        return right(model, layers, plan, *rest)

    monkeypatch.setattr(heads_solve, "difference", counted)
    compress(made("Llama", **SIZES), [ids()], keep=0.25, parts="heads", uniform=True)
    assert tried == [(2, 3, 3)] * 2  # 3 of 4 heads before the work, and the chosen heads after it
    tried.clear()
    compress(made("Llama", **SIZES), [ids()], keep={"blocks": 0.5, "heads": 0.25}, uniform=True)
    assert tried == [(2, 3, 3), (1, 3), (1, 3)]  # again without the blocks that were removed


def test_uniform_heads_and_a_latent_cache_are_saved_together(tmp_path: Path) -> None:
    model = FAMILIES["qwen2"][0]()
    done = compress(model, [ids(8, 24)], keep={"heads": 0.5, "kv": 0.5}, uniform=True)
    folder = save_compressed(model, tmp_path / "both", done)
    assert json.loads((folder / "config.json").read_text())["num_attention_heads"] == 2
    again = rw.load_compressed(folder)
    assert torch.equal(output(again, BATCH), output(model, BATCH))


NO_PLAIN = r"expected fewer heads in every layer.*Remove heads without `uniform`, or blocks"


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (bert, {}, NO_PLAIN),
        (gpt2, {}, rf"its class builds .*c_attn.*{NO_PLAIN[-40:]}"),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval(),
            {},
            "its heads are not seen",
        ),
        (llama, {"keep": 0.75}, r"no number of heads for `keep` 0.75 of 4. `keep` can be 0.5\."),
        (llama, {"parts": "width"}, r"`uniform`: expected the part 'heads', which it is for, got width"),
        (
            llama,
            {"parts": None},
            r"`uniform`: expected the part 'heads'.*got no parts. Name it: .*--parts heads",
        ),
        (llama, {"parts": None, "keep": {"kv": 0.5}}, r"`uniform`: expected the part 'heads'.*got kv"),
    ],
)
def test_sizes_without_a_configuration_are_refused(make: Make, options: dict[str, Any], said: str) -> None:
    model = make()
    batch: Any = BATCH if hasattr(model, "config") else torch.randn(2, 5, 8)
    with untouched(model, but="config"), pytest.raises(CompressionError, match=said):
        compress(model, [batch], **{"keep": 0.5, "parts": "heads", "uniform": True} | options)


def test_the_advice_of_a_refusal_works() -> None:
    make = partial(made, "Llama", **SIZES | {"num_hidden_layers": 1})
    said = r"hidden size \(32\) is not a multiple.*heads \(3\).*`keep` can be ([\d. or]+)\. "
    with pytest.raises(CompressionError, match=said) as refused:
        compress(make(), [BATCH], keep=0.75, parts="heads", uniform=True)
    shares = re.search(said, str(refused.value))
    assert shares is not None
    for share in shares.group(1).split(" or "):
        model: Any = make()
        compress(model, [BATCH], keep=float(share), parts="heads", uniform=True)
        assert model.config.num_attention_heads == 4 * float(share)
