"""Do TSSA layers descend the rate they are derived from?

Claim     A TSSA layer is derived as one gradient step on R_c^var, the rate of the tokens grouped by their
          memberships (Wu et al., "Token Statistics Transformer"). The derived step returns through the
          *transpose* of the projection that made w; a layer as released has an output projection of its own.
Measured  R_c^var at every layer, with its own projection: of the tokens that it reads, after the layer's
          part, and after the feed-forward part
Models    the bundled ToST (causal, trained); the same untrained; a bidirectional one, untrained, and trained
          here to distinguish text from the same text with shuffled words (three seeds)
Data      the excerpt of tiny Shakespeare that comes with the package, 16 windows of 256 bytes
Hardware  two CPU cores, about ten minutes, nearly all of it training
Expect    the derived step always descends (it is the gradient); the layer's own step untrained no better
          than chance
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from experiments.render import markdown_table
from experiments.study import Study
from experiments.tost.train_demo import tost
from rankwise.cli.load_data import load_text
from rankwise.cli.load_model import demo_text, demo_tost_model
from rankwise.measures import variational_rate
from rankwise.models import ToSTConfig, ToSTForCausalLM, ToSTForSequenceClassification

TOKENS, WINDOWS, OFFSET = 256, 16, 3
"""ByT5Tokenizer's byte b is token b + 3."""
HEADINGS = (
    "layer", "R_c^var read", "after the layer's part", "after the block", "cos, derived", "cos, layer's part"
)  # fmt: skip


def rate(block: Any, x: Tensor) -> Tensor:
    """Return R_c^var of token states per window, with the norm, projection and memberships of a block."""
    read = block.mixer_norm(x)
    return grouped_rate(block.mixer.mixing_projection(read), block.mixer.memberships(read))


def grouped_rate(w: Tensor, membership: Tensor) -> Tensor:
    """Return R_c^var of tokens (B, T, H, K), the sum over heads."""
    return variational_rate(w.transpose(1, 2), membership.transpose(1, 2)).sum(1)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine between two changes of all tokens, the mean over windows."""
    return float(nn.functional.cosine_similarity(a.flatten(1), b.flatten(1)).mean())


def measure_layer(block: Any, x: Tensor, leaves: Tensor) -> dict[str, float]:
    """Measure one block on the states that it reads and returns; means over windows.

    Returns:
        `rate` of the tokens that the layer reads, `after_layer` and `after_block`; `derived`, the cosine of
        the derived step with the steepest descent at fixed memberships; `cosine` of the layer's part with the
        steepest descent, and `chance`, the standard deviation of that cosine for a random direction.
    """
    x = x.detach().requires_grad_()
    before = rate(block, x)
    (slope,) = torch.autograd.grad(before.sum(), x)
    with torch.no_grad():
        read = block.mixer_norm(x)
        membership = block.mixer.memberships(read)
        mixed = (block.mixer.mixing_operator(read) @ block.mixer.mixing_values(read)).transpose(1, 2)
        added = block.mixer_scale(block.mixer(read).output)
        derived = mixed.flatten(2) @ block.mixer.in_proj.weight
    read = read.detach().requires_grad_()
    fixed = grouped_rate(block.mixer.mixing_projection(read), membership)
    (plain,) = torch.autograd.grad(fixed.sum(), read)
    with torch.no_grad():
        return {
            "rate": float(before.mean()),
            "derived": cosine(derived, -plain),
            "cosine": cosine(added, -slope),
            "chance": float(added[0].numel() ** -0.5),
            "after_layer": float(rate(block, x + added).mean()),
            "after_block": float(rate(block, leaves).mean()),
        }


def measure_layers(model: nn.Module, ids: Tensor) -> list[dict[str, float]]:
    """Measure every layer of a model, in float64, on windows of token ids."""
    model = model.eval().double()
    body: Any = model if hasattr(model, "layers") else model.get_submodule("model")
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, given: Any, output: Any) -> None:
        seen.append((given[0].detach(), output[0].detach()))

    handles = [block.register_forward_hook(keep) for block in body.layers]
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return [measure_layer(block, *states) for block, states in zip(body.layers, seen, strict=True)]


def windows(text: str, count: int, generator: torch.Generator) -> list[str]:
    starts = torch.randint(len(text) - TOKENS, (count,), generator=generator).tolist()
    return [text[start : start + TOKENS] for start in starts]


def as_ids(passages: list[str]) -> Tensor:
    rows = [list(passage.encode("utf-8"))[:TOKENS] for passage in passages]
    return torch.tensor([row + [0] * (TOKENS - len(row)) for row in rows]) + OFFSET


def shuffled(passage: str, generator: torch.Generator) -> str:
    words = passage.split(" ")
    return " ".join(words[i] for i in torch.randperm(len(words), generator=generator).tolist())


def classifier(seed: int) -> ToSTForSequenceClassification:
    """Return the bundled ToST's frame, bidirectional, with two classes."""
    torch.manual_seed(seed)
    settings = tost(intermediate_size=496).to_dict()
    settings |= {"causal": False, "position_bias": False, "num_labels": 2}
    return ToSTForSequenceClassification(ToSTConfig.from_dict(settings))


def train(seed: int, text: str, steps: int) -> tuple[nn.Module, float]:
    """Train the classifier on batches of 32; return its accuracy on the last quarter of the text, too."""
    model, g = classifier(seed), torch.Generator().manual_seed(seed)
    known, held_out = text[: len(text) * 3 // 4], text[len(text) * 3 // 4 :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)

    def batch(source: str, count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(2, (count,), generator=g)
        whole = windows(source, count, g)
        passages = [shuffled(p, g) if label else p for p, label in zip(whole, labels.tolist(), strict=True)]
        return as_ids(passages), labels

    for _ in range(steps):
        ids, labels = batch(known, 32)
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        ids, labels = batch(held_out, 256)
        right = (model(input_ids=ids).logits.argmax(-1) == labels).double().mean()
    return model, float(right)


def measure(steps: int = 400, seeds: int = 3) -> dict[str, Any]:
    text = str(load_text(demo_text()))
    ids = as_ids(windows(text, WINDOWS, torch.Generator().manual_seed(0)))
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {
        "causal, untrained": ToSTForCausalLM(tost(intermediate_size=496)),
        "causal, trained (the bundled ToST)": AutoModelForCausalLM.from_pretrained(demo_tost_model()),
        "bidirectional, untrained": classifier(0),
    }
    accuracy = {}
    for seed in range(seeds):
        name = f"bidirectional, trained, seed {seed}"
        models[name], accuracy[name] = train(seed, text, steps)
    layers = {name: measure_layers(model, ids) for name, model in models.items()}
    return {"settings": {"steps": steps, "seeds": seeds}, "accuracy": accuracy, "layers": layers}


def tables(report: dict[str, Any]) -> dict[str, str]:
    parts = []
    for name, layers in report["layers"].items():
        known = report["accuracy"].get(name)
        score = "" if known is None else f", accuracy {known:.2f} on held-out text"
        rows = []
        for number, one in enumerate(layers):
            after = (one["after_layer"], one["after_block"])
            changes = [f"{value:.2f} ({value - one['rate']:+.2f})" for value in after]
            cosines = f"{one['derived']:+.2f}", f"{one['cosine']:+.3f}"
            rows.append((str(number), f"{one['rate']:.2f}", *changes, *cosines))
        parts.append(f"**{name}**{score}\n\n{markdown_table(HEADINGS, rows)}\n")
    return {
        "chance": f"{report['layers']['causal, untrained'][0]['chance']:.4f}",
        "tables": "\n".join(parts),
    }


STUDY = Study("rate_descent", lambda data: measure(), "evidence/rate-descent", tables)
