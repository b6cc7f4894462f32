"""Causal scans (weighted sums over earlier tokens) with decay, computed in chunks, and their base class."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.operators.base import FastMixing, causal_rows

CHUNK = 64
"""Tokens per chunk. Per token, the dense weights of a chunk then cost as much as a state of 64 features."""


class CausalScanMixing(FastMixing):
    """Base class of operators with a lower-triangular M (T = S), applied by a scan over tokens."""

    may_hide_columns = False

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return rows of the support: True on and below the diagonal."""
        seen = causal_rows(start, stop, self.shape[-1], self.device)
        return seen.expand(*self.shape[:-2], -1, -1)


def log_weights(log_decay: Float[Tensor, "*batch N"], start: int = 0) -> Float[Tensor, "*batch R N"]:
    """Return the log-decay from each token s to each row t ≥ ``start``: Σ_{s < r ≤ t} log a_r.

    The decay a_r is from token r − 1 to token r. Entries with s > t are −inf. Log-decays are added and never
    subtracted, so a log-decay of −inf at token r affects only the pairs with s < r ≤ t.

    Cost: O(R N) memory per sequence and head.

    Examples:
        >>> import torch
        >>> log_weights(torch.tensor([-5.0, -1.0, -2.0])).tolist()
        [[0.0, -inf, -inf], [-1.0, 0.0, -inf], [-3.0, -2.0, 0.0]]
    """
    stop = log_decay.shape[-1]
    tokens = torch.arange(stop, device=log_decay.device)
    row = tokens[start:, None]
    steps = log_decay[..., start:, None].expand(*log_decay.shape[:-1], stop - start, stop)
    sums = steps.masked_fill(tokens >= row, 0).cumsum(-2)
    if start > 1:  # add the log-decays from each token s to row start − 1
        before = log_decay[..., 1:start].flip(-1).cumsum(-1).flip(-1)
        sums = sums + torch.nn.functional.pad(before, (0, stop - start + 1))[..., None, :]
    return sums.masked_fill(tokens > row, -torch.inf)


def scan(
    left: Float[Tensor, "*left T F"],
    right: Float[Tensor, "*right T F"],
    log_decay: Float[Tensor, "*decay T"] | None,
    values: Float[Tensor, "*values T V"],
    chunk: int = CHUNK,
) -> Float[Tensor, "*out T V"]:
    """Return Σ_{s ≤ t} (left_t · right_s) (Π_{s < r ≤ t} a_r) values_s for every token t, with decays a_r.

    Within a chunk of tokens, the weights are a dense matrix. A state of F×V numbers is passed between chunks.

    Cost: O(T (F V + chunk (F + V))) time and O(T V + chunk² + F V) memory per sequence and head. No decay
    exceeds 1, and nothing is divided by a decay, so nothing overflows.

    Args:
        left: F features per row t. The leading axes of all arguments broadcast with each other.
        right: F features per source s.
        log_decay: log a_r, in [−inf, 0], or None for a = 1. The decay of the first token has no effect.
        values: vectors that are summed, of width V.
        chunk: tokens per chunk; the choice affects only rounding and time.

    Examples:
        >>> import torch
        >>> one = torch.ones(3, 1)
        >>> scan(one, one, torch.tensor([0.5, 0.5, 0.5]).log(), one).flatten().tolist()
        [1.0, 1.5, 1.75]
    """
    state, outputs = None, []
    for start in range(0, values.shape[-2], chunk):
        span = slice(start, start + chunk)
        q, k, v = left[..., span, :], right[..., span, :], values[..., span, :]
        if log_decay is None:
            products = (q @ k.mT).tril()
        else:
            decay = log_decay[..., span]
            logs = log_weights(decay)
            products = (q @ k.mT) * logs.exp()
            k = k * logs[..., -1, :, None].exp()
        output, added = products @ v, k.mT @ v
        if state is None:
            state = added
        elif log_decay is None:
            output, state = output + q @ state, state + added
        else:
            reach = decay.cumsum(-1).exp()[..., None]  # decay of the state before the chunk, at each row
            output, state = output + (q * reach) @ state, state * reach[..., -1:, :] + added
        outputs.append(output)
    return torch.cat(outputs, dim=-2)


def scan_transposed(
    left: Float[Tensor, "*left T F"],
    right: Float[Tensor, "*right T F"],
    log_decay: Float[Tensor, "*decay T"] | None,
    values: Float[Tensor, "*values T V"],
    chunk: int = CHUNK,
) -> Float[Tensor, "*out T V"]:
    """Return Σ_{t ≥ s} (left_t · right_s) (Π_{s < r ≤ t} a_r) values_t for every token s, `scan` transposed.

    Examples:
        >>> import torch
        >>> one = torch.ones(3, 1)
        >>> scan_transposed(one, one, torch.tensor([0.5, 0.5, 0.5]).log(), one).flatten().tolist()
        [1.75, 1.5, 1.0]
    """
    if log_decay is not None:
        log_decay = reversed_decays(log_decay)
    return scan(right.flip(-2), left.flip(-2), log_decay, values.flip(-2), chunk).flip(-2)


def reversed_decays(decay: Float[Tensor, "*batch T"]) -> Float[Tensor, "*batch T"]:
    """Return the decays for a scan over the tokens in reverse order.

    A scan reads the decay between tokens r − 1 and r at the token that it visits later. In reverse order,
    this is token r − 1.
    """
    return decay.roll(-1, -1).flip(-1)
