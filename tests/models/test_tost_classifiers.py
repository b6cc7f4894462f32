"""Classifiers of sequences and images."""

import pytest
import torch
from tests.unchecked import unchecked
from torch.nn import functional as F
from tost_cases import config, stirred, texts
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from rankwise.errors import InputError
from rankwise.models import ToSTForImageClassification, ToSTForSequenceClassification
from rankwise.models.vision import ClassAttentionBlock, FourierPositions, PatchEmbedding

CLOSE = {"rtol": 1e-9, "atol": 1e-10}  # float64, two layers
TEXT = [{"causal": True}, {"causal": False}, {"causal": True, "pooling": "mean"}, {"layer_types": "softmax"},
        {"layer_types": "linear", "causal": False}]  # fmt: skip


def of_text(**changes) -> ToSTForSequenceClassification:
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_config(config(num_labels=3, **changes))
    assert type(made) is ToSTForSequenceClassification
    return stirred(made.double())


def of_images(**changes) -> ToSTForImageClassification:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "patch_size": 8, "causal": False, "num_labels": 3}
    torch.manual_seed(0)
    made = AutoModelForImageClassification.from_config(config(**{**sizes, **changes}))
    assert type(made) is ToSTForImageClassification
    return stirred(made.double(), scale=0.2)


def images(rows: int, height: int, width: int, channels: int = 3) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(rows, channels, height, width, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize("changes", TEXT, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_the_class(changes: dict, side: str) -> None:
    made, ids = of_text(**changes), texts(2, 8)
    if side == "left":
        ids[0, :3] = 0
        alone = ids[:1, 3:]
    else:
        ids[0, 5:] = 0
        alone = ids[:1, :5]
    logits = made(ids, attention_mask=(ids != 0).long()).logits
    torch.testing.assert_close(logits[:1], made(alone).logits, **CLOSE)
    torch.testing.assert_close(logits[1:], made(ids[1:]).logits, **CLOSE)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize("changes", TEXT, ids=lambda c: "-".join(map(str, c.values())))
def test_pads_at_the_right_end_are_padding_without_a_mask(changes: dict) -> None:
    made, ids = of_text(**changes), texts(2, 8)
    ids[0, 5:], ids[:, 2] = 0, 0  # a pad within a text is part of it
    logits = made(ids).logits
    torch.testing.assert_close(logits[:1], made(ids[:1, :5]).logits, **CLOSE)
    everything = torch.ones_like(ids)
    torch.testing.assert_close(logits[1:], made(ids, attention_mask=everything).logits[1:], **CLOSE)
    assert (made(ids, attention_mask=everything).logits[0] - logits[0]).abs().max() > 1e-3
    assert (made(ids, attention_mask=(ids != 0).long()).logits - logits).abs().amax(1).min() > 1e-3
    assert made(ids * 0).logits.isfinite().all()


def test_classifiers_ignore_no_argument() -> None:
    with pytest.raises(InputError, match=r"`atention_mask`.* Did you mean attention_mask"):
        of_text()(texts(1, 4), atention_mask=torch.ones(1, 4))
    with pytest.raises(InputError, match="`pixel_value`: expected an argument of ToSTForImageClassification"):
        of_images()(images(1, 16, 16), pixel_value=1)
    with pytest.raises(InputError, match="`position_ids`"):
        of_text()(texts(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_row_of_only_padding_has_finite_logits(pooling: str) -> None:
    made, ids = of_text(causal=False, pooling=pooling), texts(2, 4)
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    assert made(ids, attention_mask=mask).logits.isfinite().all()


def test_losses_and_gradients() -> None:
    made, ids, labels = of_text().train(), texts(2, 6), torch.tensor([0, 2])
    output = made(ids, labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
    output.loss.backward()
    assert [name for name, p in made.named_parameters() if p.grad is None] == []
    assert torch.equal(made(ids, return_dict=False)[0], made(ids).logits)
    assert len(made(ids, output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize(
    "changes", [{}, {"tokens_norm": False}, {"patch_size": 16, "layer_scale": 0.5}], ids=str
)
def test_images(changes: dict, tmp_path) -> None:
    made, pixels = of_images(**changes), images(2, 32, 48)
    output = made(pixels, labels=torch.tensor([1, 2]), output_hidden_states=True)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, torch.tensor([1, 2])))
    patches = (32 // made.config.patch_size) * (48 // made.config.patch_size)
    shapes = [state.shape[1] for state in output.hidden_states]
    assert shapes == [patches, patches, patches + 1, patches + 1, patches + 1]
    torch.testing.assert_close(made(pixels[:1]).logits, output.logits[:1], **CLOSE)
    made.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(again(pixels).logits, output.logits)
    made.train()(pixels, labels=torch.tensor([1, 2])).loss.backward()
    assert [name for name, p in made.named_parameters() if p.grad is None] == []


def test_patches_see_only_their_neighbourhood() -> None:
    """Three 3×3 convolutions of stride 2 reach 7 pixels to the left of a patch and none beyond its right."""
    made = PatchEmbedding(config(hidden_size=16, num_attention_heads=4, patch_size=8)).double().eval()
    pixels = images(1, 32, 32)
    changed = pixels.clone()
    changed[:, :, 16:24, 16:24] += 5.0
    moved = (made(changed) - made(pixels)).abs().amax(1)[0] > 1e-9
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[2:, 2:] = True
    assert torch.equal(moved, expected)


@pytest.mark.parametrize("tokens_norm", [True, False])
def test_class_attention_is_its_formula(tokens_norm: bool) -> None:
    made = config(hidden_size=16, num_attention_heads=4, tokens_norm=tokens_norm, layer_scale=0.5)
    block = stirred(ClassAttentionBlock(made).double())
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    normed = block.attention_norm(x)
    query, key, value = (t.view(2, 6, 4, 4) for t in block.attention.qkv_proj(normed).chunk(3, -1))
    weights = torch.einsum("bhk,bthk->bht", query[:, 0] / 2, key).softmax(-1)
    read = block.attention.out_proj(torch.einsum("bht,bthk->bhk", weights, value).flatten(1))
    token = block.mlp_norm(x[:, 0] + block.attention_scale(read))
    patches = x[:, 1:] + block.attention_scale(normed[:, 1:])
    patches = block.mlp_norm(patches) if tokens_norm else patches
    found = block(x)
    torch.testing.assert_close(found[:, 0], token + block.mlp_scale(block.mlp(token)), **CLOSE)
    torch.testing.assert_close(found[:, 1:], 2 * patches, **CLOSE)


def test_positions_tell_every_place_apart_and_scale_with_the_grid() -> None:
    made = FourierPositions(12).double()
    grid = made(3, 5).flatten(2)[0].mT
    assert torch.pdist(grid).min() > 1e-3
    # place 2 of 2 and place 4 of 4 are both the end of their axis, up to ε = 1e-6 in the denominator
    torch.testing.assert_close(made(2, 2)[..., -1, -1], made(4, 4)[..., -1, -1], rtol=0, atol=1e-4)


def test_bad_images_and_configurations() -> None:
    made = of_images()
    with pytest.raises(
        InputError, match=r"`pixel_values`: expected \(B, 3, Y, X\) with sides that 8 divides"
    ):
        made(images(1, 30, 32))
    with pytest.raises(InputError, match=r"got \(1, 1, 32, 32\)"):
        made(images(1, 32, 32, channels=1))
    with pytest.raises(InputError, match=r"ToSTForImageClassification: expected causal=False"):
        ToSTForImageClassification(config())
    for wrong in ({"patch_size": 12}, {"patch_size": 16, "hidden_size": 20}):
        with unchecked(), pytest.raises(InputError, match=r"`patch_size`: expected 2, 4, 8 or 16"):
            of_images(**wrong)
