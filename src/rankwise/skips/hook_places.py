"""Locate skip connections: find the places in a model to hook so that x + f(x) becomes λ·x + f(x)."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import Batch
from rankwise._internals.forward import batch_errors
from rankwise.auditing.error_hints import fix_hint
from rankwise.errors import SkipError, instance_of
from rankwise.skips.hooks import Port, items
from rankwise.skips.residual_sums import (
    ForwardRecord,
    Passage,
    Residual,
    Sum,
    SumName,
    Version,
    find_residuals,
)

PARAMETER = "lambda_skip"
"""Name of the parameter λ in its module; a second λ in the same module gets a number."""
NOTES = "_rankwise_skips"
"""Name of the attribute by which a module with λ lists its places."""


@dataclass(frozen=True)
class SkipPlace:
    """Place of one λ-skip in a model: the modules, arguments and outputs at which λ is applied."""

    name: str = field(compare=False)
    """Name of the module that has the parameter λ, such as ``transformer.h.0.attn``."""
    parameter: str = field(compare=False)
    """Name of the parameter λ in that module."""
    read: Port
    """Argument or output from which x is read."""
    write: Port
    """Argument or output at which λ is applied. (λ − 1)·x is added to an output; an argument is x itself, and
    is multiplied by λ."""
    scope: str | None
    """Module that opens and closes the slot for x in each call; None if x is an argument of the same call."""
    sums: tuple[SumName, ...] = field(default=(), compare=False)
    """Names of the sums that λ scales: several if the module is called several times in a forward pass."""
    block: str = ""
    """Name of the module that computes the sum."""
    time: int = field(default=0, compare=False)
    """Position of the first sum among the recorded events of the forward pass."""
    which: int = 0
    """Operand of the sum that is x: 0 is the first, 1 the second."""
    axis: int = 1
    """Axis of the tokens in x."""
    width: int = 0
    dtype: Any = None
    drops: bool = False
    """True if functional dropout is between the branch f(x) and the sum."""
    norm: str = ""
    """Name of the only module that reads the sum and returns states: the norm of a post-norm block."""
    read_by: str = ""
    """Name of the function that reads the sum outside of any module, so that its norm is unknown."""


def check_module(model: object) -> None:
    """Raise if a model is not a module, for example a name or a pipeline."""
    fix = "Pass the model itself, for example `pipeline.model`."
    instance_of("`model`", model, nn.Module, "a torch.nn.Module", fix=fix, error=SkipError)


def skip_places(model: nn.Module) -> list[SkipPlace]:
    """Return the places of the λ-skips in a model, in the order of the forward pass."""
    check_module(model)
    modules = model.named_modules()
    places = [_rebased(place, name) for name, module in modules for place in vars(module).get(NOTES, ())]
    return sorted(places, key=lambda place: place.time)


def _rebased(place: SkipPlace, module: str) -> SkipPlace:
    """Return a place with the module names of the current model, which may be a part or a larger model."""
    old, new = _words(place.write.module), _words(module)
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()

    def name(before: str) -> str:
        words = _words(before)
        return ".".join([*new, *words[len(old) :]]) if words[: len(old)] == old else before

    return replace(
        place, read=replace(place.read, module=name(place.read.module)),
        write=replace(place.write, module=module),
        scope=None if place.scope is None else name(place.scope), block=name(place.block),
        norm=place.norm and name(place.norm),
        sums=tuple((name(owner), call, index) for owner, call, index in place.sums),
    )  # fmt: skip


def _words(name: str) -> list[str]:
    return name.split(".") if name else []


def find_places(model: nn.Module, example: Batch) -> tuple[list[SkipPlace], list[str]]:
    """Run a model once; return its places, and the blocks with residual connections that no hook reaches.

    Several calls of a module in a forward pass belong to the same place. A norm outside of its block counts
    as the norm of the place only if every sum has a reader; otherwise it is the final norm of a stack.
    """
    with batch_errors(model, example, fix_hint):
        residuals, record = find_residuals(model, example)
    located, missed = [], []
    for residual in residuals:
        total = residual.sum
        way = _as_argument(residual, record) or _as_sum(residual, record) or _as_branch(residual, record)
        drops = way is None
        way = way or _as_branch(residual, record, drops=True)
        if way is None:
            missed.append(total.name[0] or "the model itself")
            continue
        place = SkipPlace(
            "", "", *way, sums=(total.name,), block=total.name[0], time=total.time, which=residual.which,
            axis=residual.axis, width=total.like.shape[-1], dtype=total.like.dtype, drops=drops,
        )  # fmt: skip
        located.append((place, _reader(total, record)))
    every = all(reader is not None for _, reader in located)
    calls: dict[SkipPlace, list[SumName]] = {}
    for place, reader in located:
        if reader is not None and (every or reader[2]):
            place = replace(place, norm=reader[0], read_by=reader[1])
        calls.setdefault(place, []).extend(place.sums)
    places, taken = [], Counter[str]()
    for place, sums in calls.items():
        taken[place.write.module] += 1
        suffix = f"_{number}" if (number := taken[place.write.module]) > 1 else ""
        name, parameter = f"{place.write.module}{suffix}", f"{PARAMETER}{suffix}"
        places.append(replace(place, name=name, parameter=parameter, sums=tuple(sums)))
    return places, missed


def blocks_without(model: nn.Module, names: Iterable[str], blocks: Iterable[str]) -> list[str]:
    """Return the blocks that hold none of the named modules, although similar blocks hold one.

    A block is an item of a list or a dict, or a module with the classes of one of ``blocks``. Two items are
    similar if their names differ only in numbers and they have the same class; in a ModuleList or a
    ModuleDict, any two items are similar. Items inside an outer item are only compared to items at the same
    place.
    """

    def listed(name: str) -> bool:
        return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList | nn.ModuleDict)

    def is_item(name: str) -> bool:
        return name.rpartition(".")[2].isdigit() or listed(name)

    def place(name: str) -> tuple[str, type]:
        outer = re.sub(r"\b\d+\b(?=\.)", "*", name)
        kind = nn.Module if listed(name) else type(model.get_submodule(name))
        return outer if "*" in outer else name.rpartition(".")[0], kind

    modules = {name: module for name, module in model.named_modules() if name}
    held = {name for name in modules if any(f"{inner}.".startswith(f"{name}.") for inner in names)}
    places = {place(name) for name in held if is_item(name)}
    built = {_classes(modules[name]) for name in blocks}
    without = [
        name
        for name, module in modules.items()
        if name not in held and ((is_item(name) and place(name) in places) or _classes(module) in built)
    ]
    return [name for name in without if not any(name.startswith(f"{outer}.") for outer in without)]


def _classes(module: nn.Module) -> tuple[tuple[str, type], ...]:
    """Return the names and classes of a module and of all modules inside it."""
    return tuple((name, type(inner)) for name, inner in module.named_modules())


def _reader(total: Sum, record: ForwardRecord) -> tuple[str, str, bool] | None:
    """Return (module, function, True if in the block) for the only reader of a sum, or None.

    The sum has no reader if it is itself the state: if it is read and also added to, or is read only by
    matrix products, by functions with smaller outputs (such as a mean over tokens), or not at all. If the sum
    is only added to, as in x + f(x) + g(x), the reader of the whole sum is returned.
    """
    same = record.same_numbers(total.result)
    uses = [use for tensor in same for use in record.uses.get(tensor, ()) if not use.copies]
    onward = [later for later in record.sums if any(tensor in later.operands for tensor in same)]
    if onward:
        return _reader(onward[0], record) if len(uses) == 1 else None
    size = math.prod(total.like.shape)
    reads = [use for use in uses if use.numbers == size]
    if not reads:
        return None
    inside = all(total.frames[-1].serial in use.running for use in uses)
    given = [passage.call for tensor in same for passage in record.received.get(tensor, ())]
    states = [
        (call, value)
        for call in sorted(given, key=lambda call: call.serial)
        if all(call.serial in use.running for use in uses)
        for _, value in items(call.output)
        if isinstance(value, Tensor) and value.numel() == size
    ]
    # the innermost module counts whose output the outermost returns unchanged
    names = [call.name for call, value in states if torch.equal(value, states[0][1])]
    return (names[-1], "", inside) if names else ("", reads[0].function, inside)


# --- ways to add λ, the most exact first: read, write, scope ----------------------------------------------

Way = tuple[Port, Port, str | None]


def _as_argument(residual: Residual, record: ForwardRecord) -> Way | None:
    """Return ports to scale x, if x is an argument that the module of the sum only adds; None otherwise."""
    total = residual.sum
    inner, x = total.frames[-1], record.origin(total.operands[residual.which])[0]
    uses = [use for tensor in record.copies_of(x) for use in record.uses.get(tensor, ())]
    uses = [use for use in uses if not use.copies and inner.serial in use.running]
    passages = _received(x, total.like.shape, record)
    received = [passage.port for passage in passages if passage.call is inner]
    if {use.sum for use in uses} != {total.name} or not received:
        return None
    return received[0], received[0], None


def _as_sum(residual: Residual, record: ForwardRecord) -> Way | None:
    """Return ports to correct x + f(x), if a module receives x and returns the unused sum; None otherwise."""
    total = residual.sum
    x, _ = record.origin(total.operands[residual.which])
    for made in record.returned.get(total.result, ()):
        used = any(use.time < made.time for use in record.uses.get(total.result, ()))
        passages = _received(x, made.shape, record)
        received = [passage.port for passage in passages if passage.call is made.call]
        if any(made.call is frame for frame in total.frames) and received and not used:
            return received[0], made.port, None
    return None


def _as_branch(residual: Residual, record: ForwardRecord, drops: bool = False) -> Way | None:
    """Return ports to correct f(x), if a module returns f(x) after x passed a module; None otherwise."""
    total = residual.sum
    x, _ = record.origin(total.operands[residual.which])
    made = _maker(total.operands[1 - residual.which], total.time, record, drops)
    if made is None or made.shape[-1:] != total.like.shape[-1:]:
        return None
    before = [passage for passage in _received(x, made.shape, record) if passage.time < made.time]
    same_call = [passage.port for passage in before if passage.call is made.call]
    if same_call:  # the module that returns f(x) also receives x
        return same_call[0], made.port, None
    returned = [passage for tensor in record.copies_of(x) for passage in record.returned.get(tensor, ())]
    before += [passage for passage in returned if passage.time < made.time and passage.shape == made.shape]
    if not before:
        return None
    source = max(before, key=lambda passage: passage.time)
    # the innermost call around the sum that had begun when x was read
    scope = [frame for frame in total.frames if frame.serial <= source.call.serial][-1]
    return source.port, made.port, scope.name


def _received(x: Version, shape: torch.Size, record: ForwardRecord) -> list[Passage]:
    """Return the passages by which modules received a tensor, or a copy of it, in one shape."""
    given = [passage for tensor in record.copies_of(x) for passage in record.received.get(tensor, ())]
    return [passage for passage in given if passage.shape == shape]


def _maker(y: Version, before: int, record: ForwardRecord, drops: bool) -> Passage | None:
    """Return the outermost module call, before a time, that returned y, a copy of y, or a summand of y."""
    made = [passage for passage in record.returned.get(y, ()) if passage.time < before]
    if made:
        return made[-1]
    source, how, *_ = record.sources.get(y, (y, "made"))
    if how == "copy" or (how == "dropout" and drops):
        return _maker(source, before, record, drops)
    total = next((total for total in record.sums if total.result == y), None)
    if total is None or total.time >= before:
        return None
    makers = (_maker(operand, total.time, record, drops) for operand in total.operands)
    return next((maker for maker in makers if maker is not None), None)
