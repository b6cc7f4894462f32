"""What tells audits of other weights apart, and audits of the same sequences: digests of both."""

import hashlib
from collections.abc import Collection

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch, tensors_of

SAMPLE = 64
"""Numbers of each weight that are looked at: training changes nearly all of them."""
LENGTH = 16
"""Hexadecimal digits of a digest that are kept."""


def weights_digest(model: nn.Module, without: Collection[str] = ()) -> str:
    """A digest of the weights: of their shapes, and of 64 numbers of each, evenly spaced.

    Weights that differ in other numbers only have the same digest. It does not depend on the device, nor on
    a wrapper around the model.

    Cost: one small copy of each weight.

    Args:
        model: the model.
        without: names of weights to leave out, such as those that are in no checkpoint and drawn anew.

    Returns:
        Hexadecimal digits; nothing where weights cannot be looked at: sharded, on the meta device, or of a
        class that holds no plain numbers.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> first, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        >>> weights_digest(first) == weights_digest(torch.nn.Sequential(first))
        True
        >>> weights_digest(first) == weights_digest(other)
        False
    """
    weights = [weight for name, weight in model.named_parameters() if name not in without]
    if not all(_plain(weight) for weight in weights):
        return ""
    found = hashlib.sha256()
    for weight in weights:
        found.update(str(tuple(weight.shape)).encode())
        found.update(_sample(weight).numpy().tobytes())
    return found.hexdigest()[:LENGTH]


def _plain(weight: Tensor) -> bool:
    """Whether numbers can be read out of a weight: those of tensor classes, sharded or quantized, cannot."""
    held = weight.detach()
    return type(held) is Tensor and held.layout is torch.strided and not (held.is_meta or held.is_quantized)


def _sample(weight: Tensor) -> Tensor:
    numbers = weight.detach().reshape(-1)
    numbers = numbers[:: max(len(numbers) // SAMPLE, 1)][:SAMPLE].cpu()
    return torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers.to(torch.float64)


class DataDigest:
    """A digest of the batches that an audit has measured, in their order.

    Examples:
        >>> read = DataDigest()
        >>> read.value
        ''
        >>> read.add(torch.zeros(1, 2))
        >>> len(read.value)
        16
    """

    def __init__(self) -> None:
        self._found = hashlib.sha256()
        self._known: bool | None = None

    def add(self, batch: Batch) -> None:
        """Add a batch that has been measured.

        Args:
            batch: as the model was given it.
        """
        tensors = tensors_of(batch)
        self._known = bool(tensors) and self._known is not False
        for name, tensor in sorted(tensors.items()):
            if tensor.layout != torch.strided or tensor.is_nested:
                self._known = False
                return
            values = tensor.detach().to("cpu").contiguous()
            self._found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            self._found.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())

    @property
    def value(self) -> str:
        """Hexadecimal digits; nothing where there was no whole batch, or one without tensors."""
        return self._found.hexdigest()[:LENGTH] if self._known else ""
