"""Describe λ-skips that were added or fitted, and their certificate."""

from collections.abc import Mapping, Sequence
from typing import Any

from rankwise.auditing.records import Verdict
from rankwise.report.document import Document, Section, Table, nonempty
from rankwise.skips.certificate import SkipCertificate, StackCertificate


def skip_document(
    scales: Mapping[str, Sequence[float]], report: Mapping[str, Any], notes: Sequence[str] = ()
) -> Document:
    """Describe λ-skips: λ of each site, token spread and loss, before and after a fit.

    Args:
        scales: λ before and after, by site.
        report: `data`, `collapse` (for each state of the model and each stack, μ/‖Y‖ by layer) and, if λ was
            fitted, `loss` (before and after).
        notes: remarks on the sites.
    """
    rows = [[name, f"{before:.3f}", f"{after:.3f}"] for name, (before, after) in scales.items()]
    spread = [
        [
            f"{stack or 'model'}, {when}" if len(report["collapse"]) > 1 else stack or "model",
            _numbers(numbers),
        ]
        for stack in report["collapse"][0]
        for when, numbers in zip(
            ("before", "after"), (stacks[stack] for stacks in report["collapse"]), strict=False
        )
    ]
    loss = "loss, held out: {:.4f} → {:.4f}".format(*report["loss"]) if "loss" in report else ""
    return Document(
        command="Rankwise skip",
        heading="λ-skips",
        setting=report.get("data", ""),
        verdict=Verdict(sentence=loss or f"λ-skips at {len(rows)} sites."),
        sections=[
            Section(
                "skips",
                "λ-skips",
                tables=[
                    Table("λ-skips", ["site", "λ before", "λ after"], rows),
                    Table("μ/‖Y‖ by layer", ["stack", "input, and after each layer"], spread),
                ],
            )
        ],
        notes=notes,
    )


def _numbers(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:.2f}" for number in numbers)


def certificate_document(certificate: SkipCertificate) -> Document:
    """Describe a certificate: the λ to use per stack, what each layer keeps, and what each bound requires."""
    root = f"√a = {certificate.a**0.5:.2f}"
    layers = certificate.layers
    measured = [
        [x.site, *map(_cell, (x.scale, x.norm, x.kept, x.sound_bound, x.price, x.mixing_norm, x.value_norm))]
        for x in layers
    ]
    least = [
        [
            x.site,
            *map(_cell, (x.sound_scale, x.sound_scale_any_mixing, x.paper_scale, x.paper_scale_with_floor)),
        ]
        for x in layers
    ]
    uses = [[stack.stack or "model", *use] for stack in certificate.stacks for use in _uses(stack, root)]
    tables = [
        Table(
            "What each layer does",
            ["site", "λ", "norm", "kept", "sure", "price", "‖M‖", "S"],
            measured,
            note="Kept: μ after the layer over μ before; sure: the least it can be; price: ‖MV‖/‖λY + MV‖.",
        ),
        Table(
            "Least |λ|",
            ["site", "sound", "any mixing", "Eq. 7", "with b"],
            least,
            note=f"For each layer to keep {root} of μ.",
        ),
    ]
    return Document(
        command="Rankwise skip",
        heading="Certificate of λ-skips",
        setting=f"{certificate.sequences} sequences · {root}",
        verdict=Verdict(sentence=" ".join(map(_advice, certificate.stacks)) or "No λ-skips."),
        sections=nonempty(
            Section("uses", "Larger λ", tables=[Table("Larger λ", ["stack", "λ", "use"], uses)]),
            Section("layers", "Layers", tables=tables),
        ),
        notes=certificate.notes,
    )


def _advice(stack: StackCertificate) -> str:
    name, share = stack.stack or "model", f"{stack.target:.2f} of μ/‖Y‖"
    if stack.kept is None:
        return f"{name}: no λ is recommended: its tokens are all alike where it starts."
    if stack.kept >= stack.target:
        return (
            f"{name}: keep the λ that are there: it keeps {stack.kept:.2f} of μ/‖Y‖ on this batch, wanted "
            f"{stack.target:.2f}."
        )
    if stack.recommended is not None:
        return (
            f"{name}: use λ = {stack.recommended:g} in all its layers: the least that keeps {share} on this "
            f"batch, as measured; now it keeps {stack.kept:.2f}."
        )
    return (
        f"{name}: no λ is recommended: it keeps {stack.kept:.2f} of μ/‖Y‖ on this batch, and none up to 16 "
        f"keeps {stack.target:.2f}; look at what stands between its mixers."
    )


def _uses(stack: StackCertificate, root: str) -> list[tuple[str, str]]:
    uses = (
        (stack.sound_scale, f"to be sure that each layer keeps {root} of μ, whatever way its mixer points "
         "(proved for what it read here; certify again after a change)"),
        (stack.sound_scale_any_mixing, "to be sure of that whatever the attention weights become, as in "
         "training"),
        (stack.paper_scale_with_floor, "what the paper's theorem asks for, to compare with; its Eq. 7 alone, "
         f"|λ| ≥ {_cell(stack.paper_scale)}, guarantees nothing"),
    )  # fmt: skip
    return [(f"|λ| ≥ {_cell(scale)}", use) for scale, use in uses if scale is not None]


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "–" if value is None else f"{value:.3g}"
