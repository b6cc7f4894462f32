"""Reports on λ-skips and certificates."""

import math

import pytest
from tests.support.documents import Table

from rankwise.report.skip_report import certificate_document, skip_document, trial_document
from rankwise.skips import LayerCertificate, SkipCertificate, StackCertificate


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


def stack(**fields: float | None) -> StackCertificate:
    return StackCertificate(**({"stack": "h", "layers": 1, "left_out": 0} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "words", "proved", "bound"),
    [
        (0.9, "h: keeps 0.90 of the token spread on this batch.", 2.5, "|λ| ≥ 2.5"),
        (None, "h: nothing to keep, its tokens are all equal where it starts.", 4e7, "none below 1,000"),
        (0.9, "h: keeps 0.90 of the token spread on this batch.", math.inf, "none below 1,000"),
    ],
)
def test_a_certificate_names_the_kept_spread_and_explains_larger_scales(
    ratio: float | None, words: str, proved: float, bound: str
) -> None:
    only = stack(spread_ratio=ratio, min_lambda_proved=proved)
    document = certificate_document(SkipCertificate(keep_spread=0.5, sequences=1, layers=[], stacks=[only]))
    assert document.verdict.sentence == words
    ((_, least, use),) = document.sections[0].tables[0].rows
    assert least == bound
    assert "proved for this batch: each layer keeps 0.50 of μ" in str(use)


def test_every_number_of_a_certificate_is_under_its_name() -> None:
    layer = LayerCertificate(
        site="h.0", norm="RMSNorm", lambda_value=1, absolute_spread_ratio=2, absolute_spread_ratio_bound=3,
        min_lambda_proved=4, mixing_share=5,
    )  # fmt: skip
    certificate = SkipCertificate(keep_spread=0.5, sequences=1, layers=[layer], stacks=[])
    (section,) = certificate_document(certificate).sections
    (table,) = section.tables
    numbers = {"λ": "1", "norm": "RMSNorm", "kept": "2", "proved": "3", "least |λ|": "|λ| ≥ 4", "mixing": "5"}
    assert cells(table) == {"h.0": numbers}
    assert "proved to keep 0.50 of μ" in table.note


@pytest.mark.parametrize(("best", "clear"), [(3.25, False), (3.3, False), (2.9, True), (math.nan, False)])
def test_a_trial_in_which_no_run_learned_says_so(best: float, clear: bool) -> None:
    runs = {"as it is": [3.4] * 9 + [3.3], "λ = 8": [3.4] * 9 + [best]}
    said = trial_document(runs, "text", 10).verdict.sentence
    assert ("train more steps" not in said) == clear
    assert ("λ = 8" in said) == clear


def test_a_lower_start_is_no_training() -> None:
    for losses in ([2.9], [2.9, 2.89]):  # one step has trained nothing
        runs = {"as it is": [3.4] * len(losses), "λ = 8": losses}
        assert "train more steps" in trial_document(runs, "text", len(losses)).verdict.sentence
