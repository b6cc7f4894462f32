"""Results do not depend on the default dtype of the process, which frameworks set to bfloat16."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import BERT, GPT, hugging_face
from tests.support.modules import token_ids
from torch import Tensor

import rankwise as rw
from rankwise.models import ToSTForCausalLM
from rankwise.operators import LinearAttentionMixing, SoftmaxMixing, ToeplitzMixing, sample_channels


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager that sets torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32)


STATES, BRANCH, MASK = draw(2, 12, 8), draw(2, 12, 8, seed=1), torch.ones(2, 12, dtype=torch.bool).tril(8)
ATTENTION = SoftmaxMixing(draw(2, 3, 12, 4), draw(2, 3, 12, 4, seed=1), is_causal=True)
LINEAR = LinearAttentionMixing(draw(2, 3, 12, 4).exp(), draw(2, 3, 12, 4, seed=1).exp())
SHIFTS = ToeplitzMixing(draw(2, 3, 12))
STATE_MEASURES = (
    "absolute_spread",
    "direction_spread",
    "effective_rank_without_massive",
    "largest_norm_ratio",
    "largest_norm_share",
    "massive_tokens",
    "mean_cosine",
    "spread",
    "state_effective_rank",
    "token_norm",
)
"""Measures of token states, as functions."""
OPERATOR_MEASURES = [
    name for name in rw.measures.MEASURES if name not in (*STATE_MEASURES, "relative_update")
]


def bert() -> Any:
    with default_dtype(torch.float32):
        return hugging_face("BertForMaskedLM", "BertConfig", **BERT | {"num_hidden_layers": 2})()


def gpt2() -> Any:
    with default_dtype(torch.float32):
        return hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT | {"n_layer": 1})()


def tost() -> Any:
    with default_dtype(torch.float32):
        torch.manual_seed(0)
        return ToSTForCausalLM(
            rw.models.ToSTConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=2)
        ).eval()


def audited(model: Any, **settings: Any) -> Any:
    audit = rw.audit(model, [token_ids()], **settings)
    return [audit.model_dump(include={"heads", "states", "findings", "importance"})]


def with_skips() -> list[Any]:
    model = bert()
    rw.add_lambda_skip(model, 1.5, per="channel")
    with torch.no_grad():
        logits = model(**token_ids()).logits
    return [logits, rw.certify_skip(model, token_ids()).model_dump()]


def compressed() -> list[Any]:
    batches = [token_ids(seed=seed) for seed in range(2)]
    record = rw.compress(gpt2(), batches, keep=0.75, parts=("heads", "width", "kv"))
    return [record.model_dump(exclude={"seconds", "provenance", "speed"})]


USES: dict[str, Callable[[], Any]] = {
    "measures of operators": lambda: [
        rw.measures.compute_measures(OPERATOR_MEASURES, operator) for operator in (ATTENTION, LINEAR, SHIFTS)
    ],
    "estimate_spectrum": lambda: (
        rw.measures.estimate_spectrum(ATTENTION, probes=8, steps=6).effective_rank.value
    ),
    "required_head_dim": lambda: rw.measures.required_head_dim(ATTENTION),
    "measures of states": lambda: (
        [getattr(rw.measures, name)(STATES, mask=MASK) for name in STATE_MEASURES]
        + [rw.measures.relative_update(STATES, BRANCH, MASK), rw.measures.head_distance(ATTENTION)]
    ),
    "variational_rate": lambda: rw.measures.variational_rate(draw(2, 3, 12, 4), draw(2, 3, 12).sigmoid()),
    "sample_channels": lambda: sample_channels(SHIFTS, 2),
    "random_head_rank": lambda: list(rw.theory.random_head_rank(16, 4, trials=2)),
    "random_head_rank, window": lambda: list(
        rw.theory.random_head_rank(16, 4, mask="causal", window=4, trials=2)
    ),
    "uniform_rank": lambda: rw.theory.uniform_rank(16, "causal"),
    "rank_barrier": lambda: [
        rw.theory.rank_barrier(9, mask) for mask in ("full", "causal", MASK[0].expand(9, 12))
    ],
    "skip_bound": lambda: [
        rw.theory.skip_bound(STATES, BRANCH, 2.0, MASK, norm) for norm in ("none", "layer", "rms")
    ],
    "min_lambda_for_spread": lambda: rw.theory.min_lambda_for_spread(STATES, BRANCH, 0.1, MASK),
    "min_lambda_paper": lambda: rw.theory.min_lambda_paper(
        STATES, draw(2, 12, 12).softmax(-1), draw(2, 8, 8), 0.1
    ),
    "half_lives": lambda: rw.ops.half_lives(4),
    "tssa": lambda: [
        rw.ops.tssa(draw(2, 12, 3, 4), draw(3).exp(), causal, mask=MASK, half_life=half_life).output
        for causal in (False, True)
        for half_life in (None, rw.ops.half_lives(3).float())[: 1 + causal]
    ],
    "plan_head_dim": lambda: rw.plan_head_dim(32, heads=4, hidden_size=32, trials=2).model_dump(),
    "audit, exact": lambda: audited(gpt2(), importance="exact"),
    "audit, estimated": lambda: audited(bert(), rank_method="estimate", importance=True),
    "audit of ToST": lambda: audited(tost(), importance=True),
    "λ-skips": with_skips,
    "choose_lambda": lambda: rw.skips.choose_lambda(bert(), token_ids(), "bert.encoder.layer").model_dump(),
    "compress": compressed,
}


def numbers(value: Any) -> list[Any]:
    """Return all numbers, texts and tensors in a value, in order, with the dtypes of tensors."""
    if isinstance(value, Tensor):
        return [value.dtype, *value.detach().double().flatten().tolist()]
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in [key, *numbers(item)]]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in numbers(item)]
    return [value if isinstance(value, int | float | str | None) else repr(value)]


@pytest.mark.parametrize("use", USES)
def test_no_result_depends_on_the_default_dtype(use: str) -> None:
    wanted = numbers(USES[use]())
    for dtype in (torch.bfloat16, torch.float64):
        with default_dtype(dtype):
            got = numbers(USES[use]())
        assert [str(number) for number in got] == [str(number) for number in wanted], dtype
