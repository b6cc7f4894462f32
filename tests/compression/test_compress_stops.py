"""Errors and Ctrl-C during a compression: the model is unchanged."""

from typing import Any

import pytest
import torch
from tests.compression.compression_cases import gpt2, ids
from tests.support.untouched import untouched

import rankwise as rw
from rankwise._internals.forward import out_of_memory
from rankwise.errors import CompressionError

FULL = {
    "python": MemoryError(),
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    "cpu": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
}


@pytest.mark.parametrize("place", FULL)
def test_each_error_without_memory_is_recognized(place: str) -> None:
    assert out_of_memory(FULL[place])
    assert not out_of_memory(RuntimeError("shapes differ"))
    assert not out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(("parts", "calls"), [("width", 2), ("kv", 5), (("width", "kv"), 12), ("heads", 6)])
def test_a_step_without_memory_is_named_and_the_model_stays(parts: Any, calls: int) -> None:
    model = gpt2()
    layer: Any = model.get_submodule("transformer.h.1.attn.c_proj")
    forward, count = layer.forward, [0]

    def full(x: torch.Tensor) -> Any:
        count[0] += 1
        if count[0] > calls:
            raise MemoryError
        return forward(x)

    layer.forward = full
    said = r"GPT2LMHeadModel: expected memory for .*the model is unchanged"
    with untouched(model), pytest.raises(CompressionError, match=said):
        rw.compress(model, [ids(6, 30)], keep=0.5, parts=parts)
    assert count[0] > calls


@pytest.mark.parametrize(
    ("function", "error", "raised", "said"),
    [
        ("width_solve.head_curves", FULL["cpu"], CompressionError, r"transformer\.h\.0\.attn.*is unchanged"),
        ("run.evaluate", KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
    ids=["before the change", "after the change"],
)
def test_an_error_leaves_the_model_unchanged(
    function: str, error: BaseException, raised: type, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(f"rankwise.compression.{function}", stopped)
    model = gpt2()
    with untouched(model), pytest.raises(raised, match=said):
        rw.compress(model, [ids()], keep=3 / 8)
