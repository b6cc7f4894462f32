"""What must hold before a model is captured, and what its reader must know."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn

from rankwise.errors import CaptureError, InputError, did_you_mean


def check_capturable(model: object) -> None:
    """Refuse what hooks and modes cannot see into.

    Args:
        model: what `capture` was given.

    Raises:
        CaptureError: if it is no module, or one whose operations run compiled or scripted.
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
    if blocks is not None and not any(fnmatchcase(name, blocks) for name in known):
        raise InputError(
            f"blocks {blocks!r}",
            wanted="a pattern that matches the names of the residual blocks",
            got="no match",
            fix=did_you_mean(blocks, [other for other in known if other]),
        )


def training_notes(model: nn.Module) -> list[str]:
    """Say it where dropout is on: the operators are those before dropout, the states those after it."""
    active = [
        name
        for name, module in model.named_modules()
        if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    ]
    if not active:
        return []
    return [
        f"dropout was on in {len(active)} modules: operators are shown as they are before it, token states "
        "as they are after it, so two runs differ; call model.eval() for repeatable numbers"
    ]
