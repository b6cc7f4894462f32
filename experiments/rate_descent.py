"""Do TSSA layers descend the rate they are derived from?

Claim     A TSSA layer is derived as one gradient step on R_c^var, the rate of the tokens grouped by their
          memberships (Wu et al., "Token Statistics Transformer"). The derived step gives back through the
          *transpose* of the projection that made w; a layer as released has an output projection of its own.
Asked     At every layer, with its own projection: does what the layer adds lower R_c^var of the tokens it
          read? And have the tokens that leave the block, after the feed-forward part, a lower one?
Models    the bundled ToST (causal, trained); the same untrained; a bidirectional one, untrained, and trained
          here to tell text from the same text with its words shuffled (three seeds)
Data      the excerpt of tiny Shakespeare that comes with the package, 16 windows of 256 bytes
Hardware  two CPU cores, about ten minutes, nearly all of it training
Expect    the derived step descends, always (it is the gradient); the layer's own does so untrained no better
          than chance

    python -m experiments run rate_descent
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from experiments.render import markdown_table
from experiments.study import Study
from experiments.train_demo import tost
from rankwise.cli.load_data import load_text
from rankwise.cli.load_model import demo_text, demo_tost_model
from rankwise.measures import variational_rate
from rankwise.models import ToSTConfig, ToSTForCausalLM, ToSTForSequenceClassification

TOKENS, WINDOWS, OFFSET = 256, 16, 3
"""ByT5Tokenizer's byte b is token b + 3."""
HEADINGS = (
    "layer", "R_c^var read", "after the layer's part", "after the block", "cos, derived", "cos, layer's part"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer does to its own objective, means over windows."""

    rate: float
    """R_c^var of the tokens the layer reads."""
    derived: float
    """Cosine of the derived step, through the transposed projection, with the steepest descent of Π fixed."""
    cosine: float
    """Cosine of what the layer adds to the stream with the steepest descent there, Π included."""
    chance: float
    """Standard deviation of that cosine for a random direction."""
    after_layer: float
    """R_c^var after what the layer adds."""
    after_block: float
    """And after the feed-forward part."""


def rate(block: Any, x: Tensor, membership: Tensor | None = None) -> Tensor:
    """R_c^var of token states under a block's own norm, projection and memberships, one number a window."""
    read = block.mixer_norm(x)
    if membership is None:
        membership = block.mixer.memberships(read)
    w = block.mixer.mixing_projection(read)
    return grouped_rate(w, membership)


def grouped_rate(w: Tensor, membership: Tensor) -> Tensor:
    """R_c^var of (B, T, H, K) tokens, all heads together."""
    return variational_rate(w.transpose(1, 2), membership.transpose(1, 2)).sum(1)


def cosine(a: Tensor, b: Tensor) -> float:
    """Mean over windows of the cosine between two changes of all their tokens."""
    return float(nn.functional.cosine_similarity(a.flatten(1), b.flatten(1)).mean())


def layer(block: Any, x: Tensor, leaves: Tensor) -> Layer:
    """Study one block on the states it read and gave."""
    x = x.detach().requires_grad_()
    before = rate(block, x)
    (slope,) = torch.autograd.grad(before.sum(), x)
    with torch.no_grad():
        read = block.mixer_norm(x)
        membership = block.mixer.memberships(read)
        mixed = (block.mixer.mixing_operator(read) @ block.mixer.mixing_values(read)).transpose(1, 2)
        added = block.mixer_scale(block.mixer(read).output)
        back = block.mixer.in_proj.weight.T
        derived = mixed.flatten(2) @ back.T
    read = read.detach().requires_grad_()
    fixed = grouped_rate(block.mixer.mixing_projection(read), membership)
    (plain,) = torch.autograd.grad(fixed.sum(), read)
    with torch.no_grad():
        return Layer(
            rate=float(before.mean()),
            derived=cosine(derived, -plain),
            cosine=cosine(added, -slope),
            chance=float(added[0].numel() ** -0.5),
            after_layer=float(rate(block, x + added).mean()),
            after_block=float(rate(block, leaves).mean()),
        )


def study(model: nn.Module, ids: Tensor) -> list[Layer]:
    """Every layer of a model, in float64, on windows of token ids."""
    model = model.eval().double()
    body: Any = model if hasattr(model, "layers") else model.get_submodule("model")
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, given: Any, gave: Any) -> None:
        seen.append((given[0].detach(), gave[0].detach()))

    handles = [block.register_forward_hook(keep) for block in body.layers]
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return [layer(block, *states) for block, states in zip(body.layers, seen, strict=True)]


def windows(text: str, count: int, generator: torch.Generator) -> Iterator[str]:
    """Passages of TOKENS bytes from random places."""
    for start in torch.randint(len(text) - TOKENS, (count,), generator=generator).tolist():
        yield text[start : start + TOKENS]


def as_ids(passages: list[str]) -> Tensor:
    """Bytes as the bundled tokenizer numbers them."""
    rows = [list(passage.encode("utf-8"))[:TOKENS] for passage in passages]
    return torch.tensor([row + [0] * (TOKENS - len(row)) for row in rows]) + OFFSET


def shuffled(passage: str, generator: torch.Generator) -> str:
    """The passage with its words in another order."""
    words = passage.split(" ")
    return " ".join(words[i] for i in torch.randperm(len(words), generator=generator).tolist())


def classifier(seed: int) -> ToSTForSequenceClassification:
    """The bundled ToST's frame, bidirectional, with two classes."""
    torch.manual_seed(seed)
    settings = tost(intermediate_size=496).to_dict() | {
        "causal": False,
        "position_bias": False,
        "num_labels": 2,
    }
    return ToSTForSequenceClassification(ToSTConfig.from_dict(settings))


def trained(seed: int, text: str, steps: int) -> tuple[nn.Module, float]:
    """The classifier after ``steps`` batches of 32, and its accuracy on the last quarter of the text."""
    model, g = classifier(seed), torch.Generator().manual_seed(seed)
    learn, held = text[: len(text) * 3 // 4], text[len(text) * 3 // 4 :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)

    def batch(source: str, count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(2, (count,), generator=g)
        whole = list(windows(source, count, g))
        passages = [shuffled(p, g) if label else p for p, label in zip(whole, labels.tolist(), strict=True)]
        return as_ids(passages), labels

    for _ in range(steps):
        ids, labels = batch(learn, 32)
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        ids, labels = batch(held, 256)
        right = (model(input_ids=ids).logits.argmax(-1) == labels).double().mean()
    return model, float(right)


def run(steps: int = 400, seeds: int = 3) -> dict[str, Any]:
    """All models."""
    text = str(load_text(demo_text()))
    ids = as_ids(list(windows(text, WINDOWS, torch.Generator().manual_seed(0))))
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {
        "causal, untrained": ToSTForCausalLM(tost(intermediate_size=496)),
        "causal, trained (the bundled ToST)": AutoModelForCausalLM.from_pretrained(demo_tost_model()),
        "bidirectional, untrained": classifier(0),
    }
    accuracy = {}
    for seed in range(seeds):
        name = f"bidirectional, trained, seed {seed}"
        models[name], accuracy[name] = trained(seed, text, steps)
    layers = {name: [asdict(one) for one in study(model, ids)] for name, model in models.items()}
    return {"steps": steps, "accuracy": accuracy, "layers": layers}


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Return one table per model, and the numbers of the text."""
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
    chance = report["layers"]["causal, untrained"][0]["chance"]
    torch_version = report["versions"]["torch"] if "versions" in report else report["torch"]
    return {
        "command": STUDY.command,
        "torch": torch_version,
        "chance": f"{chance:.4f}",
        "tables": "\n".join(parts),
    }


STUDY = Study("rate_descent", lambda data: run(), "rate-descent", tables)
