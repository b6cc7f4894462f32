"""Tasks: examples to train on and to be tested on, as arrays with a checksum."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100
"""Label that no loss and no accuracy counts."""
Item = dict[str, Tensor]
"""Inputs of a model and labels, for one example."""


class Examples(Dataset[Item]):
    """Rows of arrays, made into tensors when they are read.

    Args:
        arrays: `input_ids` (N, T) or `pixel_values` (N, C, H, W) of bytes, with `labels` (N,) or (N, T).
        lengths: (N,) tokens of each row that are not padding; they become the attention mask.
        transform: applied to each item that is read; not part of the contents.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        lengths: np.ndarray | None = None,
        transform: Callable[[Item], Item] | None = None,
    ) -> None:
        self.arrays = dict(arrays) if lengths is None else {**arrays, "lengths": lengths}
        self.transform = transform

    def __len__(self) -> int:
        return len(self.arrays["labels"])

    def __getitem__(self, index: int) -> Item:
        item = {name: _tensor(name, array[index]) for name, array in self.arrays.items() if name != "lengths"}
        if "lengths" in self.arrays:
            tokens = torch.arange(len(item["input_ids"]))
            item["attention_mask"] = (tokens < int(self.arrays["lengths"][index])).long()
        return item if self.transform is None else self.transform(item)


class Windows(Dataset[Item]):
    """Windows of one sequence of token ids (N,), for language modeling: the labels are the ids."""

    def __init__(self, ids: np.ndarray, starts: np.ndarray, length: int) -> None:
        self.arrays = {"ids": ids, "starts": starts}
        self.length = length

    def __len__(self) -> int:
        return len(self.arrays["starts"])

    def __getitem__(self, index: int) -> Item:
        start = int(self.arrays["starts"][index])
        ids = torch.from_numpy(self.arrays["ids"][start : start + self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


def _tensor(name: str, row: Any) -> Tensor:
    if name == "pixel_values":  # bytes to [-1, 1], as ViT reads pictures
        return torch.from_numpy(row.astype(np.float32) / np.float32(127.5) - np.float32(1))
    return torch.from_numpy(np.asarray(row, dtype=np.int64))


def collate(items: Sequence[Item]) -> Item:
    """Stack items into a batch, without the columns that are padding in all of them."""
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    if "attention_mask" not in batch:
        return batch
    longest = max(int(batch["attention_mask"].sum(1).max()), 1)
    return {name: value[:, :longest] if value.ndim == 2 else value for name, value in batch.items()}


@dataclass(frozen=True)
class Task:
    """Examples and the sizes that a model needs.

    `length` counts the tokens of the longest sequence, or the pixels of a picture. Labels of language tasks
    are not shifted: the models of transformers shift them.
    """

    kind: Literal["language", "sequence", "image"]
    length: int
    train: Any = ()
    test: Any = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    """Name, source, seed, numbers of examples, options, SHA-256 of all arrays."""
    vocab_size: int | None = None
    num_labels: int | None = None
    image_shape: tuple[int, int, int] | None = None
    pad_token_id: int | None = None
    chance: float | None = None
    """Accuracy of the most common answer of the test split; None if every token is to be predicted."""
    bytes_per_token: float | None = None
    """UTF-8 bytes per token of the test text: nats per token divided by it are nats per byte."""


def make_task(
    name: str,
    kind: Any,
    train: Any,
    test: Any,
    *,
    length: int,
    source: str,
    seed: int | None,
    options: Mapping[str, Any],
    **more: Any,
) -> Task:
    """Return a task with its record and the accuracy of its most common answer.

    The checksum covers names, types, shapes and contents of all arrays, the training split first.
    """
    digest = hashlib.sha256()
    for part in (train, test):
        for key, array in part.arrays.items():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            digest.update(f"{key} {little.dtype.str} {little.shape};".encode())
            digest.update(np.ascontiguousarray(little).data)
    record = {
        "name": name,
        "source": source,
        "seed": seed,
        "train": len(train),
        "test": len(test),
        "sha256": digest.hexdigest(),
        "options": dict(options),
    }
    chance = None
    if "labels" in test.arrays:
        answers = test.arrays["labels"][test.arrays["labels"] != IGNORED]
        chance = float(np.unique(answers, return_counts=True)[1].max() / answers.size)
    return Task(kind, length, train, test, record, chance=chance, **more)


def choose(total: int, wanted: int | None, seed: int, part: int) -> np.ndarray:
    """Return which examples of a split to take: all in order if None, or some drawn at random.

    The draws of training (part 0) and test (part 1) are independent.
    """
    if wanted is None:
        return np.arange(total)
    if wanted > total:
        raise ValueError(f"expected at most {total} examples, got {wanted}")
    return np.random.default_rng([seed, part]).permutation(total)[:wanted]
