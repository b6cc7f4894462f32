"""A few hundred steps of Adam on the attention KL of one layer, from the closed form on."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rankwise.compression.divergence import Sample, divergence

RATE = 0.02
"""Of Adam, for factors of whitened logits; it falls to zero along a cosine."""
ROWS = 2**20
"""Entries of attention matrices in one step, about: 2 sequences of 192 tokens and 12 heads."""


def calibrate(
    samples: list[Sample],
    query: list[Float64[Tensor, "K _"]],
    key: list[Float64[Tensor, "K _"]],
    moments: tuple[Float64[Tensor, "G K K"], Float64[Tensor, "G K K"]],
    steps: int,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Lower the mean KL(M ‖ M') of a layer by gradient steps on A and B.

    Both factors are balanced and stepped in whitened coordinates, so that one rate fits all heads. Each step
    reads a few sequences drawn at random.

    Args:
        samples: sequences of the layer.
        query: A of each query head, to start from.
        key: B of each key head.
        moments: second moments of queries and of keys, for each key head.
        steps: of Adam.
        seed: of the draws.
        on_step: called with the number of steps done.

    Returns:
        A of each query head and B of each key head; those of the last step where Ctrl-C stops it.
    """
    groups = len(query) // len(key)
    widths = [factor.shape[1] for factor in key]
    whiten_q = [whitening(moments[0][h // groups]) for h in range(len(query))]
    whiten_k = [whitening(moment) for moment in moments[1]]
    start_q, start_k = [], []
    for head, factor in enumerate(query):
        start_q.append(torch.linalg.solve(whiten_q[head], factor))
    for head, factor in enumerate(key):
        start_k.append(torch.linalg.solve(whiten_k[head], factor))
    for head in range(len(key)):  # columns of A and B of equal norm: their product stays what it is
        members = range(head * groups, (head + 1) * groups)
        size_q = torch.stack([start_q[m].square().sum(0) for m in members]).mean(0).sqrt().clamp(min=1e-12)
        size_k = start_k[head].norm(dim=0).clamp(min=1e-12)
        balance = (size_k / size_q).sqrt()
        start_k[head] = start_k[head] / balance
        for member in members:
            start_q[member] = start_q[member] * balance
    device = samples[0].query.device
    widest = max(widths)
    a = _stacked(start_q, widest).to(device).requires_grad_()
    b = _stacked(start_k, widest).to(device).requires_grad_()
    to_q, to_k = (torch.stack(factors).float().to(device) for factors in (whiten_q, whiten_k))
    kept = torch.stack([torch.arange(widest) < width for width in widths]).float().to(device)[:, None]
    optimizer = torch.optim.Adam([a, b], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    done = 0
    try:
        with torch.enable_grad():
            while done < steps:
                sample, row = _drawn(samples, generator)
                loss = _loss(sample, row, to_q @ a, (to_k @ b) * kept)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                done += 1
                if on_step is not None:
                    on_step(done)
    except KeyboardInterrupt:
        pass
    end_q, end_k = (to_q @ a).detach().cpu().double(), (to_k @ b).detach().cpu().double()
    return (
        [end_q[h, :, : widths[h // groups]] for h in range(len(query))],
        [end_k[g, :, :width] for g, width in enumerate(widths)],
    )


def _loss(sample: Sample, rows: Tensor, a: Float[Tensor, "H K r"], b: Float[Tensor, "G K r"]) -> Tensor:
    with torch.no_grad():
        matrix = sample.operator[rows].dense().float()
        query, key = sample.query[rows].float(), sample.key[rows].float()
        logits = query @ key.repeat_interleave(sample.groups, 1).mT
    change = (query @ a) @ (key @ b).repeat_interleave(sample.groups, 1).mT - logits
    real = sample.tokens[rows][:, None].expand(change.shape[:-1])
    return divergence(matrix, change)[real].mean()


def _drawn(samples: list[Sample], generator: torch.Generator) -> tuple[Sample, Tensor]:
    sample = samples[int(torch.randint(len(samples), (), generator=generator))]
    batch, heads, tokens, sources = sample.operator.shape
    count = max(1, min(batch, round(ROWS / (heads * tokens * sources))))
    return sample, torch.randperm(batch, generator=generator)[:count].to(sample.query.device)


def _stacked(factors: list[Tensor], widest: int) -> Tensor:
    out = torch.zeros(len(factors), factors[0].shape[0], widest)
    for at, factor in enumerate(factors):
        out[at, :, : factor.shape[1]] = factor
    return out


def whitening(moments: Float64[Tensor, "K K"]) -> Tensor:
    """S^−½ of second moments scaled to a mean square of 1 in all, directions never seen at a floor.

    Args:
        moments: S.
    """
    values, vectors = torch.linalg.eigh(moments)
    values = values / values.clamp(min=0).mean().clamp(min=1e-300)
    return (vectors / values.clamp(min=1e-4).sqrt()) @ vectors.mT
