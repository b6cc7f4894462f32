"""Restart passes without a head at the block of the head: earlier blocks return their recorded outputs."""

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import map_tensors, tensors_in
from rankwise._internals.forward import Change, device_of, free_memory, out_of_memory
from rankwise._internals.torch_private import without_torch_function
from rankwise.errors import first_line
from rankwise.tracing.module_calls import ModuleCall, ModuleCalls, holds, snapshot

SHARE = 0.25
"""Largest fraction of the free memory that recorded outputs of blocks take."""


class _BlockRan(Exception):  # noqa: N818  (no error: it ends a pass early)
    """Raised after the block that a pass checks."""


class Restarts:
    """Outputs of the residual blocks of a model in unchanged passes, at which passes without a head restart.

    Removal of a head changes no block before its own. So these blocks return a copy of their outputs in
    the unchanged pass of the same batch, with all parts, such as position biases. Everything outside of
    blocks runs as usual: embeddings, masks, the last norm, logits. A head of a decoder skips the encoder.

    A block may read a cache or an attribute that an earlier block wrote. Therefore `check` runs each block
    alone, with all earlier blocks skipped. If a bit of an output differs, or a block runs several times in a
    pass, no pass restarts. Batches are recorded in their order until `SHARE` of the free memory is taken; the
    passes of other batches run the whole model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.why_not = ""
        """Reason why no pass restarts. Empty if passes may restart."""
        self.left_out = 0
        """Number of batches whose outputs do not fit."""
        self._model, self._outputs = model, dict[int, dict[str, Any]]()
        self._room, self._last = int(SHARE * free_memory(device_of(model))), 0

    @contextmanager
    def recording(self, number: int, blocks: Set[str]) -> Iterator[None]:
        """Context manager that records the outputs of blocks in an unchanged pass of batch ``number``."""
        outputs: dict[str, Any] = {}
        outermost = {name for name in blocks if not any(holds(block, name) for block in blocks - {name})}
        room = self._room

        def leave(call: ModuleCall) -> None:
            nonlocal room
            if call.name in outputs:
                self.why_not = f"{call.name!r} runs several times in a pass"
            with without_torch_function():
                outputs[call.name] = map_tensors(call.output, snapshot) if room >= 0 else None
            room -= sum(tensor.nbytes for tensor in tensors_in(outputs[call.name]))

        with ModuleCalls(self._model, where=lambda name, _: name in outermost, on_leave=leave).following():
            yield
        if room < 0:
            self.left_out += 1
        elif outputs:
            self._room, self._outputs[number] = room, outputs

    def check(self, mixers: Iterable[str], run: Callable[[int], object]) -> str:
        """Run each block with all earlier blocks skipped. Return the name of the last block with a mixer.

        ``mixers`` are the names of all mixers. ``run`` runs the model on the batch of a number. A pass with
        other outputs of blocks must have run before, to show values that blocks share. Set `why_not` if an
        output differs from the recorded output, or if the blocks of two batches differ.
        """
        number, outputs = next(iter(self._outputs.items()), (0, {}))
        if any(list(outputs) != list(others) for others in self._outputs.values()):
            self.why_not = self.why_not or "other blocks run in other batches"
        self._last = max((self._place(outputs, mixer) for mixer in mixers), default=0)
        # later blocks first: a block that runs rewrites the state that it shares with blocks after it
        for name in reversed(outputs) if not self.why_not else ():

            def leave(call: ModuleCall) -> None:
                pairs = zip(tensors_in(call.output), tensors_in(outputs[call.name]), strict=True)
                if not all(torch.equal(new.nan_to_num(), old.nan_to_num()) for new, old in pairs):
                    self.why_not = f"{call.name!r} differs if the blocks before it are skipped"
                raise _BlockRan

            def is_checked(module: str, _: object, name: str = name) -> bool:
                return module == name

            calls = ModuleCalls(self._model, where=is_checked, on_leave=leave)
            try:
                with self.skipping(number, [name]), calls.following():
                    run(number)
            except _BlockRan:
                pass
            except Exception as error:
                if out_of_memory(error):
                    raise
                self.why_not = (
                    f"{name!r} cannot run if the blocks before it are skipped ({first_line(error)})"
                )
        return list(outputs)[self._last] if outputs else ""

    def skipping(self, number: int, changed: Iterable[str]) -> Change:
        """Return the change that skips all blocks before the first block in which a module is changed.

        The last block with a mixer is not skipped. If ``changed`` is empty, nothing is.
        """
        outputs = {} if self.why_not else self._outputs.get(number, {})
        first = min((self._place(outputs, name) for name in changed), default=0)
        skipped = list(outputs)[: min(first, self._last)]
        forwards = {name: self._returning(name, outputs[name]) for name in skipped}
        return Change(self._model, attributes={name: {"forward": run} for name, run in forwards.items()})

    def _returning(self, name: str, output: Any) -> Callable[..., Any]:
        """Return a function like ``forward`` of a block that returns copies of a recorded output."""

        @wraps(self._model.get_submodule(name).forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with without_torch_function():
                return map_tensors(output, Tensor.clone)

        return forward

    @staticmethod
    def _place(outputs: Iterable[str], module: str) -> int:
        """Return the number of blocks that end before the block with a module. Return 0 if it is in none."""
        return next((place for place, block in enumerate(outputs) if holds(block, module)), 0)
