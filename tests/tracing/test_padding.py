"""A sequence's operator does not depend on what it was batched with."""

import pytest
import torch
from capture_zoo import (
    TOKENS,
    WIDTH,
    Attention,
    Block,
    CrossStack,
    Stack,
    heads_of,
    hidden,
    merged,
    plain,
    scores,
    seen,
    stack_of,
)
from experiments.families import FAMILIES
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.operators import (
    DiagonalMixing,
    GatedDeltaMixing,
    MixingOperator,
    ProductMixing,
    SemiseparableMixing,
    SumMixing,
)
from rankwise.tracing.module_calls import parameter_names
from rankwise.tracing.score_masks import hidden_by

LENGTHS, LONGEST = (9, 5), 9
# Scores of size ≤ 100 in float32, their rounding carried through two blocks of gain ≤ 10 each.
TOLERANCE = 100 * torch.finfo(torch.float32).eps * 10**2
TEXT_FAMILIES = [
    family for family in FAMILIES if "input_ids" in family.inputs() and "style" not in family.name
]
CASES = [
    (family, how, side)
    for family in TEXT_FAMILIES
    for how in family.implementations
    for side in ("right", "left")
    if side == "left" or how == family.implementations[0]
]


def padded_batch(side: str, prefix: str = "") -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Two sequences padded to one length, and each alone."""
    torch.manual_seed(3)
    alone = [torch.randint(5, 60, (1, length)) for length in LENGTHS]
    ids, mask = torch.zeros(2, LONGEST, dtype=torch.long), torch.zeros(2, LONGEST, dtype=torch.long)
    for at, sequence in enumerate(alone):
        place = slice(0, LENGTHS[at]) if side == "right" else slice(LONGEST - LENGTHS[at], LONGEST)
        ids[at, place], mask[at, place] = sequence, 1
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}, alone


def positions(model: nn.Module, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Position ids that count real tokens, for the models that do not count them themselves."""
    names = parameter_names(model)
    if "position_ids" not in names or "Roberta" in type(model).__name__ or "Esm" in type(model).__name__:
        return {}
    return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.parametrize(
    ("family", "how", "side"), CASES, ids=[f"{family.name}-{how}-{side}" for family, how, side in CASES]
)
def test_padded_rows_and_columns_are_known_and_change_nothing(family, how, side):
    model = family.build(how)  # float32: in float64 the eager models' own masks overflow to NaN
    batch, alone = padded_batch(side)
    mask = batch["attention_mask"]
    more, extra = {}, {}
    if family.name == "T5":
        more, decoder_alone = padded_batch(side, "decoder_")
        extra = {"decoder_input_ids": decoder_alone}
    trace = seen(model, **batch, **more, **({} if family.name == "T5" else positions(model, mask)))
    real = mask.bool()
    for site in trace.mixers:
        assert torch.equal(site.valid_tokens, real), site.name
        assert torch.equal(site.valid_sources, real), site.name
    for state in trace.states:
        assert state.mask is not None
        assert torch.equal(state.mask, real)
    for at, ids in enumerate(alone):
        own = {name: sequences[at] for name, sequences in extra.items()}
        single = seen(model, input_ids=ids, **own)
        assert len(single.mixers) == len(trace.mixers)
        for site, lone in zip(trace.mixers, single.mixers, strict=True):
            matrix = site.operator[at].dense()[:, site.valid_tokens[at]][..., site.valid_sources[at]]
            assert (matrix - lone.operator[0].dense()).abs().max() < TOLERANCE, site.name
        for state, lone in zip(trace.states, single.states, strict=True):
            tokens = state.tokens[at][real[at]]
            assert (tokens - lone.tokens[0]).abs().max() < TOLERANCE * lone.tokens.abs().max()


def test_cross_attention_has_the_rows_of_the_decoder_and_the_columns_of_the_encoder():
    family = next(family for family in FAMILIES if family.name == "T5")
    encoder, _ = padded_batch("right")
    decoder = {
        "decoder_input_ids": torch.randint(5, 60, (2, 4)),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
    }
    for how in family.implementations:
        model = family.build(how)
        for given in (encoder | decoder, encoder | {"decoder_input_ids": decoder["decoder_input_ids"]}):
            trace = seen(model, **given)
            rows = given.get("decoder_attention_mask", torch.ones(2, 4)).bool()
            for site in trace.mixers:
                if "decoder" in site.stack:
                    assert torch.equal(site.valid_tokens, rows)
                    columns = encoder["attention_mask"].bool() if site.cross else rows
                    assert torch.equal(site.valid_sources, columns)
    with torch.no_grad(), rw.capture(model) as trace:  # rows are told even where no columns are
        model(input_ids=encoder["input_ids"], **decoder)
    crossed = [site for site in trace.mixers if site.cross]
    assert all(torch.equal(site.valid_tokens, decoder["decoder_attention_mask"].bool()) for site in crossed)
    assert all(site.valid_sources.all() for site in crossed)


# --- masks that models of their own make --------------------------------------------------------------------


class Masked(nn.Module):
    """A model that receives padding under another name."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.blocks = nn.ModuleList([Block(Attention(self.mix)) for _ in range(2)])
        self.norm, self.real = nn.LayerNorm(WIDTH), torch.ones(0)

    def mix(self, q, k, v):
        allowed = self.real[:, None, None, :]
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, self.low)
        if self.style.startswith("fused"):
            mask = allowed.expand(-1, -1, q.shape[-2], -1) if self.style == "fused bool" else bias
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
        return scores.softmax(-1) @ v

    @property
    def low(self) -> float:
        styles = {"written -1e4": -1e4, "written -1e9": -1e9, "written min": torch.finfo(torch.float32).min}
        return styles.get(self.style, float("-inf"))

    def forward(self, x, keep):
        self.real = keep
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


STYLES = ["fused bool", "fused bias", "written -inf", "written -1e4", "written -1e9", "written min"]


@pytest.mark.parametrize("style", STYLES)
def test_padding_is_read_from_masks_inside(style):
    model, keep = Masked(style).eval(), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    trace = seen(model, torch.randn(2, 6, WIDTH), keep)
    for site in trace.mixers:
        assert torch.equal(site.valid_tokens, keep)
        assert torch.equal(site.valid_sources, keep)
        assert torch.equal(site.operator.support(), keep[:, None, None, :].expand(2, 3, 6, 6))
    assert all(torch.equal(state.mask, keep) for state in trace.states)


def nobody_looks_at_token_two(q, k, v):
    penalty = torch.zeros(k.shape[-2])
    penalty[2] = -2000.0  # exp(−2000) is 0, in float32 and in float64
    return (q @ k.mT + penalty).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softmax_that_underflows_is_not_padding(dtype):
    model = Stack(lambda: Block(Attention(nobody_looks_at_token_two)), 2).eval().to(dtype)
    trace = seen(model, torch.randn(1, 5, WIDTH, dtype=dtype))
    for site in trace.mixers:
        assert (site.operator.dense()[..., 2] == 0).all()
        assert site.operator.support().all()
        assert site.valid_tokens.all()
        assert site.valid_sources.all()


class Told(nn.Module):
    """Blocks that never use the ``attention_mask`` they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(lambda: Block(Attention(plain)), 2)

    def forward(self, x, attention_mask=None):
        return self.inner(x)


def test_an_additive_mask_is_not_taken_for_zeros_and_ones():
    model = Told().eval()
    for mask in (torch.zeros(2, 6), torch.zeros(2, 6).index_fill(1, torch.tensor([5]), -torch.inf)):
        trace = seen(model, torch.randn(2, 6, WIDTH), attention_mask=mask)
        assert all(site.valid_tokens.all() for site in trace.mixers)
    keep = torch.tensor([[1.0] * 6, [1.0] * 3 + [0.0] * 3])
    for given in (keep, keep.long(), keep.bool()):
        trace = seen(model, torch.randn(2, 6, WIDTH), given)  # by position
        assert all(torch.equal(site.valid_tokens, keep.bool()) for site in trace.mixers)


def test_the_mask_of_a_call_that_was_interrupted_is_forgotten():
    class Interrupted(Told):
        armed = True

        def forward(self, x, attention_mask=None):
            x = super().forward(x)
            if self.armed:
                raise KeyboardInterrupt
            return x

    model, keep = Interrupted().eval(), torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    with torch.no_grad(), rw.capture(model) as trace:
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 6, WIDTH), attention_mask=keep)
        model.armed = False
        model(torch.randn(2, 6, WIDTH))
    assert [bool(site.valid_tokens.all()) for site in trace.mixers] == [False, False, True, True]


class Bare(nn.Module):
    """An encoder-decoder with a decoder without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Told(), CrossStack()

    def forward(self, x, y, attention_mask=None, decoder_attention_mask=None):
        return self.decoder(y, context=self.encoder(x, attention_mask=attention_mask))


def test_a_decoder_without_a_mask_uses_the_mask_of_its_model():
    model, x, y = Bare().eval(), torch.randn(2, 6, WIDTH), torch.randn(2, 6, WIDTH)
    keep = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    for told in (None, keep.flip(0)):
        trace = seen(
            model, x, y, attention_mask=keep, **({} if told is None else {"decoder_attention_mask": told})
        )
        rows = torch.ones(2, 6).bool() if told is None else told.bool()
        for site in trace.mixers:
            assert torch.equal(site.valid_tokens, rows if "decoder" in site.stack else keep.bool())


class Wrapped(nn.Module):
    """An encoder-decoder inside a model that receives only the encoder's padding."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        return self.inner(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids
        )


def test_the_mask_of_an_encoder_is_not_taken_for_the_decoders_of_the_same_length():
    family = next(family for family in FAMILIES if family.name == "T5")
    batch, _ = padded_batch("right")
    for how in family.implementations:
        model, ids = Wrapped(family.build(how)), torch.randint(5, 60, (2, LONGEST))
        trace = seen(model, **batch, decoder_input_ids=ids)
        keep = batch["attention_mask"].bool()
        for site in trace.mixers:
            decodes = "decoder" in site.stack
            assert torch.equal(site.valid_tokens, torch.ones_like(keep) if decodes else keep)
            own = decodes and not site.cross
            assert torch.equal(site.valid_sources, torch.ones_like(keep) if own else keep)


@pytest.mark.parametrize("tokens", [5, 7])
def test_keys_of_a_context_are_cross_attention_also_at_equal_length(tokens):
    model = CrossStack().eval()
    trace = seen(model, torch.randn(2, 7, WIDTH), torch.randn(2, tokens, WIDTH))
    assert [site.cross for site in trace.mixers] == [False, True] * 2
    with torch.no_grad(), rw.capture(model) as trace:
        x = torch.randn(2, 7, WIDTH)
        model.layers[0].cross(x, x)
    assert [site.cross for site in trace.mixers] == [False]


def test_the_zoo_splits_and_merges_heads():
    x = torch.randn(2, 7, WIDTH)
    assert torch.equal(merged(heads_of(x)), x)


class Says(nn.Module):
    """A layer that applies an operator, and says which."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def mixing_operator(self, x):
        return self.operator

    def forward(self, x):
        return (self.operator @ x[:, None])[:, 0]


def unmasked() -> dict[str, MixingOperator]:
    scan = SemiseparableMixing(torch.randn(2, 1, 7, 3), torch.randn(2, 1, 7, 3), -torch.rand(2, 1, 7))
    diagonal = DiagonalMixing(torch.randn(2, 1, 7))
    rule = GatedDeltaMixing(torch.randn(2, 1, 7, 3), torch.randn(2, 1, 7, 3), torch.rand(2, 1, 7))
    return {
        "a scan": scan,
        "a gated scan": ProductMixing(diagonal, scan),
        "a scan and a skip": SumMixing(scan, diagonal),
        "a delta rule": rule,
    }


@pytest.mark.parametrize("which", unmasked())
def test_no_support_is_formed_of_an_operator_without_a_mask(which, monkeypatch):
    """It would take T×T entries of each head or channel of a layer that runs in linear time."""
    operator = unmasked()[which]
    monkeypatch.setattr(type(operator), "support", lambda self: pytest.fail("it was searched for padding"))
    model = nn.Sequential(Says(operator), Says(operator))
    trace = seen(model, torch.randn(2, 7, WIDTH))
    assert len(trace.mixers) == 2
    assert all(bool(site.valid_tokens.all() and site.valid_sources.all()) for site in trace.mixers)


def top_one(w):
    return torch.where(w >= w.amax(-1, keepdim=True), w, 0.0)


CHANGES = {
    "top": top_one,
    "gate": lambda w: w * torch.eye(TOKENS)[0],
    "renormalised": lambda w: top_one(w) / top_one(w).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("causal", [False, True])
def test_zeros_after_the_softmax_are_not_padding_or_a_mask(change, causal):
    keep = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() if causal else torch.ones(TOKENS, TOKENS) > 0

    def mix(q, k, v):
        return CHANGES[change](scores(q, k).masked_fill(~keep, -torch.inf).softmax(-1)) @ v

    for site in seen(stack_of(mix, 2), hidden()).mixers:
        assert (site.operator.dense() == 0).all(-2).any()  # there is a column nobody looks at
        assert torch.equal(site.operator.support(), keep.expand(site.operator.shape))
        assert site.valid_tokens.all()
        assert site.valid_sources.all()


def test_padding_of_a_memory_of_unknown_name_hides_no_queries():
    class Reads(nn.Module):
        def forward(self, x, y, keep):
            q, k = heads_of(x), heads_of(y)
            return x + merged(F.scaled_dot_product_attention(q, k, k, keep[:, None, None]))

    keep = torch.arange(TOKENS) < torch.tensor([[3], [TOKENS]])
    (site,) = seen(Reads(), hidden(), hidden(), keep).mixers
    assert site.valid_tokens.all()
    assert torch.equal(site.valid_sources, keep)


def window_mask(low):
    """Two regions that do not see each other."""
    region = torch.arange(TOKENS) < 3
    return torch.where(region[:, None] == region, 0.0, low)


def test_a_moderate_bias_between_regions_is_a_mask_but_a_slope_is_not():
    mask, slope = window_mask(-100.0), -4.0 * (torch.arange(40)[:, None] - torch.arange(40)).abs()
    assert torch.equal(hidden_by(mask), mask < 0)
    assert torch.equal(hidden_by(mask + torch.rand(TOKENS, TOKENS)), mask < 0)
    assert slope.min() < -150
    assert not hidden_by(slope).any()
    assert not hidden_by(torch.tensor([0.0, -2000.0, 0.0])).any()  # nobody looks there, and it stays a token
    for site in seen(stack_of(lambda q, k, v: (scores(q, k) + mask).softmax(-1) @ v, 2), hidden()).mixers:
        assert torch.equal(site.operator.support(), (mask == 0).expand(site.operator.shape))


def test_large_scores_are_not_a_mask():
    for site in seen(stack_of(lambda q, k, v: (1e6 * scores(q, k)).softmax(-1) @ v, 2), hidden()).mixers:
        assert site.operator.support().all()


class Cached(nn.Module):
    def forward(self, x, keys, attention_mask=None, past_key_values=None):
        q, k = heads_of(x), heads_of(torch.cat([keys, x], 1))
        return x + merged(F.scaled_dot_product_attention(q, k, k))


def test_rows_with_a_cache_are_the_last_of_the_mask():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    (site,) = seen(Cached(), hidden(tokens=2), hidden(tokens=4), mask, past_key_values=[1]).mixers
    assert torch.equal(site.valid_tokens, mask[:, -2:].bool())
    assert torch.equal(site.valid_sources, mask.bool())
