"""A few hundred steps of Adam on the attention KL of one layer, from the closed form on."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rankwise.compression.divergence import Sample, divergence
from rankwise.compression.layers import AttentionLayer
from rankwise.compression.qk_modules import Factors

RATE = 0.02
"""Of Adam, for factors of whitened logits; it falls to zero along a cosine."""
ROWS = 2**20
"""Entries of attention matrices in one step, about: 2 sequences of 192 tokens and 12 heads."""


def calibrate(
    layer: AttentionLayer,
    start: Factors,
    steps: int,
    seed: int = 0,
    on_step: Callable[[int], None] = lambda done: None,
) -> Factors:
    """Lower the mean KL(M ‖ M') of a layer by gradient steps on A and B.

    Both factors are balanced and stepped in whitened coordinates, so that one rate fits all heads. Each step
    reads a few sequences drawn at random. Where positions are rotated in, what a kept pair carries may become
    any linear map of the head's channels before the rotation: content of pairs that go is taken over by pairs
    of near frequency, of slow ones almost without loss.

    Args:
        layer: a layer and what it saw.
        start: factors to start from; channels that went stay so.
        steps: of Adam.
        seed: of the draws.
        on_step: called with the number of steps done.

    Returns:
        Factors; those of the last step where Ctrl-C stops it.
    """
    groups, device = layer.found.groups, layer.samples[0].query.device
    rotated = len(layer.found.pairs) > 0
    white_q, white_k, start_q, start_k = [], [], [], []
    for head, key in enumerate(start.key):
        to_q, to_k = (whitening(moments[head]) for moments in (layer.query_moments, layer.key_moments))
        members = torch.linalg.solve(to_q, start.query[head * groups : (head + 1) * groups])
        own = torch.linalg.solve(to_k, key)
        balance = _balance(members, own, rotated)
        white_q += [to_q] * groups
        white_k.append(to_k)
        start_q += list(members * balance)
        start_k.append(own / balance)
    mask = torch.zeros(len(start.key), 1, layer.found.width)
    for head, channels in enumerate(start.kept):
        mask[head, 0, channels] = 1
    wide = layer.found.width if rotated else max(map(len, start.kept))  # of no use to compute zeros
    kept_k = mask[..., :wide].to(device)
    kept_q = kept_k.repeat_interleave(groups, 0)
    a, b = (
        torch.stack(factors)[..., :wide].float().to(device).requires_grad_() for factors in (start_q, start_k)
    )
    to_q, to_k = (torch.stack(factors).float().to(device) for factors in (white_q, white_k))
    optimizer = torch.optim.Adam([a, b], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.enable_grad():
            for done in range(1, steps + 1):
                loss = _loss(_drawn(layer.samples, generator), (to_q @ a) * kept_q, (to_k @ b) * kept_k)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                on_step(done)
    except KeyboardInterrupt:
        pass
    query, key = torch.zeros_like(start.query), torch.zeros_like(start.key)
    query[..., :wide] = ((to_q @ a) * kept_q).detach().cpu().double()
    key[..., :wide] = ((to_k @ b) * kept_k).detach().cpu().double()
    return Factors(query, key, start.kept)


def _balance(query: Float64[Tensor, "h K K"], key: Float64[Tensor, "K K"], rotated: bool) -> Tensor:
    """What columns of A are multiplied with, and those of B divided by, so that both are as large.

    A rotation mixes columns: there one number is for all.
    """
    size_q, size_k = query.square().sum(1).mean(0), key.square().sum(0)
    if rotated:
        size_q, size_k = size_q.sum(), size_k.sum()
    return (size_k.clamp(min=1e-24) / size_q.clamp(min=1e-24)) ** 0.25


def _loss(sample: Sample, a: Float[Tensor, "H K r"], b: Float[Tensor, "G K r"]) -> Tensor:
    with torch.no_grad():
        matrix = sample.operator.dense().float()
    change = sample.logit_change(sample.query.float(), sample.key.float(), a, b)
    real = sample.tokens[:, None].expand(change.shape[:-1])
    return divergence(matrix, change)[real].mean()


def _drawn(samples: list[Sample], generator: torch.Generator) -> Sample:
    sample = samples[int(torch.randint(len(samples), (), generator=generator))]
    batch, heads, tokens, sources = sample.operator.shape
    count = max(1, min(batch, round(ROWS / (heads * tokens * sources))))
    return sample.of(torch.randperm(batch, generator=generator)[:count].to(sample.query.device))


def whitening(moments: Float64[Tensor, "K K"]) -> Tensor:
    """S^−½ of second moments scaled to a mean square of 1 in all, directions never seen at a floor.

    Args:
        moments: S.
    """
    values, vectors = torch.linalg.eigh(moments)
    values = values / values.clamp(min=0).mean().clamp(min=1e-300)
    return (vectors / values.clamp(min=1e-4).sqrt()) @ vectors.mT
