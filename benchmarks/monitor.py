"""What watching a training costs: an audit of the probe against a step of the training, in turns.

    python benchmarks/monitor.py
    python benchmarks/monitor.py --device cuda --out monitor_h200.json

Two models with random weights and AdamW: the bundled demo's size, and six layers of width 384. In each round
come a step, an audit, what a user would write by hand (attention matrices of the probe from
``output_attentions``, their singular values) and the limit (a forward pass of the probe), in changing order;
the medians of their ratios to a step come with the interval that holds them in 95 % of runs, as shares of a
training with an audit every ``--every`` steps. A training with the monitor and one without must end with the
same weights, bit for bit, and the singular values by hand must have the effective rank that the audit says
(both checked in the run). CPU seconds of the process on a CPU, so that other work counts less.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from harness import machine, median, percent, taken
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import rankwise as rw
from rankwise.cli.load_model import demo_model
from rankwise.monitor.monitor import EVERY

SAME = 1e-4
"""Distance of effective ranks by hand and by the audit, relative: both are of float32 matrices."""


def models(device: torch.device) -> dict[str, nn.Module]:
    """By name: the demo's size, and six layers of width 384; weights are random."""
    torch.manual_seed(0)
    made = {
        "demo's size": AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo_model())),
        "6 layers of width 384": GPT2LMHeadModel(
            GPT2Config(n_layer=6, n_embd=384, vocab_size=8192, bos_token_id=0, eos_token_id=0)
        ),
    }
    return {name: model.to(device) for name, model in made.items()}


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    rows = [race(name, model, args, device) for name, model in models(device).items()]
    for row in rows:
        shares = "; ".join(f"{name} {percent(row[name])}" for name in ("audit", "by hand", "limit"))
        print(f"{row['model']}, every {row['every']} steps, of the training's time: {shares}")
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")


def race(title: str, model: Any, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """A step, and what can stand between two of them."""
    model.set_attn_implementation("eager")  # by hand needs it; ours does not
    ids = torch.randint(3, 259, (args.batch, args.tokens), device=device)
    probe = {"input_ids": ids[: args.probe]}
    check(model, ids, probe)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)

    def audit() -> rw.Audit | None:
        return rw.RankMonitor(probe, every=args.every).step(model, 0)

    def forward() -> Tensor:
        with torch.no_grad():
            return model.eval()(**probe).logits

    turns = {
        "step": lambda: step(model, optimiser, ids),
        "audit": audit,
        "by hand": lambda: by_hand(model, probe),
        "limit": forward,
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order, dice = list(turns), random.Random(0)
    for _ in range(args.repeats):
        dice.shuffle(order)
        for name in order:
            seconds[name].append(taken(turns[name], device))
    shares = {
        name: median([one / (args.every * unit) for one, unit in zip(values, seconds["step"], strict=True)])
        for name, values in seconds.items()
        if name != "step"
    }
    size = {name: getattr(args, name) for name in ("batch", "tokens", "probe", "every", "repeats")}
    return {"model": title, **size, **shares}


def step(model: Any, optimiser: torch.optim.Optimizer, ids: Tensor) -> None:
    """A step of training."""
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def by_hand(model: Any, probe: dict[str, Tensor]) -> Tensor:
    """Effective rank of each head, mean over sequences."""
    with torch.no_grad():
        found = model.eval()(**probe, output_attentions=True).attentions
        values = torch.linalg.svdvals(torch.stack(found).double())
        share = values / values.sum(-1, keepdim=True)
        return torch.special.entr(share).sum(-1).exp().mean(1)


def check(model: Any, ids: Tensor, probe: dict[str, Tensor]) -> None:
    """Two short trainings end alike, and the audit says what singular values by hand say."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ends = []
    for watched in (False, True):
        model.load_state_dict(start)
        torch.manual_seed(1)
        optimiser, monitor = torch.optim.AdamW(model.parameters(), 1e-4), rw.RankMonitor(probe, every=1)
        for at in range(3):
            step(model, optimiser, ids)
            if watched:
                monitor.step(model, at)
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in start), "the monitor changed a training"
    found = monitor.history.audits[-1]
    ours = torch.tensor([head.effective_rank for head in found.heads], dtype=torch.float64)
    wanted = by_hand(model, probe).flatten().cpu()
    assert torch.allclose(ours, wanted, rtol=SAME), "the audit and svdvals differ"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--probe", type=int, default=2, help="sequences in the probe")
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
