"""Largest logits and mean norms of queries and keys of each kind of head, against logits computed by hand.

By hand: one pair of tokens at a time, in float64, from the same weights and inputs.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from experiments.zoo.state_space import tiny
from hypothesis import given
from hypothesis import strategies as st
from tests.measures.measure_cases import U, normal
from tests.support.modules import GivenOperator, sites_of, token_ids
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import rankwise as rw
from rankwise.measures import largest_logit, mean_norm
from rankwise.operators import DenseMixing, SoftmaxMixing, ToeplitzMixing

WIDTH, HEADS, HEAD_DIM, TOKENS, REAL = 16, 4, 4, 7, 5
POSITIONS = torch.arange(TOKENS)
ANGLES = [1.0, 0.1]
SLOPES = [2.0 ** -(head + 1) for head in range(HEADS)]
CAP, NORM_EPS = 3.0, 1e-6
BIASES = ("alibi", "table")
VISIBLE = {
    "causal": lambda i, j: j <= i,
    "window": lambda i, j: (j <= i) & (i - j < 3),
    "padding": lambda i, j: (j < REAL) & (i >= 0),
}
"""True where a mask lets token i see token j."""


@dataclass(frozen=True)
class Kind:
    """Kind of head."""

    scale: float = HEAD_DIM**-0.5
    key_heads: int = HEADS
    normed: bool = False
    rotated: bool = False
    capped: bool = False
    bias: str = ""
    mask: str = ""


KINDS = {
    "plain": Kind(),
    "scaled": Kind(scale=2.0),
    "normed": Kind(normed=True),
    "rotated": Kind(rotated=True),
    "soft-capped": Kind(scale=2.0, capped=True),
    "grouped": Kind(key_heads=2),
    "grouped, normed and rotated": Kind(key_heads=1, normed=True, rotated=True, mask="causal"),
    "ALiBi": Kind(bias="alibi", mask="causal"),
    "T5": Kind(scale=1.0, bias="table"),
    "T5 with a window": Kind(scale=1.0, bias="table", mask="window"),
    "causal": Kind(mask="causal"),
    "window": Kind(mask="window"),
    "padding": Kind(mask="padding"),
}


class Heads(nn.Module):
    """Attention heads of one kind; a fused function, or products and a softmax, computes the attention."""

    def __init__(self, kind: Kind, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.way = kind, way
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kind.key_heads * HEAD_DIM)
        self.k = nn.Linear(WIDTH, kind.key_heads * HEAD_DIM)
        self.gains = nn.Parameter(1 + torch.rand(2, HEAD_DIM))
        table = torch.randn(HEADS, TOKENS, TOKENS)
        distance = (POSITIONS[:, None] - POSITIONS).abs()
        self.bias = nn.Parameter(
            -torch.tensor(SLOPES)[:, None, None] * distance if kind.bias == "alibi" else table
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        kind = self.kind
        q, k, v = (part(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if kind.normed:
            q, k = (F.rms_norm(y, (HEAD_DIM,), self.gains[n], NORM_EPS) for n, y in enumerate((q, k)))
        if kind.rotated:
            angles = POSITIONS[:, None] * torch.tensor(ANGLES)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            q, k = (
                torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
                for a, b in (y.chunk(2, -1) for y in (q, k))
            )
        grid = POSITIONS[:, None], POSITIONS
        visible = VISIBLE[kind.mask](*grid).expand(TOKENS, TOKENS) if kind.mask else None
        bias = self.bias if kind.bias else None
        if self.way == "flex":
            mod = lambda score, b, h, i, j: CAP * torch.tanh(score / CAP)  # noqa: E731
            mixed = flex_attention(q, k, v, score_mod=mod, scale=kind.scale)
        elif self.way == "fused":
            mask = bias if visible is None or bias is None else bias.masked_fill(~visible, -torch.inf)
            mask = visible if mask is None else mask
            grouped = kind.key_heads < HEADS
            mixed = F.scaled_dot_product_attention(q, k, v, mask, scale=kind.scale, enable_gqa=grouped)
        else:
            k, v = (y.repeat_interleave(HEADS // kind.key_heads, 1) for y in (k, v))
            logits = q @ k.mT * kind.scale
            logits = CAP * torch.tanh(logits / CAP) if kind.capped else logits
            logits = logits if bias is None else logits + bias
            if visible is not None:
                hidden = torch.zeros(TOKENS, TOKENS, dtype=x.dtype)
                logits = logits + hidden.masked_fill(~visible, torch.finfo(x.dtype).min)
            if self.way == "with a sink":  # the largest entry of each row, which is not a token
                logits = torch.cat((logits, logits.new_full((*logits.shape[:-1], 1), 50.0)), -1)
                logits = logits - logits.max(-1, keepdim=True).values
            weights = logits.softmax(-1, dtype=torch.float32).to(x.dtype)[..., :TOKENS]
            if self.way == "mixed heads":
                weights = torch.einsum("bhij,hg->bgij", weights, torch.eye(HEADS, dtype=x.dtype))
            mixed = weights @ v
        return mixed.transpose(1, 2).flatten(2)


def by_hand(model: Heads, x: Tensor) -> tuple[dict[str, list[float]], float]:
    """Return the measures of each head, and the largest size of a product ‖q‖‖k‖·scale plus its bias."""
    kind, real = model.kind, range(REAL if model.kind.mask == "padding" else TOKENS)
    weights = {name: weight.detach().double() for name, weight in model.named_parameters()}

    def vector(part: str, token: Tensor, place: int, head: int) -> Tensor:
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        y = weights[f"{part}.weight"][rows] @ token.double() + weights[f"{part}.bias"][rows]
        if kind.normed:
            y = y / math.sqrt(y.square().mean() + NORM_EPS) * weights["gains"]["qk".index(part)]
        for pair, angle in enumerate(ANGLES if kind.rotated else []):
            a, b = float(y[pair]), float(y[pair + 2])
            cos, sin = math.cos(place * angle), math.sin(place * angle)
            y[pair], y[pair + 2] = a * cos - b * sin, b * cos + a * sin
        return y

    measured, size = {"largest_logit": [], "query_norm": [], "key_norm": []}, 0.0
    for head in range(HEADS):
        logits, norms = [], {"q": [], "k": []}
        for sequence in x:
            q, k = (
                [vector(part, sequence[place], place, number) for place in real]
                for part, number in (("q", head), ("k", head * kind.key_heads // HEADS))
            )
            norms["q"] += [float(y.norm()) for y in q]
            norms["k"] += [float(y.norm()) for y in k]
            for i in real:
                for j in real:
                    z = float(q[i] @ k[j]) * kind.scale
                    z = CAP * math.tanh(z / CAP) if kind.capped else z
                    bias = float(weights["bias"][head, i, j]) if kind.bias else 0.0
                    size = max(size, float(q[i].norm() * k[j].norm()) * kind.scale + abs(bias))
                    if not kind.mask or VISIBLE[kind.mask](i, j):
                        logits.append(z + bias)
        measured["largest_logit"].append(max(logits))
        measured["query_norm"].append(sum(norms["q"]) / len(norms["q"]))
        measured["key_norm"].append(sum(norms["k"]) / len(norms["k"]))
    return measured, size


def batch(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return two sequences. The last tokens are large, so that masked logits are larger than visible ones."""
    x = normal(2, TOKENS, WIDTH, seed=seed)
    x[:, REAL:] *= 3
    return {"x": x.to(dtype), "attention_mask": (POSITIONS < REAL).long().expand(2, -1)}


def given_to(kind: Kind, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    inputs = batch(dtype, seed)
    return inputs if kind.mask == "padding" else {"x": inputs["x"]}


CASES = [(name, way) for name in KINDS for way in ("written out", "fused") if name != "soft-capped"]
CASES += [("soft-capped", "written out"), ("soft-capped", "flex")]
CASES += [("causal", "with a sink"), ("ALiBi", "with a sink")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_the_largest_logit_is_the_largest_by_hand(name, way, dtype):
    kind = KINDS[name]
    model, inputs = Heads(kind, way).to(dtype).eval(), given_to(kind, dtype)
    wanted, size = by_hand(model, inputs["x"])
    heads = rw.audit(model, [inputs]).heads
    # The linear layer rounds queries and keys, as do the norm (at most 4 times) and the rotation (4: cosines,
    # two products, a sum). Logits that the model forms add the product, the factor, the cap (3) and the bias.
    # Each time an entry moves by at most half an eps of ‖q‖‖k‖. Sums of 17 and 4 terms are in float32.
    of_vectors = 1 + 4 * kind.normed + 4 * kind.rotated
    of_logits = 0 if way == "fused" else 2 + 3 * kind.capped + bool(kind.bias)
    sums, eps = (torch.finfo(each).eps / 2 for each in (torch.float32, dtype))
    tolerance = size * ((2 * of_vectors + of_logits) * eps + (2 * 17 + 4) * sums)
    for head, by_head in zip(heads, wanted["largest_logit"], strict=True):
        assert abs(head.largest_logit - by_head) < tolerance
    for field in ("query_norm", "key_norm"):
        values = [getattr(head, field) for head in heads]
        if way == "fused":
            assert values == pytest.approx(wanted[field], rel=of_vectors * eps + 17 * sums)
        else:  # queries and keys are not captured
            assert all(map(math.isnan, values))


@pytest.mark.parametrize("name", KINDS)
def test_the_kinds_differ_by_more_than_the_tolerances(name):
    """Otherwise the test above could not fail: a head without its property has another largest logit."""
    model, x = Heads(KINDS[name], "fused"), batch(torch.float32)["x"]
    logits = by_hand(model, x)[0]["largest_logit"]
    model.kind = Kind(key_heads=model.kind.key_heads)
    if name == "grouped":
        model.kind = Kind(key_heads=1)  # all queries with the first key head
    plain = by_hand(model, x)[0]["largest_logit"]
    differences = [abs(a - b) for a, b in zip(logits, plain, strict=True)]
    assert max(differences) > 0.5 or name == "plain"


@given(
    shape=st.tuples(*(st.integers(1, 6) for _ in range(5))),
    seed=st.integers(0, 2**31),
    power=st.integers(-8, 8),
    causal=st.booleans(),
)
def test_logits_of_operators_scale_and_shift(shape, seed, power, causal):
    """A softmax does not show a shift. Powers of two are exact; a bias of 7 adds a rounding of at most 50."""
    groups, heads, tokens, sources, head_dim = shape
    query = normal(2, groups * heads, tokens, head_dim, seed=seed)
    key = normal(2, heads, sources, head_dim, seed=seed + 1)
    op = SoftmaxMixing(query, key, is_causal=causal)
    logits = torch.einsum("bhid,bhjd->bhij", query, key.repeat_interleave(groups, 1)) * op.scale
    if causal:
        logits = logits.masked_fill(~torch.ones(tokens, sources, dtype=torch.bool).tril(), -torch.inf)
    largest = largest_logit(op)
    # Sums of at most 6 products, in another order.
    torch.testing.assert_close(largest, logits.amax((-2, -1)), rtol=0, atol=8 * 50 * U)
    scaled = SoftmaxMixing(query, key, is_causal=causal, scale=op.scale * 2.0**power)
    assert torch.equal(largest_logit(scaled), largest * 2.0**power)
    shifted = SoftmaxMixing(query, key, torch.full((tokens, sources), 7.0), is_causal=causal)
    torch.testing.assert_close(largest_logit(shifted), largest + 7, rtol=0, atol=50 * U)
    assert torch.equal(largest_logit(op[:, -1:]), largest[:, -1:])


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.bfloat16).min, -1e4])
def test_logits_that_a_mask_hides_do_not_count(hidden):
    """A negative logit is not hidden, however large; a head that sees nothing has no logit."""
    query, key = torch.full((1, 2, 1), 300.0), torch.tensor([[[-100.0], [5.0], [-200.0]]])
    bias = torch.tensor([0.0, hidden, 0.0])
    for mask in (bias, bias == 0):
        assert largest_logit(SoftmaxMixing(query, key, mask, scale=1.0)).item() == -30000
    assert largest_logit(SoftmaxMixing(query, key, torch.zeros(3, dtype=torch.bool))).isnan()


def test_mean_norms_leave_padding_out():
    vectors, real = torch.tensor([[[[3.0, 4.0], [math.nan, 1.0]]]] * 2), torch.tensor([[True, False]] * 2)
    assert mean_norm(vectors, real).tolist() == [[5.0], [5.0]]
    assert mean_norm(vectors, ~real | real).isnan().all()
    assert mean_norm(vectors, real & ~real).isnan().all()


def largest_of(audit: rw.Audit) -> list[float]:
    return [head.largest_logit for head in audit.heads]


@pytest.mark.parametrize("way", ["written out", "fused"])
def test_maxima_of_batches_and_of_merged_audits_are_exact(way, tmp_path):
    model = Heads(KINDS["padding"], way).eval()
    batches = [given_to(KINDS["padding"], torch.float32, seed) for seed in range(3)]
    alone = [rw.audit(model, [each]) for each in batches]
    wanted = [max(values) for values in zip(*map(largest_of, alone), strict=True)]
    assert len({*map(tuple, map(largest_of, alone)), tuple(wanted)}) == 4  # no batch has all maxima
    together = rw.audit(model, batches)
    saved = rw.Audit.load(rw.Audit.merge(alone[:2]).save(tmp_path / "audit.json"))
    for audit in (together, rw.Audit.merge(alone), rw.Audit.merge([saved, alone[2]])):
        assert largest_of(audit) == wanted
    for head, merged in zip(together.heads, rw.Audit.merge(alone).heads, strict=True):
        assert merged.key_norm == pytest.approx(head.key_norm, rel=32 * U, nan_ok=True)


@pytest.mark.parametrize("way", ["written out", "fused"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sequences_with_nan_or_infinity_do_not_count(way, bad):
    model, x = Heads(KINDS["plain"], way).eval(), batch(torch.float32)["x"]
    wanted = largest_of(rw.audit(model, [x[:1]]))
    x[1, 2, 3] = bad
    heads = rw.audit(model, [x]).heads
    assert [head.largest_logit for head in heads] == wanted
    assert {head.nonfinite_sequences for head in heads} == {1}
    assert all(map(math.isnan, largest_of(rw.audit(model, [x[1:]]))))


@pytest.mark.parametrize("operator", [DenseMixing(torch.eye(3)), ToeplitzMixing(torch.ones(3))])
def test_operators_without_a_softmax_have_no_logits(operator):
    assert largest_logit(operator).isnan()
    assert largest_logit(operator.dense()).isnan()


def test_models_and_matrices_without_known_logits_have_none():
    audits = [rw.audit(tiny("Mamba"), [token_ids()])]
    audits.append(rw.audit(Heads(KINDS["plain"], "mixed heads"), [batch(torch.float32)["x"]]))
    matrix = DenseMixing(torch.randn(1, 2, TOKENS, TOKENS).softmax(-1))
    audits.append(rw.audit(GivenOperator(), [torch.ones(1, TOKENS, 2)], sites=sites_of(matrix)))
    for audit in audits:
        for head in audit.heads:
            assert all(map(math.isnan, (head.largest_logit, head.query_norm, head.key_norm)))
            assert head.effective_rank >= 1
