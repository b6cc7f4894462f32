"""Reports on λ-skips and certificates."""

import math

import pytest
from tests.support.documents import Table

from rankwise.report.skip_report import certificate_document, skip_document, trial_document
from rankwise.skips import LayerCertificate, SkipCertificate


def cells(table: Table) -> dict[str, dict[str, str]]:
    """Rows by their first cell, cells by column."""
    rows = [[str(cell) for cell in row] for row in table.rows]
    return {row[0]: dict(zip(table.columns[1:], row[1:], strict=True)) for row in rows}


def test_before_comes_before_after() -> None:
    states = {"": [0.9, math.nan], "h": [0.7]}
    document = skip_document({"a.drop": [1.0, 1.5]}, states, "a text", ["mind the gap"])
    scales, spread = document.sections[0].tables
    assert cells(scales) == {"a.drop": {"λ before": "1.000", "λ after": "1.500"}}
    assert spread.rows == [["model", "0.90 –"], ["h", "0.70"]]
    assert document.verdict.sentence == "λ-skips at 1 sites."
    assert document.notes == ["mind the gap"]


@pytest.mark.parametrize(
    ("ratios", "words", "proved", "bounds"),
    [
        ([0.9, 0.8], "Each layer keeps 0.80 of μ or more on this batch.", [2.5, 1.0], ["|λ| ≥ 2.5"]),
        ([0.9], "Each layer keeps 0.90 of μ or more on this batch.", [math.inf], ["none below 1,000"]),
        ([0.9, None], "The norm behind 1 of 2 λ-skips is unknown.", [2.5, None], []),
        ([], "No λ-skips.", [], []),
    ],
)
def test_a_certificate_names_the_kept_spread_and_explains_larger_scales(
    ratios: list[float | None], words: str, proved: list[float | None], bounds: list[str]
) -> None:
    layers = [
        LayerCertificate(
            site="h", lambda_value=1, norm="none", mixing_share=1, absolute_spread_ratio=ratio,
            min_lambda_proved=least,
        )
        for ratio, least in zip(ratios, proved, strict=True)
    ]  # fmt: skip
    document = certificate_document(SkipCertificate(keep_spread=0.5, sequences=1, layers=layers))
    assert document.verdict.sentence == words
    uses = next((section for section in document.sections if section.title == "Larger λ"), None)
    rows = [] if uses is None else uses.tables[0].rows
    assert [row[1] for row in rows] == bounds
    assert all("proved for this batch: each layer keeps 0.50 of μ" in str(row[2]) for row in rows)


def test_every_number_of_a_certificate_is_under_its_name() -> None:
    layer = LayerCertificate(
        site="h.0", norm="RMSNorm", lambda_value=1, absolute_spread_ratio=2, absolute_spread_ratio_bound=3,
        min_lambda_proved=4, mixing_share=5,
    )  # fmt: skip
    certificate = SkipCertificate(keep_spread=0.5, sequences=1, layers=[layer])
    *_, section = certificate_document(certificate).sections
    (table,) = section.tables
    numbers = {"λ": "1", "norm": "RMSNorm", "kept": "2", "proved": "3", "least |λ|": "|λ| ≥ 4", "mixing": "5"}
    assert cells(table) == {"h.0": numbers}
    assert "proved to keep 0.50 of μ" in table.note


@pytest.mark.parametrize(("best", "clear"), [(3.25, False), (3.3, False), (2.9, True), (math.nan, False)])
def test_a_trial_in_which_no_run_learned_advises_more_steps(best: float, clear: bool) -> None:
    runs = {"as it is": [3.4] * 9 + [3.3], "λ = 8": [3.4] * 9 + [best]}
    said = trial_document(runs, "text", 10).verdict.sentence
    assert ("train more steps" not in said) == clear
    assert ("λ = 8" in said) == clear


def test_a_lower_start_is_not_training() -> None:
    for losses in ([2.9], [2.9, 2.89]):  # one step has trained nothing
        runs = {"as it is": [3.4] * len(losses), "λ = 8": losses}
        assert "train more steps" in trial_document(runs, "text", len(losses)).verdict.sentence
