"""One budget over several parts: what it is a share of, who gets it, and what it costs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.compression.compression_cases import bert, gpt2, ids, llama, opt
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import rankwise as rw
from rankwise._internals.forward import Change
from rankwise.compression.budget import Offer, SharedBudget
from rankwise.compression.output_price import OutputPrice
from rankwise.compression.parts import Job, PartResult, Prepared, parts
from rankwise.errors import CompressionError

QUICK: dict[str, Any] = {"time": False, "nulls": False}
HELD_OUT = [ids(6, 30, seed=3)]


def test_the_price_is_the_divergence_of_the_outputs() -> None:
    model, batch = gpt2(), ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:] = 0
    batch = {**batch, "attention_mask": mask}
    price = OutputPrice(model, [batch])
    assert price.now() == 0
    with torch.no_grad():
        before = model(**batch).logits[mask.bool()].double().log_softmax(-1)
        model.transformer.h[1].attn.c_attn.weight.mul_(0.7)
        after = model(**batch).logits[mask.bool()].double().log_softmax(-1)
    expected = (before.exp() * (before - after)).sum(-1).mean()
    assert price.now() == pytest.approx(float(expected), rel=1e-9)


def test_without_logits_the_price_is_the_squared_error() -> None:
    model, batch = bert(), ids(2, 12)
    price = OutputPrice(model, [batch])
    with torch.no_grad():
        before = model(**batch).last_hidden_state
        model.encoder.layer[1].output.dense.weight.mul_(0.5)
        after = model(**batch).last_hidden_state
    off = ((after - before).norm() / before.norm()) ** 2
    assert price.now() == pytest.approx(float(off), rel=1e-5)
    assert "squared" in price.unit


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (bert, ("qk", "heads")),
        (opt, ("heads", "kv")),
        (llama, ("rotary", "heads")),
        (llama, ("rotary", "kv")),
    ],
)
def test_a_share_is_of_all_bytes_together(make: Callable[[], nn.Module], names: tuple[str, ...]) -> None:
    model = make()
    whole = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    done = rw.compress(
        model, [ids(6, 30)], keep=0.6, parts=names, held_out=HELD_OUT, cache_tokens=40, **QUICK
    )
    budget = done.budget
    assert budget is not None
    left = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    saved = whole - left + 40 * (done.cache_bytes_before - done.cache_bytes_after)
    assert budget.bytes_before - budget.bytes_after == saved
    assert saved >= 0.4 * budget.bytes_before
    assert [share.part for share in budget.shares] == done.parts
    assert sum(share.bytes_saved for share in budget.shares) == saved
    assert sum(share.price for share in budget.shares) == pytest.approx(budget.price)
    assert budget.price > 0
    assert budget.price_held_out > 0
    assert budget.cache_tokens == (0 if make is bert else 40)


def test_together_a_budget_costs_no_more_than_the_better_part_alone() -> None:
    batch = ids(6, 30)
    both = rw.compress(bert(), [batch], keep=0.6, parts=("qk", "heads"), **QUICK).budget
    assert both is not None
    alone = {}
    for name, keep in (("heads", 0.5), ("qk", 0.19)):  # each saves at least 0.4 of the bytes by itself
        model = bert()
        price = OutputPrice(model, [batch])
        rw.compress(model, [batch], keep=keep, parts=(name,), **QUICK)
        alone[name] = price.now()
    assert both.price <= 1.05 * min(alone.values())


@pytest.mark.parametrize("tolerance", [0.03, 0.003])
def test_a_tolerance_is_of_all_parts_together(tolerance: float) -> None:
    for make, names in ((bert, ("qk", "heads")), (llama, ("rotary", "heads"))):
        model = make()
        price = OutputPrice(model, [ids(6, 30)])
        done = rw.compress(model, [ids(6, 30)], tolerance=tolerance, parts=names, **QUICK)
        assert done.budget is not None
        assert price.now() == pytest.approx(done.budget.price)
        assert done.budget.price <= tolerance


def sharp_gpt2() -> nn.Module:
    """One in which the removal of a few heads spends at once what narrow queries would cost in all."""
    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=64, n_layer=2, n_head=4, **tokens)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4)
    return model


def test_no_tolerance_is_exceeded_and_none_leaves_more_than_its_half() -> None:
    left = {}
    for tolerance in (0.035, 0.07):
        torch.manual_seed(1)
        batches = [{"input_ids": torch.randint(0, 97, (2, 32))} for _ in range(2)]
        done = rw.compress(sharp_gpt2(), batches, tolerance=tolerance, parts=("qk", "heads"), **QUICK).budget
        assert done is not None
        assert done.price <= tolerance
        assert done.tolerance == tolerance
        left[tolerance] = done.bytes_after
        assert left[tolerance] <= left.get(tolerance / 2, math.inf)


@dataclass
class Worse:
    """A part that is dearer when it is done than when it was tried."""

    model: Any

    def finish(self, job: Job) -> PartResult:
        assert job.keep is not None
        weight = self.model.transformer.h[0].attn.c_attn.weight
        before = weight.detach().clone()
        weight.data.mul_(job.keep)
        return PartResult(undo=lambda: weight.data.copy_(before))


@pytest.mark.parametrize("tolerance", [1e-12, 1e-3])
def test_what_costs_more_than_was_tried_is_taken_back(tolerance: float) -> None:
    model = sharp_gpt2()
    budget = SharedBudget(Job(model, [ids(4, 30)], [], tolerance=tolerance), None)
    keep, result = budget._finished(
        Prepared(set(), lambda keep: Change(model, []), Worse(model).finish),
        0.1,
    )
    assert budget.price.now() <= tolerance
    assert (keep == 1) == (result is None) == (tolerance == 1e-12)
    assert keep > 0.1


def test_shares_lie_between_what_was_tried() -> None:
    offer = Offer([0.2, 0.5, 1.0], [100, 160, 200], [0.3, 0.1, 0.0])
    assert offer.keep_at(100) == 0.2
    assert offer.keep_at(130) == pytest.approx(0.35)
    assert offer.keep_at(180) == pytest.approx(0.75)
    assert offer.keep_at(250) == 1


def drawn_offer(whole: int, now: int, generator: torch.Generator) -> Offer:
    """Nine shares of a part that is the dearer the more it takes."""
    sizes, prices = torch.rand(2, 8, generator=generator, dtype=torch.float64)
    left = (now - sizes.cumsum(0).flip(0) / 8.5 * whole).long().tolist()
    rising = (prices * torch.arange(1, 9)).cumsum(0).flip(0).tolist()
    return Offer([0.1 * at for at in range(1, 10)], [*left, now], [*rising, 0.0])


@pytest.mark.parametrize("seed", range(6))
def test_no_other_shares_are_cheaper_together(seed: int) -> None:
    """What two parts leave of the same bytes is the product of their shares."""
    generator = torch.Generator().manual_seed(seed)
    budget = object.__new__(SharedBudget)
    budget.job, budget.whole, budget.start = Job(nn.Identity(), [], [], keep=0.4), 10**6, 3 * 10**6
    offers = {name: drawn_offer(budget.whole, budget.start, generator) for name in ("rotary", "kv")}

    def log_share(left: int) -> float:
        return math.log(1 - (budget.start - left) / budget.whole)

    tried = [
        [(log_share(left), price) for left, price in zip(offer.left, offer.prices, strict=True)]
        for offer in offers.values()
    ]
    chosen = budget._bytes_left(budget.start, 0.0, offers)
    logs = [log_share(chosen[name]) for name in offers]
    assert sum(logs) <= math.log(0.4) + 1e-5  # bytes are whole numbers
    paid = sum(_between(points, at) for points, at in zip(tried, logs, strict=True))
    others = [(at / 200, math.log(0.4) - at / 200) for at in range(-200, 1)]
    others = [
        pair for pair in others if all(points[0][0] <= at for points, at in zip(tried, pair, strict=True))
    ]
    assert others
    for pair in others:
        assert paid <= sum(_between(points, at) for points, at in zip(tried, pair, strict=True)) + 1e-4


def _between(points: list[tuple[float, float]], at: float) -> float:
    """The price on the lower hull of what was tried."""
    lines = [
        low + (high - low) * (at - first) / (last - first)
        for first, low in points
        for last, high in points
        if first < last and first - 1e-5 <= at <= last + 1e-5
    ]
    return min(lines)


def test_what_cannot_be_shared_is_refused_and_nothing_is_changed() -> None:
    model = opt()
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(CompressionError, match=r"at least 0\.\d+ of the [\d,]+ bytes.* layers and the cache"):
        rw.compress(model, [ids(6, 30)], keep=0.01, parts=("qk", "heads"), time=False)
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    assert all(name in parts() for name in ("heads", "qk", "rotary", "kv"))
