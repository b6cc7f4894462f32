"""Build the reports on λ-skips, skip connections λx + f(x) around a mixer f, and on their certificates."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rankwise._internals.records import format_number
from rankwise.auditing.records import Verdict
from rankwise.report.document import Document, Section, Table, nonempty
from rankwise.skips.certificate import (
    MOST_LAMBDA,
    LambdaChoice,
    SkipCertificate,
    StackCertificate,
    lambda_words,
)

ABOUT = "Bounds are about single layers, trials about a stack, so that they differ; nothing was trained."

PLAIN, CLEAR = "as it is", 0.02
"""Unchanged model of a trial, and the share of its loss by which a run must be better."""
UNCLEAR = (
    f"No run ends {CLEAR:.0%} or more below its start and the model as it is: train more steps or use "
    "another learning rate before you choose."
)


def skip_document(
    scales: Mapping[str, Sequence[float]], report: Mapping[str, Any], notes: Sequence[str] = ()
) -> Document:
    """Return the report on λ-skips before and after a fit: λ per site, token spread by layer, and loss."""
    rows = [[name, f"{before:.3f}", f"{after:.3f}"] for name, (before, after) in scales.items()]
    states = report["collapse"]
    times = (", before", ", after") if len(states) > 1 else ("",)
    spread = [
        [f"{stack or 'model'}{when}", " ".join(format_number(number, 2) for number in stacks[stack])]
        for stack in states[0]
        for when, stacks in zip(times, states, strict=True)
    ]
    losses = " → ".join(format_number(loss, 4) for loss in report.get("loss", ()))
    loss = f"loss, held out: {losses}" if losses else ""
    tables = [
        Table("λ-skips", ["site", "λ before", "λ after"], rows),
        Table("Token spread μ/‖Y‖ by layer", ["stack", "input, and after each layer"], spread),
    ]
    return Document(
        command="Rankwise skip",
        heading="λ-skips",
        setting=report.get("data", ""),
        verdict=Verdict(sentence=loss or f"λ-skips at {len(rows)} sites."),
        sections=[Section("skips", "λ-skips", tables=tables)],
        notes=notes,
    )


def trial_document(runs: Mapping[str, Sequence[float]], setting: str, steps: int) -> Document:
    """Return the report on the losses of training runs by name; the last tenth of the steps counts."""
    last = max(steps // 10, 1)
    ends = {name: fmean(losses[-last:]) for name, losses in runs.items()}
    rows = [[name, f"{runs[name][0]:.3f}", f"{end:.3f}", f"{len(runs[name])}"] for name, end in ends.items()]
    lowest, best = min(((end, name) for name, end in ends.items() if math.isfinite(end)), default=(0, "none"))
    plain = ends.get(PLAIN, math.nan)
    before = [one for one in (plain, runs.get(best, [lowest])[0]) if math.isfinite(one)]
    unclear = any(lowest > one - CLEAR * abs(one) for one in before)
    sentence = UNCLEAR if unclear else f"Lowest loss at the end, with one seed: {best}."
    at_end = "loss in the last step" if last == 1 else f"mean loss of the last {last} steps"
    headings = ["run", "loss at the start", at_end, "steps"]
    return Document(
        command="Rankwise skip",
        heading="Training with λ",
        setting=setting,
        verdict=Verdict(sentence=sentence),
        sections=[Section("trial", "Losses", tables=[Table("Losses", headings, rows)])],
    )


def certificate_document(certificate: SkipCertificate, choices: Sequence[LambdaChoice] = ()) -> Document:
    """Return the report on a certificate, with the |λ| of each bound, and the choices for its stacks."""
    root = f"√a = {certificate.a**0.5:.2f}"
    measured = "lambda_value", "norm", "kept", "kept_lower_bound", "mixing_share", "mixing_norm", "value_norm"
    least = "min_lambda_proved", "min_lambda_any_mixing", "min_lambda_paper"
    rows = [
        [[layer.site, *(_cell(getattr(layer, name), most) for name in names)] for layer in certificate.layers]
        for names, most in ((measured, None), (least, MOST_LAMBDA))
    ]
    advised = [
        [choice.stack or "model", "none" if choice.value is None else f"|λ| ≥ {choice.value:g}",
         choice.instead or "tried: an audit of this batch finds no COLLAPSE"]
        for choice in choices
    ]  # fmt: skip
    uses = [[stack.stack or "model", *use] for stack in certificate.stacks for use in _uses(stack, root)]
    larger = Table("Larger λ", ["stack", "λ", "use"], advised + uses, note=ABOUT)
    tables = [
        Table(
            "What each layer does",
            ["site", "λ", "norm", "kept", "proved", "mixing", "‖M‖", "S"],
            rows[0],
            note="μ: absolute token spread. Kept: μ after the layer over μ before; proved: a lower bound "
            "of it for this batch; mixing: ‖f(x)‖/‖λx + f(x)‖.",
        ),
        Table("Least |λ|", ["site", "proved", "any mixing", "paper"], rows[1], note=f"To keep {root} of μ."),
    ]
    return Document(
        command="Rankwise skip",
        heading="Certificate of λ-skips",
        setting=f"{certificate.sequences} sequences · {root}",
        verdict=Verdict(sentence=" ".join(map(_kept, certificate.stacks)) or "No λ-skips."),
        sections=nonempty(
            Section("uses", "Larger λ", tables=[larger]),
            Section("layers", "Layers", tables=tables),
        ),
        notes=certificate.notes,
    )


def _kept(stack: StackCertificate) -> str:
    name = stack.stack or "model"
    if stack.kept is None:
        return f"{name}: nothing to keep, its tokens are all equal where it starts."
    return f"{name}: keeps {stack.kept:.2f} of the token spread on this batch."


def _uses(stack: StackCertificate, root: str) -> list[tuple[str, str]]:
    uses = (
        (stack.min_lambda_proved, f"proved for this batch: after each layer, μ is at least {root} times μ "
         "before it (certify again if λ changes)"),
        (stack.min_lambda_any_mixing, "proved for the tokens of this batch and any attention weights"),
        (stack.min_lambda_paper, "required by both hypotheses of the paper's theorem, for comparison"),
    )  # fmt: skip
    return [(lambda_words(least), use) for least, use in uses if least is not None]


def _cell(value: float | str | None, most: int | None) -> str:
    if isinstance(value, str):
        return value
    return "–" if value is None else f">{most:,}" if most and value > most else f"{value:.3g}"
