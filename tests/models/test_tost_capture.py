"""What capture sees of our models: every mixer, exactly, and nothing changed by looking."""

import pytest
import torch
from tost_cases import VARIANTS, config, stirred, texts

import rankwise as rw
from rankwise.models import ToSTForCausalLM, ToSTForImageClassification

KINDS = {"tssa": "diagonal", "softmax": "softmax"}
CLOSE = {"rtol": 1e-10, "atol": 1e-12}  # float64, two layers


@pytest.mark.parametrize(
    "variant", ["tssa", "tssa-decayed", "softmax", "hybrid", "post-norm", "gated", "scanned"]
)
def test_a_language_model_is_seen_whole(variant: str) -> None:
    lm, ids = stirred(ToSTForCausalLM(config(**VARIANTS[variant])).double()), texts(2, 7)
    ids[0, :3] = 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "use_cache": False}
    read = []
    for layer in lm.model.layers:
        layer.mixer.register_forward_pre_hook(lambda mixer, args, kwargs: read.append(args), with_kwargs=True)
    before = lm(**batch).logits
    with rw.capture(lm) as trace:
        after = lm(**batch).logits
    assert torch.equal(before, after)
    assert trace.uncaptured == []
    kinds = KINDS | ({"tssa": "sum"} if variant == "scanned" else {})
    assert [site.kind for site in trace.mixers] == [kinds[name] for name in lm.config.layer_types]
    assert [site.layer for site in trace.mixers] == [0, 1]
    assert [state.layer for state in trace.states] == [0, 1, 2]
    for site, layer, args in zip(trace.mixers, lm.model.layers, read, strict=False):
        mixed = site.operator @ layer.mixer.values(*args)
        output = layer.mixer.out_proj(mixed.transpose(1, 2).flatten(2))
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(output[real], layer.mixer(*args).output[real], **CLOSE)


def test_an_image_classifier_is_one_stack() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "patch_size": 8, "causal": False, "num_labels": 3}
    made = stirred(ToSTForImageClassification(config(**sizes)).double(), scale=0.2)
    with rw.capture(made) as trace:
        made(torch.randn(2, 3, 16, 24, dtype=torch.float64))
    assert trace.uncaptured == []
    found = [(site.layer, site.kind, tuple(site.operator.shape)) for site in trace.mixers]
    patches, one = (2, 4, 6, 6), (2, 4, 1, 7)
    assert found == [
        (0, "diagonal", patches),
        (1, "diagonal", patches),
        (2, "softmax", one),
        (3, "softmax", one),
    ]
