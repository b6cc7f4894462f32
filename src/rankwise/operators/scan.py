"""Causal products with decay, chunk by chunk: what linear attention and semiseparable operators share."""

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 64
"""Tokens multiplied as a dense block: its cost, O(CHUNK) a token, is that of a state of 64 features."""
STATES = 1 << 20
"""Numbers of the states that a selective scan holds at once: 4 MiB in float32."""


def log_weights(log_decay: Float[Tensor, "*batch N"], start: int = 0) -> Float[Tensor, "*batch R N"]:
    """Logarithm of the decay from every source to the rows from ``start`` on: Σ_{s < r ≤ t} log a_r.

    It is summed, never taken as a difference of two sums: a decay of zero (−inf) or of e^−1e30 then leaves
    what lies on either side of it exact. Sources after the row get −inf.

    Cost: O(R N) memory for each leading axis.

    Args:
        log_decay: log a_r, in [−inf, 0].
        start: first row.

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

    Examples:
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

    Examples:
        >>> import torch
        >>> one = torch.ones(3, 1)
        >>> scan_transposed(one, one, torch.tensor([0.5, 0.5, 0.5]).log(), one).flatten().tolist()
        [1.75, 1.5, 1.0]
    """
    if log_decay is not None:  # a_r lies between tokens r − 1 and r: read backwards it belongs to r − 1
        log_decay = log_decay.roll(-1, -1).flip(-1)
    return scan(right.flip(-2), left.flip(-2), log_decay, values.flip(-2), chunk).flip(-2)


def selective_scan(
    left: Float[Tensor, "*left T N"],
    right: Float[Tensor, "*right T N"],
    rate: Float[Tensor, "*rate N"],
    step: Float[Tensor, "*step T"],
    values: Float[Tensor, "*values T V"],
    numbers: int = STATES,
) -> Float[Tensor, "*out T V"]:
    """Σ_{s ≤ t} Σ_n left_tn right_sn exp(rate_n Σ_{s < r ≤ t} step_r) values_s for every t.

    `scan` with a decay for each feature: token by token, through a state of N×V numbers.

    Cost: O(T N V) time and O(T V + N V) memory for each leading axis, and twice as many tokens' states at
    once as hold ``numbers`` numbers, over all leading axes.

    Args:
        left: one vector a row; its leading axes and those of the others broadcast.
        right: one vector a source.
        rate: logarithm of the decay of each feature in one unit of step, at most 0.
        step: how far each token carries the decay, finite. That of the first token has no part.
        values: what is summed.
        numbers: how many to hold at once. It changes memory and time, nothing else.

    Examples:
        >>> import torch
        >>> one = torch.ones(3, 1)
        >>> selective_scan(one, one, torch.tensor([0.5]).log(), torch.ones(3), one).flatten().tolist()
        [1.0, 1.5, 1.75]
    """
    lead = torch.broadcast_shapes(left.shape[:-2], rate.shape[:-1], step.shape[:-1], values.shape[:-2])
    size = (*lead, left.shape[-1], values.shape[-1])
    state, outputs = values.new_zeros(size), []
    chunk = max(1, numbers // max(1, state.numel()))
    for start in range(0, values.shape[-2], chunk):
        part = slice(start, start + chunk)
        # the axis of tokens goes first, so that the state of one token lies in one piece
        decay = (step[..., part, None] * rate[..., None, :]).exp().movedim(-2, 0)[..., None]
        added = (right[..., part, :, None] * values[..., part, None, :]).movedim(-3, 0)
        states = []
        for a, x in zip(decay.unbind(), added.unbind(), strict=True):
            state = torch.addcmul(x, a, state)
            states.append(state)
        # summed products: many small matrix products take longer on a CPU
        read = left[..., part, :, None].expand(*lead, -1, -1, 1).movedim(-3, 0)
        outputs.append((read * torch.stack(states)).sum(-2))
    return torch.cat(outputs).movedim(0, -2)


def selective_scan_transposed(
    left: Float[Tensor, "*left T N"],
    right: Float[Tensor, "*right T N"],
    rate: Float[Tensor, "*rate N"],
    step: Float[Tensor, "*step T"],
    values: Float[Tensor, "*values T V"],
    numbers: int = STATES,
) -> Float[Tensor, "*out T V"]:
    """Σ_{t ≥ s} Σ_n left_tn right_sn exp(rate_n Σ_{s < r ≤ t} step_r) values_t for every s.

    `selective_scan`, from the end.

    Args:
        left: one vector a row.
        right: one vector a source.
        rate: as in `selective_scan`.
        step: as in `selective_scan`.
        values: what is summed, one vector a row.
        numbers: how many to hold at once.

    Examples:
        >>> import torch
        >>> one, half = torch.ones(3, 1), torch.tensor([0.5]).log()
        >>> selective_scan_transposed(one, one, half, torch.ones(3), one).flatten().tolist()
        [1.75, 1.5, 1.0]
    """
    step = step.roll(-1, -1).flip(-1)  # as in `scan_transposed`
    left, right, values = left.flip(-2), right.flip(-2), values.flip(-2)
    return selective_scan(right, left, rate, step, values, numbers).flip(-2)
