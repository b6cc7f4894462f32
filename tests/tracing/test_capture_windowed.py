"""Lightning attention, Longformer's and BigBird's windows: operators against what the layers gave."""

import pytest
import torch
import transformers
from experiments.state_space_models import EXPERTS, SIZES, widen
from experiments.tiny_models import BERT

import rankwise as rw
from rankwise.tracing.adapters.base import CONTINUED


def built(name, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    config._experts_implementation = "eager"  # the grouped kernel takes no float64
    model = getattr(transformers, f"{name}Model")(config)
    with torch.no_grad():
        widen(model)
    return model.double().eval()


@torch.no_grad()
def look(model, given, name):
    """A capture with values, and what the modules of one name gave."""
    alone, gave = model(**given)[0], {}
    hooks = [
        module.register_forward_hook(lambda module, args, out, at=at: gave.update({at: out}))
        for at, module in model.named_modules()
        if at.endswith(name)
    ]
    with rw.capture(model, values=True) as trace:
        watched = model(**given)[0]
    for hook in hooks:
        hook.remove()
    assert torch.equal(alone, watched)
    assert trace.uncaptured == []
    return trace, gave


def tokens(count, padded=0):
    torch.manual_seed(1)
    mask = torch.ones(2, count, dtype=torch.long)
    mask[0, count - padded :] = 0
    return {"input_ids": torch.randint(5, 60, (2, count)), "attention_mask": mask}


@torch.no_grad()
def test_lightning_attention_is_a_scan_with_one_decay_a_head():
    sizes = SIZES | EXPERTS | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    kinds = ["linear_attention", "full_attention"]
    model = built("MiniMax", **sizes, layer_types=kinds, block_size=5, num_local_experts=2)
    trace, gave = look(model, tokens(13), "self_attn")  # blocks of 5: two whole ones and a rest
    assert [site.kind for site in trace.mixers] == ["semiseparable", "softmax"]
    site = trace.mixers[0]
    for product in (site.operator @ site.values, site.operator.dense() @ site.values):
        # the layer's decays are float32 powers of one: the operator's are exact for its float32 slope
        off = (site.apply_output(product) - gave[site.name][0]).abs().max()
        assert off <= 13 * 8 * torch.finfo(torch.float32).eps * float(gave[site.name][0].abs().max())


@torch.no_grad()
def test_lightning_attention_goes_unseen_only_where_it_goes_on_from_a_state():
    sizes = SIZES | EXPERTS | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    kinds = ["linear_attention", "full_attention"]
    model = built("MiniMax", **sizes, layer_types=kinds, block_size=5, num_local_experts=2)
    trace, _ = look(model, tokens(13) | {"use_cache": False}, "self_attn")
    assert [site.kind for site in trace.mixers] == ["semiseparable", "softmax"]
    cache = model(input_ids=tokens(13)["input_ids"], use_cache=True).past_key_values
    with rw.capture(model) as trace:
        model(input_ids=tokens(1)["input_ids"], past_key_values=cache, use_cache=True)
    assert [site.kind for site in trace.mixers] == ["softmax"]
    assert [one.reason for one in trace.uncaptured] == [CONTINUED]


LONGFORMER = BERT | {"attention_window": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("padded", [0, 5])
def test_a_window_is_a_softmax_with_a_mask(padded):
    trace, _ = look(built("Longformer", **LONGFORMER), tokens(14, padded), "self")  # filled up to 16
    for site in trace.mixers:
        assert site.operator.shape == (2, 4, 16, 16)
        # the layer takes its softmax in float32: 5 columns, values of size ≤ 10
        off = (site.operator @ site.values - site.output).abs().max()
        assert off <= 50 * torch.finfo(torch.float32).eps
        assert site.valid_tokens.sum(1).tolist() == [14 - padded, 14]
    dense = trace.mixers[0].operator.dense()
    assert bool((dense[1, :, 6, 4:9] > 0).all())
    assert bool((dense[1, :, 6, 9:] == 0).all())


@torch.no_grad()
def test_global_tokens_see_and_are_seen_by_all():
    model, given = built("Longformer", **LONGFORMER), tokens(16, 3)
    given["global_attention_mask"] = torch.zeros(2, 16, dtype=torch.long)
    given["global_attention_mask"][0, 0] = 1
    given["global_attention_mask"][1, [2, 9]] = 1
    trace, _ = look(model, given, "self")
    told = model(**given, output_attentions=True)
    for site, local, everywhere in zip(trace.mixers, told.attentions, told.global_attentions, strict=True):
        dense = site.operator.dense()
        # columns of `attentions`: the global tokens, then the window from t − 2 to t + 2
        torch.testing.assert_close(dense[1, :, 5, [2, 9]], local[1, :, 5, :2].double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(dense[1, :, 5, 3:8], local[1, :, 5, 2:].double(), rtol=0, atol=1e-6)
        rows = everywhere[1].transpose(-1, -2).double()
        torch.testing.assert_close(dense[1, :, [2, 9]], rows, rtol=0, atol=1e-6)
        torch.testing.assert_close(dense[0].sum(-1)[:, :13], torch.ones(4, 13, dtype=torch.float64))
        assert bool((dense[0, :, :, 13:] == 0).all())
        assert bool((dense[0, :, 0, :13] > 0).all())
        assert site.values is None


def test_the_encoder_of_led_is_read_alike():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "vocab_size": 64, "pad_token_id": 0}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "attention_window": 4}
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "bos_token_id": 1, "eos_token_id": 2}
    given = tokens(12) | {"decoder_input_ids": torch.randint(5, 60, (2, 6))}
    trace, _ = look(built("LED", **sizes, decoder_start_token_id=1), given, "self_attn")
    assert [tuple(site.operator.shape[-2:]) for site in trace.mixers] == [(12, 12)] * 2 + [(6, 6), (6, 12)]
    for site in trace.mixers[:2]:
        off = (site.operator @ site.values - site.output).abs().max()
        assert off <= 50 * torch.finfo(torch.float32).eps


BIG_BIRD = BERT | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2}
BIG_BIRD |= {"num_hidden_layers": 2, "max_position_embeddings": 128}


@pytest.mark.parametrize("padded", [0, 9])
def test_blocks_of_big_bird_are_one_softmax(padded):
    trace, _ = look(built("BigBird", **BIG_BIRD), tokens(62, padded), "self")  # filled up to 64
    assert [site.operator.shape for site in trace.mixers] == [(2, 4, 64, 64)] * 2
    for site in trace.mixers:
        # float64 throughout: ≤ 64 terms of size ≤ 10, and the mask's −10000 gives exact zeros in both
        assert (site.operator @ site.values - site.output).abs().max() <= 1e-12
        assert site.valid_tokens.sum(1).tolist() == [62 - padded, 62]
    dense = trace.mixers[0].operator.dense()
    assert bool((dense[1, :, 20:24, 8:16] == 0).all())
    assert bool((dense[1, :, 20:24, 16:28] > 0).all())


def test_random_blocks_of_big_bird_are_not_guessed():
    model = built("BigBird", **BIG_BIRD).train()
    with pytest.raises(rw.RankwiseError, match="it draws its random blocks inside itself"), rw.capture(model):
        model(**tokens(62))
