"""What every mixer promises: pieces equal the whole, padding changes nothing, operators are exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unchecked import unchecked
from tost_cases import BOTH_WAYS, CAUSAL, HEADS, LIMIT, WIDTH, mixers

from rankwise.errors import InputError, ShapeError
from rankwise.models import MIXERS, TokenStatisticsAttention
from rankwise.models.mixers import SoftmaxAttention
from rankwise.models.mixers.base import Mixer
from rankwise.operators import DiagonalMixing, SoftmaxMixing, SumMixing
from rankwise.ops import tssa

# float64, values of order 1, sums over at most 24 tokens and 12 channels: rounding stays under 1e-12
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cases() -> list[tuple[bool, str]]:
    return [(True, name) for name in CAUSAL] + [(False, name) for name in BOTH_WAYS]


@pytest.mark.parametrize(("causal", "name"), cases())
@pytest.mark.parametrize("count", [1, 7])
def test_the_operator_times_the_values_is_what_is_projected(causal: bool, name: str, count: int) -> None:
    mixer, x = mixers(causal)[name], tokens(2, count)
    mixed = mixer.mixing_operator(x) @ mixer.values(x)
    output = mixer.out_proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, mixer(x).output, **CLOSE)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_operator_in_the_middle_of_a_text_is_that_of_its_rows(name: str) -> None:
    mixer, x = mixers(True)[name], tokens(2, 7)
    state = mixer(x[:, :4], return_state=True).state
    rest = mixer.mixing_operator(x[:, 4:], None, state) @ mixer.values(x[:, 4:], None, state)
    whole = mixer.mixing_operator(x) @ mixer.values(x)
    torch.testing.assert_close(rest, whole[:, :, 4:], **CLOSE)


def test_kinds_of_operators() -> None:
    x = tokens(2, 5)
    made = mixers(True)
    diagonal, softmax = made["tssa"].mixing_operator(x), made["softmax"].mixing_operator(x)
    assert isinstance(diagonal, DiagonalMixing)
    assert diagonal.shape == (2, HEADS, 5, 5)
    assert isinstance(softmax, SoftmaxMixing)
    assert isinstance(made["tssa-conv"].mixing_operator(x), DiagonalMixing)
    assert isinstance(made["tssa-scan"].mixing_operator(x), SumMixing)
    torch.testing.assert_close(softmax.dense().sum(-1), torch.ones(2, HEADS, 5, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(diagonal.diagonal.sum(1), torch.ones(2, 5, dtype=torch.float64), **CLOSE)


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(1, 8), min_size=1, max_size=4), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", CAUSAL)
def test_pieces_equal_the_whole(name: str, cuts: list[int], seed: int) -> None:
    cuts = cuts if sum(cuts) <= LIMIT else cuts[:1]
    mixer, x = mixers(True)[name], tokens(2, sum(cuts), seed)
    state, pieces = None, []
    for piece in x.split(cuts, 1):
        output, state = mixer(piece, state=state, return_state=True)
        pieces.append(output)
    torch.testing.assert_close(torch.cat(pieces, 1), mixer(x).output, **CLOSE)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_token_sees_a_later_one(name: str) -> None:
    mixer, x = mixers(True)[name], tokens(1, 9)
    changed = x.clone()
    changed[:, 5:] += 10.0
    before, after = mixer(x).output, mixer(changed).output
    torch.testing.assert_close(before[:, :5], after[:, :5], **CLOSE)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize(("causal", "name"), cases())
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_padded_row_equals_the_row_alone(causal: bool, name: str, side: str) -> None:
    mixer, x = mixers(causal)[name], tokens(1, 6)
    left, right = {"left": (3, 0), "right": (0, 3), "both": (2, 1)}[side]
    # the second row is whole, so the rows of one batch stand at different positions
    padded = 7.0 * tokens(2, 9, seed=5)
    padded[0, left : 9 - right] = x[0]
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :left], mask[0, 9 - right :] = 0, 0
    output = mixer(padded, mask).output
    torch.testing.assert_close(output[:1, left : 9 - right], mixer(x).output, **CLOSE)
    torch.testing.assert_close(output[1:], mixer(padded[1:]).output, **CLOSE)
    assert output.isfinite().all()


@pytest.mark.parametrize("name", [name for name in CAUSAL if name.startswith("tssa")])
def test_what_padding_holds_does_not_matter(name: str) -> None:
    mixer, x = mixers(True)[name], tokens(1, 5)
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    torch.testing.assert_close(
        mixer(x.masked_fill(~mask.bool()[..., None], torch.nan), mask).output[mask.bool()],
        mixer(x, mask).output[mask.bool()],
        **CLOSE,
    )


@pytest.mark.parametrize("name", CAUSAL)
def test_decoding_goes_on_from_a_padded_row(name: str) -> None:
    mixer, x = mixers(True)[name], tokens(2, 6)
    padded = torch.cat([5.0 * tokens(2, 3, seed=8), x], 1)
    mask = torch.ones(2, 9)
    mask[0, :3] = 0
    state = mixer(padded[:, :8], mask[:, :8], return_state=True).state
    last = mixer(padded[:, 8:], mask[:, 8:], state).output
    torch.testing.assert_close(last[:1, 0], mixer(x[:1]).output[:, -1], **CLOSE)
    torch.testing.assert_close(last[1:, 0], mixer(padded[1:]).output[:, -1], **CLOSE)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_state_has_the_size_it_states_and_is_not_changed_in_place(name: str) -> None:
    mixer = mixers(True)[name]
    for count in (1, 5):
        state = mixer(tokens(3, count), return_state=True).state
        assert sum(tensor.numel() for tensor in state) == 3 * mixer.state_size(count)
        assert all(tensor.shape[0] == 3 for tensor in state)
        kept = [tensor.clone() for tensor in state]
        mixer(tokens(3, 2, seed=1), state=state, return_state=True)
        assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))
    fixed = mixer.state_size(1) == mixer.state_size(1_000_000)
    assert fixed == name.startswith("tssa")


@pytest.mark.parametrize("name", [name for name in BOTH_WAYS if "rotary" not in name])
def test_bidirectional_mixers_have_no_order(name: str) -> None:
    mixer, x = mixers(False)[name], tokens(1, 6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(mixer(x[:, order]).output, mixer(x).output[:, order], **CLOSE)


@pytest.mark.parametrize(("causal", "name"), cases())
def test_gradients_reach_every_parameter(causal: bool, name: str) -> None:
    mixer, x = mixers(causal)[name], tokens(1, 5).requires_grad_()
    mixer(x).output.square().sum().backward()
    still = {n for n, p in mixer.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    # a bias of keys shifts all logits of a row alike
    assert still <= ({"k_proj.bias"} if name.startswith("softmax") else set())
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("causal", [True, False])
def test_no_row_of_softmax_is_empty(causal: bool) -> None:
    """Backends differ in what they make of a query that may see nothing."""
    x, mask = tokens(2, 5), torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    matrix = mixers(causal)["softmax"].mixing_operator(x, mask).dense()
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, HEADS, 5, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(matrix[1], torch.eye(5, dtype=torch.float64).expand(HEADS, -1, -1), **CLOSE)


def gains(name: str, seed: int) -> torch.Tensor:
    """What the last token of a text, always the same, is multiplied by in each channel before out_proj."""
    mixer, x = mixers(True)[name], tokens(1, 7, seed)
    x[:, -1] = tokens(1, 1, seed=9)[:, 0]
    mixed = (mixer.mixing_operator(x) @ mixer.values(x)).transpose(1, 2)[0, -1]
    return mixed / mixer.projected(x)[0, -1]


@pytest.mark.parametrize("name", ["tssa", "tssa-bias", "tssa-decayed", "tssa-uniform"])
def test_in_tssa_the_past_decides_how_much_of_a_token_is_kept_and_nothing_else(name: str) -> None:
    """No content moves: each channel of w is multiplied by a number from -1 to 0, whatever came before."""
    of_pasts = torch.stack([gains(name, seed) for seed in range(8)])
    assert (of_pasts <= 0).all()
    assert (of_pasts >= -1).all()
    assert of_pasts.std(0).max() > 1e-3


@pytest.mark.parametrize("name", ["tssa-scan", "tssa-both"])
def test_a_scan_moves_content(name: str) -> None:
    assert max(gains(name, seed).max() for seed in range(8)) > 0.05


@pytest.mark.parametrize("side", [4, 16, 64])
def test_without_decay_the_token_before_is_one_of_all(side: int) -> None:
    """∂m_t / ∂w_{t-1}² = Π_{t-1} / Σ_u Π_u, so it is 1 / t where memberships are uniform."""
    mixer, x = mixers(True)["tssa-uniform"], tokens(1, side)
    w = mixer.projected(x).detach().requires_grad_()
    m = -(w.detach() / HEADS) / tssa(w, None, causal=True, membership="uniform").output - 1
    slope = torch.autograd.grad(m[0, -1, 0, 0], w)[0][0, -2, 0, 0]
    torch.testing.assert_close(slope, 2 * w[0, -2, 0, 0].detach() / side, rtol=1e-6, atol=1e-9)


def test_membership_and_subspaces() -> None:
    mixer, x = mixers(True)["tssa"], tokens(2, 5)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    share = mixer.membership_of(x, mask)
    torch.testing.assert_close(share.sum(-1), mask.double(), **CLOSE)
    torch.testing.assert_close(mixer.projected(x).flatten(2), mixer.in_proj(x), **CLOSE)
    assert mixer.projected(x).shape == (2, 5, HEADS, WIDTH // HEADS)


@pytest.mark.parametrize("name", ["tssa", "softmax"])
def test_a_mask_of_another_length_is_refused(name: str) -> None:
    wanted = r"`attention_mask`: expected one value for each token, \(1, 5\), got \(1, 6\)"
    with unchecked(), pytest.raises(ShapeError, match=wanted):
        mixers(True)[name](tokens(1, 5), torch.ones(1, 6))


def test_the_protocol_cannot_be_half_kept() -> None:
    class Half(Mixer):
        def forward(self, hidden_states, attention_mask=None, state=None, *, return_state=False):
            return hidden_states

    with pytest.raises(TypeError, match="abstract method"):
        Half()


@pytest.mark.parametrize("name", ["tssa", "softmax"])
def test_a_mask_that_is_added_to_scores_is_refused(name: str) -> None:
    added = torch.tensor([[0.0, 0.0, 0.0, 0.0, -1e9]])
    with pytest.raises(InputError, match=r"`attention_mask`: expected 1 .or true. for real tokens"):
        mixers(True)[name](tokens(1, 5), added)


SIZES = {
    "indivisible width": ({"hidden_size": 10}, "heads: expected a number that divides the width 10, got 3"),
    "no heads": ({"num_heads": 0}, "`num_heads`: expected at least 1, got 0"),
    "no head width": ({"head_dim": 0}, "`head_dim`: expected at least 1, got 0"),
    "a dropout of 2": ({"dropout": 2.0}, "`dropout`: expected a rate from 0 to 1, got 2.0"),
}


@pytest.mark.parametrize("case", sorted(SIZES))
@pytest.mark.parametrize("name", ["tssa", "softmax", "linear", "mamba2"])
def test_sizes_that_cannot_be_are_refused(name: str, case: str) -> None:
    changes, match = SIZES[case]
    with pytest.raises(InputError, match=match):
        MIXERS[name](**{"hidden_size": WIDTH, "num_heads": HEADS, **changes})


OPTIONS = {
    "membership": ({"membership": "unifrom"}, r"`membership`.* got 'unifrom'. Did you mean uniform"),
    "impl": ({"impl": "cppu"}, r"`impl`.* got 'cppu'. Did you mean cpu"),
    "half-lives": ({"half_life": [1.0, 2.0]}, "`half_life`.* one for each of 3 heads"),
    "half-life 0": ({"half_life": [1.0, 2.0, 0.0]}, "`half_life`.* numbers of tokens above 0"),
    "half-lives both ways": ({"half_life": [1.0] * 3, "causal": False}, "`half_life`: expected causal=True"),
    "convolution both ways": ({"conv_tokens": 4, "causal": False}, "`conv_tokens`: expected 0, or more with"),
    "scan both ways": ({"features": 4, "causal": False}, "`features`: expected 0, or more with causal=True"),
    "fewer than no features": ({"features": -1}, "`features`: expected 0.* got -1"),
    "positions both ways": (
        {"max_positions": 5, "causal": False},
        "`max_positions`: expected 0, or more with",
    ),
    "uniform positions": ({"max_positions": 5, "membership": "uniform"}, "`max_positions`: expected 0"),
}


@pytest.mark.parametrize("case", sorted(OPTIONS))
def test_options_that_cannot_be_are_refused(case: str) -> None:
    changes, match = OPTIONS[case]
    with pytest.raises(InputError, match=match):
        TokenStatisticsAttention(WIDTH, HEADS, **{"causal": True, **changes})


def test_none_is_a_head_that_forgets_nothing() -> None:
    made = TokenStatisticsAttention(WIDTH, HEADS, causal=True, half_life=[1, None, 2])
    assert made.half_life == (1.0, float("inf"), 2.0)


def test_rotary_scores_see_distances_alone() -> None:
    mixer, x = mixers(True)["softmax-rotary"], tokens(1, 1)
    logs = mixer.mixing_operator(x.expand(-1, 7, -1)).dense().log()[0]  # of one token, again and again
    scores = logs - logs.diagonal(0, 1, 2)[..., None]
    for distance in (1, 2, 3):
        values = scores.diagonal(-distance, 1, 2)
        torch.testing.assert_close(values, values[:, :1].expand_as(values), **CLOSE)
    assert (scores[:, 6, 5] - scores[:, 6, 3]).abs().max() > 1e-3


def test_rotary_positions_need_pairs() -> None:
    with pytest.raises(InputError, match="even width, got 3"):
        SoftmaxAttention(WIDTH, HEADS, query_dim=3, rotary_base=50.0)
    for base in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="expected a positive number"):
            SoftmaxAttention(WIDTH, HEADS, query_dim=4, rotary_base=base)


def test_rotary_positions_count_real_tokens() -> None:
    mixer, x = mixers(True)["softmax-rotary"], tokens(1, 6)
    real = [0, 1, 3, 4, 5]
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    torch.testing.assert_close(mixer(x, mask).output[:, real], mixer(x[:, real]).output, **CLOSE)
    begun = mixer(x[:, :3], mask[:, :3], return_state=True).state
    rest = mixer(x[:, 3:], mask[:, 3:], begun).output
    torch.testing.assert_close(rest, mixer(x[:, real]).output[:, 2:], **CLOSE)
