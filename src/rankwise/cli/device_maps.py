"""Where the weights of a model go: one device, or spread over several, the memory and the disk."""

import importlib.util
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rankwise._internals.files import writable_folder
from rankwise.errors import InputError, did_you_mean

KINDS = ("cpu", "cuda", "mps", "xpu", "npu", "hpu")
"""Of devices."""
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways that accelerate spreads a model over the devices it finds."""
ON_DISK = "disk"


def checked_device(name: str, option: str = "--device") -> torch.device:
    """Refuse a device that torch does not see. Nothing is put on it, so processes that share it may ask.

    Args:
        name: such as ``cpu`` or ``cuda:0``.
        option: that names it.

    Raises:
        InputError: if there is no such device.

    Examples:
        >>> checked_device("cpu")
        device(type='cpu')
    """
    there = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        there += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    with suppress(RuntimeError):  # torch has no devices of that kind
        device = torch.device(name)
        if device.type == "cpu" or f"{device.type}:{device.index or 0}" in there:
            return device
    raise InputError(
        f"{option} {name}",
        expected="a device that torch sees",
        got=f"only {', '.join(there)} (torch {torch.__version__})",
        fix="Use cpu, or install torch for your accelerator.",
    )


def placement(
    model: str, device: str | None, device_map: str | None, offload_folder: Path | None
) -> dict[str, Any]:
    """What ``from_pretrained`` is told of devices; nothing where the model goes to one of them as a whole.

    Args:
        model: as the user named it.
        device: for the whole of it.
        device_map: one of `SPREAD`, a device, or JSON of the devices of its modules.
        offload_folder: where weights go that are on the disk.

    Raises:
        InputError: if these do not go together, accelerate is not installed, there is no such device, or the
            folder cannot be made.

    Examples:
        >>> placement("gpt2", "cpu", None, None)
        {}
    """
    if device_map is None:
        if offload_folder is not None:
            raise InputError(
                f"--offload-folder {offload_folder}",
                expected="--device-map beside it, which says what goes there",
                got="none",
                fix="Pass --device-map auto.",
            )
        return {}
    option = f"--device-map {device_map}"
    if device is not None:
        raise InputError(
            option, expected="no --device beside it", got=f"--device {device}", fix="Leave one of them out."
        )
    if model.rpartition(":")[0].endswith(".py"):
        raise InputError(
            option,
            expected="a model that transformers loads",
            got=f"the factory {model}",
            fix="Put the model on its devices in the factory.",
        )
    if importlib.util.find_spec("accelerate") is None:
        raise InputError(
            option,
            expected="the package accelerate",
            got="an environment without it",
            fix="pip install 'rankwise[train]'",
        )
    chosen = _parsed(device_map, option)
    devices = set(chosen.values()) if isinstance(chosen, dict) else {chosen}.difference(SPREAD)
    for name in devices - {ON_DISK}:
        checked_device(f"cuda:{name}" if isinstance(name, int) else str(name), "--device-map")
    if ON_DISK in devices and offload_folder is None:
        raise InputError(
            option, expected="--offload-folder for what goes to the disk", got="none", fix="Name a folder."
        )
    if offload_folder is None:
        return {"device_map": chosen}
    writable_folder(offload_folder, "--offload-folder")
    return {"device_map": chosen, "offload_folder": str(offload_folder)}


def _parsed(device_map: str, option: str) -> str | dict[str, Any]:
    if not device_map.lstrip().startswith("{"):
        if device_map not in SPREAD and not device_map.startswith(KINDS):
            raise InputError(
                option,
                expected="a way to spread a model, a device, or JSON",
                got=device_map,
                fix=did_you_mean(device_map, SPREAD),
            )
        return device_map
    try:
        parsed: dict[str, Any] = json.loads(device_map)
    except ValueError as error:
        raise InputError(
            option,
            expected='JSON such as {"model.embed_tokens": 0, "model.layers": "cpu"}',
            got=str(error),
            fix='Quote it for the shell: --device-map \'{"": "cpu"}\'.',
        ) from error
    return parsed
