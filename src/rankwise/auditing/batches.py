"""Check batches before they are measured, and turn texts into batches."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from rankwise._internals.forward import Batch, tensors_of
from rankwise.auditing.text_inputs import PASS_TEXTS, model_batches
from rankwise.errors import InputError, instance_of
from rankwise.tracing.model_checks import without_copies


def check_batches(batches: object) -> None:
    """Raise `InputError` if ``batches`` is a single batch or a string instead of an iterable of batches."""
    fix = "Put a single batch into a list: `rw.audit(model, [batch])`."
    if isinstance(batches, str):
        fix = PASS_TEXTS
    elif batches is None:
        fix = f"Pass a list of batches. {PASS_TEXTS}"
    elif isinstance(batches, Iterable) and not isinstance(batches, Tensor | Mapping):
        return
    got = "none" if batches is None else type(batches).__name__
    raise InputError("`batches`", expected="an iterable of batches", got=got, fix=fix)


def check_rows(model: nn.Module, batch: Any, number: int) -> None:
    """Raise `InputError` if a batch has no tokens or, for transformers models, a row with only padding."""
    tensors = tensors_of(batch)
    fix = "Leave it out: an empty text is the usual cause."
    if tensors and not any(tensor.numel() for tensor in tensors.values()):
        got = f"the shape {tuple(next(iter(tensors.values())).shape)}"
        raise InputError(f"batch {number}", expected="one or more sequences with tokens", got=got, fix=fix)
    mask, ids = tensors.get("attention_mask"), tensors.get("input_ids")
    if getattr(without_copies(model), "config", None) is None or mask is None or ids is None:
        return
    if mask.shape != ids.shape or mask.dim() < 2:
        return
    empty = (mask == 0).all(-1).nonzero().tolist()
    if empty:
        row = ", ".join(map(str, empty[0]))  # multiple choice has two indices: row and choice
        expected = "a token that is not padding in every row"
        got = f"nothing but padding in row {row}, counted from 0"
        raise InputError(f"`attention_mask` of batch {number}", expected=expected, got=got, fix=fix)


def from_texts(
    model: nn.Module,
    batches: object,
    texts: object,
    tokenizer: Callable[..., Any] | None,
    *,
    tokens: int,
    batch_size: int,
) -> tuple[Iterable[Batch], list[str]]:
    """Return batches with one sequence per text, and notes on how the texts were changed."""
    if batches is not None:
        raise InputError(
            "`batches` and `texts`", expected="one of them", got="both", fix="Audit them separately."
        )
    fix = "Give a list of strings."
    if not isinstance(texts, Iterable) or isinstance(texts, dict):
        raise InputError("`texts`", expected="a list of strings", got=type(texts).__name__, fix=fix)
    several = [texts] if isinstance(texts, str) else list(texts)
    for number, text in enumerate(several, start=1):
        instance_of(f"`texts`, number {number}", text, str, "a str", fix=fix)
    if not several:
        raise InputError("`texts`", expected="at least one text", got="none", fix=fix)
    if not callable(tokenizer):
        fix = "Pass `tokenizer=transformers.AutoTokenizer.from_pretrained(…)` with the name of the model."
        expected = "the tokenizer of the model for `texts`"
        got = "none" if tokenizer is None else type(tokenizer).__name__
        raise InputError("`tokenizer`", expected=expected, got=got, fix=fix)
    return model_batches(
        model, several, tokenizer, tokens=tokens, sequences=len(several), batch_size=batch_size
    )
