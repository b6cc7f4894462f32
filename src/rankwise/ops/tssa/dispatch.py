"""Which implementation runs: one rule, and no silent change of an explicit choice."""

from importlib.util import find_spec

import torch

from rankwise.errors import InputError, did_you_mean

IMPLEMENTATIONS = ("reference", "cpu", "triton")


def choose(impl: str, device: torch.device) -> str:
    """The implementation for a device.

    ``"auto"`` is ``"cpu"`` for tensors on a CPU, ``"triton"`` for tensors on a CUDA or ROCm device where
    triton is installed, and ``"reference"`` elsewhere. Neither the length nor the dtype is looked at.

    Args:
        impl: what was asked for.
        device: where w lies.

    Returns:
        One of `IMPLEMENTATIONS`.

    Raises:
        InputError: if the name is unknown or the named implementation cannot run there; it never falls back.

    Examples:
        >>> import torch
        >>> choose("auto", torch.device("cpu")), choose("reference", torch.device("cpu"))
        ('cpu', 'reference')
    """
    if impl == "auto":
        if device.type == "cpu":
            return "cpu"
        return "triton" if device.type == "cuda" and _has_triton() else "reference"
    if impl not in IMPLEMENTATIONS:
        fix = did_you_mean(str(impl), ("auto", *IMPLEMENTATIONS))
        raise InputError("impl", wanted="auto, reference, cpu or triton", got=repr(impl), fix=fix)
    if impl == "cpu" and device.type != "cpu":
        raise _cannot("cpu", "tensors on a CPU", f"tensors on {device}")
    if impl == "triton":
        _check_triton(device)
    return impl


def _check_triton(device: torch.device) -> None:
    if not _has_triton():
        raise _cannot("triton", "an installed triton", "none that can be imported")
    if device.type != "cuda" and not interpreting():
        raise _cannot("triton", "tensors on a GPU, or TRITON_INTERPRET=1 set", f"tensors on {device}")


def interpreting() -> bool:
    """Whether Triton's interpreter is switched on, which runs its kernels on a CPU, slowly, for tests."""
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"


def _has_triton() -> bool:
    return find_spec("triton") is not None


def _cannot(impl: str, wanted: str, got: str) -> InputError:
    fix = 'Pass impl="auto", or impl="reference", which runs everywhere.'
    return InputError(f'impl="{impl}"', wanted=wanted, got=got, fix=fix)
