"""A few hundred steps of Adam on the attention KL of a rotary layer, from the kept pairs on.

What a kept pair carries may be any linear map of the head's channels before the rotation: content of pairs
that go is taken over by pairs of near frequency, of slow ones almost without loss.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rankwise.compression.calibrate import whitening
from rankwise.compression.divergence import divergence
from rankwise.compression.rotary_data import PairFactors, RotarySample, SeenRotary

RATE = 0.02
"""Of Adam, in whitened coordinates; it falls to zero along a cosine."""
ROWS = 2**20
"""Entries of attention matrices in one step, about."""


def calibrate_pairs(
    layer: SeenRotary, start: PairFactors, steps: int, seed: int, on_step: Callable[[int], None]
) -> PairFactors:
    """Lower the mean KL(M ‖ M') of a layer by gradient steps on its factors.

    Args:
        layer: a layer and what it saw.
        start: factors to start from; channels that went stay so.
        steps: of Adam.
        seed: of the draws of sequences.
        on_step: called with the number of steps done.

    Returns:
        Factors; those of the last step where Ctrl-C stops it.
    """
    groups, device = layer.found.groups, layer.samples[0].query.device
    white_q, white_k, start_q, start_k = [], [], [], []
    for head, key in enumerate(start.key):
        to_q, to_k = (whitening(moment[head]) for moment in (layer.query_moments, layer.key_moments))
        white_q += [to_q] * groups
        white_k.append(to_k)
        members = torch.stack(
            [torch.linalg.solve(to_q, query) for query in start.query[head * groups : (head + 1) * groups]]
        )
        own = torch.linalg.solve(to_k, key)
        balance = (own.norm() / members.norm().clamp(min=1e-12) * groups**0.5).sqrt().clamp(min=1e-6)
        start_q += list(members * balance)
        start_k.append(own / balance)
    mask = torch.zeros(len(start.key), layer.found.width)
    for head, channels in enumerate(start.kept):
        mask[head, channels] = 1
    kept_k = mask[:, None].to(device)
    kept_q = kept_k.repeat_interleave(groups, 0)
    a, b = (torch.stack(factors).float().to(device).requires_grad_() for factors in (start_q, start_k))
    to_q, to_k = (torch.stack(factors).float().to(device) for factors in (white_q, white_k))
    optimizer = torch.optim.Adam([a, b], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.enable_grad():
            for done in range(1, steps + 1):
                loss = _loss(*_drawn(layer.samples, generator), (to_q @ a) * kept_q, (to_k @ b) * kept_k)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                on_step(done)
    except KeyboardInterrupt:
        pass
    query, key = ((to_q @ a) * kept_q).detach(), ((to_k @ b) * kept_k).detach()
    return PairFactors(query.cpu().double(), key.cpu().double(), start.kept)


def _loss(sample: RotarySample, rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
    turn = type(sample.rotation)(sample.rotation.pairs, sample.rotation.cos[rows], sample.rotation.sin[rows])
    with torch.no_grad():
        matrix = sample.operator[rows].dense().float()
        query, key = sample.query[rows].float(), sample.key[rows].float()
        logits = turn(query) @ turn(key).repeat_interleave(sample.groups, 1).mT
    change = turn(query @ a) @ turn(key @ b).repeat_interleave(sample.groups, 1).mT - logits
    real = sample.tokens[rows][:, None].expand(change.shape[:-1])
    return divergence(matrix, change)[real].mean()


def _drawn(samples: list[RotarySample], generator: torch.Generator) -> tuple[RotarySample, Tensor]:
    sample = samples[int(torch.randint(len(samples), (), generator=generator))]
    batch, heads, tokens, sources = sample.operator.shape
    count = max(1, min(batch, round(ROWS / (heads * tokens * sources))))
    return sample, torch.randperm(batch, generator=generator)[:count].to(sample.query.device)
