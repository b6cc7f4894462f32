"""Token states of the user's own: words through a random embedding, or what a model's first block reads."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise._internals.forward import run_model
from rankwise.cli.load_data import inputs_for
from rankwise.cli.load_model import Subject
from rankwise.data import load_text
from rankwise.errors import InputError
from rankwise.plan.planner import embedded
from rankwise.tracing import capture


def attention_of(subject: Subject, asked: int | None = None) -> dict[str, Any]:
    """What the configuration says of attention: sizes, positions and mask.

    Args:
        subject: the model.
        asked: width that was asked for beside it, if any.

    Raises:
        InputError: if its configuration has no attention heads, its keys and values are one latent, or it
            has another width than was asked for.
    """
    config: Any = getattr(subject.model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    width = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int):
        raise InputError(
            f"model {subject.name}",
            expected="a model whose configuration has attention heads",
            got=f"{type(config).__name__} without num_attention_heads and hidden_size",
            fix="Leave --model out and give --width.",
        )
    if getattr(config, "kv_lora_rank", None):
        raise InputError(
            f"model {subject.name}",
            expected="projections of keys and of values of their own: their parameters and cache are priced",
            got=f"{type(config).__name__}, whose keys and values are one latent",
            fix="Leave --model out and give --width.",
        )
    if asked is not None and asked != width:
        raise InputError(
            f"--width {asked}",
            expected=f"{width}, as the token states and heads of model {subject.name} have it",
            got=str(asked),
            fix="Leave --width out, or --model.",
        )
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    causal = type(subject.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return {
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or width // heads,
        "width": width,
        "positions": "rope" if rotary else "none",  # learned ones are in its token states
        "mask": "causal" if causal else "full",
    }


def model_states(
    subject: Subject, text: Path | None, images: Path | None, tokens: int, sequences: int
) -> tuple[list[Any], Tensor, list[str]]:
    """What the first block of the model reads, of the sequences that are as long as the longest.

    Args:
        subject: the model.
        text: a text file, or none.
        images: pictures, or none.
        tokens: of a sequence, at most what the model takes.
        sequences: at most.

    Returns:
        The batches, states (B, T, D), and in words what they are, then notes.

    Raises:
        InputError: if the text is too short, or the data are not what the model reads.
    """
    inputs = inputs_for(subject, text=text, images=images, tokens=tokens, sequences=sequences)
    device = next(subject.model.parameters()).device
    batches, found = [], []
    for given in inputs.batches:
        batch = {name: part.to(device) for name, part in given.items()} if isinstance(given, dict) else given
        batches.append(batch)
        with torch.no_grad(), capture(subject.model) as trace:
            run_model(subject.model, batch)
        first = trace.states[0]
        masks = first.mask if first.mask is not None else [slice(None)] * len(first.tokens)
        found += [row[mask].float().cpu() for row, mask in zip(first.tokens, masks, strict=True)]
    longest = max(len(row) for row in found)
    if longest < 2 or (images is None and longest < tokens and not inputs.notes):
        raise InputError(
            f"--text {text}",
            expected=f"a sequence of {tokens} tokens",
            got=f"{longest} at most",
            fix=f"Give a longer text, or --tokens {max(longest, 2)}.",
        )
    kept = torch.stack([row for row in found if len(row) == longest])
    said = [f"token states of {subject.name} on {inputs.data} ({len(kept)} sequences)", *inputs.notes]
    return batches, kept, said


def text_states(path: Path, width: int, tokens: int, sequences: int, seed: int) -> tuple[Tensor, list[str]]:
    """Words of a text through a random embedding.

    Args:
        path: the text.
        width: D.
        tokens: words and signs of a sequence.
        sequences: at most.
        seed: of the embedding.

    Returns:
        States (B, T, D), and in words what they are, then notes.

    Raises:
        InputError: if no text is long enough.
    """
    text = load_text(path)
    names: dict[str, int] = {}
    rows = []
    for passage in [text] if isinstance(text, str) else text:
        words = re.findall(r"\w+|[^\w\s]", passage.lower())
        ids = [names.setdefault(word, len(names)) for word in words]
        rows += [ids[at : at + tokens] for at in range(0, len(ids) - tokens + 1, tokens)]
        if len(rows) >= 16 * sequences:
            break
    if not rows:
        raise InputError(
            f"--text {path}",
            expected=f"a text of {tokens} words and signs or more",
            got=f"{len(words)} in the longest" if isinstance(text, str) else "none so long",
            fix="Give a longer text, or fewer --tokens.",
        )
    chosen = torch.tensor(rows[:: max(1, len(rows) // sequences)][:sequences])
    different = sum(len(row.unique()) for row in chosen) / chosen.numel()
    return embedded(chosen, width, seed), [
        f"words of {path} through a random embedding ({len(chosen)} sequences)",
        f"{different:.0%} of the words of a sequence are different; equal ones are one column.",
    ]
