"""Batches: check, copy, edit and take apart the arguments of a model, and its labels."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from rankwise._internals.torch_private import like
from rankwise.errors import InputError

Batch = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor

LABELS = ("labels", "label", "targets", "target", "y")
"""Names by which data sets and models pass labels."""


def second_argument(model: nn.Module) -> str:
    """Return the name of the second positional argument of a transformers model, which is usually a mask.

    Labels passed as a mask would silently hide tokens. Return "" if the second argument is for labels or does
    not exist. Return "" for models of other libraries, because their second argument follows no convention.
    """
    if all(base.__name__ != "PreTrainedModel" for base in type(model).__mro__):
        return ""
    places = [parameter.name for parameter in _positional(model)]
    return "" if len(places) < 2 or places[1] in LABELS else places[1]


def check_batch(batch: Any, subject: str = "`batch`") -> None:
    """Raise InputError if a value, such as a list of batches or a DataLoader, is not a batch with tokens."""
    tensors = [*tensors_of(batch).values()] if isinstance(batch, list) else tensors_in(batch)
    if not any(tensor.numel() for tensor in tensors):
        expected = "a batch with tokens: a dict of tensors, a tuple of tensors or a tensor"
        got = "tensors of 0 elements" if tensors else type(batch).__name__
        fix = (
            "Take one batch of a list or DataLoader with `next(iter(batches))`. Make batches of texts with "
            "`rw.auditing.text_batches(texts, tokenizer)`."
        )
        fix = "Leave it out: an empty text is the usual cause." if tensors else fix
        raise InputError(subject, expected=expected, got=got, fix=fix)


def each_batch(batches: Iterable[Any], name: str = "batches") -> Iterator[Any]:
    """Yield batches. Raise InputError if ``batches`` is empty or a single batch, or an item is invalid."""
    number, several = 0, isinstance(batches, Iterable) and not isinstance(batches, Tensor | Mapping | str)
    for number, batch in enumerate(batches if several else (), 1):
        check_batch(batch, f"`{name}`, batch {number}")
        yield batch
    if not number:
        got = "none" if several else type(batches).__name__
        fix = "Put a single batch into a list: `[batch]`. An iterator that was read before yields none."
        raise InputError(f"`{name}`", expected="an iterable of at least one batch", got=got, fix=fix)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors moved to a device."""
    return map_tensors(batch, lambda tensor: like(tensor.to(device), tensor))


def first_sequences(batch: Batch, count: int) -> Any:
    """Return a copy of a batch; if it is a dict, only its first ``count`` sequences are copied.

    In a dict the first axis of a tensor is the batch, by the convention of Hugging Face. In a tuple or a
    plain tensor the first axis may be time, so these are copied whole. Raise InputError if a dict contains an
    object, such as a cache, that cannot be cut.
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
    """Apply a function to each value in nested dicts, lists and tuples; return the same nested structure."""
    if isinstance(value, Mapping):
        mapped = copy(value) if isinstance(value, dict) else {}  # keeps classes such as `BaseModelOutput`
        for key, item in value.items():
            mapped[key] = map_leaves(item, function)
        return mapped
    if isinstance(value, tuple | list):
        items = [map_leaves(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def drop_unused_labels(model: nn.Module, batch: Any) -> tuple[Any, str]:
    """Return a batch without the labels that ``forward`` does not accept, and a note on labels or on items.

    A key that ``forward`` does not accept is dropped if it is in `LABELS` or its value contains no tensor. In
    a pair (x, y), y is dropped if it has one number per sequence and ``forward`` does not accept labels. If
    a tuple stays whole, the note names the arguments that its items become. Otherwise the note is "".

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
    if isinstance(batch, tuple | list) and 1 < len(batch) <= len(taken := _positional(model)):
        names = [parameter.name for parameter in taken[: len(batch)]]
        return batch, f"items of the batches were passed as {', '.join(names)}; a dict names them otherwise"
    return batch, ""


def output_embedding(model: nn.Module) -> nn.Module | None:
    """Return the output embedding of a model of transformers. Return None if there is none."""
    find_head: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    return find_head()


def can_leave_out_logits(model: nn.Module) -> bool:
    """Return True if a model of transformers can compute the logits of some tokens alone."""
    return "logits_to_keep" in argument_names(model) and isinstance(output_embedding(model), nn.Linear)


def without_logits(model: nn.Module, batch: Any) -> Any:
    """Return a batch that asks for the logits of one token, if the model can do so and computes no loss.

    An audit reads no logits, which take most of the time and memory of small models with many words.
    """
    is_free = isinstance(batch, Mapping) and not {"logits_to_keep", *LABELS} & batch.keys()
    return {**batch, "logits_to_keep": 1} if is_free and can_leave_out_logits(model) else batch


def real_tokens(batch: Batch, shape: Sequence[int], decoder: bool = False) -> Bool[Tensor, "B *T"]:
    """Return the mask of real tokens in a batch. All tokens are real if the batch has no mask of the shape.

    With ``decoder`` the decoder's mask is used, because the encoder's mask does not apply to its outputs.
    """
    mask = tensors_of(batch).get("decoder_attention_mask" if decoder else "attention_mask")
    if mask is not None and tuple(mask.shape) == tuple(shape):
        return mask.bool()
    return torch.ones(*shape, dtype=torch.bool)


def token_ids(batch: Batch, name: str = "input_ids") -> Tensor | None:
    """Return token ids (B, T): `name` of a dict or first integer matrix of a tuple. Return None if absent."""
    tensors = tensors_of(batch)
    if name in tensors:
        return tensors[name]
    if isinstance(batch, Mapping):
        return None
    integers = (tensor for tensor in tensors.values() if tensor.dim() == 2 and not tensor.is_floating_point())
    return next(integers, None)


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
    """Return the position of the labels among ``forward``'s arguments. Return None if it takes no labels."""
    names = [parameter.name for parameter in _positional(model)]
    return next((position for position, name in enumerate(names) if position and name in LABELS), None)


def takes_dict(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return True if ``forward`` takes a dict: it requires one argument, and no batch key is an argument."""
    required = [parameter for parameter in _positional(model) if parameter.default is parameter.empty]
    return len(required) == 1 and bool(batch) and not {*argument_names(model)} & {*batch}


def _one_label_each(x: Any, y: Any) -> bool:
    """Return True if y has one number per sequence of x, so that y is regarded as labels."""
    both = isinstance(x, Tensor) and isinstance(y, Tensor)
    return both and x.dim() > 1 and y.shape in ((x.shape[0],), (x.shape[0], 1))
