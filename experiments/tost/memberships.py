"""Memberships of the tokens of a picture in the heads of a ToST, trained and at initialization.

Claim     Wu et al., “Token Statistics Transformer”, ICLR 2025, figures of memberships: heads group the tokens
          of a picture by their content.
Question  How far are memberships from uniform, and do they follow the picture or only the place in it?
Model     the row `tost` of the experiment `vision`, about 4 minutes of a CPU core
Data      held-out pictures of CIFAR-10, in data/cifar10/cifar10.npz
Hardware  one CPU core, seconds

    python -m experiments run vision --rows tost --seeds 0 --results try
    python -m experiments run memberships
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageClassification, PreTrainedModel

from experiments.study import DOCS, Report, Study
from experiments.tasks.pictures import cifar10
from rankwise.models import TokenStatisticsAttention

PICTURE = DOCS / "images" / "memberships.webp"
EXAMPLES, SHOWN, ENLARGED, GAP = 200, 6, 2, 4
"""Measured pictures and drawn pictures; screen pixels per pixel, and between two pictures."""


def memberships(model: PreTrainedModel, pixels: Float[Tensor, "N C H W"]) -> list[Float[Tensor, "N T H"]]:
    """Return the memberships of the tokens of pictures in the heads of each TSSA layer."""
    found: list[Tensor] = []

    def keep(mixer: TokenStatisticsAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(mixer.memberships(*args, **{k: v for k, v in kwargs.items() if k == "hidden_states"}))

    with torch.no_grad(), ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, TokenStatisticsAttention):
                handle = module.register_forward_pre_hook(keep, with_kwargs=True)
                hooks.callback(handle.remove)
        model.eval()(pixel_values=pixels)
    return found


def entropy(membership: Float[Tensor, "N T H"]) -> float:
    """Return the mean entropy over ln H: 1 if all heads share a token, 0 if one head has it."""
    bits = -(membership * membership.clamp(min=1e-30).log()).sum(-1)
    return float(bits.mean() / np.log(membership.shape[-1]))


def by_place(membership: Float[Tensor, "N T H"]) -> float:
    """Return the share of the variance over pictures and places that the place alone explains, from 0 to 1.

    1: every picture has the same memberships. With N pictures, chance alone explains 1/N.
    """
    whole = membership.var((0, 1), correction=0).sum()
    return float(membership.mean(0).var(0, correction=0).sum() / whole)


def measured(model: PreTrainedModel, pixels: Tensor) -> list[dict[str, float]]:
    return [
        {
            "entropy": entropy(layer),
            "by_place": by_place(layer),
            "least": float(layer.min()),
            "most": float(layer.max()),
        }
        for layer in memberships(model, pixels)
    ]


def drawn(model: PreTrainedModel, pixels: Tensor) -> Image.Image:
    """Draw a row per picture: itself, then memberships by layer and head, over the range of the layer."""
    layers = memberships(model, pixels)
    edge, heads = pixels.shape[-1] * ENLARGED, layers[0].shape[-1]
    step = edge + GAP
    strip = 3 * GAP + heads * step  # width of a layer
    sheet = Image.new("RGB", (edge + len(layers) * strip, len(pixels) * step - GAP), "white")

    def paste(values: Tensor, left: int, row: int) -> None:
        image = Image.fromarray(values.round().to(torch.uint8).numpy())
        sheet.paste(image.resize((edge, edge), Image.Resampling.NEAREST), (left, row * step))

    for row, picture in enumerate(pixels):
        paste((picture.permute(1, 2, 0) + 1) * 127.5, 0, row)
        for number, layer in enumerate(layers):
            scaled = (layer[row] - layer.min()) / (layer.max() - layer.min()) * 255
            side = round(layer.shape[1] ** 0.5)
            for head in range(heads):
                left = edge + 3 * GAP + number * strip + head * step
                paste(scaled[:, head].reshape(side, side), left, row)
    return sheet


def measure(data: Path) -> Report:
    """Measure the newest model of the row `tost` of the experiment `vision`, and draw its memberships."""
    folders = sorted(Path("runs", "vision").glob("tost-seed0-*/model"), key=lambda path: path.stat().st_mtime)
    if not folders:
        first = "`python -m experiments run vision --rows tost --seeds 0 --results try`"
        raise FileNotFoundError(f"runs/vision: expected a model of the row tost, got none. Run {first}.")
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_pretrained(folders[-1])
    fresh = AutoModelForImageClassification.from_config(model.config)
    task = cifar10(data / "cifar10")
    pixels = torch.stack([task.test[place]["pixel_values"] for place in range(EXAMPLES)])
    drawn(model, pixels[:SHOWN]).save(PICTURE, lossless=True)
    return {
        "examples": EXAMPLES,
        "shown": SHOWN,
        "sha256": task.record["sha256"],
        "trained": measured(model, pixels),
        "fresh": measured(fresh, pixels),
        "temperatures": [
            module.temperature.flatten().tolist()
            for module in model.modules()
            if isinstance(module, TokenStatisticsAttention)
        ],
    }


def tables(found: Report) -> dict[str, str]:
    rows = [
        f"| {layer} | {trained['least']:.2f} to {trained['most']:.2f} | {trained['entropy']:.4f} "
        f"| {fresh['entropy']:.4f} | {trained['by_place']:.2f} | {fresh['by_place']:.2f} |"
        for layer, (trained, fresh) in enumerate(zip(found["trained"], found["fresh"], strict=True))
    ]
    learned = [value for layer in found["temperatures"] for value in layer]
    return {
        "table": "\n".join(rows),
        "examples": str(found["examples"]),
        "shown": str(found["shown"]),
        "coldest": f"{min(learned):.2f}",
        "hottest": f"{max(learned):.2f}",
    }


STUDY = Study("memberships", measure, "evidence/memberships", tables)
