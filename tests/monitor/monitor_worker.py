"""Process of a training of a small model, wrapped in several ways, with and without a monitor.

``python -m torch.distributed.run`` runs it twice as ``monitor_worker.py FOLDER``; results are in
``FOLDER/RANK.json``.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import dispatch_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw
from rankwise.auditing import AtInitSettings, reinitialized
from rankwise.errors import CaptureError

STEPS, WORDS, WIDTH = 2, 16, 8
DATA = torch.randint(0, WORDS, (STEPS + 1, 4, 6), generator=torch.Generator().manual_seed(1))
PROBE = {"input_ids": DATA[-1, :2]}


class Model(nn.Module):
    """Compute logits of tokens; FSDP gathers the layer separately from embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)])

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


def whole() -> nn.Module:
    """Return the model as one process trains it."""
    torch.manual_seed(0)
    return Model()


def ddp() -> nn.Module:
    """Copy the model to each process."""
    return DistributedDataParallel(whole())


def fsdp2() -> nn.Module:
    """Shard the weights, which are gathered per layer."""
    model = whole()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp1() -> nn.Module:
    """Shard by the earlier class, which is refused."""
    return FullyShardedDataParallel(whole(), device_id=torch.device("cpu"))


def device_map() -> nn.Module:
    """Dispatch by accelerate, whose hooks move the inputs of each part."""
    places = dict.fromkeys(("embedding", "layers", "head"), "cpu")
    return dispatch_model(whole(), places, main_device="cpu", force_hooks=True)


WAYS = (whole, ddp, fsdp2, fsdp1, device_map)
SHARES = (ddp, fsdp2, fsdp1)
"""Wrappers with which each process reads half of a batch."""


def trained(make: Any, monitor: rw.RankMonitor | None) -> tuple[dict[str, Tensor], nn.Module]:
    """Return weights after some steps, audited before the optimizer exists and between gradient and step."""
    model = make().train()
    if monitor is not None:
        monitor.step(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, batch in enumerate(DATA[:-1], 1):
        mine = batch.chunk(2)[dist.get_rank()] if make in SHARES else batch
        nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.flatten()).backward()
        if monitor is not None:
            monitor.step(model, step)
        optimizer.step()
        optimizer.zero_grad()
    kept = model.state_dict()
    return {name.removeprefix("module."): gathered(weight) for name, weight in kept.items()}, model


def gathered(weight: Tensor) -> Tensor:
    """Return a copy of the whole weight."""
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


def measured(make: Any, model: nn.Module) -> list[list[Any]]:
    """Return site, effective rank and effective rank at initialization of each head."""
    built = (lambda seed: reinitialized(whole(), seed)) if make is fsdp2 else None  # FSDP2 cannot be copied
    copied = AtInitSettings(seeds=1, build=built)
    heads = rw.audit(model.eval(), [PROBE], at_init=copied).heads
    return [[head.site, head.effective_rank, head.at_init.mean["effective_rank"]] for head in heads]


def result(make: Any, alone: dict[str, Tensor]) -> dict[str, Any]:
    """Return the results for one way to wrap the model."""
    monitor = rw.RankMonitor(PROBE, every=1)
    try:
        watched, model = trained(make, monitor)
    except CaptureError as error:
        return {"error": str(error)}
    without, _ = trained(make, None)
    return {
        "same_bits": all(torch.equal(watched[name], one) for name, one in without.items()),
        "from_alone": max((watched[name] - one).abs().max().item() for name, one in alone.items()),
        "watched": [[head.effective_rank for head in audit.heads] for audit in monitor.history.audits],
        "audit": measured(make, model),
    }


def stopped(broken: int) -> str | None:
    """Return the code that stops training if the weights of one process are NaN."""
    model = whole()
    if dist.get_rank() == broken:
        nn.init.constant_(model.layers[0].self_attn.in_proj_weight, float("nan"))
    monitor = rw.RankMonitor(PROBE, stop_on="NONFINITE")
    monitor.step(model, 0)
    return monitor.stopped_by and monitor.stopped_by.code


def above_limit(grown: int) -> str | None:
    """Return the code that stops training if queries and keys of one process are large."""
    model = whole()
    if dist.get_rank() == grown:
        model.layers[0].self_attn.in_proj_weight.data *= 100
    monitor = rw.RankMonitor(PROBE, stop_on="largest_logit > 100")
    monitor.step(model, 0)
    return monitor.stopped_by and monitor.stopped_by.code


def main() -> None:
    """Train with each wrapper."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    alone, _ = trained(whole, None)
    found = {make.__name__: result(make, alone) for make in WAYS}
    found["stops"] = [stopped(broken) for broken in (0, 1)]
    found["limits"] = [above_limit(grown) for grown in (0, 1)]
    path = Path(sys.argv[1]) / f"{dist.get_rank()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # results are written; on a busy machine gloo's threads can abort a normal exit


if __name__ == "__main__":
    main()
