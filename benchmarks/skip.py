"""What λ-skips cost in a forward pass: the model with them against the model without, in turns.

    python benchmarks/skip.py
    python benchmarks/skip.py --device cuda --out skip_h200.json

The bundled demo and a model of GPT-2's size (random weights, nothing is downloaded), each at λ = 1, where the
outputs must be bit-identical (checked in the run), and the limit: what the same number of multiplications of
the token states by a number takes alone. It is one model, its hooks on and off: two copies in two places of
the memory differ by more than a hook costs. Each round has every turn, in changing order, and gives one
ratio; their median comes with the interval that holds it in 95 % of runs. The model without, against itself,
says what the run can resolve. CPU seconds of the process on a CPU, so that other work counts less.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from harness import machine, median, percent, taken
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rankwise.cli.load_model import demo_model
from rankwise.skips import add_lambda_skip
from rankwise.skips.observe import without_skips


def models() -> dict[str, nn.Module]:
    """By name: the demo, trained; GPT-2's 124M, random."""
    torch.manual_seed(0)
    return {
        "demo": AutoModelForCausalLM.from_pretrained(demo_model()),
        "gpt2 (124M, random)": GPT2LMHeadModel(GPT2Config()),
    }


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    rows = [race(name, model, args, device) for name, model in models().items() if args.model in name]
    for row in rows:
        print(
            f"{row['model']:20} {row['sites']} λ-skips, {row['batch']} × {row['tokens']} tokens: "
            f"{percent(row['cost'])} of a forward pass; without against itself {percent(row['control'])}; "
            f"multiplications alone {percent(row['limit'])}"
        )
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")


def race(title: str, model: nn.Module, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One model, without and with, and the multiplications alone."""
    hooked: Any = model.eval().to(device)
    hooked.config.use_cache = False
    ids = torch.randint(3, 259, (args.batch, args.tokens), device=device)
    states = torch.randn(args.batch, args.tokens, hooked.config.hidden_size, device=device)
    skips = add_lambda_skip(hooked)

    def forward() -> Tensor:
        with torch.no_grad():
            return hooked(input_ids=ids).logits

    def multiply() -> list[Tensor]:
        with torch.no_grad():
            return [states * scale for scale in skips.values()]

    def bare() -> float:
        with without_skips(hooked):
            return taken(forward, device)

    with without_skips(hooked):
        plain = forward()
    assert torch.equal(plain, forward()), "λ = 1 changed an output"
    turns = {
        "without": bare,
        "control": bare,
        "cost": lambda: taken(forward, device),
        "limit": lambda: taken(multiply, device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order, dice = list(turns), random.Random(0)
    for _ in range(args.repeats):
        dice.shuffle(order)
        for name in order:
            seconds[name].append(turns[name]())
    less = {"control": 1, "cost": 1, "limit": 0}
    shares = {
        name: [one / unit - own for one, unit in zip(seconds[name], seconds["without"], strict=True)]
        for name, own in less.items()
    }
    size = {"sites": len(skips), "batch": args.batch, "tokens": args.tokens, "repeats": args.repeats}
    return {"model": title, **size, **{name: median(share) for name, share in shares.items()}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="", help="demo or gpt2; both unless given")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
