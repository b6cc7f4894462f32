"""Each claim holds on a model made for it, fails on one made against it, or says why it is silent."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.support.modules import Apply, Average, Block, Stack, same
from tests.support.nets import NETS
from tests.support.untouched import untouched
from torch import Tensor, nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.claims import CheckedClaim
from rankwise.claims.evidence import Run, States
from rankwise.claims.table import CLAIMS
from rankwise.errors import InputError

HOLDS, FAILS, SILENT = "holds", "does not hold", "cannot be measured here"


class Attention(nn.Module):
    """Attention of one head whose queries, keys and values are the thirds of a state; writes to the values.

    ``gain`` multiplies the queries: ``trained`` in the model, ``initial`` after `reset_parameters`.
    """

    def __init__(self, trained: float = 1.0, initial: float = 1.0, *, is_causal: bool = False) -> None:
        super().__init__()
        self.gain, self.initial, self.is_causal = nn.Parameter(torch.tensor(trained)), initial, is_causal

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part[:, None] for part in x.chunk(3, -1))
        mixed = F.scaled_dot_product_attention(self.gain * query, key, value, is_causal=self.is_causal)
        return torch.cat([torch.zeros_like(mixed), torch.zeros_like(mixed), mixed], -1)[:, 0]


def checked(code: str, model: nn.Module, *batches: Any) -> CheckedClaim:
    return next(claim for claim in rw.claims.check(model.eval(), batches) if claim.code == code)


def attention(*gains: float, is_causal: bool = False) -> nn.Module:
    """Return a block of `Attention` with these gains."""
    return blocks(same, gains=gains, is_causal=is_causal)


def blocks(*after: Callable[[Tensor], Tensor], gains: Any = (), is_causal: bool = False) -> nn.Module:
    """Return a block of `Attention` for each function, which is applied to the states after the block."""
    return Stack([Block(Attention(*gains, is_causal=is_causal), after=Apply(change)) for change in after])


def thirds(*parts: Tensor) -> Tensor:
    """Return one sequence of states with these queries, keys and values."""
    return torch.cat(parts, -1)[None].float()


def low(tokens: int = 64, width: int = 32, rank: int = 3) -> Tensor:
    return torch.randn(tokens, rank) @ torch.randn(rank, width)


def full(tokens: int = 64, width: int = 32) -> Tensor:
    return torch.randn(tokens, width)


def spike(size: float, sign: float) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces token 0 by a large one, whose key agrees (sign 1) with all queries."""

    def change(x: Tensor) -> Tensor:
        key = sign * size * torch.ones(x.shape[-1] // 3)
        return torch.cat([torch.cat([torch.zeros_like(key), key, key]).expand(len(x), 1, -1), x[:, 1:]], 1)

    return change


def biased() -> Tensor:
    """Return random states whose queries have a common positive part."""
    return thirds(full() + 1, full(), full())


def shifted(*sizes: float) -> nn.Module:
    """Return blocks after which the states are random ones plus a constant: the larger, the more similar."""
    states = thirds(full(), full(), full())
    return blocks(*(lambda x, size=size: states + size for size in sizes))


class Formed(nn.Module):
    """Attention that forms its matrix, so that queries are unknown, with a weight that no method draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.weight * torch.eye(x.shape[1]).expand(len(x), -1, -1), -1) @ x


class Rows(nn.Module):
    """Readout of tokens by ten heads; two heads have outputs ``small`` times as large."""

    def __init__(self, small: float, weight: float) -> None:
        super().__init__()
        self.size = torch.cat([torch.full((2,), small), torch.ones(8)])
        self.weight = torch.cat([torch.full((2,), weight), torch.zeros(8) if weight else torch.ones(8)])

    def forward(self, x: Tensor) -> Tensor:
        one_hot = F.one_hot(x, 12).float()
        heads = one_hot[:, None] * self.size[:, None, None]
        query = 50 * one_hot[:, None].expand_as(heads)
        mixed = F.scaled_dot_product_attention(query, query, heads) * self.weight[:, None, None]
        return mixed.transpose(1, 2).flatten(2).unflatten(2, (10, 12)).sum(2)


def equal(tokens: int = 64, width: int = 32) -> Tensor:
    """Return states with equal queries, keys, values: with a large gain, tokens attend to themselves."""
    return thirds(*[full(tokens, width)] * 3)


def different(tokens: int = 64, width: int = 32) -> Tensor:
    return thirds(*(full(tokens, width) for _ in range(3)))


def spiked(sign: float, *, is_causal: bool = True) -> nn.Module:
    return blocks(spike(1, 1), spike(100, sign), spike(1, 1), is_causal=is_causal)


def averaged() -> nn.Module:
    return blocks(*[lambda x: x.mean(1, keepdim=True).expand_as(x)] * 2)


def labeled(labels: Tensor) -> dict[str, Tensor]:
    return {"x": IDS, "labels": labels}


IDS = torch.arange(12).repeat(2, 1)
LINE = torch.arange(12.0)[None, :, None] * torch.eye(8)[0] + torch.eye(8)[1]
NORMED = Stack([Block(Average(), before=nn.LayerNorm(8)), Block(Average(), before=nn.LayerNorm(8))])
FORMED = Stack([Block(Formed())])
CASES: list[tuple[str, str, Callable[[], tuple[Any, ...]], str]] = [
    ("logit_energy", HOLDS, lambda: (attention(), thirds(low(), full(), full())), "to 3"),
    ("logit_energy", HOLDS, lambda: (attention(), thirds(full(), full() + 50, full())), "1 to 1"),
    ("logit_energy", FAILS, lambda: (attention(), different()), "median 1"),
    ("logit_energy", SILENT, lambda: (attention(), different(63)), "no head has 32 channels and 64 tokens"),
    ("logit_energy", SILENT, lambda: (attention(), different(64, 31)), "no head has 32 channels"),
    ("centered_logit_energy", HOLDS, lambda: (attention(), thirds(full(), low() + 50, full())), "to 3"),
    ("centered_logit_energy", FAILS, lambda: (attention(), thirds(full(), full() + 50, full())), "median 1"),
    ("centered_logit_energy", SILENT, lambda: (FORMED, full()[None]), "queries are unknown"),
    ("dormant_heads", HOLDS, lambda: (Rows(0.01, 0.0), labeled(IDS)), "1 of 10 heads: loss +0.0%"),
    ("dormant_heads", FAILS, lambda: (Rows(0.01, 100.0), labeled(IDS)), "1 of 10 heads: loss +"),
    ("dormant_heads", SILENT, lambda: (Rows(0.01, 0.0), IDS), "no loss on these data"),
    ("dormant_heads", SILENT, lambda: (Rows(0.01, 0.0), labeled(IDS.flip(1))), "no better than chance"),
    ("dormant_heads", SILENT, lambda: (attention(), different()), "12 % of 1 heads"),
    ("barrier_at_initialization", HOLDS, lambda: (attention(100.0, 0.0), equal()), "0.02 n, barrier 0.64 n"),
    ("barrier_at_initialization", FAILS, lambda: (attention(0.0, 100.0), equal()), "1.00 n, barrier 0.64 n"),
    ("barrier_at_initialization", SILENT, lambda: (FORMED, full()[None]), "a method that draws it"),
    ("barrier_after_training", HOLDS, lambda: (attention(0.0, 100.0), equal()), "0 of 1 above"),
    ("barrier_after_training", FAILS, lambda: (attention(100.0, 0.0), equal()), "1 of 1 above"),
    ("barrier_after_training", SILENT, lambda: (attention(), equal(7)), "no sequence has 8 tokens"),
    ("rank_saturates", HOLDS, lambda: (attention(9.0, 0.0), different()), "+0.000 n from 16 to 32"),
    ("rank_saturates", FAILS, lambda: (attention(), different(64, 10)), "from 5 to 10 channels"),
    ("rank_saturates", SILENT, lambda: (attention(), different(64, 8)), "half of the head width 8"),
    ("spectral_gap", HOLDS, lambda: (attention(), different()), "σ₁/σ₂ = "),
    ("spectral_gap", FAILS, lambda: (attention(0.0, 100.0), equal()), "σ₁/σ₂ = 1"),
    ("spectral_gap", SILENT, lambda: (attention(is_causal=True), different()), "masked (causal)"),
    ("compression_valley", HOLDS, lambda: (spiked(1), biased()), "entropy 0.0"),
    ("compression_valley", FAILS, lambda: (spiked(-1), biased()), "attention 0.0"),
    ("compression_valley", SILENT, lambda: (attention(is_causal=True), biased()), "no layer reads a token"),
    ("compression_valley", SILENT, lambda: (spiked(1, is_causal=False), biased()), "not a decoder"),
    ("no_collapse_with_depth", HOLDS, lambda: (blocks(same, same), different()), "after 2 blocks"),
    ("no_collapse_with_depth", FAILS, lambda: (averaged(), biased()), "0.00 least"),
    ("no_collapse_with_depth", SILENT, lambda: (attention(), biased()), "fewer than 2 blocks"),
    (
        "no_collapse_with_depth",
        SILENT,
        lambda: (blocks(same, same), torch.ones_like(different())),
        "parallel at the",
    ),
    ("affine_rank", HOLDS, lambda: (NORMED, torch.randn(2, 8, 8)), "changed in 0 of 4, such as 7 to 7"),
    ("affine_rank", FAILS, lambda: (NORMED, LINE), "such as 1 to 2"),
    ("affine_rank", SILENT, lambda: (attention(), biased()), "no LayerNorm"),
    ("alike_early_or_late", HOLDS, lambda: (shifted(0, 5, 0), biased()), "0.00 last"),
    ("alike_early_or_late", FAILS, lambda: (shifted(0, 0, 5), biased()), "0.96 last"),
    ("alike_early_or_late", SILENT, lambda: (shifted(0, 5), biased()), "fewer than 3 blocks"),
]


@pytest.mark.parametrize(("code", "outcome", "make", "words"), CASES)
def test_a_claim_is_judged_by_the_behavior_of_a_model(code: str, outcome: str, make: Any, words: str) -> None:
    torch.manual_seed(1)
    model, batch = make()
    claim = checked(code, model, batch)
    assert claim.outcome == outcome, claim
    assert words in (claim.reason or claim.yours), claim


def test_every_claim_has_a_case_of_each_outcome_and_a_definition() -> None:
    cases = {(code, outcome) for code, outcome, *_ in CASES}
    for _, claim, _ in CLAIMS:
        assert {(claim.code, outcome) for outcome in (HOLDS, FAILS, SILENT)} <= cases
        assert "olds if" in claim.definition or claim.definition.startswith("Like the")


def test_short_sequences_and_nan_are_left_out_with_the_reason() -> None:
    for states, words in ((full(1), "no sequence has 8 tokens"), (full(7), "no sequence has 8 tokens"),
                          (full() * torch.nan, "numbers are NaN")):  # fmt: skip
        for claim in rw.claims.check(attention(is_causal=True), [thirds(states, states, states)]):
            assert claim.outcome == SILENT
            assert words in claim.reason or "no LayerNorm" in claim.reason, claim
    both = torch.cat([biased() * torch.nan, biased()])
    assert checked("logit_energy", attention(), both) == checked("logit_energy", attention(), both[1:])


def test_all_tokens_massive_means_none_is() -> None:
    model = blocks(lambda x: 1e4 * x, same, is_causal=True)
    assert "no layer reads" in checked("compression_valley", model, biased()).reason


def test_a_model_without_attention_is_asked_about_its_states_only() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 50, "state_size": 4}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    reasons = {claim.code: claim.reason for claim in rw.claims.check(model, [{"input_ids": IDS}])}
    measured = {"no_collapse_with_depth", "alike_early_or_late"}
    assert {code for code, reason in reasons.items() if not reason} == measured
    assert all(
        "no attention: the mixers are selective" in reasons[code]
        for code in reasons.keys() - measured - {"affine_rank"}
    )


def test_state_space_models_are_judged_by_late_similarity() -> None:
    judge = next(check for check, claim, _ in CLAIMS if claim.code == "alike_early_or_late")
    states = thirds(full(), full(), full())[0].double()
    for sizes, holds in (((0, 0, 5), True), ((5, 0, 0), False), ((0, 5, 0), False)):
        after = [States("", blocks, (0, 0), states + size) for blocks, size in enumerate((0, *sizes))]
        assert judge(Run(nn.Module(), [], kinds={"selective"}, states=after))[1] is holds


def test_claims_need_a_batch() -> None:
    with pytest.raises(InputError, match="at least one batch"):
        rw.claims.check(attention(), [])


@given(st.integers(0, 10**6), st.floats(-1e3, 1e3))
def test_softmax_and_centered_logits_ignore_a_common_key(seed: int, size: float) -> None:
    torch.manual_seed(seed)
    query, key = full().double(), full().double()
    found = [
        checked("centered_logit_energy", attention().double(), torch.cat([query, moved, query], -1)[None])
        for moved in (key, key + size * torch.randn(32).double())
    ]
    assert found[0].yours == found[1].yours


@given(st.integers(64, 80), st.integers(32, 40), st.booleans())
def test_components_equal_the_components_of_formed_logits(tokens: int, width: int, centered: bool) -> None:
    query, key = full(tokens, width).double(), full(tokens, width).double() + 1
    code = "centered_logit_energy" if centered else "logit_energy"
    claim = checked(code, attention().double(), torch.cat([query, key, query], -1)[None])
    energy = torch.linalg.svdvals(query @ (key - centered * key.mean(0)).T).square()
    count = 1 + int((energy.cumsum(0) < 0.9 * energy.sum()).sum())
    assert claim.yours == f"{count} to {count}, median {count}"


def test_padding_and_the_cut_into_batches_change_nothing() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    states, padding = torch.randn(2, 64, 32), torch.zeros(2, 70, dtype=torch.bool)
    padding[:, 64:] = True
    padded = {"src": F.pad(states, (0, 0, 0, 6)), "src_key_padding_mask": padding}
    whole = rw.claims.check(model, [{"src": states}])
    without = {"dormant_heads", "affine_rank"}  # one needs a loss; the other reads all rows of a LayerNorm
    for batches in ([{"src": states[:1]}, {"src": states[1:]}], [padded]):
        for first, other in zip(whole, rw.claims.check(model, batches), strict=True):
            assert first.yours == other.yours or first.code in without


def test_the_model_is_left_unchanged() -> None:
    model = attention(is_causal=True).train()
    states = biased()
    with untouched(model):
        rw.claims.check(model, [states])


def test_the_command_prints_the_table(run: Callable[..., Any]) -> None:
    result = run("claims", f"{NETS}:with_batches")
    assert result.exit_code == 0, result.exception
    outcomes = re.findall(f"(?m) ({HOLDS}|{FAILS}|{SILENT}) *$", result.stdout)
    assert len(outcomes) == len(CLAIMS)
    counts = [outcomes.count(outcome) for outcome in (HOLDS, FAILS)]
    assert f"{counts[0]} of {len(CLAIMS)} claims hold, {counts[1]} do not" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "none.txt"], "none.txt"),
        (["--text", "text.txt", "--dataset", "text.txt"], "one of --text, --images, --dataset"),
    ],
)
def test_the_command_refuses_bad_options(run: Callable[..., Any], options: list[str], words: str) -> None:
    assert words in str(run("claims", f"{NETS}:build", *options).exception)


def test_ctrl_c_keeps_checked_claims_and_progress_names_each() -> None:
    steps: list[tuple[str, float]] = []

    def progress(step: str, done: float) -> None:
        steps.append((step, done))
        if len(steps) == 3:
            raise KeyboardInterrupt

    claims = rw.claims.check(attention(1.0).eval(), [torch.randn(2, 12, 9)], on_progress=progress)
    every = rw.claims.check(attention(1.0).eval(), [torch.randn(2, 12, 9)])
    assert [claim.code for claim in claims] == [claim.code for claim in every[:2]]
    assert steps == [(claim.statement, place / len(every)) for place, claim in enumerate(every[:3])]
