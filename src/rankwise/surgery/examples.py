"""Something small to run a model on, where the user gives nothing."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.surgery.errors import SkipError

TOKENS = 8
OTHER_TOKENS = 6
"""Of a decoder: another number, so that the two sequences are told apart."""
Example = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor


def example_for(model: nn.Module) -> Example:
    """Make a small batch for a model of transformers: a few token ids, or one picture of noise.

    Args:
        model: the model.

    Raises:
        SkipError: if the model does not say what it reads.
    """
    config = getattr(model, "config", None)
    reads = str(getattr(model, "main_input_name", ""))
    if config is not None and reads == "input_ids":
        return _ids(model, config)
    if config is not None and reads == "pixel_values":
        return {"pixel_values": _noise(model, _picture(config))}
    raise SkipError(
        f"model {type(model).__name__}",
        wanted="an example of what it reads, to see where its residual connections are",
        got="none, and it does not say what it reads" if not reads else f"none; it reads {reads}",
        fix="Pass one small batch: `rw.add_lambda_skip(model, example=batch)`, a dict, a tuple or a tensor.",
    )


def _ids(model: nn.Module, config: Any) -> dict[str, Tensor]:
    text = getattr(config, "get_text_config", lambda: config)()
    most = int(getattr(text, "vocab_size", 0) or 64)
    special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "mask", "image")}
    plain = [token for token in range(min(most, 64)) if token not in special] or [0]
    ids = [plain[(3 * at + 1) % len(plain)] for at in range(TOKENS)]
    device = _device(model)
    example = {"input_ids": torch.tensor([ids], device=device)}
    if getattr(config, "is_encoder_decoder", False):
        example["decoder_input_ids"] = torch.tensor([ids[:OTHER_TOKENS]], device=device)
    if "attention_mask" in inspect.signature(model.forward).parameters:
        example["attention_mask"] = torch.ones_like(example["input_ids"])
    return example


def _picture(config: Any) -> tuple[int, ...]:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return (1, int(getattr(config, "num_channels", 3)), int(height), int(width))


def _noise(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(_device(model), _dtype(model))


def _device(model: nn.Module) -> torch.device:
    return next((one.device for one in model.parameters() if not one.is_meta), torch.device("cpu"))


def _dtype(model: nn.Module) -> torch.dtype:
    return next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)


def call(model: nn.Module, example: Example) -> Any:
    """Run a model on a batch as `rankwise.audit` takes them.

    Args:
        model: the model.
        example: a dict, a tuple or list, or a tensor.
    """
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def tensors_in(output: Any) -> list[Tensor]:
    """All floating tensors in what a model gave.

    Args:
        output: a tensor, or tuples and dicts of them.
    """
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if not isinstance(output, tuple | list):
        return []
    return [tensor for value in output for tensor in tensors_in(value)]
