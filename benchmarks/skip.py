"""What λ-skips cost in a forward pass: the model with them against the model without, in turns.

    python benchmarks/skip.py
    python benchmarks/skip.py --device cuda --out skip_h200.json

The bundled demo and a model of GPT-2's size (random weights, nothing is downloaded), each at λ = 1, where the
outputs must be bit-identical (checked in the run), and the limit: what the same number of multiplications of
the token states by a number takes alone. A pass without is timed before and after each pass with: their
difference among themselves says what the run can resolve.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import machine, timed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rankwise.assets import demo_model
from rankwise.surgery import add_lambda_skip


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
    rows = [race(name, model, args, device) for name, model in models().items()]
    for row in rows:
        print(
            f"{row['model']:20} {row['sites']} λ-skips, {row['batch']} × {row['tokens']} tokens: "
            f"{100 * row['cost']:+.2f} % of a forward pass (quartiles {100 * row['quartiles'][0]:+.2f} and "
            f"{100 * row['quartiles'][1]:+.2f}; two passes without differ by {100 * row['noise']:+.2f} %; "
            f"multiplications alone {100 * row['limit']:.2f} %)"
        )
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")


def race(name: str, model: nn.Module, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One model, without and with, and the multiplications alone."""
    plain: Any = model.eval().to(device)
    plain.config.use_cache = False
    scaled = copy.deepcopy(plain)
    skips = add_lambda_skip(scaled)
    ids = torch.randint(3, 259, (args.batch, args.tokens), device=device)
    states = torch.randn(args.batch, args.tokens, plain.config.hidden_size, device=device)

    def forward(model: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad():
                return model(input_ids=ids).logits

        return run

    def multiply() -> list[Tensor]:
        with torch.no_grad():
            return [states * scale for scale in skips.values()]

    without, with_skips = forward(plain), forward(scaled)
    assert torch.equal(without(), with_skips()), "λ = 1 changed an output"
    multiply()
    cost, noise, alone = [], [], []
    for _ in range(args.repeats):
        before, _ = timed(without, device)
        own, _ = timed(with_skips, device)
        after, _ = timed(without, device)
        taken, _ = timed(multiply, device)
        unit = (before + after) / 2
        cost.append(own / unit - 1)
        noise.append(after / before - 1)
        alone.append(taken / unit)
    quartiles = statistics.quantiles(cost, n=4)
    return {
        "model": name,
        "sites": len(skips),
        "batch": args.batch,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "cost": statistics.median(cost),
        "quartiles": [quartiles[0], quartiles[2]],
        "noise": statistics.median(noise),
        "limit": statistics.median(alone),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
