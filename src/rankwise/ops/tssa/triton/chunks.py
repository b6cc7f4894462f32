"""How the tokens are cut into chunks, and the launch of kernels over them."""

from typing import Any

import torch
from torch import Tensor

from rankwise.ops.tssa.problem import Problem, exact
from rankwise.ops.tssa.triton.kernels import carry_kernel, sums_kernel

LEAST = -2000.0
"""Of log2 λ: 2 to it is 0 in float64 too, but no tokens' worth of it is still 1, which of -∞ is NaN."""


class Chunks:
    """One call's tokens, cut into chunks that never span two sequences.

    Attributes:
        first: first token of each chunk, (C,).
        last: token behind its last, (C,).
        owner: its sequence, (C,).
        begin: first chunk of each sequence, and the number of chunks, (N + 1,).
        size: tokens of a chunk at most, BT; a power of 2, at least 16.
        channels: K rounded up to a power of 2, at least 16, BK.
    """

    def __init__(self, problem: Problem) -> None:
        w = problem.w
        self.w, self.dtype = w.contiguous(), exact(w.dtype)
        self.heads, self.width = w.shape[2], w.shape[3]
        self.channels = max(16, 1 << (self.width - 1).bit_length())
        most = 64 if problem.rate is None else 32  # a triangle of powers of λ costs BT² a chunk
        self.size = max(16, min(most, 4096 // self.channels))
        self.mask = None if problem.mask is None else problem.mask.contiguous()
        if problem.bounds is not None:
            bounds = problem.bounds
            counts = (bounds.diff() + self.size - 1) // self.size
            self.begin = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            self.count = int(self.begin[-1])  # must be read back; of rows of equal length it is known
        else:
            batch, tokens = w.shape[:2]
            each, rows = -(-tokens // self.size), torch.arange(batch + 1, device=w.device)
            bounds, self.begin, self.count = rows * tokens, rows * each, batch * each
        index = torch.arange(self.count, device=w.device)
        self.owner = torch.searchsorted(self.begin, index, right=True) - 1
        self.first = bounds[self.owner] + (index - self.begin[self.owner]) * self.size
        self.last = torch.minimum(self.first + self.size, bounds[self.owner + 1])
        self.rate = problem.rate
        self.decay = torch.zeros(1, device=w.device, dtype=torch.float64)
        if problem.rate is not None:
            rate = problem.rate.to(w.device, torch.float64)
            self.decay = torch.log2(rate).clamp(min=LEAST).contiguous()

    def launch(self, kernel: Any, *arrays: Tensor | float, **switches: bool) -> None:
        """Run a kernel for every chunk and head.

        Args:
            kernel: compiled by Triton; its first arguments are those of every kernel here.
            arrays: its own.
            switches: its own constants.
        """
        masked = self.mask is not None
        kernel[(self.count, self.heads)](
            self.w,
            self.mask if masked else self.w,
            self.first,
            self.last,
            self.owner,
            self.decay,
            *arrays,
            H=self.heads,
            K=self.width,
            BT=self.size,
            BK=self.channels,
            MASKED=masked,
            DECAYED=self.rate is not None,
            **switches,
        )

    def sums(self, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """What every chunk adds to Σ weight w², (C, H, K), and to Σ weight, (C, H); no weight means 1."""
        total, mass = self.per_chunk()
        by = self.w if weight is None else weight.contiguous()
        self.launch(sums_kernel, by, total, mass, WEIGHTED=weight is not None)
        return total, mass

    def per_chunk(self) -> tuple[Tensor, Tensor]:
        """Room for sums by chunk, head and channel, and by chunk and head."""
        shape = (self.count, self.heads, self.width)
        sums = torch.empty(shape, dtype=self.dtype, device=self.w.device)
        return sums, torch.empty(shape[:2], dtype=self.dtype, device=self.w.device)

    def carry(
        self, sums: Tensor, ages: Tensor, start: Tensor, backward: bool = False
    ) -> tuple[Tensor, Tensor]:
        """From what each chunk adds to the sums at its start (its end, if backward) and behind the last.

        Args:
            sums: what each chunk adds, (C, H, X).
            ages: tokens by which it decays what was before, (C,).
            start: sums to begin with, (N, H, X).
            backward: from the last chunk of a sequence to its first.

        Returns:
            (C, H, X) and (N, H, X).
        """
        at, end = torch.empty_like(sums), torch.empty_like(start, memory_format=torch.contiguous_format)
        width = sums.shape[2]
        block = max(16, 1 << (width - 1).bit_length())
        carry_kernel[(len(start), self.heads)](
            sums, ages, start.contiguous(), at, end, self.begin, self.decay,
            H=self.heads, X=width, BX=block, BACKWARD=backward, DECAYED=self.rate is not None,
        )  # fmt: skip
        return at, end

    def ages(self) -> Tensor:
        """Real tokens of every chunk, (C,)."""
        if self.mask is None:
            return self.last - self.first
        upto = torch.nn.functional.pad(self.mask.flatten().cumsum(0), (1, 0))
        return upto[self.last] - upto[self.first]

    def tokens(self) -> Tensor:
        """Room for a number by token and head, (B, T, H)."""
        return torch.empty(self.w.shape[:3], dtype=self.dtype, device=self.w.device)
