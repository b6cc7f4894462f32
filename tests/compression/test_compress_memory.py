"""Memory that runs out: the layer is named, finished work stays, the model is whole."""

from typing import Any

import pytest
import torch
from tests.compression.compression_cases import gpt2, ids
from torch import Tensor

import rankwise as rw
from rankwise.compression.layers import out_of_memory
from rankwise.compression.qk_solve import calibrate
from rankwise.errors import CompressionError

FULL = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


@pytest.mark.parametrize("error", FULL, ids=["python", "device", "cpu"])
def test_each_kind_of_want_is_known(error: Exception) -> None:
    assert out_of_memory(error)
    for other in (RuntimeError("shapes differ"), ValueError("out of memory")):
        assert not out_of_memory(other)


@pytest.mark.parametrize(
    ("parts", "calls"), [(("qk",), 2), (("kv",), 5), (("qk", "kv"), 12), (("heads",), 6)]
)
def test_a_model_that_runs_out_of_memory_names_the_step_and_stays(parts: tuple[str, ...], calls: int) -> None:
    model, batch = gpt2(), ids(6, 30)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    inside: Any = model.get_submodule("transformer.h.1.attn.c_proj")
    forward, count = inside.forward, 0

    def full(x: Tensor) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            raise MemoryError
        return forward(x)

    inside.forward = full
    with pytest.raises(
        CompressionError, match=r"GPT2LMHeadModel: expected memory for .*the model is unchanged"
    ):
        rw.compress(model, [batch], keep=0.5, parts=parts)
    del inside.forward
    assert count > calls
    now = model.state_dict()
    assert now.keys() == state.keys()
    assert all(torch.equal(weight, state[name]) for name, weight in now.items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_that_were_calibrated_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(layer: Any, *args: Any, **more: Any) -> Any:
        if layer.projections.layer == 1:
            raise MemoryError
        return calibrate(layer, *args, **more)

    monkeypatch.setattr("rankwise.compression.qk_solve.calibrate", once)
    done = rw.compress(gpt2(), [ids(6, 30)], keep=3 / 8, calibrate=6)
    assert not done.complete
    assert any(
        "for want of memory at transformer.h.1.attn: finished layers are calibrated" in note
        for note in done.notes
    )
    better = {head.layer: head.kl_calibrated < head.kl for head in done.heads}
    assert better == {0: True, 1: False}
