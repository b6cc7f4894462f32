"""Run a model on something small, to see where its residual connections are."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch, eval_mode, map_tensors, run_model
from rankwise._internals.torch_private import is_compiled
from rankwise.errors import SkipError
from rankwise.skips.locate import SkipLocation, Traffic, locate, reader, with_readers
from rankwise.skips.residuals import Residual, find_residuals, not_finite
from rankwise.skips.sums import Change, History, SumName, SumRecorder, SumReplacer
from rankwise.tracing.model_checks import is_distributed, split_modules
from rankwise.tracing.module_calls import ModuleCalls

TOKENS = 8
OTHER_TOKENS = 6
"""Of a decoder: another number, so that the two sequences are told apart."""


def find_skip_locations(model: nn.Module, example: Batch) -> tuple[list[SkipLocation], list[str]]:
    """Find where the λ-skips of a model go.

    Runs the model once, in evaluation mode and with gradients; nothing of it changes.

    Args:
        model: any module without λ-skips.
        example: something to run it on.

    Returns:
        One location for each residual connection around a mixer, and the names of the blocks in which there
        is one that no module is near enough to reach.

    Raises:
        SkipError: if what the model gives, or a residual connection, is not finite.
    """
    history = History()
    traffic = Traffic(history)
    frames = ModuleCalls(model, on_enter=traffic.entered, on_leave=traffic.left)
    given = map_tensors(example, _with_gradient)
    with probing(model), _differentiable(model), frames.following(), SumRecorder(frames.running, history):
        output = run_model(model, given)
    residuals = find_residuals(history)
    if any(bool(tensor.isnan().any()) for tensor in tensors_in(output)):  # some models mask with infinity
        raise not_finite("what the model gives")
    locations, readers, missed = [], [], []
    for residual in residuals:
        found = locate(residual, traffic)
        if found is None:
            missed.append(_block(residual))
        else:
            locations.append(found)
            readers.append(reader(residual.sum, traffic))
    return with_readers(locations, readers), missed


def run_with(model: nn.Module, example: Batch, changes: Mapping[SumName, Change]) -> list[Tensor]:
    """What a model gives on an example if some sums are something else.

    Args:
        model: the model.
        example: what to run it on.
        changes: name of a sum → what it is to be.
    """
    with probing(model), replacing_sums(model, changes):
        return [tensor.detach() for tensor in tensors_in(run_model(model, example))]


@contextmanager
def replacing_sums(model: nn.Module, changes: Mapping[SumName, Change]) -> Iterator[None]:
    """Put something else in the place of some sums of a model, for as long as the block runs."""
    frames = ModuleCalls(model)
    with frames.following(), SumReplacer(frames.running, changes):
        yield


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, gradients and a seed of our own; afterwards all is as before."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with (
        eval_mode(model),
        torch.random.fork_rng(devices=sorted(devices, key=str)),
        torch.enable_grad(),
    ):
        torch.manual_seed(0)
        yield


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    frozen = [
        parameter
        for parameter in model.parameters()
        if parameter.is_floating_point() and not parameter.requires_grad
    ]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_().clone() if tensor.is_floating_point() else tensor


def _block(residual: Residual) -> str:
    frames = residual.sum.frames
    return (frames[-1].name if frames else "") or "the model itself"


WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})
"""Classes that have counted the parameters of what they wrap: one that comes later is not synchronised."""


def check_traceable(model: object) -> None:
    """Refuse what cannot be changed by hooks.

    Args:
        model: what the user gave.

    Raises:
        SkipError: if it is no module, or one that is compiled, scripted, wrapped or split for several
            devices, or of tensors made in inference mode, or if that mode is on.
    """
    if not isinstance(model, nn.Module):
        raise SkipError(
            "`model`",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            fix="Pass the model itself; of a pipeline, its `.model`.",
        )
    scripted = isinstance(model, torch.jit.ScriptModule)
    if scripted or any(is_compiled(module) for module in model.modules()):
        raise SkipError(
            f"model {type(model).__name__}",
            expected="a module that is not compiled yet",
            got="one that is compiled or scripted",
            fix="Add the skips first, then call torch.compile on the model.",
        )
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    for wrapper in sorted(names & WRAPPERS):
        raise SkipError(
            f"model {type(model).__name__}",
            expected="a module that is not wrapped yet",
            got=f"one wrapped by {wrapper}",
            fix="Add the skips to the model itself first, then wrap it.",
        )
    placed = [name for name, parameter in model.named_parameters() if is_distributed(parameter)]
    if placed or split_modules(model):
        raise SkipError(
            f"model {type(model).__name__}",
            expected="a model whose weights are plain tensors, whole in this process",
            got=f"{len(placed)} DTensor weights, such as {placed[0]!r}"
            if placed
            else "layers split by a plan",
            fix="Add or certify the skips on the model before it is parallelised, or load it without a plan.",
        )
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in model.parameters()):
        raise SkipError(
            f"model {type(model).__name__}",
            expected="a model outside of torch.inference_mode(), where derivatives can be taken",
            got="inference mode, or parameters made in it",
            fix="Build the model and call this outside of it; torch.no_grad() is no hindrance.",
        )


def example_for(model: nn.Module) -> Batch:
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
        expected="an example of what it reads, to see where its residual connections are",
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
    return next(
        (parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu")
    )


def _dtype(model: nn.Module) -> torch.dtype:
    return next(
        (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32
    )


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
