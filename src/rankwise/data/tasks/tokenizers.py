"""Tokenizers of language tasks: trained on a text, or loaded; and the digest that tells two apart."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankwise.data.tasks.checks import need_whole
from rankwise.errors import InputError, first_line

END = "<|endoftext|>"
SMALLEST = 257
"""Entries: the 256 bytes and the end mark."""


def train_tokenizer(texts: Sequence[str], vocab_size: int = 1024) -> Any:
    """Train a byte-level BPE, as GPT-2's (Radford et al. 2019, section 2.2).

    Every text can be encoded, and decoding gives it back: the alphabet is the 256 bytes. The same texts give
    the same tokenizer. A text in which fewer pairs of neighbours occur gives fewer entries.

    Args:
        texts: to count pairs in.
        vocab_size: entries, the bytes and the end mark ``<|endoftext|>`` among them.

    Returns:
        A ``PreTrainedTokenizerFast`` of transformers, whose end mark is its one special token.

    Raises:
        InputError: if there are fewer entries than bytes and end mark.

    Examples:
        >>> tokenizer = train_tokenizer(["to be or not to be"], 260)
        >>> len(tokenizer), tokenizer.decode(tokenizer("be ü")["input_ids"])
        (260, 'be ü')
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    need_whole("vocab_size", vocab_size, SMALLEST)
    if isinstance(texts, str):  # otherwise its characters
        texts = [texts]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, clean_up_tokenization_spaces=False)


def load_tokenizer(place: str | Path) -> Any:
    """Load a tokenizer of transformers; a folder needs no network.

    Args:
        place: a folder, or a name on the Hugging Face Hub.

    Raises:
        InputError: if there is no tokenizer.
    """
    from transformers import AutoTokenizer

    folder = Path(place)
    if _is_path(str(place)) and not folder.is_dir():
        raise _refused(place, "a file" if folder.exists() else "no such folder")
    try:
        return AutoTokenizer.from_pretrained(str(place))
    except Exception as error:  # whatever a broken file or the Hub brings about
        got = f"{type(error).__name__}: {first_line(error)}"
        if folder.is_dir():
            names = ", ".join(sorted(file.name for file in folder.iterdir())[:6])
            got = f"a folder with {names or 'nothing in it'} ({got})"
        raise _refused(place, got) from error


def _refused(place: str | Path, got: str) -> InputError:
    return InputError(
        f"tokenizer {place}",
        expected="a folder with tokenizer.json and tokenizer_config.json, or a name on the Hugging Face Hub",
        got=got,
        fix="Write one with tokenizer.save_pretrained(folder); or name none: a byte-level BPE is trained.",
    )


def _is_path(place: str) -> bool:
    """Whether it can be no name on the Hub, so that no network is asked for it."""
    return place.startswith((".", "/", "~")) or place.count("/") > 1 or "\\" in place or Path(place).exists()


def tokenizer_sha256(tokenizer: Any) -> str:
    """SHA-256 of what decides a tokenizer's ids: entries, end mark, and the whole rule of a fast one.

    Args:
        tokenizer: of transformers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rule = None if backend is None else json.loads(backend.to_str())
    content = {"entries": tokenizer.get_vocab(), "end": tokenizer.eos_token_id, "rule": rule}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
