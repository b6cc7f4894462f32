"""Time and memory of language models by context: a step of training, and the state that decoding keeps.

    PYTHONPATH=. python benchmarks/language.py
    PYTHONPATH=. python benchmarks/language.py --tokens 256 1024 --repeats 5 --out language.json

The models of the experiment `language`, of equal parameters but for positions. What a user would pick instead
is the transformer (blocks of Llama, fused attention of torch); the limit is a product with as many weights in
one matrix, forward and backward, which no model can be faster than. A step has `--batch-tokens` tokens
whatever the context, so that what grows with the context is mixing. In each round every model does a step, in
changing order; medians of their ratios to the transformer come with the interval that holds them in 95 % of
runs.
Memory is the most that a step takes beside model and optimiser, in a process of its own. State is what
decoding keeps of one sequence in float32. Before it is timed each model must give the same logits at once and
token by token, in float64: TSSA divides by a sum of squares, and where the first token has a channel near 0,
rounding grows ten-thousandfold. CPU seconds of the process, so that other work counts less.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experiments.tasks.task import Task
from experiments.tasks.text import BYTE_VOCABULARY
from experiments.tost.language import MODELS, PARAMETERS, config
from experiments.training.models import model_config
from harness import machine, median, peak_mib, taken
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

BASE, LIMIT = "transformer", "limit"
SAME = 1e-9
"""Of logits at once and token by token, absolute."""
RESULTS = Path(__file__).with_name("results") / "language.json"


def main() -> None:
    args = arguments()
    if args.peak:
        print(peak_mib(step_of(args.peak, args.tokens[0], args.batch_tokens), torch.device("cpu")))
        return
    for name in MODELS:
        check(name)
    rows = [row for tokens in args.tokens for row in race(tokens, args)]
    for row in rows:
        ratio = "{:.2f} ({:.2f} … {:.2f})".format(*row["time"])
        kept = "" if row["state"] is None else f", {row['memory']:,.0f} MiB, {row['state']:,} bytes"
        print(f"{row['tokens']:>6} {row['model']:17} {ratio}{kept}")
    args.out.write_text(json.dumps({"machine": machine(torch.device("cpu")), "rows": rows}, indent=1) + "\n")


def race(tokens: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A step of each model in turns, its memory, and its state after as many tokens."""
    steps: dict[str, Callable[[], object]] = {
        name: step_of(name, tokens, args.batch_tokens) for name in MODELS
    }
    steps[LIMIT] = product(args.batch_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, dice = list(steps), random.Random(0)
    for _ in range(args.repeats):
        dice.shuffle(order)
        for name in order:
            seconds[name].append(taken(steps[name], torch.device("cpu")))
    return [
        {
            "tokens": tokens,
            "model": name,
            "time": median([one / base for one, base in zip(seconds[name], seconds[BASE], strict=True)]),
            "memory": None if name == LIMIT else alone(name, tokens, args.batch_tokens),
            "state": None if name == LIMIT else state_bytes(name, tokens),
        }
        for name in steps
    ]


def model_of(name: str, tokens: int) -> PreTrainedModel:
    """Return a model of the experiment, with positions for this context."""
    row = config(name)
    made = model_config(row, Task("language", row.tokens, vocab_size=BYTE_VOCABULARY))
    made.max_position_embeddings = tokens
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(made)


def step_of(name: str, tokens: int, batch_tokens: int) -> Callable[[], object]:
    """A step of training; the first is done, so that the optimiser's state is there."""
    model = model_of(name, tokens).train()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)
    ids = torch.randint(3, BYTE_VOCABULARY, (max(batch_tokens // tokens, 1), tokens))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    step()
    return step


def product(tokens: int) -> Callable[[], object]:
    """Forward and backward of a product with as many weights as a model has; the first is done."""
    width = config("transformer").width
    weight = torch.randn(width, PARAMETERS // width, requires_grad=True)
    x = torch.randn(tokens, width, requires_grad=True)

    def run() -> None:
        output = x @ weight
        output.backward(output.detach())
        weight.grad = x.grad = None

    run()
    return run


def alone(name: str, tokens: int, batch_tokens: int) -> float:
    """MiB of a step in a process of its own."""
    sizes = ["--tokens", str(tokens), "--batch-tokens", str(batch_tokens)]
    command = [sys.executable, __file__, "--peak", name, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


@torch.no_grad()
def state_bytes(name: str, tokens: int) -> int:
    """What decoding keeps after so many tokens of one sequence."""
    model = model_of(name, tokens).eval()
    kept = model(input_ids=torch.randint(3, BYTE_VOCABULARY, (1, tokens)), use_cache=True).past_key_values
    found: dict[int, Tensor] = {}
    collect(kept, found)
    return sum(tensor.nbytes for tensor in found.values())


def collect(thing: Any, found: dict[int, Tensor]) -> None:
    """Every tensor in a cache, once."""
    if isinstance(thing, Tensor):
        found[id(thing)] = thing
    elif isinstance(thing, dict):
        for one in thing.values():
            collect(one, found)
    elif isinstance(thing, list | tuple):
        for one in thing:
            collect(one, found)
    elif hasattr(thing, "__dict__"):
        collect(vars(thing), found)


@torch.no_grad()
def check(name: str) -> None:
    """The same logits at once and token by token."""
    model, ids = model_of(name, 64).double().eval(), torch.randint(3, BYTE_VOCABULARY, (2, 64))
    kept, parts = None, []
    for at in range(ids.shape[1]):
        found = model(input_ids=ids[:, at : at + 1], past_key_values=kept, use_cache=True)
        kept = found.past_key_values
        parts.append(found.logits)
    apart = (torch.cat(parts, 1) - model(input_ids=ids).logits).abs().max().item()
    assert apart < SAME, f"{name}: token by token its logits are {apart} away"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peak", choices=MODELS, help="measure the memory of this model alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
