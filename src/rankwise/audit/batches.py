"""Batches as people hold them: what a model cannot take is left out where that is certain, else named."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rankwise.errors import InputError, did_you_mean
from rankwise.running import LABELS, Batch, second_taken_as, tensors_of

LEFT_OUT = -100
"""The label of what is not to be predicted, as PyTorch and transformers have it."""

_TEXTS = "Pass strings with their tokenizer: `rw.audit(model, texts=[…], tokenizer=tokenizer)`."
_SEE = "Run the model on this batch by itself to see the whole traceback."


def check_batches(batches: object) -> None:
    """Refuse what is no iterable of batches, such as one batch alone.

    Args:
        batches: what the user gave.

    Raises:
        InputError: naming the cure.
    """
    fix = "Put a single batch into a list: `rw.audit(model, [batch])`."
    if isinstance(batches, str):
        fix = _TEXTS
    elif batches is None:
        fix = f"Pass a list of batches. {_TEXTS}"
    elif isinstance(batches, Iterable) and not isinstance(batches, Tensor | Mapping):
        return
    raise InputError("`batches`", wanted="an iterable of batches", got=_kind(batches), fix=fix)


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
    names, anything = _parameters(model)
    if isinstance(batch, Mapping) and not anything:
        extra = [key for key in batch if key not in names and (key in LABELS or not _has_tensor(batch[key]))]
        if extra:
            kept = {key: value for key, value in batch.items() if key not in extra}
            return kept, f"left out of the batches, for the model does not take them: {', '.join(extra)}"
    if isinstance(batch, tuple | list) and len(batch) == 2 and _are_labels(*batch):
        taken = _only_one(model) or bool(second_taken_as(model))
        return (
            (batch[:1], "labels left out of the batches: the second of two items") if taken else (batch, "")
        )
    return batch, ""


def check_rows(model: nn.Module, batch: Any, number: int) -> None:
    """Refuse a sequence of nothing but padding: it has no token that a measure could be of.

    Only models of transformers are looked at: elsewhere a mask of that name may say which tokens are hidden.

    Args:
        model: the model.
        batch: as the model is to be given it.
        number: of the batch, from 1.

    Raises:
        InputError: naming the row.
    """
    if not isinstance(batch, Mapping) or getattr(model, "config", None) is None:
        return
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if not isinstance(mask, Tensor) or not isinstance(ids, Tensor) or mask.shape != ids.shape:
        return
    empty = (mask == 0).all(1).nonzero().flatten().tolist()
    if empty:
        raise InputError(
            f"`attention_mask` of batch {number}",
            wanted="a token that is not padding in every row",
            got=f"nothing but padding in row {empty[0]}, counted from 0",
            fix="Leave the row out: an empty text is the usual cause.",
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
            "`batches` and `texts`", wanted="one of them", got="both", fix="Audit them one after the other."
        )
    several, made = check_texts(texts, tokenizer)
    return model_batches(model, several, made, tokens=tokens, sequences=len(several), batch_size=batch_size)


def _trips_the_fast_path(model: nn.Module, error: Exception) -> bool:
    """Whether PyTorch's own encoder layers took the method ``weight`` of a quantised layer for a tensor."""
    return (
        isinstance(error, AttributeError)
        and "'function' object has no attribute 'device'" in str(error)
        and any(
            isinstance(layer, nn.TransformerEncoderLayer) and callable(getattr(layer.linear1, "weight", None))
            for layer in model.modules()
        )
    )


def cure(model: nn.Module, batch: Any, error: Exception) -> str:
    """What to do about a batch that a model failed on.

    Args:
        model: the model.
        batch: the batch.
        error: what the model raised.

    Returns:
        Sentences for the end of an error.
    """
    names, _ = _parameters(model)
    if isinstance(error, NotImplementedError) and type(model).forward is nn.Module.forward:
        lists = (nn.ModuleList, nn.ModuleDict)
        inner = [name for name, module in model.named_children() if not isinstance(module, lists)]
        name = next(iter(inner), "inner")
        return (
            "An audit calls the model, and a `training_step`, as Lightning has it, is not called: define "
            f"`forward`, such as `def forward(self, x): return self.{name}(x)`, or audit the module inside "
            f"that has it, such as `model.{name}`."
        )
    if _trips_the_fast_path(model, error):
        return (
            "PyTorch's fast path of TransformerEncoderLayer reads weights as tensors, which quantised layers "
            "hide behind a method: without Rankwise the model fails alike. Switch it off, "
            "`torch.backends.mha.set_fastpath_enabled(False)`."
        )
    if isinstance(batch, Mapping):
        unknown = [str(key) for key in batch if key not in names]
        if unknown:
            guess = did_you_mean(unknown[0], names)
            return f"`forward` has no {', '.join(unknown)}: leave them out or rename them. {guess}"
        if batch and not _has_tensor(batch):
            return (
                'Its values are no tensors: `tokenizer(texts, return_tensors="pt", padding=True)`; for rows '
                "of a data set, a DataLoader with `collate_fn=DataCollatorWithPadding(tokenizer)`."
            )
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 1:
            return (
                "It is one row without a batch axis: put rows together with `DataLoader(rows, batch_size=4, "
                "collate_fn=DataCollatorWithPadding(tokenizer))`."
            )
    elif not _has_tensor(batch):
        if isinstance(batch, str) or (_is_list(batch) and any(isinstance(item, str) for item in batch)):
            return _TEXTS
        if _is_list(batch):
            return (
                "It is a row of plain Python numbers or lists: a batch is a tensor (B, T), "
                "`[torch.tensor([row]) for row in rows]`, or padded rows with their attention_mask."
            )
        return f"A batch is a dict of tensors, a tuple of tensors or a tensor. {_SEE}"
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        return (
            f"The model was called with all {len(batch)} items of it: if the last are labels, pass "
            f"`[(x,) for x, *labels in batches]`. {_SEE}"
        )
    return _SEE + _by_message(model, batch, str(error))


def label_error(model: nn.Module, batch: Any, number: int, error: Exception) -> InputError | None:
    """That labels of a batch are no classes of a model of transformers; None where they are, or may be.

    Args:
        model: the model.
        batch: the batch that it failed on.
        number: of the batch, from 1.
        error: what the model raised.
    """
    config = getattr(model, "config", None)
    of_target = any(word in str(error).lower() for word in ("target", "device-side assert"))
    choices = type(model).__name__.endswith("MultipleChoice")  # its labels are places of its inputs
    if not isinstance(batch, Mapping) or config is None or choices or not of_target:
        return None
    ask = getattr(model, "get_output_embeddings", None)
    words = getattr(ask() if callable(ask) else None, "weight", None)
    classes = getattr(config, "num_labels", 0) if words is None else words.shape[0]
    what = "classes" if words is None else "tokens of its vocabulary"
    fix = "set `num_labels` where the model is made" if words is None else "use the model's own tokenizer"
    for name in LABELS:
        labels = batch.get(name)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not isinstance(classes, int):
            continue
        wrong = labels[((labels < 0) & (labels != LEFT_OUT)) | (labels >= classes)]
        if classes > 1 and wrong.numel():
            return InputError(
                f"{name} of batch {number}",
                wanted=f"whole numbers from 0 to {classes - 1}, as {type(model).__name__} has {classes} "
                f"{what}, or {LEFT_OUT} for what is left out",
                got=f"{int(wrong[0])}",
                fix=f"Correct them, or {fix}; an audit without worth needs no labels.",
            )
    return None


def _by_message(model: nn.Module, batch: Any, message: str) -> str:
    """What the words of an error point at."""
    said = message.lower()
    ids = [tensor for tensor in tensors_of(batch).values() if not tensor.is_floating_point()]
    longest = max((tensor.shape[-1] for tensor in ids if tensor.dim() > 1), default=0)
    config = getattr(model, "config", None)
    words, positions = getattr(config, "vocab_size", 0), getattr(config, "max_position_embeddings", 0)
    if isinstance(positions, int) and 0 < positions < longest:
        return f" Its {longest} tokens are more than the {positions} positions of the model: cut them."
    if "out of memory" in said or "can't allocate" in said:
        return " Use smaller batches or shorter sequences."
    if "index out of range" in said or "out of bounds" in said or "indexselect" in said:
        if isinstance(words, int) and words and any(int(part.max()) >= words for part in ids if part.numel()):
            return f" A token id is not below the {words} the model knows: is it the model's own tokenizer?"
        return (
            " Too long a sequence, a token id that the model does not know, or a label that is none of its "
            "classes is the usual cause."
        )
    if "dtype" in said or "same type" in said or "scalar type" in said:
        return " Cast the batch to the dtype of the weights, or the model to that of the batch."
    return ""


def _parameters(model: nn.Module) -> tuple[list[str], bool]:
    """The names ``forward`` takes, and whether it takes any other."""
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


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensor, value)))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _kind(value: object) -> str:
    return "none" if value is None else type(value).__name__
