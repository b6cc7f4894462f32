"""What `rankwise skip` prints: every number in its place."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from rankwise.cli.skip_tables import show_certificate, show_skips
from rankwise.skips import SkipCertificate, Skips, add_lambda_skip
from rankwise.skips.certificate import LayerCertificate, StackCertificate


def printed(show: Callable[..., None], *what: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(console, *what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def table(text: str, title: str) -> dict[str, dict[str, str]]:
    """Rows by their first cell, cells by heading."""
    lines = text.split(title)[1].splitlines()
    cells = [[cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]] for line in lines]
    start = next(at for at, row in enumerate(cells) if row)
    rows: dict[str, dict[str, str]] = {}
    for row in cells[start + 2 :]:
        if not row:
            break
        rows[row[0]] = dict(zip(cells[start][1:], row[1:], strict=True))
    return rows


def skips(notes: tuple[str, ...] = ()) -> Skips:
    """λ of 2 in one layer, and of each channel, 1 to 8, in another."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers).eval()
    found = add_lambda_skip(model, per="channel", example=torch.randn(1, 5, 8))
    with torch.no_grad():
        found["0.dropout1"].fill_(2)
        found["1.dropout1"].copy_(torch.arange(1.0, 9))
    return Skips(model, found.sites.values(), notes)


def test_scales_that_are_not_fitted_are_as_they_are() -> None:
    text = printed(show_skips, skips(("mind the gap",)), {"collapse": [{"h": [0.5, 0.25]}]})
    assert table(text, "λ-skips") == {
        "0.dropout1": {"λ before": "2.000", "λ after": "2.000"},
        "1.dropout1": {"λ before": "4.500", "λ after": "4.500"},  # the mean of its channels
    }
    assert text.splitlines()[-2:] == ["μ/‖Y‖ by layer, h: 0.50 0.25", "note: mind the gap"]


def test_before_comes_before_after() -> None:
    report = {
        "scales": {"0.dropout1": [1.0, 1.5]},
        "loss": [4.0, 3.0],
        "collapse": [{"": [0.9, 0.8], "h": [0.7]}, {"": [0.6, 0.5], "h": [0.4]}],
    }
    text = printed(show_skips, skips(), report)
    assert table(text, "λ-skips")["0.dropout1"] == {"λ before": "1.000", "λ after": "1.500"}
    assert [line.strip() for line in text.splitlines()[-5:]] == [
        "μ/‖Y‖ by layer, model: 0.90 0.80",
        "after: 0.60 0.50",
        "μ/‖Y‖ by layer, h: 0.70",
        "after: 0.40",
        "loss, held out: 4.0000 → 3.0000",
    ]


NUMBERS = [name for name, field in LayerCertificate.model_fields.items() if field.annotation is not str]


def advice(text: str) -> list[str]:
    """What is said of one stack, a line for each use."""
    lines = [line.strip() for line in text.split("\n\n", 1)[1].splitlines() if not line.startswith("note")]
    joined: list[str] = []
    for line in lines:
        if line.startswith(("|λ|", "h:")):
            joined.append(line)
        else:
            joined[-1] += f" {line}"
    return joined


@pytest.mark.parametrize(
    ("kept", "threshold", "recommended", "said"),
    [
        (0.9, 0.3, None, "h: keep the λ that are there: it keeps 0.90 of μ/‖Y‖ on this batch, wanted 0.71."),
        (0.5, 1.28, 1.28, "h: use λ = 1.28 in all its layers: the least that keeps 0.71 of μ/‖Y‖"),
        (
            0.5,
            math.inf,
            None,
            "h: no λ is recommended: it keeps 0.50 of μ/‖Y‖ on this batch, and none up to 16",
        ),
        (None, None, None, "h: no λ is recommended: its tokens are all alike where it starts."),
    ],
)
def test_one_scale_is_recommended(
    kept: float | None, threshold: float | None, recommended: float | None, said: str
) -> None:
    stack = StackCertificate(
        stack="h", layers=1, kept=kept, target=0.71, threshold=threshold, recommended=recommended,
        kept_mu=kept, threshold_mu=threshold, left_out=0, paper_scale=None, paper_scale_with_floor=None,
        sound_scale=2.5,
    )  # fmt: skip
    certificate = SkipCertificate(a=0.5, target=0.71, sequences=1, layers=[], stacks=[stack])
    first, *rest = advice(printed(show_certificate, certificate))
    assert first.startswith(said)
    assert [line.split(":")[0] for line in rest] == ["|λ| ≥ 2.5"]
    assert "whatever way its mixer points" in rest[0]


def test_every_number_of_a_certificate_is_under_its_name() -> None:
    values = {name: 1.0 + at for at, name in enumerate(NUMBERS)} | dict.fromkeys(
        ["paper_holds", "paper_guaranteed"]
    )
    layer = LayerCertificate(site="h.0", norm="RMSNorm", **values)  # type: ignore[arg-type]
    stack = StackCertificate(
        stack="h", layers=1, kept=0.1, target=0.2, threshold=0.3, recommended=0.3, kept_mu=0.4,
        threshold_mu=0.5, left_out=0, paper_scale=0.6, paper_scale_with_floor=0.7, sound_scale=None,
        sound_scale_any_mixing=0.8,
    )  # fmt: skip
    certificate = SkipCertificate(
        a=0.25, target=0.2, sequences=1, layers=[layer], stacks=[stack], notes=["mind the gap"]
    )
    text = printed(show_certificate, certificate)
    names = {"λ": "scale", "kept": "kept", "sure": "sound_bound", "price": "price"}
    names |= {"‖M‖": "mixing_norm", "S": "value_norm"}
    shown = {heading: f"{values[name]:.3g}" for heading, name in names.items()}
    assert table(text, "what each layer does") == {"h.0": {"norm": "RMSNorm", **shown}}
    names = {"sound": "sound_scale", "any mixing": "sound_scale_any_mixing"}
    names |= {"Eq. 7": "paper_scale", "with b": "paper_scale_with_floor"}
    shown = {heading: f"{values[name]:.3g}" for heading, name in names.items()}
    assert table(text, "least |λ|") == {"h.0": shown}
    assert "keep √a = 0.50 of μ" in text
    assert advice(text) == [
        "h: use λ = 0.3 in all its layers: the least that keeps 0.20 of μ/‖Y‖ on this batch, as measured; "
        "now it keeps 0.10.",
        "|λ| ≥ 0.8: to be sure of that whatever the attention weights become, as in training",
        "|λ| ≥ 0.7: what the paper's theorem asks for, to compare with; its Eq. 7 alone, |λ| ≥ 0.6, "
        "guarantees nothing",
    ]
    assert text.splitlines()[-1] == "note: mind the gap"
