"""Batches: samples of their first sequences, and the tensors inside them."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

from rankwise._internals.batches import batch_size, first_sequences, tensors_of, to_device
from rankwise.errors import InputError
from rankwise.models import ToSTConfig, ToSTModel


class Pair(NamedTuple):
    x: Tensor
    bias: Tensor


TIME_FIRST, BIAS = torch.randn(9, 6, 8), torch.randn(9, 9)


@pytest.mark.parametrize(
    "batch",
    [TIME_FIRST, (TIME_FIRST, BIAS), [TIME_FIRST, 2.0], Pair(TIME_FIRST, BIAS)],
    ids=["tensor", "tuple", "list", "namedtuple"],
)
def test_a_batch_without_names_is_sampled_completely(batch: Any) -> None:
    sample = first_sequences(batch, 4)
    assert type(sample) is type(batch)
    whole, copies = ([batch], [sample]) if isinstance(batch, Tensor) else (batch, sample)
    for one, other in zip(whole, copies, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert whole[0].data_ptr() != copies[0].data_ptr()


def test_the_first_sequences_of_a_dict_are_sampled_and_other_tensors_stay_complete() -> None:
    x, scale = torch.randn(6, 9, 8), torch.tensor(2.0)
    batch = {"scale": scale, "x": x, "bias": BIAS, "labels": torch.arange(6), "past": Pair(x, BIAS), "on": 1}
    sample = first_sequences(batch, 4)
    assert torch.equal(sample["x"], x[:4])
    assert torch.equal(sample["bias"], BIAS)
    assert torch.equal(sample["scale"], scale)
    assert sample["labels"].tolist() == [0, 1, 2, 3]
    assert [len(tensor) for tensor in sample["past"]] == [4, 9]
    assert sample["on"] == 1


def test_nested_tensors_are_found_and_moved() -> None:
    batch = {"n": 3, "x": torch.ones(2, 3), "more": Pair(torch.ones(1), [torch.ones(1)])}
    there = to_device(batch, torch.device("meta"))
    moved = (there["x"], there["more"].x, there["more"].bias[0])
    assert [tensor.device.type for tensor in moved] == ["meta"] * 3
    assert (there["n"], list(tensors_of(batch)), batch_size(batch)) == (3, ["x"], 2)


@pytest.mark.parametrize("mask", [causal_lower_right, causal_upper_left])
def test_a_mask_with_attributes_keeps_them_in_a_sample(mask: Any) -> None:
    x = torch.randn(2, 6, 8)
    sample = first_sequences({"x": x, "bias": mask(6, 6)}, 1)
    got = scaled_dot_product_attention(*[sample["x"]] * 3, attn_mask=sample["bias"])
    assert torch.allclose(got, scaled_dot_product_attention(x, x, x, attn_mask=mask(6, 6))[:1])


def test_a_state_that_cannot_be_cut_is_refused() -> None:
    ids = torch.arange(12).view(2, 6)
    config = ToSTConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with torch.no_grad():
        cache = ToSTModel(config)(ids, use_cache=True).past_key_values
    with pytest.raises(InputError, match="MixerCache"):
        first_sequences({"input_ids": ids, "past_key_values": cache}, 1)
    assert first_sequences({"input_ids": ids, "past_key_values": cache}, 2)["past_key_values"] is cache
