"""What λ-skips cost in a forward pass: the model with them against the model without, in turns.

    python benchmarks/skip.py
    python benchmarks/skip.py --device cuda --out skip_h200.json

The bundled demo and a model of GPT-2's size (random weights, nothing is downloaded), each at λ = 1, where the
outputs must be bit-identical (checked in the run), and the limit: what the same number of multiplications of
the token states by a number takes alone. A copy of the model without takes its turn as well: what it differs
by says what the run can resolve. CPU seconds of the process on a CPU, so that other work counts less.
"""

import argparse
import copy
import json
import statistics
import time
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
            f"{100 * row['cost']:+.2f} % of a forward pass (two copies without differ by "
            f"{100 * row['noise']:+.2f} %; multiplications alone {100 * row['limit']:.2f} %)"
        )
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")


def race(title: str, model: nn.Module, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One model, without and with, and the multiplications alone."""
    plain: Any = model.eval().to(device)
    plain.config.use_cache = False
    copied, scaled = copy.deepcopy(plain), copy.deepcopy(plain)
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

    runs = {"without": forward(plain), "copy": forward(copied), "with": forward(scaled), "limit": multiply}
    assert torch.equal(runs["without"](), runs["with"]()), "λ = 1 changed an output"
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(args.repeats):
        for name in names[turn % 4 :] + names[: turn % 4]:
            seconds[name].append(taken(runs[name], device))
    median = {name: statistics.median(one) for name, one in seconds.items()}
    unit = (median["without"] + median["copy"]) / 2
    return {
        "model": title,
        "sites": len(skips),
        "batch": args.batch,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "cost": median["with"] / unit - 1,
        "noise": median["copy"] / median["without"] - 1,
        "limit": median["limit"] / unit,
    }


def taken(run: Callable[[], object], device: torch.device) -> float:
    """CPU seconds of the process, or seconds until a GPU is done."""
    if device.type == "cuda":
        return timed(run, device)[0]
    start = time.process_time()
    run()
    return time.process_time() - start


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
