"""Language modelling of tokens: documents one behind the other, cut into windows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankwise.data.tasks.checks import need_share
from rankwise.data.tasks.language import cut
from rankwise.data.tasks.task import Task, make_task
from rankwise.data.text import load_text
from rankwise.errors import InputError


def token_language_model(
    documents: str | Path | Sequence[str],
    tokenizer: Any,
    *,
    length: int = 256,
    validation_share: float | int = 0.1,
) -> Task:
    """Prepare language modelling of the tokens of documents, packed.

    Every document is tokenized without special tokens and ends with the tokenizer's end mark; all are joined
    and cut into windows that overlap by one token. As in GPT-2 and GPT-3, a window may hold the end of a
    document and the beginning of the next, attention reaches across, and the loss counts every token, end
    marks included; what is left over at the end is not used. The last documents, or the last characters of a
    single text, are the test split.

    Args:
        documents: a text file (one document), a ``.jsonl`` file with one ``text`` a line, or the documents.
        tokenizer: of transformers.
        length: tokens of a window.
        validation_share: of the documents, at least one of them; of the characters of a single text.

    Raises:
        InputError: if the file cannot be read, the tokenizer has no end mark, or a part is shorter than a
            window.

    Examples:
        >>> from transformers import ByT5Tokenizer
        >>> task = token_language_model(["abc", "de", "fgh"], ByT5Tokenizer(), length=4, validation_share=0.3)
        >>> task.train[0]["input_ids"], len(task.train), len(task.test)  # </s> is 1
        (tensor([100, 101, 102,   1]), 2, 1)
    """
    need_share("validation_share", validation_share)
    is_file = isinstance(documents, str | Path)
    texts = load_text(documents) if isinstance(documents, str | Path) else list(documents)
    end = getattr(tokenizer, "eos_token_id", None)
    if end is None:
        fix = "Set tokenizer.eos_token, or give another tokenizer."
        raise InputError("the tokenizer", wanted="an end mark (eos_token_id)", got="none", fix=fix)
    ids = [_packed(part, tokenizer, end) for part in _split(texts, validation_share)]
    return make_task(
        "token_language_model",
        "language",
        cut(ids[0], length, "the training part"),
        cut(ids[1], length, "the validation part"),
        length=length,
        source=Path(str(documents)).name if is_file else f"{len(texts)} documents given as text",
        options={
            "length": length,
            "validation_share": validation_share,
            "tokenizer": getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__,
        },
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )


def _split(texts: str | list[str], share: float) -> tuple[list[str], list[str]]:
    if isinstance(texts, str):
        boundary = int(len(texts) * (1 - share))
        return [texts[:boundary]], [texts[boundary:]]
    if len(texts) < 2:
        fix = "Give more documents, or one text file, which is split by characters."
        raise InputError(
            "documents", wanted="two or more, to keep some for testing", got=str(len(texts)), fix=fix
        )
    boundary = min(int(len(texts) * (1 - share)), len(texts) - 1)
    return texts[: max(boundary, 1)], texts[max(boundary, 1) :]


def _packed(texts: list[str], tokenizer: Any, end: int) -> np.ndarray:
    written = [text for text in texts if text]
    rows = tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"] if written else []
    return np.array([token for row in rows for token in (*row, end)], dtype=np.int32)
