"""Language modeling on the bytes or the tokens of a text file; its last tenth is the test split."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from experiments.tasks.task import Task, Windows, make_task
from rankwise.cli.load_data import load_text

BYTE_SHIFT, BYTE_VOCABULARY = 3, 259
"""Ids of ByT5Tokenizer: 0 <pad>, 1 </s>, 2 <unk>, then the 256 bytes."""
TEST_SHARE = 0.1
END = "<|endoftext|>"


def read_text(path: Path) -> str:
    """Return the text of a file; texts in the rows of a `.jsonl` file are joined by blank lines."""
    text = load_text(path)
    return text if isinstance(text, str) else "\n\n".join(text)


def byte_ids(text: str) -> np.ndarray:
    """Return the UTF-8 bytes of a text as ids of ByT5Tokenizer, without its end mark."""
    # UTF-8 has no byte above 244, so that the sum fits into uint8
    return np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8) + np.uint8(BYTE_SHIFT)


def split_text(text: str) -> tuple[str, str]:
    boundary = int(len(text) * (1 - TEST_SHARE))
    return text[:boundary], text[boundary:]


def byte_text(path: Path, *, length: int, windows: int | None = None, seed: int = 0) -> Task:
    """Return language modeling on bytes; None: consecutive windows in place of windows at random places."""
    splits = map(byte_ids, split_text(read_text(path)))
    more = {"vocab_size": BYTE_VOCABULARY, "pad_token_id": 0, "bytes_per_token": 1.0}
    return _language_task("byte_language_model", path, splits, length, windows, seed, {}, more)


def token_text(
    path: Path, *, length: int, windows: int | None = None, vocab_size: int = 1024, seed: int = 0
) -> Task:
    """Return language modeling on tokens of a byte-level BPE that is trained on the training part.

    An end mark closes each part. `bytes_per_token` counts end marks as tokens.
    """
    parts = split_text(read_text(path))
    tokenizer = train_tokenizer(parts[0], vocab_size)
    end = tokenizer.eos_token_id
    train, test = (
        np.array([*tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"], end], np.int32)
        for part in parts
    )
    options = {
        "tokenizer": f"byte-level BPE of {len(tokenizer):,} entries, trained on the training part",
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
    }
    more = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bytes_per_token": len(parts[1].encode()) / len(test),
    }
    return _language_task("token_language_model", path, (train, test), length, windows, seed, options, more)


def _language_task(
    name: str, path: Path, splits: Any, length: int, windows: int | None, seed: int, options: Any, more: Any
) -> Task:
    train, test = splits
    return make_task(
        name,
        "language",
        cut(train, length, f"{path}, training part", windows, seed),
        cut(test, length, f"{path}, test part"),
        length=length,
        source=path.name,
        seed=None if windows is None else seed,
        options={"length": length, "validation_share": TEST_SHARE, "windows": windows, **options},
        **more,
    )


def cut(ids: np.ndarray, length: int, subject: str, windows: int | None = None, seed: int = 0) -> Windows:
    """Cut a sequence into windows that overlap by one token, or take some at random places.

    Consecutive windows predict every token except the first exactly once.
    """
    if len(ids) < length:
        raise ValueError(f"{subject}: expected {length} tokens for one window, got {len(ids)}")
    if windows is None:
        starts = np.arange((len(ids) - 1) // (length - 1)) * (length - 1)
    else:
        starts = np.random.default_rng([seed, 0]).integers(0, len(ids) - length + 1, windows)
    return Windows(ids, starts, length)


def train_tokenizer(text: str, vocab_size: int) -> Any:
    """Train a byte-level BPE, as for GPT-2 (Radford et al. 2019, section 2.2).

    Its alphabet is the 256 bytes, so that decoding restores every text.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, clean_up_tokenization_spaces=False)


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the SHA-256 of everything that decides the ids of a fast tokenizer."""
    rule = json.loads(tokenizer.backend_tokenizer.to_str())
    content = {"entries": tokenizer.get_vocab(), "end": tokenizer.eos_token_id, "rule": rule}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
