"""Language modelling of tokens: documents one behind the other, cut into windows."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankwise.cli.load_data import load_text
from rankwise.data.tasks.checks import need_share, need_whole
from rankwise.data.tasks.language import cut
from rankwise.data.tasks.task import Task, make_task
from rankwise.data.tasks.tokenizers import load_tokenizer, tokenizer_sha256, train_tokenizer
from rankwise.errors import InputError


def token_language_model(
    documents: str | Path | Sequence[str],
    tokenizer: Any = None,
    *,
    vocab_size: int | None = None,
    length: int = 256,
    validation_share: float | int = 0.1,
    windows: int | None = None,
    seed: int = 0,
) -> Task:
    """Prepare language modelling of the tokens of documents, packed.

    Every document is tokenized without special tokens and ends with the tokenizer's end mark; all are joined
    and cut into windows that overlap by one token. As in GPT-2 and GPT-3, a window may hold the end of a
    document and the beginning of the next, attention reaches across, and the loss counts every token, end
    marks included; what is left over at the end is not used. The last documents, or the last characters of a
    single text, are the test split.

    Losses per token of two tokenizers cannot be compared, those per byte can: divide by ``bytes_per_token``,
    the bytes of the whole test part over its tokens, end marks included.

    Args:
        documents: a text file (one document), a ``.jsonl`` file with one ``text`` a line, or the documents.
        tokenizer: of transformers, or the folder or name of one for ``AutoTokenizer``; without it, a
            byte-level BPE is trained on the training part alone.
        vocab_size: entries of that BPE, 1,024 where None.
        length: tokens of a window.
        validation_share: of the documents, at least one of them; of the characters of a single text.
        windows: train on so many windows from random places instead, drawn beforehand.
        seed: of that draw.

    Raises:
        InputError: if the file cannot be read or is no Unicode, there is no such tokenizer or it has no end
            mark, or a part is shorter than a window.

    Examples:
        >>> from transformers import ByT5Tokenizer
        >>> task = token_language_model(["abc", "de", "fgh"], ByT5Tokenizer(), length=4, validation_share=0.3)
        >>> task.train[0]["input_ids"], len(task.train), len(task.test)  # </s> is 1
        (tensor([100, 101, 102,   1]), 2, 1)
    """
    need_share("validation_share", validation_share)
    need_whole("seed", seed, 0)
    is_file = isinstance(documents, str | Path)
    if not is_file and (isinstance(documents, bytes) or not isinstance(documents, Iterable)):
        raise InputError(
            "documents",
            expected="a text file, a .jsonl file, or a list of texts",
            got=type(documents).__name__,
            fix="Give the path of a file, or decode what was read and give it in a list.",
        )
    texts = load_text(documents) if isinstance(documents, str | Path) else list(documents)
    parts = _split(texts, validation_share)
    sizes = [sum(map(_bytes, part)) for part in parts]
    if windows is not None:
        need_whole("windows", windows)
    tokenizer, name = _tokenizer(tokenizer, vocab_size, parts[0])
    end = getattr(tokenizer, "eos_token_id", None)
    if end is None:
        fix = "Set tokenizer.eos_token, or give another tokenizer."
        raise InputError("the tokenizer", expected="an end mark (eos_token_id)", got="none", fix=fix)
    ids = [_packed(part, tokenizer, end) for part in parts]
    return make_task(
        "token_language_model",
        "language",
        cut(ids[0], length, "the training part", windows, seed),
        cut(ids[1], length, "the validation part"),
        length=length,
        source=Path(str(documents)).name if is_file else f"{len(texts)} documents given as text",
        seed=None if windows is None else seed,
        options={
            "length": length,
            "validation_share": validation_share,
            "windows": windows,
            "tokenizer": name,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
        },
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bytes_per_token=sizes[1] / len(ids[1]),
        tokenizer=tokenizer,
    )


def _tokenizer(given: Any, vocab_size: int | None, texts: list[str]) -> tuple[Any, str]:
    """The tokenizer, and what a record calls it: a folder is told by its last part alone."""
    if given is None:
        made = train_tokenizer(texts, 1024 if vocab_size is None else vocab_size)
        return made, f"byte-level BPE of {len(made):,} entries, trained on the training part"
    if vocab_size is not None:
        fix = "Leave one of the two out."
        raise InputError("vocab_size", expected="none beside a tokenizer", got=str(vocab_size), fix=fix)
    found = load_tokenizer(given) if isinstance(given, str | Path) else given
    name = str(getattr(found, "name_or_path", "")) or type(found).__name__
    return found, Path(name).name if Path(name).is_dir() else name


def _bytes(text: str) -> int:
    if not isinstance(text, str):
        raise InputError(
            f"the document {text!r}"[:60],
            expected="text",
            got=type(text).__name__,
            fix="Leave it out, or make it a string.",
        )
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InputError(
            f"the document {text[:20]!r}…",
            expected="Unicode text",
            got=f"half of a surrogate pair at character {error.start}",
            fix="Correct or leave out the document.",
        ) from error


def _split(texts: str | list[str], share: float) -> tuple[list[str], list[str]]:
    if isinstance(texts, str):
        boundary = int(len(texts) * (1 - share))
        return [texts[:boundary]], [texts[boundary:]]
    if len(texts) < 2:
        fix = "Give more documents, or one text file, which is split by characters."
        raise InputError(
            "documents", expected="two or more, to keep some for testing", got=str(len(texts)), fix=fix
        )
    boundary = min(int(len(texts) * (1 - share)), len(texts) - 1)
    return texts[: max(boundary, 1)], texts[max(boundary, 1) :]


def _packed(texts: list[str], tokenizer: Any, end: int) -> np.ndarray:
    written = [text for text in texts if text]
    rows = tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"] if written else []
    return np.array([token for row in rows for token in (*row, end)], dtype=np.int32)
