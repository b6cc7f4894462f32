"""How a model is run on a batch: called as the batch asks, where its weights are, in evaluation mode."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.errors import InputError

Batch = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor

LABELS = ("labels", "label", "targets", "target", "y")
"""What data sets and models call labels."""


def run_model(model: nn.Module, batch: Batch) -> Any:
    """Call a model on a batch: ``model(**batch)`` of a dict, ``model(*batch)`` of a tuple, ``model(batch)``.

    Args:
        model: the model.
        batch: a dict, a tuple or list, or a tensor.

    Raises:
        InputError: if a model of transformers would read the second item of a tuple as a mask or the like.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    several = isinstance(batch, tuple | list) and any(isinstance(value, Tensor) for value in batch[1:])
    if several and (taken := second_argument(model)):
        raise InputError(
            "batch",
            expected=f"a dict that names what {type(model).__name__} takes",
            got=f"{len(batch)} items without names, of which the second would be read as its `{taken}`",
            fix="Leave the others out, `[(x,) for x, *rest in batches]`, which is all that a loss of next "
            "tokens needs; or name them, `[{'input_ids': x, 'labels': y} for x, y in batches]` for labels in "
            "the places of their tokens, `'attention_mask': y` for a mask.",
        )
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def second_argument(model: nn.Module) -> str:
    """What a model of transformers takes the second of several items without names for.

    Models of transformers take ten and more arguments, after the tokens mostly a mask: labels in its place
    would hide the tokens whose label is 0, without a word. Other models are called as their authors wrote.

    Args:
        model: the model.

    Returns:
        The name of its argument; nothing where that is for labels, or where the model is no such.
    """
    if all(base.__name__ != "PreTrainedModel" for base in type(model).__mro__):
        return ""
    kinds = inspect.Parameter
    places = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    return "" if len(places) < 2 or places[1] in LABELS else places[1]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is in the mode it was in.

    Modules that do something of their own in ``train(mode)``, such as LoRA layers that merge their factors
    into a weight for evaluation, are called to undo it.

    Args:
        model: the model.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        with fresh_autocast_cache():
            model.eval()
            yield
    finally:
        try:
            for module, training in modes:  # outer ones first: they call those inside, which may differ
                if acts_on_mode(module) and module.training != training:
                    module.train(training)
        finally:
            for module, training in modes:
                module.training = training


def acts_on_mode(module: nn.Module) -> bool:
    """Whether a module does something of its own in ``train(mode)`` and ``eval()``.

    A ``train`` whose first argument is something else, such as data that a model is fitted to, switches none.

    Args:
        module: the module.
    """
    if getattr(module.train, "__func__", None) is nn.Module.train:
        return False
    first = next(iter(inspect.signature(module.train).parameters.values()), None)
    return first is not None and (
        first.name == "mode" or isinstance(first.default, bool) or first.kind is first.VAR_POSITIONAL
    )


@contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """Take no cast of a weight that ``torch.autocast`` keeps from the passes before, and leave none.

    Autocast keeps the first cast of each weight until its outermost block ends. A cast of before is of what
    the weight was then; a cast made without gradients cuts it off from every later pass in that block.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def device_of(model: nn.Module) -> torch.device:
    """Where the first weight lies: models spread over devices read their inputs there.

    Args:
        model: the model.
    """
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device, in the dicts and lists it came in.

    Args:
        batch: the batch.
        device: where to.
    """
    return changed(batch, lambda tensor: tensor.to(device))


def first_sequences(batch: Batch, count: int) -> Any:
    """A copy of the first sequences of a dict, and of anything else the whole.

    A dict lies batch first, by the convention of Hugging Face; elsewhere the first axis may be time.

    Args:
        batch: the batch.
        count: how many sequences at most.
    """
    sequences = batch_size(batch) if isinstance(batch, Mapping) else None

    def copied(tensor: Tensor) -> Tensor:
        batched = tensor.dim() > 0 and tensor.shape[0] == sequences
        return (tensor[:count] if batched else tensor).clone()

    return changed(batch, copied)


def batch_size(batch: Batch) -> int:
    """How many sequences a batch holds: the first length of its first tensor.

    Args:
        batch: the batch.
    """
    return next((value.shape[0] for value in tensors_of(batch).values() if value.dim()), 1)


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name, or by number.

    Args:
        batch: the batch.
    """
    items = (
        batch.items()
        if isinstance(batch, Mapping)
        else enumerate(batch if isinstance(batch, tuple | list) else [batch])
    )
    return {str(name): value for name, value in items if isinstance(value, Tensor)}


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with other tensors, in the dicts and lists it came in.

    Args:
        value: the batch, or a part of it.
        change: from a tensor to the tensor in its place.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
