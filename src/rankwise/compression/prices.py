"""What a compression costs and gains, measured on the model as it was and as it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import device_of, run_model, to_device
from rankwise.compression.latency import measure_latency
from rankwise.compression.output_price import compared_batches, log_probabilities, output_kl
from rankwise.compression.outputs import cache_bytes, main_output, relative_error
from rankwise.compression.parts import PartResult
from rankwise.compression.task import Task, measure_task
from rankwise.tracing import MixerSite, StateSite, capture


@dataclass
class Prices:
    """Fields of a record, and the errors of its layers."""

    fields: dict[str, Any]
    layer_errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Seen:
    """A model as it is."""

    states: dict[tuple[str, int], Tensor]
    """Of tokens of the first batch, by stack and layer: encoders and decoders number their layers alike."""
    output: Tensor
    """Of the first batch."""
    task: Task
    """Over all batches."""
    stacks: dict[str, str]
    """Stack of each mixer, by name."""
    parameters: int
    cache: int
    """Bytes of keys and values for each token."""


def measure_prices(
    model: nn.Module,
    batches: list[Any],
    done: list[PartResult],
    time: bool,
    on_step: Callable[[str], None],
) -> Prices:
    """Compare the model as it was with the model as it is.

    Args:
        model: compressed.
        batches: what prices are measured on.
        done: what the parts did; they can be undone and done again.
        time: whether to measure latency.
        on_step: told what is under way.
    """

    def before() -> None:
        for result in reversed(done):
            result.undo()

    def after() -> None:
        for result in done:
            result.redo()

    def pair(batch: Any) -> tuple[Tensor | None, Tensor | None]:
        compressed = log_probabilities(model, batch)
        before()
        try:
            return log_probabilities(model, batch), compressed
        finally:
            after()

    on_step("comparing outputs")
    moved_batches = [to_device(batch, device_of(model)) for batch in batches]
    new = _look(model, moved_batches)
    before()
    try:
        old = _look(model, moved_batches)
    finally:
        after()
    places = {head.site: (head.stack, head.layer) for result in done for head in result.heads}
    for latent in (latent for result in done for latent in result.latents):
        places[latent.site] = (old.stacks.get(latent.site, ""), latent.layer)
    errors = {
        site: relative_error(new.states[stack, layer + 1], old.states[stack, layer + 1])
        for site, (stack, layer) in places.items()
        if (stack, layer + 1) in old.states and (stack, layer + 1) in new.states
    }
    fields: dict[str, Any] = {
        "output_kl": output_kl(pair(batch) for batch in compared_batches(model, moved_batches)),
        "output_error": relative_error(new.output, old.output),
        "loss_before": old.task.loss,
        "loss_after": new.task.loss,
        "metric": new.task.metric,
        "metric_before": old.task.accuracy,
        "metric_after": new.task.accuracy,
        "parameters_before": old.parameters,
        "parameters_after": new.parameters,
        "cache_bytes_before": old.cache,
        "cache_bytes_after": new.cache,
    }
    if time:
        on_step("measuring latency")
        fields["latency"], notes = measure_latency(model, moved_batches[0], before, after)
        return Prices(fields, errors, notes)
    return Prices(fields, errors)


def _look(model: nn.Module, batches: list[Any]) -> _Seen:
    states: dict[tuple[str, int], Tensor] = {}
    stacks: dict[str, str] = {}

    def keep(site: StateSite) -> None:
        real = site.mask if site.mask is not None else torch.ones(site.tokens.shape[:2], dtype=torch.bool)
        states[site.stack, site.layer] = site.tokens[real.to(site.tokens.device)].float().cpu()

    def note(site: MixerSite) -> None:
        stacks.setdefault(site.name, site.stack)

    with torch.no_grad(), capture(model, on_state=keep, on_mixer=note):
        run_model(model, batches[0])
    mask = batches[0].get("attention_mask") if isinstance(batches[0], dict) else None
    output = main_output(model, batches[0])
    if mask is not None and mask.shape == output.shape[:2]:
        output = output[mask.bool()]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _Seen(
        states,
        output.float().cpu(),
        measure_task(model, batches),
        stacks,
        parameters,
        cache_bytes(model, batches[0]),
    )
