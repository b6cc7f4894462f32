"""Run a model on a batch, and change a model reversibly."""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from rankwise._internals.batches import (
    Batch,
    map_leaves,
    output_embedding,
    second_argument,
    takes_dict,
    tensors_in,
)
from rankwise._internals.torch_private import like, original_of, preserve_state, set_attribute
from rankwise.errors import InputError, RankwiseError, first_line

HALF = (torch.float16, torch.bfloat16)
Progress = Callable[[str, float], None]
"""Function of a step's text and the finished share of the work, 0 to 1; the share restarts with a new kind
of step, and is NaN if it is unknown."""


def config_value(source: Any, *names: str, default: Any = None) -> Any:
    """Return the first value that is not None under `names` in a configuration or a model's configuration.

    Return ``default`` if there is no value, or if transformers raises because a value depends on the layer.
    """
    config = getattr(source, "config", None) if isinstance(source, nn.Module) else source
    try:
        return next((v for name in names if (v := getattr(config, name, None)) is not None), default)
    except RuntimeError:
        return default


def vocabulary(model: nn.Module) -> int:
    """Return the number of rows of the output embedding of a transformers model. Return 0 if unknown."""
    weight = getattr(output_embedding(model), "weight", None)
    return len(weight) if isinstance(weight, Tensor) else 0


def run_model(model: nn.Module, batch: Batch, *, seed: int | None = 0) -> Any:
    """Call ``model(**batch)`` for a dict, ``model(*batch)`` for a tuple or list, otherwise ``model(batch)``.

    A dict is passed as one argument if ``forward`` takes a dict, as in sentence-transformers.

    The model gets a copy of the batch and of its own buffers. Otherwise a cache, a counter or running
    statistics that the model writes would change the next run. Runs with the same ``seed`` draw the same
    random numbers, so that only a change of the model changes the output. With None, no seed is set.

    Raises:
        InputError: if a transformers model would read the second item of a tuple as a mask, or an object in
            the batch cannot be copied.
    """
    batch = _fresh(batch)
    if isinstance(batch, Mapping):
        batch = (batch,) if takes_dict(model, batch) else batch
    several = isinstance(batch, tuple | list) and any(isinstance(value, Tensor) for value in batch[1:])
    if several and (taken := second_argument(model)):
        raise InputError(
            "batch",
            expected=f"a dict with the argument names of {type(model).__name__}",
            got=f"{len(batch)} items without names, of which the second would be read as its `{taken}`",
            fix="Pass the first item only, `[(x,) for x, *rest in batches]`, which suffices for a loss on "
            "next tokens; or name the items: `[{'input_ids': x, 'labels': y} for x, y in batches]` for one "
            "label per token, `'attention_mask': y` for a mask.",
        )
    with preserve_state(model), nullcontext() if seed is None else preserve_random_state(model, seed):
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or an error that caused it, reports a lack of memory on any device."""
    if error is None or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return error is not None
    words = str(error).lower() if isinstance(error, RuntimeError) else ""
    lacking = "out of memory" in words or "allocate memory" in words
    return lacking or out_of_memory(error.__cause__)


def _fresh(batch: Any) -> Any:
    copies: dict[int, Any] = {id(tensor): like(tensor.clone(), tensor) for tensor in tensors_in(batch)}

    def fresh(value: Any) -> Any:
        try:
            return deepcopy(value, copies)  # a tensor or object that occurs twice is copied once
        except Exception as error:
            raise InputError(
                f"{type(value).__name__} in the batch",
                expected="an object that can be copied, because each run must start from the same batch",
                got="tensors with gradients" if "graph leaves" in str(error) else first_line(error),
                fix="Leave it out; fill a cache under torch.no_grad(), or detach its tensors: "
                "`layer.keys = layer.keys.detach()` for each of `cache.layers`, and its values, too.",
            ) from error

    return map_leaves(batch, fresh)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that sets a model to evaluation mode, then restores the mode of every module.

    Some modules override ``train(mode)``, such as LoRA layers that merge weights for evaluation. The method
    ``train`` of these modules is called at the end, which undoes the merge.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        with fresh_autocast_cache():
            model.eval()
            yield
    finally:
        try:
            for module, training in modes:  # outer modules first, because `train` also changes inner ones
                if overrides_train(module) and module.training != training:
                    module.train(training)
        finally:
            for module, training in modes:
                module.training = training


def overrides_train(module: nn.Module) -> bool:
    """Return True if the class of a module overrides ``train(mode)``; a method ``train(data)`` is ignored."""
    if getattr(module.train, "__func__", None) is nn.Module.train:
        return False
    first = next(iter(inspect.signature(module.train).parameters.values()), None)
    return first is not None and (
        first.name == "mode" or isinstance(first.default, bool) or first.kind is first.VAR_POSITIONAL
    )


@contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """Context manager that clears the cache of ``torch.autocast`` before and after its block.

    A cached low-precision weight may be out of date. A weight cached without gradients also blocks gradients.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def preserve_random_state(model: nn.Module, seed: int | None = None) -> Iterator[Callable[[], bool]]:
    """Context manager that restores the random states of torch (on a model's devices), NumPy and Python.

    With ``seed``, the block begins in the states of this seed. Yield a function that returns True if random
    numbers were drawn from torch.
    """
    devices = {weight.device for weight in model.parameters() if weight.device.type not in ("cpu", "meta")}
    kind, indices = next(iter(devices)).type if devices else "cuda", [device.index or 0 for device in devices]
    module = torch.get_device_module(kind)
    numpy_state, python_state = np.random.get_state(), random.getstate()

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(module.get_rng_state(index) for index in indices)]

    try:
        with torch.random.fork_rng(indices, device_type=kind):
            if seed is not None:
                torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed every device
                for device in devices:
                    state = torch.Generator(device).manual_seed(seed).get_state()
                    module.set_rng_state(state, device.index or 0)
                np.random.seed(seed)
                random.seed(seed)
            before = states()
            yield lambda: not all(map(torch.equal, before, states()))
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Context manager that converts half-precision weights and buffers to float32, then restores them.

    Cost: additional memory, twice the size of these tensors.
    """
    tensors = [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.dtype in HALF]
    before = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in before:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first weight or buffer that is not on "meta", otherwise the CPU."""
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))


def check_in_memory(model: nn.Module, error: type[RankwiseError] = InputError) -> None:
    """Raise ``error`` if weights of a model are offloaded: to the disk, or to the CPU between passes."""
    if any(weight.is_meta for weight in model.parameters()):
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        raise error(
            f"model {type(model).__name__}", expected=f"weights in memory ({size / 1e9:.1f} GB)",
            got="offloaded weights", fix="Load the model without `device_map`, or onto one device.",
        )  # fmt: skip


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes, at most the limit of the control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free, groups = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    files = [groups / "memory.max"]  # the file of a container that sees its own group as the root
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            folder, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
            if not kinds or "memory" in kinds.split(","):
                inner = folder / group.lstrip("/")
                files += [path / name for path in (inner, *inner.parents)]
    for file in files:
        if file.is_file() and (limit := file.read_text().strip()).isdigit():
            free = min(free, int(limit) - psutil.Process().memory_info().rss)
    return max(0, free)


class AddedHook(NamedTuple):
    """Hook to add, called with (module, args, kwargs) before a module, or (…, kwargs, output) after it."""

    module: str
    kind: Literal["before", "after"]
    hook: Callable[..., Any]
    prepend: bool = False


@dataclass
class Change:
    """Reversible change of a model: replaced modules, new attribute values and added hooks.

    Used as a context manager, a change lasts for one block of code. Its keys are module paths as in
    ``named_modules()``, with "" for the model. A path may lead into a module that the same change inserts.

    Examples:
        >>> model = nn.Sequential(nn.Dropout(), nn.ReLU())
        >>> with Change(model, modules={"1": nn.Identity()}, attributes={"0": {"p": 0.0}}):
        ...     print(model[0].p, model[1])
        0.0 Identity()
        >>> model[0].p, model[1]
        (0.5, ReLU())
    """

    model: nn.Module
    modules: dict[str, nn.Module] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    hooks: list[AddedHook] = field(default_factory=list)
    _undo: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def apply(self) -> None:
        """Replace modules, set attributes and add hooks; if one step raises, undo the steps before it."""
        try:
            for path, module in self.modules.items():
                parent, _, name = path.rpartition(".")
                self._undo.append(set_attribute(self.model.get_submodule(parent), name, module))
            for path, values in self.attributes.items():
                for name, value in values.items():
                    self._undo.append(set_attribute(self.model.get_submodule(path), name, value))
            for added in self.hooks:
                module = self.model.get_submodule(added.module)
                before = added.kind == "before"
                register = module.register_forward_pre_hook if before else module.register_forward_hook
                handle = register(added.hook, prepend=added.prepend, with_kwargs=True)
                self._undo.append(handle.remove)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the model exactly; do nothing if the change is not applied."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Change":
        self.apply()
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def without_copies(model: Any) -> Any:
    """Return the model inside a wrapper of DDP or `torch.nn.DataParallel`; return any other model unchanged.

    The wrapper hides the model's arguments and structure, and DDP waits for other processes.
    """
    inner = original_of(model)
    copies = isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return inner.module if copies else model
