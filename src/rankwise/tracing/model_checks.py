"""Refuse models that cannot be captured, write notes for users, and unwrap or reshard DDP and FSDP models."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.forward import config_value
from rankwise._internals.torch_private import dropout_rate, is_compiled, is_program, runs_compiled_eagerly
from rankwise.errors import CaptureError, InputError, described, did_you_mean, instance_of
from rankwise.operators import MixingOperator
from rankwise.tracing.block_finder import matches
from rankwise.tracing.module_calls import ModuleCalls, holds
from rankwise.tracing.read_operators import MixingCall
from rankwise.tracing.trace import Trace

NO_STATES = (
    "no token states were found: no item of a list of modules mixes tokens and returns (B, T, D) states of "
    "the shape of its input; name the residual blocks in `blocks=` if there are any"
)
OTHER_THREAD = (
    "the model was also called in another thread, which did not enter `capture`; those calls were not "
    "recorded"
)


def check_capturable(model: nn.Module) -> None:
    """Raise `CaptureError` if a model is not a module, or is compiled, scripted or split over processes."""
    fix = "Pass the model itself; if it is in a pipeline, pass `pipeline.model`."
    model = instance_of("`capture`", model, nn.Module, "a torch.nn.Module", fix=fix, error=CaptureError)
    if is_program(model):
        got, fix = "a program of TorchScript or torch.export", "Pass the module that it was made of."
        raise CaptureError("`model`", expected="a module whose code runs in Python", got=got, fix=fix)
    if compiled_modules(model) and not runs_compiled_eagerly():
        raise CaptureError(
            f"compiled module {compiled_modules(model)[0] or type(model).__name__!r}",
            expected="a module whose operations run one by one",
            got="one whose operations torch.compile has fused",
            fix='Capture inside `with torch.compiler.set_stance("force_eager"):`, which runs the same '
            "weights uncompiled.",
        )
    check_whole(model)


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that `torch.compile` has compiled.

    Examples:
        >>> compiled_modules(nn.Sequential(nn.Linear(2, 2)))
        []
    """
    return [name for name, module in model.named_modules() if is_compiled(module)]


def checked_operator(given: object, site: str) -> MixingCall:
    """Return a ``sites=`` function's result as `MixingCall`. Raise CaptureError if it is not an operator."""
    if isinstance(given, MixingOperator) and len(given.shape) == 4:
        return MixingCall(given)
    raise CaptureError(
        f"site {site!r}",
        expected="a function that returns a MixingOperator of shape (B, H, T, S)",
        got=described(given),
        fix="Return `rw.operators.DenseMixing(weights)`, or `rw.operators.SoftmaxMixing(query, key)` with "
        "the heads split.",
    )


def nothing_found(model: nn.Module, trace: Trace, calls: ModuleCalls, ran: bool) -> CaptureError:
    """Return the error for a capture without mixers. ``ran`` is True if mixers ran but their calls raised."""
    subject = f"model {type(model).__name__}" if ran or calls.called else "`capture`"
    reasons: dict[str, list[str]] = {}
    for module in trace.uncaptured:
        reasons.setdefault(module.reason, []).append(f"{module.name or 'the model itself'} ({module.type})")
    like = "; ".join(f"{_some(names)}: {reason}" for reason, names in reasons.items())
    if ran:
        expected, got = "at least one call that ends without an error", "mixers only in calls that raised"
        fix = "Do not catch the error inside the model, or fix its cause."
    elif calls.called:
        expected = "at least one mixing operator"
        got = f"none; modules that look like mixers: {like or 'none'}"
        fix = (
            "Name them by hand: `rw.capture(model, sites={'layers.0.mixer': f})`, where f(module, args, "
            "kwargs, output) returns the operator, such as `rw.operators.DenseMixing(weights)` of shape "
            "(B, H, T, S)."
        )
    elif calls.in_other_thread:
        got = "calls in another thread only"
        expected = "the model to run in the thread that entered the block"
        fix = "Enter `rw.capture(model)` in the thread that calls the model."
    else:
        got = "no call of it or of any of its modules"
        expected = "the model to run inside the block"
        fix = "Call the captured model itself: `with rw.capture(model) as trace: model(**batch)`."
    return CaptureError(subject, expected=expected, got=got, fix=fix)


def _some(names: list[str]) -> str:
    """Return the first three names and the number of further names, as text for an error message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_sites(model: nn.Module, sites: Iterable[str], blocks: str | None) -> None:
    """Raise `InputError` if a name in ``sites`` or the pattern ``blocks`` matches no module of the model."""
    names = [name for name, _ in model.named_modules()]
    unknown = [
        (f"site {name!r}", name, "the name of a module of the model", "none of that name")
        for name in sites
        if name not in names
    ]
    if blocks is not None and not any(matches(name, blocks) for name in names):
        expected = "a pattern that matches the names of the residual blocks"
        unknown.append((f"blocks {blocks!r}", blocks, expected, "no match"))
    for subject, name, expected, got in unknown:
        raise InputError(subject, expected=expected, got=got, fix=did_you_mean(name, filter(None, names)))


DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout}
DROPOUT_NOTE = (
    "dropout was active in modules or functions: operators are recorded before it and token states after it, "
    "so two runs differ; call model.eval() for repeatable numbers, or pass `training=self.training` to "
    "dropout that is active in evaluation mode"
)


def training_notes(model: nn.Module) -> list[str]:
    """Return a list with one note if modules with dropout are active, otherwise an empty list."""
    active = any(
        dropout_rate(module) > 0 or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)
        for module in model.modules()
        if module.training
    )
    return [DROPOUT_NOTE] if active else []


SHARD = "it works on sharded tensors (DTensor), and this process holds only a part of them"


def check_whole(model: nn.Module) -> None:
    """Raise `CaptureError` if a layer is split over processes.

    Under tensor parallelism each process computes only some heads, and would report them as all heads. FSDP
    gathers each layer before it runs, and DDP copies the model, so both can be captured.
    """
    split = split_modules(model)
    if not split:
        return
    parts = _some([f"{name or 'the model itself'} ({how})" for name, how in split.items()])
    raise CaptureError(
        f"model {type(model).__name__}",
        expected="a model whose layers are whole in each process when they run",
        got=f"layers split over processes by a tensor or pipeline parallel plan: {parts}",
        fix="A process would report the heads or layers that it holds as if they were all. Load the model "
        "without `tp_plan`, `distributed_config` or `parallelize_module`: on one device, with whole layers "
        "on several devices (`device_map=`), or under FSDP (`fully_shard`) or DDP.",
    )


def split_modules(model: nn.Module) -> dict[str, str]:
    """Return the names of modules that are split over processes, each with a description of the split."""
    wrapped = [name for name, module in model.named_modules() if is_of(module, "fsdp", "FSDPModule")]
    split = {}
    for name, module in model.named_modules():
        gathered = any(holds(outer, name) for outer in wrapped)
        for parameter in module.parameters(recurse=False):
            if _processes(parameter, gathered) > 1:
                split[name] = f"{parameter.placements} over {parameter.device_mesh}"
        marked = _marked(module)
        if marked is not None:
            split.setdefault(name, marked)
    return split


def is_shard(tensor: Tensor) -> bool:
    """Return True if a tensor is a DTensor that is split over processes."""
    return _processes(tensor) > 1


def is_distributed(tensor: Tensor) -> bool:
    """Return True if a tensor is a DTensor, even if this process holds all of it."""
    return is_of(tensor, "tensor", "DTensor")


def _processes(tensor: Tensor, gathered: bool = False) -> int:
    """Return the number of processes over which a tensor is split. ``gathered`` ignores the axis of FSDP."""
    if not is_distributed(tensor):
        return 1
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    sizes = [mesh.size(axis) for axis, placed in enumerate(placements) if not placed.is_replicate()]
    return prod(sizes[1:] if gathered else sizes)


def _marked(module: nn.Module) -> str | None:
    """Return how a library such as transformers has split a module into plain tensors, otherwise None."""
    plan, mesh = getattr(module, "_hf_tp_plan", None), getattr(module, "_hf_device_mesh", None)
    if plan is not None and (mesh is None or mesh.size() > 1):
        return f"{plan}"
    asked = config_value(module, "distributed_config")
    sizes = {"tp_size": getattr(module, "tp_size", None), "pp_size": getattr(asked, "pp_size", None)}
    told = [f"{name} {size}" for name, size in sizes.items() if isinstance(size, int) and size > 1]
    return told[0] if told else None


def is_of(thing: object, package: str, name: str) -> bool:
    """Return True if an object is a ``torch.distributed.{package}.{name}``, without importing the package."""
    kind = getattr(sys.modules.get(f"torch.distributed.{package}"), name, None)
    return kind is not None and isinstance(thing, kind)


@contextmanager
def sharded_again(model: Any) -> Iterator[None]:
    """Context manager that shards the weights of an FSDP2 model again when the block ends.

    A forward pass without a backward pass leaves the outermost weights gathered. The optimizer then updates
    only the shards, so the next step would run with old gathered weights.

    Raises:
        CaptureError: if FSDP1 wraps the model, because FSDP1 cannot shard weights again.
    """
    modules: list[Any] = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(is_of(module, "fsdp", "FullyShardedDataParallel") for module in modules):
        raise CaptureError(
            f"model {type(model).__name__}",
            expected="a model sharded by FSDP2, if it is sharded",
            got="a model wrapped by FSDP1, which may continue to train with weights gathered for the audit",
            fix="Shard it by `torch.distributed.fsdp.fully_shard` (accelerate: `fsdp_version: 2`), or audit "
            "its saved checkpoints.",
        )
    try:
        yield
    finally:
        for module in modules:
            if is_of(module, "fsdp", "FSDPModule"):
                module.reshard()
