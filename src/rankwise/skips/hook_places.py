"""Locate skip connections: find the places in a model to hook so that x + f(x) becomes λ·x + f(x)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import Batch
from rankwise.auditing.error_hints import batch_errors
from rankwise.errors import SkipError, instance_of
from rankwise.skips.hooks import Argument, Key, items
from rankwise.skips.residual_sums import (
    ForwardRecord,
    Passage,
    Residual,
    Sum,
    SumName,
    Version,
    find_residuals,
)
from rankwise.tracing.module_calls import holds

PARAMETER = "lambda_skip"
"""Name of the parameter λ in its module. A second λ in the same module gets a number."""
NOTES = "_rankwise_skips"
"""Name of the attribute by which a module with λ lists its places."""


@dataclass(frozen=True)
class SkipPlace:
    """Place of one λ-skip in a model: the modules, arguments and outputs at which λ is applied."""

    name: str = field(compare=False)
    """Name of the module with the parameter λ, such as ``transformer.h.0.attn``. A second λ adds ``_2``."""
    parameter: str = field(compare=False)
    """Name of the parameter λ in that module."""
    module: str
    """Name of the module that returns the branch f(x) and has the parameter λ."""
    key: Key
    """Key of the item in the output of `module` to which (λ − 1)·x is added."""
    source: str
    """Name of the module that receives x."""
    argument: Argument
    """Argument of `source` that is x."""
    scope: str
    """Name of the module whose calls open and close the slot for x."""
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
    """Raise `SkipError` if a model is not a module, for example a name or a pipeline."""
    fix = "Pass the model itself, for example `pipeline.model`."
    instance_of("`model`", model, nn.Module, "a torch.nn.Module", fix=fix, error=SkipError)


def skip_places(model: nn.Module) -> list[SkipPlace]:
    """Return the places of the λ-skips in a model, in the order of the forward pass.

    Raise `SkipError` if λ is computed from other parameters, because its value may then be out of date.
    """
    check_module(model)
    places = []
    for name, module in model.named_modules():
        parameters = {
            parameter for parameter, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        for place in vars(module).get(NOTES, ()):
            if place.parameter not in parameters:
                raise SkipError(
                    f"λ of {place.name!r}", expected="a parameter of its module", got="one that is computed",
                    fix="Remove its parametrization, pruning or weight norm; take FSDP2 in place of FSDP1.",
                )  # fmt: skip
            places.append(_rebased(place, name))
    return sorted(places, key=lambda place: place.time)


def _rebased(place: SkipPlace, module: str) -> SkipPlace:
    """Return a place with the module names of the current model, which may be a part or a larger model."""
    old, new = _words(place.module), _words(module)
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()

    def name(before: str) -> str:
        words = _words(before)
        return ".".join([*new, *words[len(old) :]]) if words[: len(old)] == old else before

    return replace(
        place, module=module, source=name(place.source), scope=name(place.scope),
        block=name(place.block), norm=place.norm and name(place.norm),
        sums=tuple((name(owner), call, index) for owner, call, index in place.sums),
    )  # fmt: skip


def _words(name: str) -> list[str]:
    return name.split(".") if name else []


def find_places(model: nn.Module, example: Batch) -> tuple[list[SkipPlace], list[str]]:
    """Run a model once. Return its places for λ, and the blocks whose residual connections no hook reaches.

    Several calls of a module in a forward pass belong to the same place. A norm outside of the block counts
    as the norm of the place only if every sum has a reader. Otherwise the norm is the final norm of a stack.
    """
    with batch_errors(model, example):
        residuals, record = find_residuals(model, example)
    located, missed = [], []
    for residual in residuals:
        total = residual.sum
        hooked = _modules(residual, record, drops=False) or _modules(residual, record, drops=True)
        if hooked is None:
            missed.append(total.name[0] or "the model itself")
            continue
        place = SkipPlace(
            "", "", **hooked, sums=(total.name,), block=total.name[0], time=total.time,
            which=residual.which, axis=residual.axis, width=total.like.shape[-1], dtype=total.like.dtype,
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
        taken[place.module] += 1
        suffix = f"_{number}" if (number := taken[place.module]) > 1 else ""
        name, parameter = f"{place.module}{suffix}", f"{PARAMETER}{suffix}"
        places.append(replace(place, name=name, parameter=parameter, sums=tuple(sums)))
    return places, missed


def blocks_without(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the items of module lists that contain no named module, if another item of the list does.

    In a Sequential, only items of the same class as such another item are returned.
    """
    without: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            items = {f"{name}.{key}".lstrip("."): item for key, item in module.named_children()}
            held = [key for key in items if any(holds(key, inner) for inner in names)]
            kinds = {type(items[key]) for key in held}
            any_class = bool(held) and not isinstance(module, nn.Sequential)
            without += [
                key for key, item in items.items() if key not in held and (any_class or type(item) in kinds)
            ]
    return without


def _reader(total: Sum, record: ForwardRecord) -> tuple[str, str, bool] | None:
    """Return (module, function, True if in the block) for the only reader of a sum. One name is empty.

    Return None if the sum itself is the next state. This is so if the sum is read and also added to. It is
    also so if only matrix products or functions with smaller outputs (such as a mean over tokens) read the
    sum, or nothing does. For a sum that is only added to, as in x + f(x) + g(x), the reader of the whole sum
    is returned.
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
    # modules around the norm may return its output unchanged: take the innermost of these modules
    names = [call.name for call, value in states if torch.equal(value, states[0][1])]
    return (names[-1], "", inside) if names else ("", reads[0].function, inside)


# --- modules to hook --------------------------------------------------------------------------------------


def _modules(residual: Residual, record: ForwardRecord, drops: bool) -> dict[str, Any] | None:
    """Return the modules to hook, as fields of a place.

    Return None if no module returns f(x), or if no module receives x before. With ``drops``, functional
    dropout may be between the module that returns f(x) and the sum.
    """
    total = residual.sum
    x, _ = record.origin(total.operands[residual.which])
    made = _maker(total.operands[1 - residual.which], total.time, record, drops)
    if made is None or made.shape[-1:] != total.like.shape[-1:]:
        return None
    passages = [passage for tensor in record.copies_of(x) for passage in record.received.get(tensor, ())]
    before = [passage for passage in passages if passage.time < made.time and passage.shape == made.shape]
    if not before:
        return None
    same_call = [passage for passage in before if passage.call is made.call]
    source = same_call[0] if same_call else max(before, key=lambda passage: passage.time)
    # the innermost call that contains the sum and already ran when the skip input x was read
    scope = [frame for frame in total.frames if frame.serial <= source.call.serial][-1]
    return {
        "module": made.call.name, "key": made.place, "source": source.call.name, "argument": source.place,
        "scope": scope.name, "drops": drops,
    }  # fmt: skip


def _maker(y: Version, before: int, record: ForwardRecord, drops: bool) -> Passage | None:
    """Return the outermost module call that returned y, a copy of y, or a summand of y before a time.

    Return None if there is no such call.
    """
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
