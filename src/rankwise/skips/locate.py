"""Locate λ-skips: the module to hook so that a residual connection becomes λ·x + f(x)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from rankwise._internals.forward import Batch, map_tensors, run_model
from rankwise.skips.find import (
    Residual,
    block_of,
    differentiable,
    find_residuals,
    not_finite,
    probe_mode,
    tensors_in,
)
from rankwise.skips.hooks import (
    Argument,
    CloseSlot,
    CorrectBranch,
    CorrectSum,
    HoldInput,
    HoldOutput,
    Key,
    OpenSlot,
    ScaleArgument,
    ThreadSlot,
)
from rankwise.skips.sums import History, Sum, SumName, SumRecorder, Version, version
from rankwise.tracing.module_calls import ModuleCall, ModuleCalls, parameter_names

PARAMETER = "lambda_skip"
"""Name of λ in the module that carries it; a second one in the same module gets a number."""
NOTES = "_rankwise_skips"
"""Attribute of a module with λ: its sites."""


@dataclass(frozen=True)
class Given:
    """Tensor that a module received."""

    time: int
    frame: ModuleCall
    position: int | None
    name: str | None


@dataclass(frozen=True)
class Made:
    """Tensor that a module returned."""

    time: int
    frame: ModuleCall
    key: Key


@dataclass
class Traffic:
    """Tensors that every module received and returned in one forward pass."""

    history: History
    given: dict[Version, list[Given]] = field(default_factory=dict)
    made: dict[Version, list[Made]] = field(default_factory=dict)

    def entered(self, frame: ModuleCall) -> None:
        """Record the arguments of a call."""
        time = self.history.tick()
        names = parameter_names(frame.module)
        for at, value in enumerate(frame.args):
            if isinstance(value, Tensor):
                name = names[at] if at < len(names) else None
                self._note(self.given, value, Given(time, frame, at, name))
        for name, value in frame.kwargs.items():
            if isinstance(value, Tensor):
                position = names.index(name) if name in names else None
                self._note(self.given, value, Given(time, frame, position, name))

    def left(self, frame: ModuleCall) -> None:
        """Record the output of a call."""
        time = self.history.tick()
        for key, value in _items(frame.output):
            if isinstance(value, Tensor):
                self._note(self.made, value, Made(time, frame, key))

    def given_as(self, origin: Version) -> list[Given]:
        """Return the calls that received a tensor or a copy of it."""
        return [note for name in self.history.names(origin) for note in self.given.get(name, ())]

    def made_as(self, origin: Version) -> list[Made]:
        """Return the calls that returned a tensor or a copy of it."""
        return [note for name in self.history.names(origin) for note in self.made.get(name, ())]

    def _note(self, notes: dict[Version, list[Any]], tensor: Tensor, note: Given | Made) -> None:
        self.history.alive.append(tensor)
        notes.setdefault(version(tensor), []).append(note)


def _items(output: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(output, Tensor):
        yield None, output
    elif isinstance(output, tuple | list):
        yield from enumerate(output)
    elif isinstance(output, dict):
        yield from output.items()


@dataclass(frozen=True)
class SkipLocation:
    """Modules, arguments and outputs at which one λ-skip is added."""

    module: str
    """Module that has λ."""
    how: str
    """"argument": the hook multiplies an argument by λ; "sum" or "branch": it adds (λ − 1)·x to an output."""
    argument: tuple[str | None, int | None] = (None, None)
    key: Key = None
    source: str = ""
    """Module that receives or returns x, if it is another module."""
    source_gives: bool = False
    source_key: Key = None
    scope: str = ""
    """Module whose call opens and closes the slot."""
    block: str = ""
    """Module that takes the sum."""
    width: int = 0
    sum: SumName = field(default=("", 0, 0), compare=False)
    """Sum of the forward pass that λ scales."""
    time: int = field(default=0, compare=False)
    """Time of that sum."""
    which: int = 0
    """Operand of the sum that is x."""
    drops: bool = False
    """True if functional dropout is between branch and sum."""
    dtype: Any = None
    axis: int = 1
    """The axis of the tokens."""
    norm: str = ""
    """Module that is the only reader of the sum and returns states: a norm, in a post-norm block."""
    read_by: str = ""
    """Function that reads the sum, if it is not in a module; its norm is unknown."""

    def install(self, model: nn.Module, parameter: str) -> None:
        """Add the hooks; λ must exist."""
        module, given = model.get_submodule(self.module), Argument(*self.argument)
        if self.how == "argument":
            module.register_forward_pre_hook(ScaleArgument(parameter, given), with_kwargs=True)
            return
        if self.how == "sum":
            module.register_forward_hook(CorrectSum(parameter, given, self.key), with_kwargs=True)
            return
        held, source, scope = ThreadSlot(), model.get_submodule(self.source), model.get_submodule(self.scope)
        scope.register_forward_pre_hook(OpenSlot(held))  # before any hook of the same module that reads
        if self.source_gives:
            source.register_forward_hook(HoldOutput(self.source_key, held))
        else:
            source.register_forward_pre_hook(HoldInput(given, held), with_kwargs=True)
        module.register_forward_hook(CorrectBranch(parameter, self.key, held))
        scope.register_forward_hook(CloseSlot(held), always_call=True)

    def renamed(self, module: str) -> "SkipLocation":
        """Return the location for another name of its module, in a part of the model or in a larger model."""
        old, new = _parts(self.module), _parts(module)
        while old and new and old[-1] == new[-1]:
            old.pop()
            new.pop()

        def name(before: str) -> str:
            parts = _parts(before)
            return ".".join([*new, *parts[len(old) :]]) if parts[: len(old)] == old else before

        return replace(
            self,
            module=module,
            source=name(self.source),
            scope=name(self.scope),
            block=name(self.block),
            norm=self.norm and name(self.norm),
            sum=(name(self.sum[0]), *self.sum[1:]),
        )


@dataclass(frozen=True)
class SkipSite:
    """Place of one λ-skip in a model."""

    name: str
    """Module that carries λ, such as ``transformer.h.0.attn``."""
    parameter: str
    """Name of λ in that module."""
    location: SkipLocation
    sums: tuple[SumName, ...] = ()
    """Sums of a forward pass that λ scales: several if the module is called several times."""


def skip_sites(model: nn.Module) -> list[SkipSite]:
    """Return the sites of a model with λ-skips, in the order of the forward pass."""
    if not isinstance(model, nn.Module):
        return []
    sites = [
        _renamed(site, name) for name, module in model.named_modules() for site in vars(module).get(NOTES, ())
    ]
    return sorted(sites, key=lambda site: site.location.time)


def _renamed(site: SkipSite, module: str) -> SkipSite:
    location = site.location.renamed(module)
    return replace(
        site, location=location, sums=tuple((location.sum[0], call, at) for _, call, at in site.sums)
    )


def name_sites(locations: list[SkipLocation]) -> list[SkipSite]:
    """Return named sites; several calls of one module in a forward pass are one site."""
    sites: list[SkipSite] = []
    for location in dict.fromkeys(locations):
        number = sum(site.location.module == location.module for site in sites)
        suffix = f"_{number + 1}" if number else ""
        sums = tuple(other.sum for other in locations if other == location)
        sites.append(SkipSite(f"{location.module}{suffix}", f"{PARAMETER}{suffix}", location, sums))
    return sites


def _parts(name: str) -> list[str]:
    return name.split(".") if name else []


def locate(residual: Residual, traffic: Traffic) -> SkipLocation | None:
    """Return the most exact location for λ, or None if no module can be hooked."""
    common: dict[str, Any] = {
        "block": residual.sum.frames[-1].name if residual.sum.frames else "",
        "width": residual.sum.shape[-1],
        "sum": residual.sum.name,
        "time": residual.sum.time,
        "which": residual.which,
        "dtype": residual.sum.dtype,
        "axis": residual.axis,
    }
    found = (
        _as_argument(residual, traffic)
        or _as_sum(residual, traffic)
        or _as_branch(residual, traffic, drops=False)
        or _as_branch(residual, traffic, drops=True)
    )
    return None if found is None else SkipLocation(**found, **common)


@dataclass(frozen=True)
class Reader:
    """The only reader of a sum that returns states."""

    module: str = ""
    function: str = ""
    """Name of the function, if no module reads the sum."""
    inside: bool = False
    """True if the reader is in the module that takes the sum; otherwise it may be the norm after a stack."""

    def __bool__(self) -> bool:
        return bool(self.module or self.function)


def reader(sum_: Sum, traffic: Traffic) -> Reader:
    """Return the only reader of the sum of a residual connection; an empty reader in most blocks.

    It is empty if the sum is read and also added to, or is read only by products with a matrix, by functions
    with smaller outputs (a mean over tokens), or not at all: then the sum is the state. If the sum is only
    added to, x + f(x) + g(x), it is the reader of the whole sum.
    """
    history = traffic.history
    same = history.same_numbers(sum_.result)
    uses = [use for tensor in same for use in history.uses.get(tensor, ()) if not use.passes]
    onward = [later for later in history.sums if any(tensor in later.operands for tensor in same)]
    if onward:
        return reader(onward[0], traffic) if len(uses) == 1 else Reader()
    size = math.prod(sum_.shape)
    reads = [use for use in uses if use.numbers == size and not use.product]
    if not reads:
        return Reader()
    around = sum_.frames[-1] if sum_.frames else None
    inside = around is None or all(around.serial in use.running for use in uses)
    given = [argument.frame for name in same for argument in traffic.given.get(name, ())]
    alone = [frame for frame in given if all(frame.serial in use.running for use in uses)]
    for frame in sorted(alone, key=lambda frame: frame.serial, reverse=True):
        gives = [value for _, value in _items(frame.output) if isinstance(value, Tensor)]
        if any(value.numel() == size for value in gives):
            return Reader(frame.name, "", inside)
    return Reader("", reads[0].function, inside)


def with_readers(locations: Sequence[SkipLocation], readers: Sequence[Reader]) -> list[SkipLocation]:
    """Return locations with the readers of their sums.

    A reader outside of the block counts only if every sum has one; otherwise it is the norm after a stack.
    """
    every = all(readers)
    return [
        replace(location, norm=by.module, read_by=by.function) if by.inside or every else location
        for location, by in zip(locations, readers, strict=True)
    ]


def _as_argument(residual: Residual, traffic: Traffic) -> dict[str, Any] | None:
    """Return a location if the module that takes the sum receives x and does nothing else with it."""
    sum_, history = residual.sum, traffic.history
    if not sum_.frames:
        return None
    inner = sum_.frames[-1]
    x = history.origin(sum_.operands[residual.which])
    all_uses = (use for name in history.names(x) for use in history.uses.get(name, ()) if not use.copies)
    uses = [use for use in all_uses if inner.serial in use.running]
    if {use.sum for use in uses} != {sum_.name}:
        return None
    for given in traffic.given_as(x):
        if given.frame is inner:
            return {"module": inner.name, "how": "argument", "argument": (given.name, given.position)}
    return None


def _as_sum(residual: Residual, traffic: Traffic) -> dict[str, Any] | None:
    """Return a location if a module that receives x returns the sum and has not used the sum."""
    sum_, history = residual.sum, traffic.history
    x = history.origin(sum_.operands[residual.which])
    around = {frame.serial for frame in sum_.frames}
    for made in traffic.made.get(sum_.result, ()):
        if made.frame.serial not in around:
            continue
        used = [use for use in history.uses.get(sum_.result, ()) if use.time < made.time]
        given = [argument for argument in traffic.given_as(x) if argument.frame is made.frame]
        if given and not used:
            argument = (given[0].name, given[0].position)
            return {"module": made.frame.name, "how": "sum", "argument": argument, "key": made.key}
    return None


def _as_branch(residual: Residual, traffic: Traffic, drops: bool) -> dict[str, Any] | None:
    """Return a location if a module returns f(x) or a summand, and a module received or returned x before."""
    sum_, history = residual.sum, traffic.history
    x = history.origin(sum_.operands[residual.which])
    made = _maker(sum_.operands[1 - residual.which], sum_.time, traffic, drops)
    if made is None:
        return None
    source = _source(x, made, traffic)
    if source is None:
        return None
    common = {"module": made.frame.name, "key": made.key, "drops": drops}
    if isinstance(source, Given) and source.frame is made.frame:  # it can see the residual itself
        return common | {"how": "sum", "argument": (source.name, source.position)}
    # the innermost call around the sum that had begun when x was read
    scope = [frame for frame in sum_.frames if frame.serial <= source.frame.serial][-1]
    held = {"how": "branch", "source": source.frame.name, "scope": scope.name}
    if isinstance(source, Made):
        return common | held | {"source_gives": True, "source_key": source.key}
    return common | held | {"argument": (source.name, source.position)}


def _maker(y: Version, before: int, traffic: Traffic, drops: bool) -> Made | None:
    """Return the outermost call that returned a tensor, a copy of it, or a summand of it."""
    history = traffic.history
    mades = [made for made in traffic.made.get(y, ()) if made.time < before]
    if mades:
        return mades[-1]
    copy = history.copies.get(y)
    if copy is not None and (drops or not copy.drops):
        return _maker(copy.source, before, traffic, drops)
    sum_ = history.results.get(y)
    if sum_ is not None and sum_.time < before:
        parts = (_maker(part, sum_.time, traffic, drops) for part in sum_.operands)
        return next((part for part in parts if part is not None), None)
    return None


def _source(x: Version, made: Made, traffic: Traffic) -> Given | Made | None:
    """Return the last call before the end of the branch that received or returned x."""
    around: list[Given | Made] = [*traffic.given_as(x), *traffic.made_as(x)]
    events = [event for event in around if event.time < made.time]
    own = [event for event in events if isinstance(event, Given) and event.frame is made.frame]
    return own[0] if own else max(events, key=lambda event: event.time, default=None)


def find_skip_locations(model: nn.Module, example: Batch) -> tuple[list[SkipLocation], list[str]]:
    """Run a model once; return the locations of λ, and the blocks with residuals that no module reaches."""
    history = History()
    traffic = Traffic(history)
    frames = ModuleCalls(model, on_enter=traffic.entered, on_leave=traffic.left)
    given = map_tensors(example, _with_gradient)
    with probe_mode(model), differentiable(model), frames.following(), SumRecorder(frames.running, history):
        output = run_model(model, given)
    residuals = find_residuals(history)
    if any(bool(tensor.isnan().any()) for tensor in tensors_in(output)):  # some models mask with infinity
        raise not_finite("the output of the model")
    locations, readers, missed = [], [], []
    for residual in residuals:
        found = locate(residual, traffic)
        if found is None:
            missed.append(block_of(residual.sum))
        else:
            locations.append(found)
            readers.append(reader(residual.sum, traffic))
    return with_readers(locations, readers), missed


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_().clone() if tensor.is_floating_point() else tensor
