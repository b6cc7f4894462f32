"""Language modelling of bytes: windows of a text file, its end kept for validation."""

from pathlib import Path

import numpy as np

from rankwise.cli.load_data import read_text
from rankwise.data.tasks.checks import need_share, need_whole
from rankwise.data.tasks.examples import Windows
from rankwise.data.tasks.task import Task, make_task
from rankwise.errors import InputError

BYTE_SHIFT = 3
"""ByT5Tokenizer's ids: 0 <pad>, 1 </s>, 2 <unk>, then the 256 bytes."""
BYTE_VOCABULARY = 259


def byte_ids(text: str) -> np.ndarray:
    """The UTF-8 bytes of a text as ids of ByT5Tokenizer, without its end mark.

    Args:
        text: the text.

    Examples:
        >>> byte_ids("ab").tolist()
        [100, 101]
    """
    return np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8) + np.uint8(
        BYTE_SHIFT
    )  # UTF-8 ends at 244


def byte_language_model(
    path: str | Path,
    *,
    length: int = 256,
    validation_share: float | int = 0.1,
    windows: int | None = None,
    seed: int = 0,
) -> Task:
    """Prepare language modelling of the bytes of a text file.

    The first characters are for training, the last ``validation_share`` of them are the test split. Windows
    overlap by one token, so that every byte but the first is predicted once and the mean loss is the loss of
    the text; what is left over at the end is not used.

    Ids are those of ByT5Tokenizer: byte + 3. Chance: ln of the number of different bytes in use, 4.17 nats
    for the 65 of tiny Shakespeare.

    Cost: O(length of the text).

    Args:
        path: a UTF-8 text file.
        length: tokens of a window.
        validation_share: of the characters.
        windows: train on so many windows from random places instead, drawn beforehand.
        seed: of that draw.

    Raises:
        InputError: if the file cannot be read, or a part is shorter than a window.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("to be or not to be " * 10)
        ...     task = byte_language_model(Path(folder) / "a.txt", length=16)
        >>> len(task.train), len(task.test), task.vocab_size
        (11, 1, 259)
    """
    need_share("validation_share", validation_share)
    need_whole("seed", seed, 0)
    text = read_text(path)
    boundary = int(len(text) * (1 - validation_share))
    parts = {"train": byte_ids(text[:boundary]), "test": byte_ids(text[boundary:])}
    options = {"length": length, "validation_share": validation_share, "windows": windows}
    if windows is not None:
        need_whole("windows", windows)
    return make_task(
        "byte_language_model",
        "language",
        cut(parts["train"], length, f"{path}, training part", windows, seed),
        cut(parts["test"], length, f"{path}, validation part"),
        length=length,
        source=Path(path).name,
        seed=None if windows is None else seed,
        options=options,
        vocab_size=BYTE_VOCABULARY,
        pad_token_id=0,
        bytes_per_token=1.0,
    )


def cut(ids: np.ndarray, length: int, subject: str, windows: int | None = None, seed: int = 0) -> Windows:
    """Cut a sequence into windows that overlap by one token, or take some from random places.

    Args:
        ids: the sequence.
        length: tokens of a window.
        subject: what an error calls the sequence.
        windows: how many from random places, or None.
        seed: of that draw.

    Raises:
        InputError: if there is not one window.

    Examples:
        >>> cut(np.arange(10), 4, "numbers").arrays["starts"].tolist()
        [0, 3, 6]
    """
    need_whole("length", length, 2)
    if len(ids) < length:
        fix = "Give a longer text"
        if len(ids) >= 2:
            fix += f", or {len(ids)} tokens or less (task.tokens of a recipe)"
        raise InputError(
            subject, expected=f"{length} tokens for one window", got=f"{len(ids)} tokens", fix=f"{fix}."
        )
    if windows is None:
        starts = np.arange((len(ids) - 1) // (length - 1)) * (length - 1)
    else:
        starts = np.random.default_rng([seed, 0]).integers(0, len(ids) - length + 1, windows)
    return Windows(ids, starts, length)
