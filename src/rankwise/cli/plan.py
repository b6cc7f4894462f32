"""Command `rankwise plan`, and token states from a model, a text or images."""

import math
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from rankwise._internals.files import check_unused
from rankwise.cli.options import Device, Images, Seed, Sequences, Text, TrustRemoteCode
from rankwise.errors import INTERRUPTED, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from rankwise.cli.load_model import LoadedModel
    from rankwise.plan import HeadDimPlan

HELP = """Plan the query/key width of heads before training: where the rank of random heads saturates.

The result describes random weights. With --model, the token states of the model are used, and the width that
its trained heads require is measured too. Output: plan.json and index.html. Ctrl-C keeps finished trials.

[bold]Examples[/bold]

  rankwise plan --tokens 2048 --mask causal --width 768 --heads 12
  rankwise plan --tokens 1024 --positions rope --width 512 --heads 8 --kv-heads 2
  rankwise plan --tokens 256 --text book.txt --width 256
  rankwise plan --tokens 256 --images photos/ --width 384
  rankwise plan --tokens 256 --model gpt2 --text book.txt --out gpt2-plan
"""
SIDE = 224
"""Pixels per side to which images are resized if their sizes differ, as for ViT."""
DIM = 768
"""Default width of the random embeddings of words and patches."""


def command(
    tokens: Annotated[int, typer.Option(min=2, help="Plan for sequences of this number of tokens.")] = 1024,
    width: Annotated[
        int | None, typer.Option(min=1, help="Width D of the model, for costs and random embeddings.")
    ] = None,
    mask: Annotated[
        str | None, typer.Option(help="Mask: full or causal; by default full, or as in the model.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Least gain in rank/T per channel, from K to 2K.")] = 0.01,
    model: Annotated[
        str | None, typer.Option(help="Use token states and heads of this model: name, folder or factory.")
    ] = None,
    text: Text = None,
    images: Images = None,
    positions: Annotated[
        str | None, typer.Option(help="Positions: none or rope; by default none, or as in the model.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Temperature of softmax in units of √K; 0 counts hardmax winners.")
    ] = 0.0,
    heads: Annotated[int | None, typer.Option(min=1, help="Current number of heads, for the costs.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Current number of key heads.")] = None,
    trials: Annotated[int, typer.Option(help="Number of random draws of the weights.")] = 10,
    sequences: Sequences = 8,
    seed: Seed = 0,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="Write the plan to this new or empty folder.")] = Path(
        "rankwise-plan"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder with files.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Plan a query/key width; `HELP` describes the command."""
    import torch

    from rankwise import __version__
    from rankwise.cli import output
    from rankwise.cli.load_data import check_data
    from rankwise.cli.load_model import check_device, load_model
    from rankwise.plan import plan_head_dim
    from rankwise.plan.planner import check_arguments, present_head_dim
    from rankwise.report.plan_report import plan_document

    if not overwrite:
        check_unused(out, fix="Choose another name, or add --overwrite.")
    if model is not None or text is not None or images is not None:
        check_data(["the model"], text=text, images=images)  # batches of a factory are not used
    check_arguments(
        tokens, mask or "full", tolerance, positions=positions or "none", temperature=temperature,
        delta=0.01, trials=trials, seed=seed,
    )  # fmt: skip
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": None}
    if model is None:
        embedded = text is not None or images is not None
        dim = width if not embedded else (width or DIM) if heads is not None else None
        present_head_dim(**sizes, width=dim, positions=positions or "none")
    check_device(device or "cpu")
    loaded, given = None, TokenStates(tokens)
    with output.new_folder(out):
        if model is not None:
            loaded = load_model(model, device=device, trust_remote_code=trust_remote_code)
            own = attention_of(loaded, width)
            if heads is None:  # the model's key heads and widths only fit its own number of heads
                sizes = {name: own[name] for name in sizes} | ({"kv_heads": kv_heads} if kv_heads else {})
            positions = positions or own["positions"]
            present_head_dim(**sizes, width=own["width"], positions=positions)
            given = model_states(loaded, text, images, tokens, sequences)
            mask = mask or given.mask
        elif text is not None:
            given = text_states(text, width or DIM, tokens, sequences, seed)
        elif images is not None:
            given = image_states(images, width or DIM, tokens, sequences, seed)
        with output.show_progress("drawing random heads", trials) as show:
            plan = plan_head_dim(
                given.states, mask or "full", tolerance, **sizes,
                width=width if model is None and heads is not None else None, positions=positions or "none",
                temperature=temperature, trials=trials, seed=seed, on_trial=lambda done: show(done=done),
            )  # fmt: skip
        about = {
            "command": output.command_line(), "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "rankwise": __version__, "torch": torch.__version__,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        }  # fmt: skip
        notes = [*plan.notes, *given.notes]
        plan = plan.model_copy(update={"about": about, "inputs": given.data or plan.inputs, "notes": notes})
        if plan.complete and loaded is not None:
            plan = _with_trained_widths(plan, loaded.model, given.batches)
        out = output.keep_finished(out / "plan.json", plan.complete)
        written = [("plan", plan.save(out / "plan.json")), ("page", plan.to_html(out / "index.html"))]
        output.print_results(plan_document(plan), written)
        if not plan.complete:
            raise typer.Exit(INTERRUPTED)


def _with_trained_widths(plan: "HeadDimPlan", model: Any, batches: Sequence[Any]) -> "HeadDimPlan":
    """Return the plan with the widths that the trained heads of a model require; incomplete after Ctrl-C."""
    from rankwise.plan import trained_widths

    try:
        trained = trained_widths(model, batches)
    except KeyboardInterrupt:
        notes = [*plan.notes, "Interrupted before the trained heads were measured."]
        return plan.model_copy(update={"complete": False, "notes": notes})
    note = "" if trained else "No softmax attention was captured: the width that heads require is unknown."
    if broken := sum(math.isnan(head.required) for head in trained):
        note = f"NaN or infinity in {broken} of {len(trained)} heads: the width they require is unknown."
    notes = [*plan.notes, *([note] if note else [])]
    return plan.model_copy(update={"trained": trained, "notes": notes})


def attention_of(loaded: "LoadedModel", width: int | None = None) -> dict[str, Any]:
    """Return heads, widths and positions of a model by its configuration; raise if unusable."""
    from rankwise._internals.forward import config_value

    config: Any = getattr(loaded.model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind, subject = type(config).__name__, f"model {loaded.name}"
    fix = "Omit --model and pass --width and --heads."

    def value(name: str) -> Any:
        if name in config_value(config, "per_layer_attributes", default=()):  # such as the widths of Gemma 4
            got = f"{kind}, whose {name} depends on the layer"
            raise InputError(subject, expected="equal sizes in all layers", got=got, fix=fix)
        return config_value(config, name)

    heads, dim = value("num_attention_heads") or value("n_head"), value("hidden_size")
    if not isinstance(heads, int) or not isinstance(dim, int):
        got = f"{kind} without num_attention_heads and hidden_size"
        raise InputError(subject, expected="a configuration with attention heads", got=got, fix=fix)
    if value("kv_lora_rank"):
        expected = "separate projections of keys and of values: their costs are counted"
        got = f"{kind}, whose keys and values are one latent"
        raise InputError(subject, expected=expected, got=got, fix=fix)
    if width is not None and width != dim:
        expected = f"{dim}, as in {loaded.name}"
        raise InputError(f"--width {width}", expected=expected, got=str(width), fix="Omit --width.")
    rotary = value("rope_parameters") or value("rope_theta")
    one_key_head = value("multi_query") and not value("new_decoder_architecture")  # Falcon, GPTBigCode
    return {
        "heads": heads,
        "kv_heads": 1 if one_key_head else value("num_key_value_heads") or value("num_kv_heads") or heads,
        "head_dim": value("head_dim") or dim // heads,
        "width": dim,
        "positions": "rope" if rotary else "none",  # token states include learned positions
    }


class TokenStates(NamedTuple):
    """Token states (B, T, D) or a number of tokens, with what a model adds: notes, batches and its mask."""

    states: "int | Tensor"
    data: str = ""
    notes: tuple[str, ...] = ()
    batches: Sequence[Any] = ()
    mask: Literal["full", "causal"] | None = None


def model_states(
    loaded: "LoadedModel", text: Path | None, images: Path | None, tokens: int, sequences: int
) -> TokenStates:
    """Return the states that the first block reads: real tokens of the longest sequences only."""
    import torch

    from rankwise._internals.forward import batch_errors, device_of, run_model, to_device
    from rankwise.auditing.error_hints import fix_hint
    from rankwise.cli.load_data import load_data
    from rankwise.tracing import capture

    inputs = load_data(loaded, text=text, images=images, tokens=tokens, sequences=sequences)
    batches, rows = [], []
    for given in inputs.batches:
        batch = to_device(given, device_of(loaded.model))
        batches.append(batch)
        failures = batch_errors(loaded.model, batch, fix_hint)
        with failures, torch.no_grad(), capture(loaded.model) as trace:
            run_model(loaded.model, batch)
        if not trace.mixers:
            expected, fix = "a captured mixer, to read its mask and its states", "Pass --width and --heads."
            raise InputError(f"model {loaded.name}", expected=expected, got="none", fix=fix)
        causal = not bool(trace.mixers[0].operator[:1].support().triu(1).any())
        first = trace.states[0]
        masks = first.mask if first.mask is not None else [slice(None)] * len(first.tokens)
        rows += [row[mask].float().cpu() for row, mask in zip(first.tokens, masks, strict=True)]
    longest = max(len(row) for row in rows)
    if longest < 2 or (images is None and longest < tokens and not inputs.notes):
        fix = "Pass a longer text" + (f", or --tokens {longest}." if longest >= 2 else ".")
        expected = f"a sequence of {tokens} tokens"
        raise InputError(f"--text {text}", expected=expected, got=f"at most {longest}", fix=fix)
    states = torch.stack([row for row in rows if len(row) == longest])
    data = f"token states of {loaded.name} on {inputs.data} ({len(states)} sequences)"
    notes = (*loaded.notes, *inputs.notes)
    return TokenStates(states, data, notes, batches, "causal" if causal else "full")


def text_states(path: Path, width: int, tokens: int, sequences: int, seed: int) -> TokenStates:
    """Return random embeddings of the words in a text; raise `InputError` if no text is long enough."""
    import torch

    from rankwise.cli.load_data import load_text

    text = load_text(path)
    names: dict[str, int] = {}
    rows: list[list[int]] = []
    longest = 0
    for passage in [text] if isinstance(text, str) else text:
        words = re.findall(r"\w+|[^\w\s]", passage.lower())
        ids = [names.setdefault(word, len(names)) for word in words]
        longest = max(longest, len(ids))
        rows += [ids[at : at + tokens] for at in range(0, len(ids) - tokens + 1, tokens)]
        if len(rows) >= 16 * sequences:
            break
    if not rows:
        expected = f"a text of at least {tokens} words and signs"
        fix = "Pass a longer text, or fewer --tokens."
        raise InputError(f"--text {path}", expected=expected, got=f"at most {longest}", fix=fix)
    chosen = torch.tensor(rows[:: max(1, len(rows) // sequences)][:sequences])
    different = sum(len(row.unique()) for row in chosen) / chosen.numel()
    known, places = chosen.unique(return_inverse=True)
    embedding = torch.randn(len(known), width, generator=torch.Generator().manual_seed(seed))
    data = f"words of {path} through a random embedding ({len(chosen)} sequences)"
    note = f"{different:.0%} of the words of a sequence are different; equal words have equal states."
    return TokenStates(embedding[places], data, (note,))


def image_states(path: Path, width: int, tokens: int, sequences: int, seed: int) -> TokenStates:
    """Return random linear maps of image patches as states; raise `InputError` if no patches fit.

    Patches are the smallest squares that divide an image into 2 to `tokens` patches; pixels are in [−1, 1].
    """
    import torch
    from torch.nn import functional as F

    from rankwise.cli.load_images import read_images

    [batch] = read_images(path, _stack_images, sequences=sequences, batch_size=sequences)
    pixels = batch["pixel_values"]
    height, across = pixels.shape[-2:]
    sides = [k for k in range(1, min(height, across) + 1) if height % k == 0 and across % k == 0]
    side = next((k for k in sides if 2 <= (height // k) * (across // k) <= tokens), None)
    if side is None:
        expected = f"images that square patches divide into 2 to {tokens} tokens"
        fix = "Pass more --tokens, or images whose sides have a common divisor."
        raise InputError(f"--images {path}", expected=expected, got=f"{height} × {across} pixels", fix=fix)
    patches = F.unfold(pixels, side, stride=side).mT
    generator = torch.Generator().manual_seed(seed)
    states = patches @ (torch.randn(patches.shape[-1], width, generator=generator) / patches.shape[-1] ** 0.5)
    count = states.shape[1]
    notes = [f"{count} patches of {side} × {side} of {height} × {across} pixels."]
    if count < tokens:
        notes[0] += f" Fewer than --tokens {tokens}: smaller patches would be more than that."
    if batch["resized"].item():
        notes.append(f"Images of several sizes were resized to {SIDE} × {SIDE} pixels.")
    data = f"patches of {path} through a random embedding ({len(states)} images)"
    return TokenStates(states, data, tuple(notes))


def _stack_images(images: list[Any], return_tensors: str) -> dict[str, "Tensor"]:
    """Return the pixels of images in one tensor; images of different sizes are resized."""
    import numpy as np
    import torch

    several = len({image.size for image in images}) > 1
    sized = [image.resize((SIDE, SIDE)) for image in images] if several else images
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in sized])).float()
    return {"pixel_values": pixels.permute(0, 3, 1, 2) / 127.5 - 1, "resized": torch.tensor(several)}
