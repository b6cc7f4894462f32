"""Where softmax self-attention stands in a model, what it takes and what it gives."""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch, eval_mode, run_model
from rankwise.errors import ReplacementError, SkipError
from rankwise.skips.probe import example_for
from rankwise.skips.replaced_attention import none_of
from rankwise.tracing import MixerSite, RecordedCall, capture, record_calls


@dataclass
class SeenAttention:
    """What one attention layer took and gave on an example.

    Args:
        name: of its module.
        layer: its block, from 0.
        heads: how many.
        causal: whether no token saw a later one.
    """

    name: str
    layer: int
    heads: int
    causal: bool
    problem: str = "it was not called"
    """Why it cannot be replaced; empty where it can."""
    width: int = 0
    """Of its tokens."""
    results: int = 0
    """How many things it gives back; 0: a tensor that is not in a tuple."""


def see_attention(model: nn.Module, example: Batch | None) -> dict[str, SeenAttention]:
    """Every softmax self-attention layer, by name, as it ran on an example.

    Args:
        model: the model.
        example: what to run it on; made by us for models of transformers.

    Raises:
        ReplacementError: if there is no example.
    """
    if example is None:
        try:
            example = example_for(model)
        except SkipError as error:
            raise ReplacementError(
                error.subject, expected="an example of what it reads", got="none",
                fix="Pass one small batch: `replace_attention(model, layers, example=batch)`.",
            ) from error  # fmt: skip
    seen: dict[str, SeenAttention] = {}

    def note(site: MixerSite) -> None:
        if site.kind == "softmax" and not site.cross:
            causal = not bool(site.operator.dense().triu(1).any())
            seen[site.name] = SeenAttention(site.name, site.layer, int(site.operator.shape[1]), causal)

    with torch.no_grad(), eval_mode(model):
        with capture(model, on_mixer=note, on_state=lambda _: None):
            run_model(model, example)
        with record_calls(model, seen) as calls:
            run_model(model, example)
    for call in calls:
        _form(seen[call.name], call)
    return seen


def _form(seen: SeenAttention, call: RecordedCall) -> None:
    """Note what the layer took and gave, or why it cannot be replaced."""
    args, kwargs, output = call.args, call.kwargs, call.output
    names = list(inspect.signature(call.module.forward).parameters)
    tokens = kwargs.get("hidden_states", args[0] if args and names[0] == "hidden_states" else None)
    whole = output[0] if isinstance(output, tuple) else output
    rest = output[1:] if isinstance(output, tuple) else ()
    if not isinstance(tokens, Tensor) or tokens.dim() != 3:
        seen.problem = "it has no argument `hidden_states` of shape (B, T, D)"
    elif not isinstance(whole, Tensor) or whole.shape != tokens.shape:
        seen.problem = "its output has another shape than its tokens"
    elif not none_of(rest):
        seen.problem = "other layers read more of it than its output"
    else:
        seen.problem, seen.width = "", tokens.shape[-1]
        seen.results = len(output) if isinstance(output, tuple) else 0
