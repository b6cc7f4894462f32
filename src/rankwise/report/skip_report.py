"""Build the reports on λ-skips (skip connections λx + f(x) around a mixer f) and on their certificates."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from rankwise._internals.records import format_number
from rankwise.auditing.records import Verdict
from rankwise.report.document import Document, Section, Table, nonempty
from rankwise.skips.records import LambdaChoice, SkipCertificate, lambda_words

ABOUT = "Bounds are about single layers, trials about a stack, so that they differ; nothing was trained."

PLAIN, CLEAR = "as it is", 0.02
"""Name of the unchanged model in a trial, and the share of a loss by which the best run must be lower."""
UNCLEAR = (
    f"No run ends {CLEAR:.0%} or more below its start and the model as it is: train more steps or use "
    "another learning rate before you choose."
)


def skip_document(
    scales: Mapping[str, Sequence[float]], states: Mapping[str, Sequence[float]], data: str = "",
    notes: Sequence[str] = (),
) -> Document:  # fmt: skip
    """Return the report on added λ-skips: λ per site before and after, and direction spread by layer."""
    rows = [[name, f"{before:.3f}", f"{after:.3f}"] for name, (before, after) in scales.items()]
    spread = [
        [stack or "model", " ".join(format_number(number, 2) for number in numbers)]
        for stack, numbers in states.items()
    ]
    tables = [
        Table("λ-skips", ["site", "λ before", "λ after"], rows),
        Table("Direction spread by layer", ["stack", "input, and after each layer"], spread),
    ]
    return Document(
        command="Rankwise skip",
        heading="λ-skips",
        setting=data,
        verdict=Verdict(sentence=f"λ-skips at {len(rows)} sites."),
        sections=[Section("skips", "λ-skips", tables=tables)],
        notes=notes,
    )


def trial_document(runs: Mapping[str, Sequence[float]], setting: str, steps: int) -> Document:
    """Return the report on the losses of training runs, compared over the last tenth of the steps."""
    last = max(steps // 10, 1)
    ends = {name: fmean(losses[-last:]) for name, losses in runs.items()}
    rows = [[name, f"{runs[name][0]:.3f}", f"{end:.3f}", f"{len(runs[name])}"] for name, end in ends.items()]
    lowest, best = min(((end, name) for name, end in ends.items() if math.isfinite(end)), default=(0, "none"))
    plain = ends.get(PLAIN, math.nan)
    before = [loss for loss in (plain, runs.get(best, [lowest])[0]) if math.isfinite(loss)]
    unclear = any(lowest > loss - CLEAR * abs(loss) for loss in before)
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
    """Return the report on a certificate, with the |λ| proved, and the choices of λ for stacks."""
    share = f"{certificate.keep_spread:.2f}"
    rows = [
        [
            layer.site,
            f"{layer.lambda_value:.3g}",
            layer.norm,
            _cell(layer.absolute_spread_ratio),
            _cell(layer.absolute_spread_ratio_bound),
            _cell(layer.min_lambda_proved, lambda_words),
            f"{layer.mixing_share:.3g}",
        ]
        for layer in certificate.layers
    ]
    uses = [
        [choice.stack or "model", "none" if choice.value is None else f"|λ| ≥ {choice.value:g}",
         choice.advice or "tried: an audit of this batch finds no COLLAPSE"]
        for choice in choices
    ]  # fmt: skip
    least = [layer.min_lambda_proved for layer in certificate.layers]
    if proved := [number for number in least if number is not None]:
        use = f"proved for this batch: each layer keeps {share} of μ (certify again if λ changes)"
        uses += [["all layers", lambda_words(max(proved)), use]] if len(proved) == len(least) else []
    kept = [layer.absolute_spread_ratio for layer in certificate.layers]
    known = [ratio for ratio in kept if ratio is not None]
    sentence = f"Each layer keeps {min(known):.2f} of μ or more on this batch." if known else "No λ-skips."
    if len(known) < len(kept):
        sentence = f"The norm behind {len(kept) - len(known)} of {len(kept)} λ-skips is unknown."
    layers = Table(
        "Layers",
        ["site", "λ", "norm", "kept", "proved", "least |λ|", "mixing"],
        rows,
        note="μ: absolute token spread. Kept: μ after the layer over μ before; proved: a lower bound of it "
        f"for this batch; least |λ|: proved to keep {share} of μ; mixing: ‖f(x)‖/‖λx + f(x)‖.",
    )
    return Document(
        command="Rankwise skip",
        heading="Certificate of λ-skips",
        setting=f"{certificate.sequences} sequences · keeps {share} of μ",
        verdict=Verdict(sentence=sentence),
        sections=nonempty(
            Section("uses", "Larger λ", tables=[Table("Larger λ", ["stack", "λ", "use"], uses, note=ABOUT)]),
            Section("layers", "Layers", tables=[layers]),
        ),
        notes=certificate.notes,
    )


def _cell(number: float | None, words: Callable[[float], str] = "{:.3g}".format) -> str:
    return "–" if number is None else words(number)
