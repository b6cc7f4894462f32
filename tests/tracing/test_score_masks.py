"""Padding and masks: the operator of a sequence does not depend on the rest of its batch."""

import inspect

import pytest
import torch
from capture_zoo import (
    HEADS,
    TOKENS,
    WIDTH,
    CrossStack,
    heads_of,
    hidden,
    kind,
    merged,
    scores,
    seen,
    stack_of,
)
from experiments.zoo.transformers import FAMILIES
from tests.support.torch_names import Operations
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import rankwise as rw
from rankwise.operators import DiagonalMixing, GatedDeltaMixing, SemiseparableMixing, SumMixing
from rankwise.tracing.score_masks import hidden_by

LENGTHS, LONGEST = (9, 5), 9
# Scores of size ≤ 100 in float32, their rounding carried through two blocks of gain ≤ 10 each.
TOLERANCE = 100 * torch.finfo(torch.float32).eps * 10**2
TEXT_FAMILIES = [
    family for family in FAMILIES if "input_ids" in family.inputs() and "style" not in family.name
]
T5 = next(family for family in FAMILIES if family.name == "T5")
CASES = {
    f"{family.name}-{how}-{side}": (family, how, side)
    for family in TEXT_FAMILIES
    for how in family.implementations
    for side in ("right", "left")
    if side == "left" or (how == "sdpa" and family.name in ("BERT", "GPT-2", "Llama", "T5"))
}


def padded_batch(side, prefix=""):
    """Return two sequences padded to one length, and each without padding."""
    torch.manual_seed(3)
    alone = [torch.randint(5, 60, (1, length)) for length in LENGTHS]
    ids, mask = torch.zeros(2, LONGEST, dtype=torch.long), torch.zeros(2, LONGEST, dtype=torch.long)
    for at, sequence in enumerate(alone):
        place = slice(0, LENGTHS[at]) if side == "right" else slice(LONGEST - LENGTHS[at], LONGEST)
        ids[at, place], mask[at, place] = sequence, 1
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}, alone


def positions(model, mask):
    """Return position ids that count real tokens, for models that do not count them themselves."""
    name = type(model).__name__
    if (
        "position_ids" not in inspect.signature(model.forward).parameters
        or "Roberta" in name
        or "Esm" in name
    ):
        return {}
    return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def all_real(site):
    return bool(site.valid_tokens.all() and site.valid_sources.all())


@pytest.mark.parametrize("case", CASES)
def test_padding_is_known_and_changes_no_entry_of_real_tokens(case):
    family, how, side = CASES[case]
    model = family.build(how)  # float32: in float64 the eager models' own masks overflow to NaN
    batch, alone = padded_batch(side)
    real, extra = batch["attention_mask"].bool(), {}
    if family is T5:
        decoder, decoder_alone = padded_batch(side, "decoder_")
        batch, extra = batch | decoder, {"decoder_input_ids": decoder_alone}
    else:
        batch = batch | positions(model, batch["attention_mask"])
    trace = seen(model, **batch)
    assert all(torch.equal(state.mask, real) for state in trace.states)
    for at, ids in enumerate(alone):
        single = seen(model, input_ids=ids, **{name: sequences[at] for name, sequences in extra.items()})
        for site, lone in zip(trace.mixers, single.mixers, strict=True):
            assert torch.equal(site.valid_tokens, real), site.name
            assert torch.equal(site.valid_sources, real), site.name
            matrix = site.operator[at].dense()[:, real[at]][..., real[at]]
            assert (matrix - lone.operator[0].dense()).abs().max() < TOLERANCE, site.name
        for state, lone in zip(trace.states, single.states, strict=True):
            tokens = state.tokens[at][real[at]]
            assert (tokens - lone.tokens[0]).abs().max() < TOLERANCE * lone.tokens.abs().max()


# --- encoders and decoders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", T5.implementations)
def test_cross_attention_has_the_rows_of_the_decoder_and_the_columns_of_the_encoder(how):
    encoder, _ = padded_batch("right")
    ids = {"decoder_input_ids": torch.randint(5, 60, (2, 4))}
    mask = {"decoder_attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
    model, every = T5.build(how), torch.ones(2, LONGEST)
    for masks in (encoder | mask, encoder, mask):  # rows are known also if columns are not
        trace = seen(model, **encoder | ids | masks | {"attention_mask": masks.get("attention_mask")})
        rows = masks.get("decoder_attention_mask", torch.ones(2, 4)).bool()
        for site in trace.mixers:
            if "decoder" in site.stack:
                assert torch.equal(site.valid_tokens, rows)
                columns = masks.get("attention_mask", every).bool() if site.cross else rows
                assert torch.equal(site.valid_sources, columns)


@pytest.mark.parametrize("how", T5.implementations)
def test_the_mask_of_an_encoder_is_not_taken_for_the_mask_of_a_decoder_of_equal_length(how):
    def forward(self, input_ids, attention_mask, decoder_input_ids):
        return self.inner(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids
        )

    batch, _ = padded_batch("right")
    wrapped = kind(forward, inner=lambda: T5.build(how))()
    trace = seen(wrapped, **batch, decoder_input_ids=torch.randint(5, 60, (2, LONGEST)))
    keep = batch["attention_mask"].bool()
    for site in trace.mixers:
        decodes = "decoder" in site.stack
        assert torch.equal(site.valid_tokens, torch.ones_like(keep) if decodes else keep)
        assert torch.equal(site.valid_sources, torch.ones_like(keep) if decodes and not site.cross else keep)


# A stack that receives an `attention_mask` and does not use it.
Ignoring = kind(lambda self, x, attention_mask=None: self.inner(x), inner=lambda: stack_of(depth=2))


def test_a_decoder_without_a_mask_uses_the_mask_of_its_model():
    def forward(self, x, y, attention_mask=None, decoder_attention_mask=None):
        return self.decoder(y, context=self.encoder(x, attention_mask=attention_mask))

    model = kind(forward, encoder=Ignoring, decoder=CrossStack)().eval()
    x, y, keep = *torch.randn(2, 2, 6, WIDTH), torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    for masks in ({}, {"decoder_attention_mask": keep.flip(0)}):
        trace = seen(model, x, y, attention_mask=keep, **masks)
        rows = masks.get("decoder_attention_mask", torch.ones(2, 6)).bool()
        for site in trace.mixers:
            assert torch.equal(site.valid_tokens, rows if "decoder" in site.stack else keep.bool())


@pytest.mark.parametrize("tokens", [5, 7])
def test_keys_of_a_context_are_cross_attention_also_at_equal_length(tokens):
    model, x = CrossStack().eval(), torch.randn(2, 7, WIDTH)
    trace = seen(model, x, torch.randn(2, tokens, WIDTH))
    assert [site.cross for site in trace.mixers] == [False, True] * 2
    with torch.no_grad(), rw.capture(model) as trace:
        model.blocks[0].cross(x, x)
    assert [site.cross for site in trace.mixers] == [False]


def test_padding_of_a_memory_of_unknown_name_hides_no_queries():
    def forward(self, x, y, keep):
        q, k = heads_of(x), heads_of(y)
        return x + merged(F.scaled_dot_product_attention(q, k, k, keep[:, None, None]))

    keep = torch.arange(TOKENS) < torch.tensor([[3], [TOKENS]])
    (site,) = seen(kind(forward)(), hidden(), hidden(), keep).mixers
    assert site.valid_tokens.all()
    assert torch.equal(site.valid_sources, keep)


def test_rows_with_a_cache_are_the_last_rows_of_the_mask():
    def forward(self, x, keys, attention_mask=None, past_key_values=None):
        q, k = heads_of(x), heads_of(torch.cat([keys, x], 1))
        return x + merged(F.scaled_dot_product_attention(q, k, k))

    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    (site,) = seen(kind(forward)(), hidden(tokens=2), hidden(tokens=4), mask, past_key_values=[1]).mixers
    assert torch.equal(site.valid_tokens, mask[:, -2:].bool())
    assert torch.equal(site.valid_sources, mask.bool())


@pytest.mark.parametrize(("bias", "later"), [(causal_upper_left, 0), (causal_lower_right, 4)])
@pytest.mark.parametrize("rows", [2, 6])
def test_a_causal_bias_without_data_is_a_mask(bias, later, rows):
    def forward(self, x):
        q, k = heads_of(x)[..., -rows:, :], heads_of(x)
        mixed = F.scaled_dot_product_attention(q, k, k, attn_mask=bias(rows, 6))
        return x + F.pad(merged(mixed), (0, 0, 6 - rows, 0))

    x = hidden(tokens=6)
    (site,) = seen(kind(forward)(), x).mixers
    allowed = torch.ones(rows, 6, dtype=torch.bool).tril(later if rows == 2 else 0)
    weights = scores(heads_of(x)[..., -rows:, :], heads_of(x)).masked_fill(~allowed, -torch.inf).softmax(-1)
    assert (site.operator.dense() - weights).abs().max() < 1e-6


def test_an_additive_mask_is_not_taken_for_zeros_and_ones():
    model, x = Ignoring().eval(), torch.randn(2, 6, WIDTH)
    for mask in (torch.zeros(2, 6), torch.zeros(2, 6).index_fill(1, torch.tensor([5]), -torch.inf)):
        assert all(site.valid_tokens.all() for site in seen(model, x, attention_mask=mask).mixers)
    keep = torch.tensor([[1.0] * 6, [1.0] * 3 + [0.0] * 3])
    for given in (keep, keep.long(), keep.bool()):
        trace = seen(model, x, given)  # by position
        assert all(torch.equal(site.valid_tokens, keep.bool()) for site in trace.mixers)


def test_the_mask_of_an_interrupted_call_is_forgotten():
    class Interrupted(Ignoring):
        def forward(self, x, attention_mask=None):
            x = super().forward(x)
            if attention_mask is not None:
                raise KeyboardInterrupt
            return x

    model, x, keep = (
        Interrupted().eval(),
        torch.randn(2, 6, WIDTH),
        torch.tensor([[1] * 6, [1] * 3 + [0] * 3]),
    )
    with torch.no_grad(), rw.capture(model) as trace:
        with pytest.raises(KeyboardInterrupt):
            model(x, attention_mask=keep)
        model(x)
    assert [bool(site.valid_tokens.all()) for site in trace.mixers] == [False, False, True, True]


# --- masks that a model makes itself ------------------------------------------------------------------------


class Masked(nn.Module):
    """A model that receives padding under another name and masks scores in one of several styles."""

    def __init__(self, style):
        super().__init__()
        self.style, self.blocks = style, stack_of(self.mix, 2)

    def mix(self, q, k, v):
        allowed = self.real[:, None, None, :]
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, STYLES[self.style])
        if self.style.startswith("fused"):
            mask = allowed.expand(-1, -1, q.shape[-2], -1) if self.style == "fused bool" else bias
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (scores(q, k) + bias).softmax(-1) @ v

    def forward(self, x, keep):
        self.real = keep
        return self.blocks(x)


STYLES = {
    "fused bool": -torch.inf,
    "fused bias": -torch.inf,
    "explicit -inf": -torch.inf,
    "explicit -1e4": -1e4,
    "explicit -1e9": -1e9,
    "explicit min": torch.finfo(torch.float32).min,
}


@pytest.mark.parametrize("style", STYLES)
def test_padding_is_read_from_masks_inside_the_model(style):
    keep = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    trace = seen(Masked(style).eval(), torch.randn(2, 6, WIDTH), keep)
    for site in trace.mixers:
        assert torch.equal(site.valid_tokens, keep)
        assert torch.equal(site.valid_sources, keep)
        assert torch.equal(site.operator.support(), keep[:, None, None, :].expand(2, HEADS, 6, 6))
    assert all(torch.equal(state.mask, keep) for state in trace.states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softmax_that_underflows_is_not_padding(dtype):
    penalty = torch.zeros(5).index_fill(0, torch.tensor([2]), -2000.0)  # exp(−2000) is 0, also in float64
    model = stack_of(lambda q, k, v: (q @ k.mT + penalty).softmax(-1) @ v, 2).to(dtype)
    for site in seen(model, torch.randn(1, 5, WIDTH, dtype=dtype)).mixers:
        assert (site.operator.dense()[..., 2] == 0).all()
        assert site.operator.support().all()
        assert all_real(site)


# Operators without a mask: the support would be T×T entries per head or channel of a linear-time layer.
SCAN = SemiseparableMixing(torch.randn(2, 1, 7, 3), torch.randn(2, 1, 7, 3), -torch.rand(2, 1, 7))
DIAGONAL = DiagonalMixing(torch.randn(2, 1, 7))
UNMASKED = {
    "a scan": SCAN,
    "a scan and a skip": SumMixing(SCAN, DIAGONAL),
    "a delta rule": GatedDeltaMixing(torch.randn(2, 1, 7, 3), torch.randn(2, 1, 7, 3), torch.rand(2, 1, 7)),
}


@pytest.mark.parametrize("which", UNMASKED)
def test_no_support_is_formed_of_an_operator_without_a_mask(which, monkeypatch):
    operator = UNMASKED[which]
    monkeypatch.setattr(type(operator), "support", lambda self: pytest.fail("it was searched for padding"))
    layer = kind(lambda self, x: (operator @ x[:, None])[:, 0])
    layer.mixing_operator = lambda self, x: operator
    trace = seen(nn.Sequential(layer(), layer()), torch.randn(2, 7, WIDTH))
    assert [all_real(site) for site in trace.mixers] == [True, True]


def top_one(w):
    return torch.where(w >= w.amax(-1, keepdim=True), w, 0.0)


CHANGES = {
    "top": top_one,
    "gate": lambda w: w * torch.eye(TOKENS)[0],
    "renormalized": lambda w: top_one(w) / top_one(w).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("causal", [False, True])
def test_zeros_after_the_softmax_are_not_padding_or_a_mask(change, causal):
    keep = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() if causal else torch.ones(TOKENS, TOKENS) > 0

    def mix(q, k, v):
        return CHANGES[change](scores(q, k).masked_fill(~keep, -torch.inf).softmax(-1)) @ v

    for site in seen(stack_of(mix, 2), hidden()).mixers:
        assert (site.operator.dense() == 0).all(-2).any()  # a column of zeros
        assert torch.equal(site.operator.support(), keep.expand(site.operator.shape))
        assert all_real(site)


def test_a_moderate_bias_between_regions_is_a_mask_but_a_slope_is_not():
    region = torch.arange(TOKENS) < 3  # two regions that do not see each other
    mask = torch.where(region[:, None] == region, 0.0, -100.0)
    slope = -4.0 * (torch.arange(40)[:, None] - torch.arange(40)).abs()
    assert torch.equal(hidden_by(mask), mask < 0)
    assert torch.equal(hidden_by(mask + torch.rand(TOKENS, TOKENS)), mask < 0)
    assert slope.min() < -150
    assert not hidden_by(slope).any()
    assert not hidden_by(torch.tensor([0.0, -2000.0, 0.0])).any()  # a token without attention is a token
    for site in seen(stack_of(lambda q, k, v: (scores(q, k) + mask).softmax(-1) @ v, 2), hidden()).mixers:
        assert torch.equal(site.operator.support(), (mask == 0).expand(site.operator.shape))


def test_large_scores_are_not_a_mask():
    for site in seen(stack_of(lambda q, k, v: (1e6 * scores(q, k)).softmax(-1) @ v, 2), hidden()).mixers:
        assert site.operator.support().all()


@pytest.mark.parametrize("join", [lambda s: s + s.mT.mT, lambda s: s + s[None][0]])
def test_the_work_of_a_capture_grows_with_the_number_of_operations_and_not_of_paths(join):
    keep, counts = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), []
    for joins in (4, 8, 12):

        def mix(q, k, v, joins=joins):
            logits = scores(q, k).masked_fill(~keep, -torch.inf)
            for _ in range(joins):
                logits = join(logits)
            return logits.softmax(-1) @ v

        with Operations() as work:
            (site,) = seen(stack_of(mix, 1), hidden()).mixers
        assert torch.equal(site.operator.support(), keep.expand(site.operator.shape))
        counts.append(len(work.functions))
    assert counts[2] - counts[1] == counts[1] - counts[0]
