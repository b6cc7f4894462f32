"""What a monitor costs in a training, and λ-skips in a forward pass.

    python -m benchmarks monitor_skip
    python -m benchmarks monitor_skip --only skip --repeats 61
    python -m benchmarks monitor_skip --device cuda --out h200.json

Monitor: two models with random weights and AdamW, of the bundled demo's size and of six layers of width 384.
These runs take turns: a training step; an audit of the probe; what a user would write by hand (the probe's
attention matrices from `output_attentions`, their singular values); and the limit, a forward pass of the
probe. Each is given as a share of a training with an audit every `--every` steps. A training with the monitor
and one without must end with the same bits, and effective ranks by hand must be those of the audit.

λ-skips: the bundled demo and a model of GPT-2's size (random weights), each with λ-skips at λ = 1, where
outputs must be bit-identical. It is one model, its hooks on and off, since two copies in two places of the
memory differ by more than a hook costs; the model without λ-skips against itself says what the run can
resolve. The limit is the multiplication of the token states by λ alone.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.harness import Ratio, positive, race, ratio
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import rankwise as rw
from rankwise._internals.torch_private import without_forward_hooks
from rankwise.cli.load_model import demo_model
from rankwise.monitor.monitor import EVERY
from rankwise.skips import add_lambda_skip
from rankwise.skips.observe import without_skips

REPEATS = 21
SAME = 1e-4
"""Relative difference of effective ranks by hand and of the audit: both are of float32 matrices."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument(
        "--only", choices=("monitor", "skip"), help="one of the two questions (default: both)"
    )
    parser.add_argument("--every", type=positive, default=EVERY, help="steps from one audit to the next")
    parser.add_argument("--probe", type=positive, default=2, help="sequences in the probe, of 8 in a step")


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each model of each question."""
    device = torch.device(given.device)
    torch.manual_seed(0)
    demo = demo_model()
    if given.only != "skip":
        wide = GPT2Config(n_layer=6, n_embd=384, vocab_size=8192, bos_token_id=0, eos_token_id=0)
        sized = {
            "demo's size": AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo)),
            "6 layers of width 384": GPT2LMHeadModel(wide),
        }
        for name, model in list(sized.items())[: 1 if given.quick else None]:
            yield {"question": "monitor", "model": name, **monitor(model.to(device), given, device)}
    if given.only != "monitor":
        yield {
            "question": "skip",
            "model": "demo",
            **skip(AutoModelForCausalLM.from_pretrained(demo).to(device), given, device),
        }
        if not given.quick:
            gpt2 = GPT2LMHeadModel(GPT2Config())
            yield {"question": "skip", "model": "GPT-2's size", **skip(gpt2.to(device), given, device)}


def line(row: dict[str, Any]) -> str:
    """Return the shares in percent."""
    shares = {name: value.percent() for name, value in row.items() if isinstance(value, Ratio)}
    unit = (
        "a forward pass" if row["question"] == "skip" else f"a training, audited every {row['every']} steps"
    )
    return f"{row['question']}, {row['model']}, of {unit}: {'; '.join(map(' '.join, shares.items()))}"


def monitor(model: Any, given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the shares of a training."""
    model.set_attn_implementation("eager")  # by hand needs it; the audit does not
    batch, tokens = (2, 32) if given.quick else (8, 128)
    ids = torch.randint(3, 259, (batch, tokens), device=device)
    probe = {"input_ids": ids[: given.probe]}
    check(model, ids, probe)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    @torch.no_grad()
    def forward() -> Tensor:
        return model.eval()(**probe).logits

    runs = {
        "step": lambda: step(model, optimizer, ids),
        "audit": lambda: rw.RankMonitor(probe, every=given.every).step(model, 0),
        "by hand": lambda: ranks_by_hand(model, probe),
        "limit": forward,
    }
    seconds = race(runs, given.repeats, device)
    training = [given.every * one for one in seconds.pop("step")]
    shares = {name: ratio(times, training) for name, times in seconds.items()}
    return {"batch": batch, "tokens": tokens, "probe": given.probe, "every": given.every, **shares}


def step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    """Train for one step."""
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def ranks_by_hand(model: Any, probe: dict[str, Tensor]) -> Tensor:
    """Return the effective rank of each head, the mean over sequences."""
    found = model.eval()(**probe, output_attentions=True).attentions
    values = torch.linalg.svdvals(torch.stack(found).double())
    return torch.special.entr(values / values.sum(-1, keepdim=True)).sum(-1).exp().mean(1)


def check(model: Any, ids: Tensor, probe: dict[str, Tensor]) -> None:
    """Raise if the monitor changes a training, or measures other effective ranks than `ranks_by_hand`."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ends = []
    for watched in (False, True):
        model.load_state_dict(start)
        torch.manual_seed(1)
        optimizer, monitor = torch.optim.AdamW(model.parameters(), 1e-4), rw.RankMonitor(probe, every=1)
        for at in range(3):
            step(model, optimizer, ids)
            if watched:
                monitor.step(model, at)
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in start), "the monitor changed a training"
    audit = monitor.history.audits[-1]
    measured = torch.tensor([head.effective_rank for head in audit.heads], dtype=torch.float64)
    by_hand = ranks_by_hand(model, probe).flatten().cpu()
    assert torch.allclose(measured, by_hand, rtol=SAME), "the audit and svdvals differ"


def skip(model: Any, given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return what λ-skips add to a forward pass, as a share of it."""
    model.eval()
    model.config.use_cache = False
    batch, tokens = (1, 32) if given.quick else (4, 256)
    ids = torch.randint(3, 259, (batch, tokens), device=device)
    states = torch.randn(batch, tokens, model.config.hidden_size, device=device)
    skips = add_lambda_skip(model)

    @torch.no_grad()
    def run(off: bool) -> Tensor:
        with without_skips(model) if off else without_forward_hooks(model, lambda hook: False):
            return model(input_ids=ids).logits

    @torch.no_grad()
    def multiply() -> list[Tensor]:
        return [states * scale for scale in skips.values()]

    assert torch.equal(run(off=True), run(off=False)), "λ = 1 changed an output"
    without = partial(run, off=True)
    runs = {"without": without, "against itself": without, "with": partial(run, off=False), "limit": multiply}
    seconds = race(runs, given.repeats, device)
    base = seconds.pop("without")
    shares = {name: ratio(times, base) for name, times in seconds.items()}
    for name in ("against itself", "with"):
        shares[name] = Ratio(*(one - 1 for one in shares[name]))
    return {"sites": len(skips), "batch": batch, "tokens": tokens, **shares}
