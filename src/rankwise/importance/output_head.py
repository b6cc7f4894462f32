"""Logits in chunks of tokens: find the module that makes the logits of a model, and run it on a few rows."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankwise._internals.batches import (
    LABELS,
    Batch,
    batch_size,
    drop_unused_labels,
    first_sequences,
    label_position,
    tensors_in,
    to_device,
)
from rankwise._internals.forward import (
    AddedHook,
    Change,
    config_value,
    device_of,
    out_of_memory,
    run_model,
    vocabulary,
)
from rankwise._internals.torch_private import is_compiled, preserve_state
from rankwise.errors import first_line

CHUNK = 2**23
"""Number of logits that are computed at once: 32 MiB in float32."""
LAST_CALLS = 16
"""Number of module calls at the end of a pass among which the output head is looked for."""
RowFunction = Callable[[Tensor], Tensor]
"""Function of rows, such as states (N, D) or logits (N, V)."""


@dataclass(frozen=True)
class TokenLogits:
    """Logits (B, T, V) as states (B, T, D) and the function from rows of states to rows of logits.

    If no output head is known, the states are the logits themselves.
    """

    states: Float[Tensor, "B T D"]
    of_rows: RowFunction
    """Function from states (N, D) to logits (N, V)."""
    classes: int
    output: Any = None
    """Output of the model, with logits of the first token only if they are computed from states."""

    def detach(self) -> "TokenLogits":
        """Return the logits without autograd graph and output, to be kept."""
        return replace(self, states=self.states.detach(), output=None)

    def rows(self, chosen: Bool[Tensor, "B T"]) -> Float[Tensor, "N D"]:
        """Return the states of the chosen tokens."""
        return self.states.flatten(0, 1)[chosen.flatten().to(self.states.device)]

    def by_rows(
        self, function: Callable[..., Tensor], chosen: Bool[Tensor, "B T"], *values: Tensor
    ) -> Float[Tensor, " N *K"]:
        """Return ``function(logits, *values)`` of the chosen rows, with `CHUNK` logits in memory at once.

        A backward pass computes the logits of each chunk again.
        """

        def of_chunk(states: Tensor, *values: Tensor) -> Tensor:
            return function(self.of_rows(states), *values)

        step = max(1, CHUNK // self.classes)
        chunks = [*zip(*(tensor.split(step) for tensor in (self.rows(chosen), *values)), strict=True)]
        if len(chunks) == 1:
            return of_chunk(*chunks[0])
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(of_chunk, *chunk, **options) for chunk in chunks])


@dataclass(frozen=True)
class OutputHead:
    """Module that turns the states of each token into logits, and an elementwise function after it."""

    name: str
    after: RowFunction
    classes: int

    def run(self, model: nn.Module, batch: Batch, seed: int | None = 0) -> TokenLogits:
        """Run a model without labels; the head gets the states of the first token only."""
        head, states = model.get_submodule(self.name), list[Tensor]()

        def cut(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            states.append(args[0])
            return (args[0][:, :1],), kwargs

        with Change(model, hooks=[AddedHook(self.name, "before", cut)]):
            output = run_model(model, without_labels(model, batch), seed=seed)
        (of_tokens,) = states
        return TokenLogits(of_tokens, self.of_rows(head), self.classes, output)

    def of_rows(self, head: nn.Module) -> RowFunction:
        """Return the function from rows of states to rows of logits."""

        def logits(rows: Tensor) -> Tensor:
            with preserve_state(head):
                return self.after(head(rows[None]))[0]

        return logits


@dataclass(frozen=True)
class FirstPass:
    """First forward pass of a model: the batch, the output, and the last modules that had one input."""

    inputs: Any
    original: Any
    output: Any
    calls: Iterable[tuple[str, Tensor]]


def first_pass(model: nn.Module, batch: Batch, seed: int | None = 0) -> FirstPass:
    """Run a model on a batch. If its logits are large, run it on the first sequence only."""
    original: Any = batch
    inputs = drop_unused_labels(model, batch)[0]
    tensors = tensors_in(batch)
    longest = max((tensor.numel() for tensor in tensors if tensor.dim() == 2), default=0)
    is_cuttable = isinstance(batch, Mapping) and {len(tensor) for tensor in tensors if tensor.dim()} == {
        batch_size(batch)
    }
    if is_cuttable and longest * vocabulary(model) > CHUNK:
        inputs, original = first_sequences(inputs, 1), first_sequences(batch, 1)
    names = {module: name for name, module in model.named_modules() if name}
    calls: deque[tuple[str, Tensor]] = deque(maxlen=LAST_CALLS)

    def note(module: nn.Module, args: Any, output: Any) -> None:
        shapes = [getattr(value, "shape", ()) for value in (*args, output)]
        if module in names and [*map(len, shapes)] == [3, 3] and shapes[0][:2] == shapes[1][:2]:
            calls.append((names[module], args[0].detach()))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        output = run_model(model, to_device(inputs, device_of(model)), seed=seed)
    finally:
        handle.remove()
    return FirstPass(inputs, original, output, calls)


def find_head(model: nn.Module, first: FirstPass, read: Callable[[Any], Tensor]) -> OutputHead | str:
    """Return the output head of a model, by trial on its first pass. If none is found, return the reason.

    ``read`` returns the logits (B, T, V) of an output. Rows of the last modules' inputs, in reverse order and
    only half of them, must have the model's logits. Then the model must have the same states without labels,
    and the logits that it returns for one token must equal the logits of the head bit by bit.
    """
    if any(map(is_compiled, model.modules())):
        return "the model is compiled"
    logits = read(first.output)
    rows = logits.flatten(0, 1).detach()
    count = min(max(1, len(rows) // 2), max(2, CHUNK // rows.shape[1]))
    chosen = torch.linspace(len(rows) - 1, 0, count).long().to(rows.device)
    rows = rows[chosen]
    why = "no module makes them from one state per token"
    for name, states in first.calls:
        module = model.get_submodule(name)
        if states.shape[:2] != logits.shape[:2] or any(weight.is_meta for weight in module.parameters()):
            continue
        for after in _functions(model):
            head = OutputHead(name, after, rows.shape[1])
            try:
                with torch.no_grad():
                    again = head.of_rows(module)(states.flatten(0, 1)[chosen])
                    if again.shape != rows.shape or not _same(again, rows, states.shape[-1]):
                        continue
                    trial = head.run(model, to_device(first.inputs, device_of(model)))
                    first_token = head.after(module(trial.states[:, :1]))
            except Exception as error:
                if out_of_memory(error):
                    raise
                why = f"{name!r} does not run on some tokens alone: {first_line(error)}"
                continue
            same_states = trial.states.shape == states.shape and _same(trial.states, states, 1)
            # the same product of the same states has the same bits
            if same_states and torch.equal(first_token.nan_to_num(), read(trial.output).nan_to_num()):
                return head
            why = "without labels, or with logits of one token, the model computes something else"
    return why


def without_labels(model: nn.Module, batch: Any) -> Any:
    """Return a batch without its labels, so that the model does not compute a loss.

    An encoder-decoder of transformers gets the inputs of the decoder that it would make of the labels.
    """
    if isinstance(batch, Mapping):
        kept = {name: value for name, value in batch.items() if name not in LABELS}
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None and batch.get("labels") is not None and "decoder_input_ids" not in batch:
            kept["decoder_input_ids"] = shift(labels=batch["labels"])
        return kept
    place = label_position(model)
    return batch[:-1] if isinstance(batch, tuple | list) and place == len(batch) - 1 else batch


def _functions(model: nn.Module) -> list[RowFunction]:
    """Return the functions that may follow the output head, as models of transformers define them."""
    text = getattr(getattr(model, "config", None), "get_text_config", lambda: None)()
    functions: list[RowFunction] = []
    if (cap := config_value(text, "final_logit_softcapping")) is not None:
        functions.append(lambda logits: torch.tanh(logits / cap) * cap)
    if (factor := config_value(text, "logit_scale", "lm_head_multiplier")) is not None:
        functions.append(lambda logits: logits * factor)
    if (divisor := config_value(text, "logits_scaling")) is not None:
        functions.append(lambda logits: logits / divisor)
    if isinstance(bias := getattr(model, "final_logits_bias", None), Tensor):
        functions.append(lambda logits: logits + bias.to(logits.device))
    return [*functions, lambda logits: logits]


def _same(ours: Tensor, wanted: Tensor, products: int) -> bool:
    """Return True if two tensors differ by rounding.

    Two results of the same formula are apart by four roundings in their dtype, or by the rounding of sums of
    ``products`` terms in float32 (float64), whose order depends on the number of rows: √products roundings of
    the largest entry.
    """
    wide = torch.float64 if wanted.dtype == torch.float64 else torch.float32
    rounding = max(4 * torch.finfo(wanted.dtype).eps, products**0.5 * torch.finfo(wide).eps)
    largest = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    both = ours.to(wide), wanted.to(wide)
    return torch.allclose(*both, rtol=0, atol=rounding * largest, equal_nan=True)
