"""Functions that run a model on a batch, edit batches, and change a model reversibly."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rankwise._internals.torch_private import like, preserve_state, set_attribute
from rankwise.errors import InputError, RankwiseError, first_line

Batch = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor

LABELS = ("labels", "label", "targets", "target", "y")
"""Names by which data sets and models pass labels."""
TRACEBACK = "Run the model on this batch alone to see the whole traceback."


def config_value(source: Any, *names: str, default: Any = None) -> Any:
    """Return the first value that a configuration, or the configuration of a model, has under `names`.

    A value that depends on the layer, which transformers raises for, counts as missing.
    """
    config = getattr(source, "config", None) if isinstance(source, nn.Module) else source
    try:
        return next((v for name in names if (v := getattr(config, name, None)) is not None), default)
    except RuntimeError:
        return default


# --- run -------------------------------------------------------------------------------------------------


def run_model(model: nn.Module, batch: Batch) -> Any:
    """Call ``model(**batch)`` for a dict, ``model(*batch)`` for a tuple or list, otherwise ``model(batch)``.

    A dict is passed as one argument if ``forward`` takes one, as that of sentence-transformers does.

    The model gets a copy of the batch and of its own buffers: a cache, a counter or running statistics that
    the model writes would otherwise change the next run.

    Raises:
        InputError: if a transformers model would read the second item of a tuple as a mask, or an object in
            the batch cannot be copied.
    """
    batch = _fresh(batch)
    if isinstance(batch, Mapping):
        batch = (batch,) if _takes_dict(model, batch) else batch
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
    with preserve_state(model):
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def batch_errors(
    model: nn.Module, batch: Any, fix: Callable[[nn.Module, Any, Exception], str] | None = None,
    subject: str = "`batch`",
) -> Iterator[None]:  # fmt: skip
    """Context manager that raises `InputError` if a model does not run on a batch; `fix` returns the fix."""
    try:
        yield
    except RankwiseError:
        raise
    except Exception as error:
        raise InputError(
            subject,
            expected=f"a batch that {type(model).__name__} runs on",
            got=f"{type(error).__name__}: {first_line(error)}",
            fix=TRACEBACK if fix is None else fix(model, batch, error),
        ) from error


def out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one that it was raised from, reports a lack of memory on any device."""
    if error is None or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return error is not None
    words = str(error).lower() if isinstance(error, RuntimeError) else ""
    lacking = "out of memory" in words or "allocate memory" in words
    return lacking or out_of_memory(error.__cause__)


def _fresh(batch: Any) -> Any:
    copies: dict[int, Any] = {id(tensor): like(tensor.clone(), tensor) for tensor in tensors_in(batch)}

    def fresh(value: Any) -> Any:
        try:
            return deepcopy(value, copies)  # the same tensor or object twice stays the same
        except Exception as error:
            raise InputError(
                f"{type(value).__name__} in the batch",
                expected="an object that can be copied, because each run must start from the same batch",
                got="tensors with gradients" if "graph leaves" in str(error) else first_line(error),
                fix="Leave it out; fill a cache under torch.no_grad(), or detach its tensors: "
                "`layer.keys = layer.keys.detach()` for each of `cache.layers`, and its values, too.",
            ) from error

    return map_leaves(batch, fresh)


def second_argument(model: nn.Module) -> str:
    """Return the name of a transformers model's second positional argument; empty if it expects labels there.

    The second argument is usually a mask, and labels passed as a mask would silently hide tokens. For models
    of other libraries the result is empty, because their second argument follows no convention.
    """
    if all(base.__name__ != "PreTrainedModel" for base in type(model).__mro__):
        return ""
    places = [parameter.name for parameter in _positional(model)]
    return "" if len(places) < 2 or places[1] in LABELS else places[1]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that sets a model to evaluation mode, then restores the mode of every module.

    Some modules override ``train(mode)``, such as LoRA layers that merge weights for evaluation. The method
    ``train`` of these modules is called at the end, so that they undo the merge.
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

    A cached low-precision weight may be out of date. If cached without gradients, it also blocks gradients.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def preserve_random_state(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager that restores torch's random state on the CPU and on a model's devices."""
    devices = {weight.device for weight in model.parameters() if weight.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    return torch.random.fork_rng([device.index or 0 for device in devices], device_type=kind)


# --- batches ---------------------------------------------------------------------------------------------


def check_batch(batch: Any, subject: str = "`batch`") -> None:
    """Raise if a value is not a batch with tokens: for example a list of batches, or a DataLoader."""
    tensors = tensors_in(batch) if isinstance(batch, tuple) else tensors_of(batch).values()
    if not any(tensor.numel() for tensor in tensors):
        expected = "a batch with tokens: a dict of tensors, a tuple of tensors or a tensor"
        got = "tensors of 0 elements" if tensors else type(batch).__name__
        fix = "Pass one batch of a list or DataLoader: `next(iter(batches))`."
        raise InputError(subject, expected=expected, got=got, fix=fix)


def each_batch(batches: Iterable[Any], name: str = "batches") -> Iterator[Any]:
    """Yield batches; raise if they are a single batch, if there are none, or if one is not a batch."""
    number, several = 0, isinstance(batches, Iterable) and not isinstance(batches, Tensor | Mapping | str)
    for number, batch in enumerate(batches if several else (), 1):
        check_batch(batch, f"`{name}`, batch {number}")
        yield batch
    if not number:
        got = "none" if several else type(batches).__name__
        fix = "Put a single batch into a list: `[batch]`. An iterator that was read before yields none."
        raise InputError(f"`{name}`", expected="an iterable of at least one batch", got=got, fix=fix)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first weight or buffer that is not on "meta"; CPU if there is none."""
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors moved to a device."""
    return map_tensors(batch, lambda tensor: like(tensor.to(device), tensor))


def first_sequences(batch: Batch, count: int) -> Any:
    """Return a copy of a batch; if it is a dict, only its first ``count`` sequences are copied.

    In a dict the first axis of a tensor is the batch, by the convention of Hugging Face. In a tuple or a
    plain tensor the first axis may be time, so these are copied whole. Raise if a cache would stay longer.
    """
    sequences = batch_size(batch) if isinstance(batch, Mapping) else None

    def first(value: Any) -> Any:
        if isinstance(value, Tensor):
            batched = value.dim() > 0 and value.shape[0] == sequences
            return like((value[:count] if batched else value).clone(), value)
        if sequences is not None and sequences > count and getattr(value, "__dict__", None):
            raise InputError(
                "batch", expected=f"tensors, of which the first {count} sequences can be taken",
                got=f"a {type(value).__name__}", fix=f"Leave it out, or pass {count} sequences at most.",
            )  # fmt: skip
        return value

    return map_leaves(batch, first)


def batch_size(batch: Batch) -> int:
    """Return the number of sequences B: the length of the first axis of the first non-scalar tensor."""
    return next((value.shape[0] for value in tensors_of(batch).values() if value.dim()), 1)


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch by name, or by position if the batch is a tuple or list."""
    items = (
        batch.items()
        if isinstance(batch, Mapping)
        else enumerate(batch if isinstance(batch, tuple | list) else [batch])
    )
    return {str(name): value for name, value in items if isinstance(value, Tensor)}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists or tuples."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return nested dicts, lists and tuples with every tensor replaced by ``function(tensor)``."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with every other value replaced by ``function(value)``."""
    if isinstance(value, Mapping):
        mapped = copy(value) if isinstance(value, dict) else {}  # `encoder_outputs` keep their class
        for key, item in value.items():
            mapped[key] = map_leaves(item, function)
        return mapped
    if isinstance(value, tuple | list):
        items = [map_leaves(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def drop_unused_labels(model: nn.Module, batch: Any) -> tuple[Any, str]:
    """Return a batch without the labels that ``forward`` does not accept, and a note that names them.

    A key that ``forward`` does not accept is dropped if it is in `LABELS` or its value contains no tensor. In
    a pair (x, y), y is dropped if it has one number per sequence and ``forward`` does not accept labels.

    Examples:
        >>> import torch
        >>> drop_unused_labels(torch.nn.Linear(2, 2), [torch.ones(1, 2), torch.tensor([0])])
        ([tensor([[1., 1.]])], 'labels left out of the batches: the second of two items')
    """
    names, kinds = argument_names(model), {parameter.kind for parameter in _parameters(model)}
    if isinstance(batch, Mapping) and inspect.Parameter.VAR_KEYWORD not in kinds:
        extra = [key for key in batch if key not in names and (key in LABELS or not tensors_in(batch[key]))]
        if extra:
            kept = {key: value for key, value in batch.items() if key not in extra}
            return kept, f"left out of the batches, for the model does not take them: {', '.join(extra)}"
    if isinstance(batch, tuple | list) and len(batch) == 2 and _one_label_each(*batch):
        single = len(_positional(model)) == 1 and inspect.Parameter.VAR_POSITIONAL not in kinds
        if single or second_argument(model):
            return batch[:1], "labels left out of the batches: the second of two items"
    return batch, ""


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(model.forward).parameters.values())


def argument_names(model: nn.Module) -> list[str]:
    """Return the names by which ``forward`` accepts arguments, without ``**kwargs``."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in _parameters(model) if parameter.kind in kinds]


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in _parameters(model) if parameter.kind in kinds]


def label_position(model: nn.Module) -> int | None:
    """Return the position of the labels among the arguments of ``forward``; None if it takes none."""
    names = [parameter.name for parameter in _positional(model)]
    return next((position for position, name in enumerate(names) if position and name in LABELS), None)


def _takes_dict(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return True if ``forward`` has one required argument and no argument with a name of the batch."""
    required = [parameter for parameter in _positional(model) if parameter.default is parameter.empty]
    return len(required) == 1 and bool(batch) and not {*argument_names(model)} & {*batch}


def _one_label_each(x: Any, y: Any) -> bool:
    """Return True if y has one number per sequence of x, so that y is regarded as labels."""
    both = isinstance(x, Tensor) and isinstance(y, Tensor)
    return both and x.dim() > 1 and y.shape in ((x.shape[0],), (x.shape[0], 1))


# --- change and undo -------------------------------------------------------------------------------------


class AddedHook(NamedTuple):
    """Hook to add: called as ``hook(module, args, kwargs)`` before a module, or with ``output`` after it."""

    module: str
    kind: Literal["before", "after"]
    hook: Callable[..., Any]
    prepend: bool = False


@dataclass
class Change:
    """Reversible change of a model: replaced modules, new attribute values and added hooks.

    As a context manager, it changes the model for one block of code. The keys are module paths as in
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
