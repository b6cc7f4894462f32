"""What must hold before a model is captured, and what its reader must know."""

from collections.abc import Iterable

import torch
from torch import nn

from rankwise.capture.calls import Call
from rankwise.capture.frames import Frames
from rankwise.capture.names import matches
from rankwise.capture.sharding import check_whole
from rankwise.capture.trace import Trace
from rankwise.errors import CaptureError, InputError, did_you_mean
from rankwise.operators import MixingOperator


def check_capturable(model: object) -> None:
    """Refuse what hooks and modes cannot see into.

    Args:
        model: what `capture` was given.

    Raises:
        CaptureError: if it is no module, one whose operations run compiled or scripted, or one whose layers
            are split over processes.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            "`capture`",
            wanted="a torch.nn.Module",
            got=type(model).__name__,
            fix="Pass the model itself; of a pipeline, its `.model`.",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "`capture`",
            wanted="a module whose operations run in Python",
            got="a TorchScript module",
            fix="Pass the module it was scripted from.",
        )
    if compiled_modules(model) and not _runs_eagerly():
        raise CaptureError(
            f"compiled module {compiled_modules(model)[0] or type(model).__name__!r}",
            wanted="a module whose operations run one by one",
            got="one whose operations torch.compile has fused",
            fix='Capture inside `with torch.compiler.set_stance("force_eager"):`, which runs the same '
            "weights uncompiled.",
        )
    check_whole(model)


def compiled_modules(model: nn.Module) -> list[str]:
    """Names of the modules that `torch.compile` has compiled."""
    optimized = torch._dynamo.eval_frame.OptimizedModule
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, optimized) or module._compiled_call_impl is not None
    ]


def _runs_eagerly() -> bool:
    return torch._dynamo.eval_frame._stance.stance == "force_eager"


def check_unused(entered: bool) -> None:
    """Refuse to start one capture twice.

    Args:
        entered: whether it was started before.

    Raises:
        CaptureError: if it was.
    """
    if entered:
        raise CaptureError(
            "`capture`",
            wanted="one `with` block for each",
            got="a capture that was started before",
            fix="Make a new one: `with rw.capture(model) as trace: ...`; captures may be nested.",
        )


def checked_operator(given: object, site: str) -> Call:
    """What a function given in ``sites`` returned, if it is an operator of shape (B, H, T, S).

    Args:
        given: what it returned.
        site: the name of the module.

    Raises:
        CaptureError: if it is anything else.
    """
    if isinstance(given, MixingOperator) and len(given.shape) == 4:
        return Call(given)
    shape = getattr(given, "shape", None)
    raise CaptureError(
        f"site {site!r}",
        wanted="a function that returns a MixingOperator of shape (B, H, T, S)",
        got=type(given).__name__ if shape is None else f"{type(given).__name__} {tuple(shape)}",
        fix="Return `rw.DenseMixing(weights)`, or `rw.SoftmaxMixing(query, key)` with the heads split.",
    )


def nothing_found(model: nn.Module, trace: Trace, frames: Frames, ran: bool) -> CaptureError:
    """The error of a capture without a mixer: what was seen instead, and how to name it by hand.

    Args:
        model: the model.
        trace: what the capture holds.
        frames: the calls it followed.
        ran: whether mixers ran all the same, in calls that did not end well.
    """
    if ran:
        return CaptureError(
            f"model {type(model).__name__}",
            wanted="at least one call that ends without an error",
            got="mixers only in calls that raised",
            fix="Let the error out of the model, or mend what raised it.",
        )
    if not frames.called and frames.elsewhere:
        return CaptureError(
            "`capture`",
            wanted="the model to run in the thread that entered the block",
            got="calls in another thread only",
            fix="Enter `rw.capture(model)` in the thread that calls the model.",
        )
    if not frames.called:
        return CaptureError(
            "`capture`",
            wanted="the model to run inside the block",
            got="no call of it or of any of its modules",
            fix="Call the captured model itself: `with rw.capture(model) as trace: model(**batch)`.",
        )
    reasons: dict[str, list[str]] = {}
    for module in trace.unseen:
        reasons.setdefault(module.reason, []).append(f"{module.name or 'the model itself'} ({module.type})")
    like = "; ".join(f"{_some(names)}: {reason}" for reason, names in reasons.items())
    return CaptureError(
        f"model {type(model).__name__}",
        wanted="at least one mixing operator",
        got=f"none; modules that look like mixers: {like or 'none'}",
        fix="Name them by hand: `rw.capture(model, sites={'layers.0.mixer': f})`, where f(module, args, "
        "kwargs, output) returns the operator, such as `rw.DenseMixing(weights)` of shape (B, H, T, S).",
    )


def _some(names: list[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_sites(model: nn.Module, sites: Iterable[str], blocks: str | None) -> None:
    """Refuse names of modules that are not there.

    Args:
        model: the model.
        sites: names of modules.
        blocks: a pattern of names, or None.

    Raises:
        InputError: naming the nearest known name.
    """
    known = dict(model.named_modules())
    for name in sites:
        if name not in known:
            raise InputError(
                f"site {name!r}",
                wanted="the name of a module of the model",
                got="none of that name",
                fix=did_you_mean(name, [other for other in known if other]),
            )
    if blocks is not None and not any(matches(name, blocks) for name in known):
        raise InputError(
            f"blocks {blocks!r}",
            wanted="a pattern that matches the names of the residual blocks",
            got="no match",
            fix=did_you_mean(blocks, [other for other in known if other]),
        )


def training_notes(model: nn.Module) -> list[str]:
    """Say it where dropout is on: the operators are those before dropout, the states those after it."""
    active = [name for name, module in model.named_modules() if module.training and _drops(module)]
    return [dropout_note(f"{len(active)} modules")] if active else []


def dropout_note(where: str) -> str:
    """What a reader must know where dropout was on."""
    return (
        f"dropout was on in {where}: operators are shown as they are before it, token states "
        "as they are after it, so two runs differ; call model.eval() for repeatable numbers"
    )


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0
