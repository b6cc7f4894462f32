"""What `rankwise skip` prints."""

from typing import Any

from rich.console import Console
from rich.table import Table

from rankwise.skips import SkipCertificate, Skips, StackCertificate


def show_skips(console: Console, skips: Skips, report: dict[str, Any]) -> None:
    """Show λ, collapse and loss, before and after.

    Args:
        console: where to.
        skips: the λ.
        report: ``collapse``, and where λ was fitted, ``scales`` and ``loss``.
    """
    table = Table("site", "λ before", "λ after", title="λ-skips", title_justify="left")
    for name, value in skips.items():
        before, after = report.get("scales", {}).get(name, [float(value.detach().mean())] * 2)
        table.add_row(name, f"{before:.3f}", f"{after:.3f}")
    console.print(table)
    for stack, numbers in report["collapse"][-1].items():
        first = report["collapse"][0][stack]
        console.print(f"μ/‖Y‖ by layer, {stack or 'model'}: {_line(first)}", highlight=False, markup=False)
        if len(report["collapse"]) > 1:
            console.print(f"{'after':>20}: {_line(numbers)}", highlight=False, markup=False)
    if "loss" in report:
        before, after = report["loss"]
        console.print(f"loss, held out: {before:.4f} → {after:.4f}", highlight=False, markup=False)
    for note in skips.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _line(numbers: list[float]) -> str:
    return " ".join(f"{number:.2f}" for number in numbers)


def show_certificate(console: Console, certificate: SkipCertificate) -> None:
    """Show what each layer keeps and what each bound asks for.

    Args:
        console: where to.
        certificate: what to show.
    """
    measured = Table("site", "λ", "norm", "kept", "sure", "price", "‖M‖", "S", title="what each layer does")
    asked = Table("site", "sound", "any mixing", "Eq. 7", "with b", title="least |λ|")
    for layer in certificate.layers:
        numbers = (
            layer.scale,
            layer.norm,
            layer.kept,
            layer.sound_bound,
            layer.price,
            layer.mixing_norm,
            layer.value_norm,
        )
        measured.add_row(layer.site, *map(_cell, numbers))
        scales = (
            layer.sound_scale,
            layer.sound_scale_any_mixing,
            layer.paper_scale,
            layer.paper_scale_with_floor,
        )
        asked.add_row(layer.site, *map(_cell, scales))
    console.print(measured, asked)
    root = f"√a = {certificate.a**0.5:.2f}"
    lines = [
        "kept: μ after the layer over μ before; sure: the least it can be; price: ‖MV‖/‖λY + MV‖; least |λ|: "
        f"for each layer to keep {root} of μ",
    ]
    for stack in certificate.stacks:
        lines += ["", *_advice(stack, root)]
    for line in lines:
        console.print(line, highlight=False, markup=False)
    for note in certificate.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _advice(stack: StackCertificate, root: str) -> list[str]:
    """Which λ to use, and what the other numbers are for."""
    name, share = stack.stack or "model", f"{stack.target:.2f} of μ/‖Y‖"
    if stack.kept is None:
        first = "no λ is recommended: its tokens are all alike where it starts"
    elif stack.kept >= stack.target:
        first = f"keep the λ that are there: it keeps {stack.kept:.2f} of μ/‖Y‖ on this batch, wanted "
        first += f"{stack.target:.2f}"
    elif stack.recommended is not None:
        first = (
            f"use λ = {stack.recommended:g} in all its layers: the least that keeps {share} on this batch, "
        )
        first += f"as measured; now it keeps {stack.kept:.2f}"
    else:
        first = f"no λ is recommended: it keeps {stack.kept:.2f} of μ/‖Y‖ on this batch, and none up to 16 "
        first += f"keeps {stack.target:.2f}; look at what stands between its mixers"
    uses = (
        (stack.sound_scale, f"to be sure that each layer keeps {root} of μ, whatever way its mixer points "
         "(proved for what it read here; certify again after a change)"),
        (stack.sound_scale_any_mixing, "to be sure of that whatever the attention weights become, as in "
         "training"),
        (stack.paper_scale_with_floor, "what the paper's theorem asks for, to compare with; its Eq. 7 alone, "
         f"|λ| ≥ {_cell(stack.paper_scale)}, guarantees nothing"),
    )  # fmt: skip
    return [
        f"{name}: {first}.",
        *(f"  |λ| ≥ {_cell(scale)}: {use}" for scale, use in uses if scale is not None),
    ]


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "–" if value is None else f"{value:.3g}"
