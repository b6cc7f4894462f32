"""RWKV's time mixing: weighted means with decay, one matrix a channel."""

import pytest
import torch
import transformers
from experiments.state_space_models import widen

import rankwise as rw
from rankwise.operators import SumMixing
from rankwise.tracing.adapters.recurrent import weighted_means

EPS32 = torch.finfo(torch.float32).eps


def by_hand(key, log_decay, bonus):
    """Entry by entry, in float64."""
    key, log_decay, bonus = key.double(), log_decay.double()[:, None], bonus.double()
    tokens = torch.arange(key.shape[-1])
    lag = (tokens[:, None] - tokens - 1).double()
    scores = key[..., None, :] + lag.clamp(min=0) * log_decay[..., None]
    own = torch.diag_embed(key + bonus[:, None])
    scores = torch.where(lag == -1, own, scores).masked_fill(lag < -1, -torch.inf)
    return scores.softmax(-1)


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_its_matrix_is_a_softmax_of_decaying_scores(tokens, size):
    """Keys of size 30 and decays down to e^−50 would overflow or cancel if sums were not kept relative."""
    torch.manual_seed(tokens)
    key, bonus = size * torch.randn(2, 5, tokens), torch.randn(5)
    log_decay = -torch.tensor([0.0, 1e-3, 0.5, 5.0, 50.0])
    op, exact = weighted_means(key, log_decay, bonus), by_hand(key, log_decay, bonus)
    # exponents of size ≤ 2·size + 70·50 in float32, summed over the tokens: off by their own rounding
    slack = 4 * EPS32 * (4 * size + tokens)
    values = torch.randn(2, 5, tokens, 3)
    assert (op.dense() - exact).abs().max() <= slack
    assert (op @ values - exact.float() @ values).abs().max() <= slack * tokens**0.5 * 4
    assert (op.mT @ values - exact.float().mT @ values).abs().max() <= slack * tokens * 4
    assert (op.dense().sum(-1) - 1).abs().max() <= slack


def model():
    torch.manual_seed(0)
    config = transformers.RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, context_length=32)
    made = transformers.RwkvModel(config)
    with torch.no_grad():
        widen(made)
    return made.eval()


@torch.no_grad()
def test_the_operator_is_what_the_layer_applied():
    made, gave = model(), {}
    given = {"input_ids": torch.randint(5, 60, (2, 12))}
    alone = made(**given)[0]
    hooks = [
        module.register_forward_hook(lambda module, args, out, at=at: gave.update({at: out[0]}))
        for at, module in made.named_modules()
        if at.endswith("attention")
    ]
    with rw.capture(made, values=True) as trace:
        watched = made(**given)[0]
    for hook in hooks:
        hook.remove()
    assert torch.equal(alone, watched)
    assert [site.name for site in trace.mixers] == ["blocks.0.attention", "blocks.1.attention"]
    assert {one.type for one in trace.uncaptured} == {"RwkvFeedForward"}  # which shifts its tokens by one
    for site in trace.mixers:
        got, wanted = site.apply_output(site.operator @ site.values), gave[site.name]
        # means of ≤ 12 values, then sums of 16 terms
        assert (got - wanted).abs().max() <= 200 * EPS32 * float(wanted.abs().max())


@torch.no_grad()
def test_a_step_that_goes_on_from_a_state_is_not_read():
    made, given = model(), {"input_ids": torch.randint(5, 60, (2, 12))}
    state = made(**given, use_cache=True).state
    refused = pytest.raises(rw.RankwiseError, match="it went on from a cache that holds earlier tokens")
    with refused, rw.capture(made):
        made(input_ids=given["input_ids"][:, :1], state=state, use_cache=True)


@torch.no_grad()
def test_no_mask_is_looked_for_where_there_is_none(monkeypatch):
    """The support is T² truth values a channel."""

    def refuse(operator):
        raise AssertionError("the support was formed")

    monkeypatch.setattr(SumMixing, "support", refuse)
    made = model()
    with rw.capture(made) as trace:
        made(input_ids=torch.randint(5, 60, (2, 12)))
    assert len(trace.mixers) == 2
