"""What `rankwise skip` prints."""

from typing import Any

from rich.console import Console
from rich.table import Table

from rankwise.surgery import SkipCertificate, Skips


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
    for one in certificate.layers:
        numbers = (one.scale, one.norm, one.kept, one.sound_bound, one.price, one.mixing_norm, one.value_norm)
        measured.add_row(one.site, *map(_cell, numbers))
        scales = (one.sound_scale, one.sound_scale_any_mixing, one.paper_scale, one.paper_scale_with_floor)
        asked.add_row(one.site, *map(_cell, scales))
    console.print(measured, asked)
    console.print(
        f"kept: μ after the layer over μ before; sure: the least it can be; price: ‖MV‖/‖λY + MV‖; least "
        f"|λ|: for each layer to keep √a = {certificate.a**0.5:.2f} of μ",
        highlight=False, markup=False,
    )  # fmt: skip
    for stack in certificate.stacks:
        console.print(
            f"{stack.stack or 'model'}: keeps {_cell(stack.kept)} of μ/‖Y‖; {stack.target:.2f} needs |λ| ≥ "
            f"{_cell(stack.threshold)} here, in all its layers; √a of μ in each single layer, which says "
            f"nothing of the stack: |λ| ≥ {_cell(stack.sound_scale)} by the sound bound, "
            f"{_cell(stack.paper_scale)} by Eq. 7, {_cell(stack.paper_scale_with_floor)} with its b",
            highlight=False, markup=False,
        )  # fmt: skip
    for note in certificate.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "–" if value is None else f"{value:.3g}"
