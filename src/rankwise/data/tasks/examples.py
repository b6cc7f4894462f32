"""The two kinds of data sets of tasks: rows of arrays, and windows of one long text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100
"""A label that no loss and no accuracy counts, as in PyTorch and transformers."""

Item = dict[str, Tensor]
"""What a model reads of an example, and what it is to answer."""


class Examples(Dataset[Item]):
    """Rows of arrays, made into tensors when they are read.

    Args:
        arrays: ``input_ids`` (N, T) or ``pixel_values`` (N, C, H, W) of bytes, with ``labels`` (N,) or
            (N, T).
        lengths: (N,) tokens of each row that are not padding, where rows are padded; it makes the
            ``attention_mask``.
        transform: applied to each item that is read, such as `crop_and_flip`; not part of the contents.

    Examples:
        >>> import numpy as np
        >>> rows = Examples({"input_ids": np.array([[5, 6, 0]]), "labels": np.array([1])}, np.array([2]))
        >>> rows[0]["attention_mask"]
        tensor([1, 1, 0])
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
    """Windows of one long sequence of token ids, for language modelling: the labels are the ids.

    Args:
        ids: (N,) the sequence.
        starts: where each window begins.
        length: tokens of a window.

    Examples:
        >>> import numpy as np
        >>> Windows(np.arange(9), np.array([0, 3]), 4)[1]["input_ids"]
        tensor([3, 4, 5, 6])
    """

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
    if name == "pixel_values":  # bytes to [−1, 1], mean and standard deviation 0.5 as ViT reads pictures
        return torch.from_numpy(row.astype(np.float32) / np.float32(127.5) - np.float32(1))
    return torch.from_numpy(np.asarray(row, dtype=np.int64))


def collate(items: Sequence[Item]) -> Item:
    """Stack items into a batch, without the columns that are padding in all of them.

    Args:
        items: of one data set.

    Returns:
        A batch: ``input_ids`` and ``attention_mask`` as long as the longest of its sequences.

    Examples:
        >>> import numpy as np
        >>> rows = Examples({"input_ids": np.array([[5, 6, 0]]), "labels": np.array([1])}, np.array([2]))
        >>> collate([rows[0], rows[0]])["input_ids"]
        tensor([[5, 6],
                [5, 6]])
    """
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    if "attention_mask" not in batch:
        return batch
    longest = max(int(batch["attention_mask"].sum(1).max()), 1)
    return {name: value[:, :longest] if value.ndim == 2 else value for name, value in batch.items()}
