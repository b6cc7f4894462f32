"""Models whose layers are split over several processes, so that this process holds a part of each."""

import sys
from math import prod
from typing import Any

from torch import Tensor, nn

from rankwise.errors import CaptureError

SHARD = "it works on sharded tensors (DTensor), of which this process holds a part"


def check_whole(model: nn.Module) -> None:
    """Refuse a model whose layers no process holds whole.

    Under tensor parallelism each process computes some of the heads, and would report them as all there are.
    FSDP gathers each layer before it runs and DDP copies the model, so both are captured as they are.

    Args:
        model: the model.

    Raises:
        CaptureError: naming the modules and how they are split.
    """
    split = split_modules(model)
    if not split:
        return
    first = ", ".join(f"{name or 'the model itself'} ({how})" for name, how in list(split.items())[:3])
    more = f" and {len(split) - 3} more" if len(split) > 3 else ""
    raise CaptureError(
        f"model {type(model).__name__}",
        wanted="a model whose layers are whole in each process when they run",
        got=f"layers split over processes by a tensor or pipeline parallel plan: {first}{more}",
        fix="A process would report the heads or layers that it holds as all there are. Load the model "
        "without `tp_plan`, `distributed_config` or `parallelize_module`: on one device, with `device_map=` "
        "where whole layers lie on several, or under FSDP (`fully_shard`) or DDP.",
    )


def split_modules(model: nn.Module) -> dict[str, str]:
    """Names of the modules of which this process holds a part while they run, with how they are split."""
    wrapped = [name for name, module in model.named_modules() if _is(module, "fsdp", "FSDPModule")]
    split = {}
    for name, module in model.named_modules():
        gathered = any(not outer or f"{name}.".startswith(f"{outer}.") for outer in wrapped)
        for parameter in module.parameters(recurse=False):
            if _processes(parameter, gathered) > 1:
                split[name] = f"{parameter.placements} over {parameter.device_mesh}"
        marked = _marked(module)
        if marked is not None:
            split.setdefault(name, marked)
    return split


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor of which this process holds a part."""
    return _processes(tensor) > 1


def _processes(tensor: Tensor, gathered: bool = False) -> int:
    """Over how many processes a DTensor is split; the axis that FSDP gathers is the first, and no split."""
    if not _is(tensor, "tensor", "DTensor"):
        return 1
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    sizes = [mesh.size(axis) for axis, placed in enumerate(placements) if not placed.is_replicate()]
    return prod(sizes[1:] if gathered else sizes)


def _marked(module: nn.Module) -> str | None:
    """How a library that keeps the parts as plain tensors says that it has split a module."""
    plan, mesh = getattr(module, "_hf_tp_plan", None), getattr(module, "_hf_device_mesh", None)
    if plan is not None and (mesh is None or mesh.size() > 1):
        return f"{plan}"
    asked = getattr(getattr(module, "config", None), "distributed_config", None)
    sizes = {"tp_size": getattr(module, "tp_size", None), "pp_size": getattr(asked, "pp_size", None)}
    told = [f"{name} {size}" for name, size in sizes.items() if isinstance(size, int) and size > 1]
    return told[0] if told else None


def _is(thing: object, package: str, name: str) -> bool:
    """Whether something is of a class of torch.distributed; where nobody imported that, nothing is."""
    kind = getattr(sys.modules.get(f"torch.distributed.{package}"), name, None)
    return kind is not None and isinstance(thing, kind)
