"""Batches as people hold them: what a model cannot take is left out where that is certain, else refused."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rankwise._internals.forward import LABELS, Batch, second_argument, tensors_of
from rankwise.errors import InputError
from rankwise.tracing.wrappers import without_copies

PASS_TEXTS = "Pass strings with their tokenizer: `rw.audit(model, texts=[…], tokenizer=tokenizer)`."


def check_batches(batches: object) -> None:
    """Refuse what is no iterable of batches, such as one batch alone.

    Args:
        batches: what the user gave.

    Raises:
        InputError: naming the cure.
    """
    fix = "Put a single batch into a list: `rw.audit(model, [batch])`."
    if isinstance(batches, str):
        fix = PASS_TEXTS
    elif batches is None:
        fix = f"Pass a list of batches. {PASS_TEXTS}"
    elif isinstance(batches, Iterable) and not isinstance(batches, Tensor | Mapping):
        return
    raise InputError("`batches`", expected="an iterable of batches", got=_kind(batches), fix=fix)


def readable(model: nn.Module, batch: Any) -> tuple[Any, str]:
    """A batch without the labels that the model has no place for.

    Only what is certain is left out: a key such as ``labels`` or one without tensors that ``forward`` does
    not have; the second of two, (x, y), where y is a number for each of x and ``forward`` takes one item, or
    is that of a model of transformers and takes something else than labels there.

    Args:
        model: the model.
        batch: the batch.

    Returns:
        The batch to run, and in words what was left out; nothing where it is the same.

    Examples:
        >>> import torch
        >>> readable(torch.nn.Linear(2, 2), [torch.ones(3, 2), torch.tensor([0, 1, 0])])
        ([tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])], 'labels left out of the batches: the second of two items')
    """
    names, anything = names_taken(model)
    if isinstance(batch, Mapping) and not anything:
        extra = [key for key in batch if key not in names and (key in LABELS or not has_tensor(batch[key]))]
        if extra:
            kept = {key: value for key, value in batch.items() if key not in extra}
            return kept, f"left out of the batches, for the model does not take them: {', '.join(extra)}"
    if isinstance(batch, tuple | list) and len(batch) == 2 and _are_labels(*batch):
        taken = _only_one(model) or bool(second_argument(model))
        return (
            (batch[:1], "labels left out of the batches: the second of two items") if taken else (batch, "")
        )
    return batch, ""


def check_rows(model: nn.Module, batch: Any, number: int) -> None:
    """Refuse a batch without tokens, and a sequence of nothing but padding: no measure could be of it.

    Padding is looked for in models of transformers alone: elsewhere a mask of that name may say which tokens
    are hidden.

    Args:
        model: the model.
        batch: as the model is to be given it.
        number: of the batch, from 1.

    Raises:
        InputError: naming the row, or the shape of what is empty.
    """
    tensors = tensors_of(batch)
    if tensors and not any(tensor.numel() for tensor in tensors.values()):
        raise InputError(
            f"batch {number}",
            expected="at least one sequence, of at least one token",
            got=f"the shape {tuple(next(iter(tensors.values())).shape)}",
            fix="Leave the batch out: an empty text is the usual cause.",
        )
    mask, ids = tensors.get("attention_mask"), tensors.get("input_ids")
    if getattr(without_copies(model), "config", None) is None or mask is None or ids is None:
        return
    if mask.shape != ids.shape or mask.dim() < 2:
        return
    empty = (mask == 0).all(-1).nonzero().tolist()
    if empty:
        row = ", ".join(map(str, empty[0]))  # of several choices, the row and the choice
        raise InputError(
            f"`attention_mask` of batch {number}",
            expected="a token that is not padding in every row",
            got=f"nothing but padding in row {row}, counted from 0",
            fix="Leave it out: an empty text is the usual cause.",
        )


def from_texts(
    model: nn.Module,
    batches: object,
    texts: str | Sequence[str],
    tokenizer: Callable[..., Any] | None,
    *,
    tokens: int,
    batch_size: int,
) -> tuple[Iterable[Batch], list[str]]:
    """Batches of texts, and notes on how they were made.

    Args:
        model: the model that is to read them.
        batches: None, or the user has given both.
        texts: one sequence each.
        tokenizer: of the texts.
        tokens: of a sequence at most.
        batch_size: sequences in a batch.

    Raises:
        InputError: if there are batches too, or no texts, or no tokenizer.
    """
    from rankwise.data import check_texts, model_batches

    if batches is not None:
        raise InputError(
            "`batches` and `texts`", expected="one of them", got="both", fix="Audit them one after the other."
        )
    several, made = check_texts(texts, tokenizer)
    return model_batches(model, several, made, tokens=tokens, sequences=len(several), batch_size=batch_size)


def names_taken(model: nn.Module) -> tuple[list[str], bool]:
    """The names ``forward`` takes, and whether it takes any other.

    Args:
        model: the model.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = inspect.Parameter
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    return names, any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters)


def _only_one(model: nn.Module) -> bool:
    """Whether ``forward`` can be given one positional argument and no more."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = inspect.Parameter
    some = [
        parameter
        for parameter in parameters
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    return len(some) == 1 and all(parameter.kind is not kinds.VAR_POSITIONAL for parameter in parameters)


def _are_labels(x: Any, y: Any) -> bool:
    """Whether y holds a number for each of x."""
    return (
        isinstance(x, Tensor)
        and isinstance(y, Tensor)
        and x.dim() > 1
        and y.shape in ((x.shape[0],), (x.shape[0], 1))
    )


def has_tensor(value: Any) -> bool:
    """Whether a batch, or a part of it, holds a tensor.

    Args:
        value: the batch.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(has_tensor, value)))


def _kind(value: object) -> str:
    return "none" if value is None else type(value).__name__
