"""What the parts ``qk`` and ``rotary`` share once factors are chosen: calibration, prices, and the result."""

from collections.abc import Callable

from rankwise.compression.calibrate import calibrate
from rankwise.compression.layers import AttentionLayer, see
from rankwise.compression.memory import out_of_memory
from rankwise.compression.narrow_heads import layer_divergence
from rankwise.compression.parts import Job, PartResult
from rankwise.compression.qk_modules import Factors, narrow_layers
from rankwise.compression.records import BudgetCurve, HeadWidth

Nulls = Callable[[list[AttentionLayer]], list[BudgetCurve]]
"""Curves of other ways, given what the layers saw of the data of the figures."""


def narrowed_heads(
    part: str, job: Job, layers: list[AttentionLayer], starts: list[Factors], nulls: Nulls
) -> PartResult:
    """Calibrate factors, put them into the model and measure what they cost.

    Args:
        part: its name.
        job: what to do.
        layers: what they saw of the calibration data.
        starts: factors of each.
        nulls: asked only where the job wants them.
    """
    plan: list[Factors] = []
    heads: list[HeadWidth] = []
    stopped = ""
    for layer, factors in zip(layers, starts, strict=True):
        before = after = _by_key(layer, factors)
        if job.calibrate and not stopped:
            factors, after, stopped = _calibrated(layer, factors, before, job)
        plan.append(factors)
        heads += [
            HeadWidth(
                part=part,
                stack=layer.found.stack,
                site=layer.found.name,
                layer=layer.found.layer,
                head=head,
                before=layer.found.width,
                width=len(kept),
                kl=before[head],
                kl_calibrated=after[head],
            )
            for head, kept in enumerate(factors.kept)
        ]
    found = [layer.found for layer in layers]
    swap = narrow_layers(job.model, list(zip(found, plan, strict=True)))
    figures = see(job.model, found, job.figures, job.on_step)
    kl = {
        layer.found.name: float(layer_divergence(layer, factors).mean())
        for layer, factors in zip(figures, plan, strict=True)
    }
    curves = nulls(figures) if job.nulls else []
    swap.apply()
    notes = [
        f"Calibration was stopped {stopped}: what was done is kept, later layers are as they were chosen."
    ]
    return PartResult(
        heads,
        kl,
        curves,
        layers[0].tokens,
        notes=notes if stopped else [],
        complete=not stopped,
        undo=swap.undo,
        redo=swap.apply,
    )


def _calibrated(
    layer: AttentionLayer, start: Factors, before: list[float], job: Job
) -> tuple[Factors, list[float], str]:
    """Factors after steps of Adam, or as they were where these are no better on the calibration data.

    With them what stopped it, if something did.
    """
    done = 0

    def count(steps: int) -> None:
        nonlocal done
        done = steps
        job.on_step(f"calibrating {layer.found.name}: {steps} of {job.calibrate}")

    try:
        factors = calibrate(layer, start, job.calibrate, job.seed, count)
        after = _by_key(layer, factors)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return start, before, f"for want of memory at {layer.found.name}"
    stopped = "" if done == job.calibrate else "by Ctrl-C"
    return (factors, after, stopped) if sum(after) < sum(before) else (start, before, stopped)


def _by_key(layer: AttentionLayer, factors: Factors) -> list[float]:
    each = layer_divergence(layer, factors)
    by_key: list[float] = each.unflatten(0, (-1, layer.found.groups)).mean(1).tolist()
    return by_key
