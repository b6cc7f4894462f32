"""What to do about a batch that a model failed on."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rankwise._internals.forward import LABELS, argument_names, has_tensor, tensors_of
from rankwise._internals.torch_private import original_of
from rankwise.auditing.batches import PASS_TEXTS
from rankwise.errors import InputError, did_you_mean
from rankwise.importance.losses import LEFT_OUT

_SEE = "Run the model on this batch by itself to see the whole traceback."


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


def _has_no_forward(model: nn.Module) -> bool:
    """Whether it has none but that of torch or of Lightning, which raises."""
    owner = next(base for base in type(model).__mro__ if "forward" in vars(base))
    return "forward" not in vars(model) and (owner is nn.Module or owner.__name__ == "LightningModule")


def cure(model: nn.Module, batch: Any, error: Exception) -> str:
    """What to do about a batch that a model failed on.

    Args:
        model: the model.
        batch: the batch.
        error: what the model raised.

    Returns:
        Sentences for the end of an error.
    """
    names, _ = argument_names(model)
    model = original_of(model)
    if isinstance(error, NotImplementedError) and _has_no_forward(model):
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
        if batch and not has_tensor(batch):
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
    elif not has_tensor(batch):
        if isinstance(batch, str) or (_is_list(batch) and any(isinstance(item, str) for item in batch)):
            return PASS_TEXTS
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
                expected=f"whole numbers from 0 to {classes - 1}, as {type(model).__name__} has {classes} "
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


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
