"""Causal products with decay, chunk by chunk: what linear attention and semiseparable operators share."""

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 64
"""Tokens multiplied as a dense block: its cost, O(CHUNK) a token, is that of a state of 64 features."""


def log_weights(log_decay: Float[Tensor, "*batch N"], start: int = 0) -> Float[Tensor, "*batch R N"]:
    """Logarithm of the decay from every source to the rows from ``start`` on: Σ_{s < r ≤ t} log a_r.

    It is summed, never taken as a difference of two sums: a decay of zero (−inf) or of e^−1e30 then leaves
    what lies on either side of it exact. Sources after the row get −inf.

    Cost: O(R N) memory for each leading axis.

    Args:
        log_decay: log a_r, in [−inf, 0].
        start: first row.

    Example:
        >>> import torch
        >>> log_weights(torch.tensor([-5.0, -1.0, -2.0])).tolist()
        [[0.0, -inf, -inf], [-1.0, 0.0, -inf], [-3.0, -2.0, 0.0]]
    """
    stop = log_decay.shape[-1]
    tokens = torch.arange(stop, device=log_decay.device)
    row = tokens[start:, None]
    steps = log_decay[..., start:, None].expand(*log_decay.shape[:-1], stop - start, stop)
    sums = steps.masked_fill(tokens >= row, 0).cumsum(-2)
    if start > 1:  # from each source up to the row before the first
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
    """Σ_{s ≤ t} (left_t · right_s) (Π_{s < r ≤ t} a_r) values_s for every t.

    Within a chunk as a dense block, across chunks through a state of F×V numbers.

    Cost: O(T (F V + chunk (F + V))) time and O(T V + chunk² + F V) memory for each leading axis; no decay is
    ever above 1 and nothing is divided by one.

    Args:
        left: one vector a row; its leading axes and those of the others broadcast.
        right: one vector a source.
        log_decay: log a_r, in [−inf, 0]; none means a = 1. That of the first token has no part.
        values: what is summed.
        chunk: tokens in a dense block. It changes rounding and time, nothing else.

    Example:
        >>> import torch
        >>> one = torch.ones(3, 1)
        >>> scan(one, one, torch.tensor([0.5, 0.5, 0.5]).log(), one).flatten().tolist()
        [1.0, 1.5, 1.75]
    """
    state, outputs = None, []
    for start in range(0, values.shape[-2], chunk):
        part = slice(start, start + chunk)
        q, k, v = left[..., part, :], right[..., part, :], values[..., part, :]
        if log_decay is None:
            products = (q @ k.mT).tril()
        else:
            decay = log_decay[..., part]
            logs = log_weights(decay)
            products = (q @ k.mT) * logs.exp()
            k = k * logs[..., -1, :, None].exp()
        output, added = products @ v, k.mT @ v
        if state is None:
            state = added
        elif log_decay is None:
            output, state = output + q @ state, state + added
        else:
            reach = decay.cumsum(-1).exp()[..., None]  # from the state to each row
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
    """Σ_{t ≥ s} (left_t · right_s) (Π_{s < r ≤ t} a_r) values_t for every s: `scan`, from the end.

    Args:
        left: one vector a row.
        right: one vector a source.
        log_decay: as in `scan`.
        values: what is summed, one vector a row.
        chunk: tokens in a dense block.

    Example:
        >>> import torch
        >>> one = torch.ones(3, 1)
        >>> scan_transposed(one, one, torch.tensor([0.5, 0.5, 0.5]).log(), one).flatten().tolist()
        [1.75, 1.5, 1.0]
    """
    if log_decay is not None:  # a_r lies between tokens r − 1 and r: read backwards it belongs to r − 1
        log_decay = log_decay.roll(-1, -1).flip(-1)
    return scan(right.flip(-2), left.flip(-2), log_decay, values.flip(-2), chunk).flip(-2)
