"""Training examples in a fixed order: example i depends only on the seed and on i."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Example = dict[str, Tensor]


class Stream(Dataset[Example]):
    """Examples of a training: each one once per epoch, every epoch in a new order.

    A resumed run, and each of several devices, gets exactly the examples of an uninterrupted run. Random
    numbers that an example draws from torch (augmentation) depend only on the seed and on i.

    Examples:
        >>> stream = Stream([{"x": x} for x in torch.arange(4)], length=8, seed=0)
        >>> [int(stream[i]["x"]) for i in range(8)]
        [2, 0, 1, 3, 3, 0, 2, 1]
    """

    def __init__(self, examples: Any, length: int, seed: int) -> None:
        self.examples, self.length, self.seed = examples, length, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        epoch, at = divmod(index, len(self.examples))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
            self._epoch = epoch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_mixed(self.seed, index))
            example: Example = self.examples[int(self._order[at])]
            return example


def _mixed(seed: int, index: int) -> int:
    """Return 32 bits of both: the generator of torch on a CPU drops higher bits of its seed."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
