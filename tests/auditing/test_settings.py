"""Options mean the same to `audit`, the command and the monitor, and are checked before the model runs."""

import dataclasses
import inspect
from functools import partial

import pytest
import torch
from tests.unchecked import unchecked
from torch import nn

import rankwise as rw
from rankwise.auditing import AtInitSettings
from rankwise.auditing.settings import AuditSettings, chosen_heads
from rankwise.errors import InputError
from rankwise.importance import ImportanceSettings

DATA = {"model", "batches", "texts", "tokens", "batch_size"}
WRONG = [
    ({"delta": "x"}, r"`delta`: expected a number in \(0, ∞\), got 'x'"),
    ({"rank_method": "estimated"}, r"`rank_method`: expected one of auto, exact, estimate, got .*mean"),
    ({"sites": ["layers.0"]}, "`sites`"),
    ({"sites": {"layers.0": 3}}, "`sites`"),
    ({"blocks": 3}, "`blocks`"),
    ({"at_init": "yes"}, "`at_init`"),
    ({"at_init": 0}, "`at_init`"),
    ({"importance": "yes"}, "`importance`"),
    ({"loss": "masked"}, "`loss`: expected True or False"),
    ({"attention_maps": "1"}, '`attention_maps`: expected "flagged", "all"'),
    *(
        ({"attention_maps": wrong}, "`attention_maps`")
        for wrong in ("3:x", "", "3:7;5:0", [], [3], 7, [("a", 1)])
    ),
    ({"tokenizer": 3}, "`tokenizer`.* got int"),
    ({"provenance": {"modle": "m"}}, "Did you mean model"),
    ({"on_progress": 3}, "`on_progress`: expected a function"),
]


class Untouched(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model ran")


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_wrong_options_are_refused_before_the_model_runs(options, says) -> None:
    x = torch.zeros(1, 2, 3)
    for build in (
        lambda: AuditSettings.of(**options),
        lambda: rw.audit(Untouched(), [x], **options),
        lambda: rw.RankMonitor(x, **options),
    ):
        with unchecked(), pytest.raises(InputError, match=says):
            build()


def test_options_are_the_arguments_of_an_audit() -> None:
    options = {
        name: argument.default
        for name, argument in inspect.signature(rw.audit).parameters.items()
        if name not in DATA
    }
    assert AuditSettings.of(**options) == AuditSettings.of() == AuditSettings()
    fields = {field.name for field in dataclasses.fields(AuditSettings)}
    assert fields ^ set(options) == {"maps", "attention_maps", "loss"}
    for build in (AuditSettings.of, partial(rw.RankMonitor, torch.zeros(1, 2, 3))):
        with unchecked(), pytest.raises(TypeError, match="rank_metod"):
            build(rank_metod="exact")


@pytest.mark.parametrize(
    ("matrices", "heads", "flagged"),
    [
        (" Flagged", set(), True),
        ("all", set(), False),
        ("3:7, 5:0", {(3, 7), (5, 0)}, False),
        ([(3, 7), (5, 0)], {(3, 7), (5, 0)}, False),
    ],
)
def test_maps_are_chosen_by_a_word_text_or_pairs(matrices, heads, flagged) -> None:
    chosen = chosen_heads(matrices)
    assert (chosen.heads, chosen.flagged) == (heads, flagged)
    assert chosen.includes(3, 7)
    assert chosen.includes(0, 0) == (not heads)


def test_importance_and_at_init_may_be_words_numbers_or_settings() -> None:
    assert AuditSettings.of(importance=True).importance == ImportanceSettings()
    assert AuditSettings.of(importance="exact").importance == ImportanceSettings(exact=True)
    alone = ImportanceSettings(estimates=False)
    assert AuditSettings.of(loss=True).importance == alone
    assert AuditSettings.of(loss=True, importance=True).importance == ImportanceSettings()
    own = ImportanceSettings(mask_token=3)
    assert AuditSettings.of(importance=own).importance == own
    assert AuditSettings.of(at_init=True).at_init == AtInitSettings(3)
    assert AuditSettings.of(at_init=2).at_init == AtInitSettings(2)
    build = Untouched
    assert AuditSettings.of(at_init=build).at_init == AtInitSettings(3, build)


def test_the_mask_token_comes_from_the_tokenizer_unless_it_is_set() -> None:
    class Words:
        mask_token_id = 7

        def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
            return {}

    for option, wanted in ((True, 7), (ImportanceSettings(mask_token=3), 3)):
        assert AuditSettings.of(importance=option, tokenizer=Words()).importance.mask_token == wanted
