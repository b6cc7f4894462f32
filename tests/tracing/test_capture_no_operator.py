"""Layers for which there is no adapter say in `uncaptured` what they do."""

from contextlib import suppress

import pytest
import torch
from experiments.guessed_inputs import fed
from experiments.tiny_architectures import builds
from torch import nn

import rankwise as rw
from rankwise.tracing.adapters.base import NoOperatorAdapter


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("mra", "multi-resolution attention: scores are exact in a few blocks"),
        ("deformable_detr", "deformable attention: each query reads its values at a few places"),
        ("reformer", "hashed attention: tokens are sorted by random hashes"),
        ("yoso", "its weights are chances that hashes"),
        ("xlstm", "the memory of an mLSTM: products of queries and keys that decay"),
        ("groupvit", "each of its tokens is given to one group alone"),
    ],
)
@torch.no_grad()
def test_they_say_what_they_do(model_type, what):
    _, model = next(builds(model_type))
    batch, error = fed(model)
    assert error is None
    with suppress(rw.RankwiseError), rw.capture(model) as trace:  # an error where there is no other mixer
        model(**batch)
    assert any(one.reason.startswith(what) for one in trace.uncaptured)


def test_a_class_of_the_same_name_elsewhere_is_not_taken_for_it():
    assert not NoOperatorAdapter().reads(type("MraSelfAttention", (nn.Module,), {})())
