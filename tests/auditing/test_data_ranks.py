"""Ranks of a data set: pooled states, keys and values of all sequences, whatever the batches and shards."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.zoo.transformers import BERT, LLAMA, hugging_face
from tests.support.modules import token_ids

import rankwise as rw
from rankwise.errors import InputError

POOLED = ("pooled_effective_rank", "pooled_effective_rank_without_massive")
NAMES = ("key_effective_rank", "value_effective_rank")


def rank(rows: torch.Tensor) -> float:
    """Return RankMe without its constant, by numpy."""
    sigma = np.linalg.svd(rows.detach().double().numpy(), compute_uv=False)
    share = sigma / sigma.sum()
    return float(np.exp(-(share[share > 0] * np.log(share[share > 0])).sum()))


def bert_and_batch() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a small encoder, and six sequences, one with padding."""
    batch = token_ids(6, 24)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 17:] = 0
    return hugging_face("BertModel", "BertConfig", **BERT)().eval(), batch


def singles(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: part[at : at + 1] for name, part in batch.items()} for at in range(6)]


def numbers(audit: rw.Audit) -> list[float]:
    """Return all ranks of a data set in an audit."""
    states = [getattr(state, name) for state in audit.states for name in POOLED]
    return [*states, *(getattr(head, name) for head in audit.heads for name in NAMES)]


def test_ranks_equal_the_ranks_of_the_rows_of_all_sequences() -> None:
    model, batch = bert_and_batch()
    audit = rw.audit(model, singles(batch))
    states = model(**batch, output_hidden_states=True).hidden_states
    real = batch["attention_mask"].bool()
    for record, state in zip(audit.states, states, strict=True):
        pooled = (state * real[..., None]).double().sum(1) / real.sum(1, keepdim=True)
        assert record.pooled_effective_rank == pytest.approx(rank(pooled), rel=1e-6)  # states are float32
        assert record.pooled_effective_rank_without_massive == record.pooled_effective_rank
    for layer, block in enumerate(model.encoder.layer):
        for name, project in zip(NAMES, (block.attention.self.key, block.attention.self.value), strict=True):
            rows = project(states[layer])[real].unflatten(-1, (model.config.num_attention_heads, -1))
            for head in range(model.config.num_attention_heads):
                measured = getattr(audit.head(layer, head), name)
                assert measured == pytest.approx(rank(rows[:, head]), rel=1e-5)


def test_batches_and_merged_files_do_not_change_a_digit_that_counts(tmp_path: Path) -> None:
    model, batch = bert_and_batch()
    whole = rw.audit(model, [batch])
    shards = [rw.audit(model, [one], keep_moments=True) for one in singles(batch)]
    loaded = [rw.Audit.load(shard.save(tmp_path / f"{at}.json")) for at, shard in enumerate(shards)]
    merged = rw.Audit.merge([rw.Audit.merge(loaded[:4]), rw.Audit.merge(loaded[4:])])
    # Sums of the same numbers in another order; singular values are roots of eigenvalues with error 1e-16.
    assert numbers(merged) == pytest.approx(numbers(whole), rel=1e-9)
    assert numbers(rw.audit(model, singles(batch))) == pytest.approx(numbers(whole), rel=1e-9)
    assert all(not head.merging.moments for head in whole.heads)


def test_ranks_are_unknown_if_one_merged_audit_has_no_moments() -> None:
    model, batch = bert_and_batch()
    parts = [rw.audit(model, [one], keep_moments=at > 0) for at, one in enumerate(singles(batch)[:3])]
    for order in (parts, parts[::-1]):
        assert all(math.isnan(number) for number in numbers(rw.Audit.merge(order)))
    with pytest.raises(InputError, match="`keep_moments`"):
        rw.audit(model, [batch], keep_moments="yes")  # type: ignore[arg-type]


def inputs(tokens: torch.Tensor, batch: int = 100, **options: Any) -> list[rw.Audit]:
    """Return an audit of each batch of sequences, whose first states are the given tokens."""
    layer = torch.nn.TransformerEncoderLayer(tokens.shape[-1], 2, 4, batch_first=True).eval()
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return [rw.audit(model, [part], **options) for part in tokens.split(batch)]


def test_massive_tokens_and_nonfinite_sequences_are_left_out() -> None:
    tokens = torch.randn(5, 9, 16, generator=torch.Generator().manual_seed(0))
    expected = rank(tokens[:4, 1:].double().mean(1))
    tokens[:, 0] = 1e4  # a token of huge norm, the same in every sequence
    tokens[4, 3] = math.nan
    record = inputs(tokens)[0].states[0]
    assert record.pooled_effective_rank < 1.1
    assert record.pooled_effective_rank_without_massive == pytest.approx(expected, rel=1e-9)


def test_many_sequences_are_folded_into_two_rows_per_channel_without_a_change() -> None:
    tokens = torch.randn(100, 3, 4, generator=torch.Generator().manual_seed(0)) + 1
    torch.manual_seed(0)
    state = rw.Audit.merge(inputs(tokens, 20, keep_moments=True)).states[0]
    assert state.pooled_effective_rank == pytest.approx(rank(tokens.double().mean(1)), rel=1e-12)
    assert len(state.pooled["pooled_effective_rank"].array()) <= 8


def test_keys_that_a_mask_repeats_for_each_query_head_are_counted_once() -> None:
    """Grouped keys are read as they are without a mask, and repeated for each query head with one."""
    model = hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA)().eval()
    batch = token_ids(6, 24)
    ones = torch.ones_like(batch["input_ids"])
    ones[-1, -1] = 0
    masked = {name: part[3:] for name, part in (batch | {"attention_mask": ones}).items()}
    free = {"input_ids": batch["input_ids"][:3]}
    mixed, alone = rw.audit(model, [free, masked]), rw.audit(model, [masked])
    last = rw.Audit.merge([rw.audit(model, [part], keep_moments=True) for part in (masked, free)])
    assert numbers(mixed) == pytest.approx(numbers(last), rel=1e-9, nan_ok=True)
    assert numbers(mixed) != pytest.approx(numbers(alone), rel=1e-3, nan_ok=True)
