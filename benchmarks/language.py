"""Time and memory of language models by context: a training step, and the state that decoding keeps.

    python -m benchmarks language --out benchmarks/results/language.json
    python -m benchmarks language --tokens 256 1024 --repeats 5

The models of the experiment `language`, of equal parameters but for positions. A user would take the
transformer instead (blocks of Llama, fused attention of torch). The limit is a product with as many weights
in one matrix, forward and backward: no model can be faster. A step has `--batch-tokens` tokens at any
context, so that only mixing grows with the context. Times are ratios to the transformer. Memory is the most
that a step takes in addition to model and optimizer, in a fresh process. State is what decoding keeps of one
sequence in float32. Before a model is timed it must give the same logits at once and token by token, in
float64: TSSA divides by a sum of squares, and where the first token has a channel near 0, float32 rounding
grows ten-thousandfold.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.harness import in_fresh_process, peak_mib, positive, race, ratio
from experiments.tasks.task import Task
from experiments.tasks.text import BYTE_VOCABULARY
from experiments.tost.language import MODELS, PARAMETERS, config
from experiments.training.models import model_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

REPEATS = 7
BASE, LIMIT = "transformer", "limit"
SAME = 1e-9
"""Largest difference of logits at once and token by token."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the contexts and the size of a step."""
    parser.add_argument("--tokens", type=positive, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--batch-tokens", type=positive, default=4096, help="tokens in a step")


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each model at each context: times of a step in turns, memory and state."""
    if given.quick:
        given.tokens, given.batch_tokens, given.repeats = [32], 64, 1
    device = torch.device(given.device)
    for name in MODELS:
        check(name)
    for tokens in given.tokens:
        size = {"tokens": tokens, "batch_tokens": given.batch_tokens, "device": given.device}
        runs: dict[str, Callable[[], object]] = {name: training_step(name, **size) for name in MODELS}
        runs[LIMIT] = product(given.batch_tokens, device)
        seconds = race(runs, given.repeats, device)
        for name in runs:
            unmeasured = name == LIMIT or given.quick
            yield {
                "tokens": tokens,
                "model": name,
                "time": ratio(seconds[name], seconds[BASE]),
                "memory": None if unmeasured else in_fresh_process("language", name=name, **size),
                "state": None if name == LIMIT else state_bytes(name, tokens),
            }


def line(row: dict[str, Any]) -> str:
    """Return the ratio of times, the memory and the state."""
    kept = "" if row["memory"] is None else f", {row['memory']:,.0f} MiB"
    kept += "" if row["state"] is None else f", {row['state']:,} bytes"
    return f"{row['tokens']:>6} {row['model']:17} {'{:.2f} ({:.2f} to {:.2f})'.format(*row['time'])}{kept}"


def model_of(name: str, tokens: int) -> PreTrainedModel:
    """Return a model of the experiment, with positions for this context."""
    row = config(name)
    made = model_config(row, Task("language", row.tokens, vocab_size=BYTE_VOCABULARY))
    made.max_position_embeddings = tokens
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(made)


def training_step(name: str, tokens: int, batch_tokens: int, device: str) -> Callable[[], object]:
    """Return a training step, after the first, which makes the optimizer's state."""
    model: Any = model_of(name, tokens).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    ids = torch.randint(3, BYTE_VOCABULARY, (max(batch_tokens // tokens, 1), tokens), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def product(tokens: int, device: torch.device) -> Callable[[], object]:
    """Return forward and backward of a product with as many weights as a model has."""
    width = config(BASE).width
    weight = torch.randn(width, PARAMETERS // width, device=device, requires_grad=True)
    x = torch.randn(tokens, width, device=device, requires_grad=True)

    def run() -> None:
        output = x @ weight
        output.backward(output.detach())
        weight.grad = x.grad = None

    return run


def peak(name: str, **size: Any) -> float | None:
    """Return the MiB of a training step."""
    return peak_mib(training_step(name, **size), torch.device(size["device"]))


@torch.no_grad()
def state_bytes(name: str, tokens: int) -> int:
    """Return the bytes that decoding keeps after so many tokens of one sequence."""
    model = model_of(name, tokens).eval()
    kept = model(input_ids=torch.randint(3, BYTE_VOCABULARY, (1, tokens)), use_cache=True).past_key_values
    return sum({id(tensor): tensor.nbytes for tensor in tensors_in(kept)}.values())


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors in a cache; a shared one more than once."""
    if isinstance(thing, Tensor):
        yield thing
        return
    if hasattr(thing, "__dict__"):
        thing = vars(thing)
    for part in (
        thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    ):
        yield from tensors_in(part)


@torch.no_grad()
def check(name: str) -> None:
    """Raise if a model's logits at once and token by token differ."""
    model, ids = model_of(name, 64).double().eval(), torch.randint(3, BYTE_VOCABULARY, (2, 64))
    kept, parts = None, []
    for at in range(ids.shape[1]):
        found = model(input_ids=ids[:, at : at + 1], past_key_values=kept, use_cache=True)
        kept = found.past_key_values
        parts.append(found.logits)
    apart = (torch.cat(parts, 1) - model(input_ids=ids).logits).abs().max().item()
    assert apart < SAME, f"{name}: token by token its logits differ by {apart}"
