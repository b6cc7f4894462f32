"""Hints on how to fix a batch on which a model raised an exception."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rankwise._internals.batches import LABELS, argument_names, tensors_in, tensors_of
from rankwise._internals.forward import TRACEBACK, config_value, tower_hint
from rankwise._internals.torch_private import original_of
from rankwise.errors import InputError, did_you_mean
from rankwise.importance.losses import IGNORE_INDEX, invalid_label

PASS_TEXTS = "Pass strings with their tokenizer: `rw.audit(model, texts=[…], tokenizer=tokenizer)`."
_COLLATE = "`DataLoader(rows, batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer))`"


def fix_hint(model: nn.Module, batch: Any, error: Exception) -> str:
    """Return the last sentences of an error message: how to fix a batch on which a model raised ``error``."""
    names = argument_names(model)
    model = original_of(model)
    owner = next(base for base in type(model).__mro__ if "forward" in vars(base))
    only_raises = owner is nn.Module or owner.__name__ == "LightningModule"
    if isinstance(error, NotImplementedError) and only_raises and "forward" not in vars(model):
        lists = (nn.ModuleList, nn.ModuleDict)
        name = next((name for name, inner in model.named_children() if not isinstance(inner, lists)), "inner")
        return (
            "An audit calls the model, not a `training_step`: define `forward`, such as "
            f"`def forward(self, x): return self.{name}(x)`, or audit the inner module that has it, such as "
            f"`model.{name}`."
        )
    layers = (layer for layer in model.modules() if isinstance(layer, nn.TransformerEncoderLayer))
    quantized = any(callable(getattr(layer.linear1, "weight", None)) for layer in layers)  # it is a method
    if quantized and "'function' object has no attribute 'device'" in str(error):
        switch = "`torch.backends.mha.set_fastpath_enabled(False)`"
        return f"The fast path of TransformerEncoderLayer fails on quantized layers. Turn it off: {switch}."
    if isinstance(batch, Mapping):
        if hint := tower_hint(model, batch, error):
            return hint
        unknown = [str(key) for key in batch if key not in names]
        if unknown:
            guess = did_you_mean(unknown[0], names)
            return f"`forward` has no {', '.join(unknown)}: leave them out or rename them. {guess}"
        if batch and not tensors_in(batch):
            tensors = '`tokenizer(texts, return_tensors="pt", padding=True)`'
            return f"Its values are not tensors. Use {tensors}, or {_COLLATE} for rows of a data set."
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 1:
            return f"It is one row without a batch axis. Put rows together: {_COLLATE}."
    elif not tensors_in(batch):
        if isinstance(batch, str) or (_is_list(batch) and any(isinstance(item, str) for item in batch)):
            return PASS_TEXTS
        if _is_list(batch):
            return (
                "It is a row of plain Python numbers or lists: a batch is a tensor (B, T), "
                "`[torch.tensor([row]) for row in rows]`, or padded rows with their attention_mask."
            )
        return f"A batch is a dict of tensors, a tuple of tensors or a tensor. {TRACEBACK}"
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        return (
            f"The model was called with all {len(batch)} items of it: if the last are labels, pass "
            f"`[(x,) for x, *labels in batches]`. {TRACEBACK}"
        )
    return TRACEBACK + _hint_from_message(model, batch, str(error))


def label_error(model: nn.Module, batch: Any, number: int, error: Exception) -> InputError | None:
    """Return an error if labels of batch ``number`` are out of range for a transformers model, else None."""
    config = getattr(model, "config", None)
    of_target = any(word in str(error).lower() for word in ("target", "device-side assert"))
    choices = type(model).__name__.endswith("MultipleChoice")  # labels are indices of choices, not of classes
    if not isinstance(batch, Mapping) or config is None or choices or not of_target:
        return None
    output_embeddings = getattr(model, "get_output_embeddings", None)
    words = getattr(output_embeddings() if callable(output_embeddings) else None, "weight", None)
    classes = config_value(config, "num_labels", default=0) if words is None else words.shape[0]
    kind = "classes" if words is None else "tokens of its vocabulary"
    fix = "set `num_labels` when the model is made" if words is None else "use the model's own tokenizer"
    for name in LABELS:
        labels = batch.get(name)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not isinstance(classes, int):
            continue
        wrong = invalid_label(labels, classes)
        if classes > 1 and wrong:
            of_model = f"as {type(model).__name__} has {classes} {kind}"
            ignored = f"or {IGNORE_INDEX} for labels that do not count"
            expected = f"whole numbers from 0 to {classes - 1}, {of_model}, {ignored}"
            fix = f"Correct them, or {fix}; an audit without importance needs no labels."
            subject = f"{name} of batch {number}"
            return InputError(subject, expected=expected, got=wrong, fix=fix)
    return None


def _hint_from_message(model: nn.Module, batch: Any, message: str) -> str:
    message = message.lower()
    ids = [tensor for tensor in tensors_of(batch).values() if not tensor.is_floating_point()]
    longest = max((tensor.shape[-1] for tensor in ids if tensor.dim() > 1), default=0)
    words, positions = config_value(model, "vocab_size"), positions_of(getattr(model, "config", None))
    if positions is not None and positions < longest:
        return f" Its {longest} tokens are more than the {positions} positions of the model: cut them."
    if "out of memory" in message or "can't allocate" in message:
        return " Use smaller batches or shorter sequences."
    if any(phrase in message for phrase in ("index out of range", "out of bounds", "indexselect")):
        if isinstance(words, int) and words and any(int(x.max()) >= words for x in ids if x.numel()):
            return (
                f" A token id is not below the {words} that the model knows: is it the model's own tokenizer?"
            )
        return " The usual cause is a sequence that is too long, an unknown token id or a wrong label."
    if longest and any(phrase in message for phrase in ("shape", "size")):
        return f" Can the model read {longest} tokens? If not, cut them (`--tokens`)."
    if any(phrase in message for phrase in ("dtype", "same type", "scalar type")):
        return " Cast the batch to the dtype of the weights, or the model to the dtype of the batch."
    return ""


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def positions_of(config: Any) -> int | None:
    """Return the number of positions in a configuration, or the smallest number in the ones inside it."""
    positions = config_value(config, "max_position_embeddings", "n_positions")
    if isinstance(positions, int):
        return positions if positions > 0 else None
    inner = [value for value in getattr(config, "__dict__", {}).values() if hasattr(value, "vocab_size")]
    return min(filter(None, map(positions_of, inner)), default=None)
