"""Errors and Ctrl-C during a compression: the model is unchanged, and finished calibration is kept."""

from typing import Any

import pytest
import torch
from tests.compression.compression_cases import gpt2, ids, output
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


@pytest.mark.parametrize(
    ("error", "step", "reason"),
    [
        (MemoryError, 3, "for want of memory at transformer.h.1.attn, which is not"),
        (KeyboardInterrupt, 3, "by Ctrl-C after 3 of 6 steps of transformer.h.1.attn"),
        (KeyboardInterrupt, 6, "by Ctrl-C after 6 of 6 steps of transformer.h.1.attn"),
    ],
)
def test_finished_layers_stay_calibrated(error: type[BaseException], step: int, reason: str) -> None:
    def stop(what: str) -> None:
        if "h.1." in what and what.endswith(f"{step} of 6"):
            raise error

    model = gpt2()
    done = rw.compress(model, [ids(6, 30)], keep=3 / 8, calibrate=6, on_step=stop)
    assert not done.complete
    assert any(f"stopped {reason}" in note for note in done.notes)
    assert all(head.kl_calibrated < head.kl for head in done.heads if head.layer == 0)
    if error is MemoryError:
        assert all(head.kl_calibrated == head.kl for head in done.heads if head.layer == 1)
    assert done.mean_width == 3
    assert bool(output(model, ids()).isfinite().all())
