"""`direction_spread_by_layer`: the mean direction spread by stack and layer, of any iterable of batches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import GPT, hugging_face, text_inputs
from tests.unchecked import unchecked
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from rankwise.errors import InputError
from rankwise.measures import direction_spread
from rankwise.skips import SkipError, direction_spread_by_layer

gpt2 = hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT)
TEXT = text_inputs()
IDS = TEXT["input_ids"]
LONG = {"input_ids": IDS.repeat(1, 2)}


class Rows(IterableDataset):
    """Data set that has no length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from ({"input_ids": row} for row in IDS)


@pytest.mark.parametrize("batches", [lambda: (one for one in [TEXT, LONG]), lambda: DataLoader(Rows())])
def test_batches_may_be_any_iterable(batches: Any) -> None:
    listed = [{name: torch.as_tensor(value) for name, value in one.items()} for one in batches()]
    assert direction_spread_by_layer(gpt2(), batches()) == direction_spread_by_layer(gpt2(), listed)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "`batches`: expected an iterable of at least one batch, got none"),
        (TEXT, "`batches`: expected an iterable of at least one batch, got dict"),
        (["text"], "batch 1: expected a batch with tokens.*got str"),
        ([{"input_ids": IDS + 1000}], "`batch`: expected a batch that GPT2LMHeadModel runs on"),
    ],
)
def test_other_batches_and_a_name_are_refused(batches: Any, message: str) -> None:
    with unchecked(), pytest.raises(InputError, match=message):
        direction_spread_by_layer(gpt2(), batches)
    with unchecked(), pytest.raises(SkipError, match=r"`model`: expected a torch\.nn\.Module, got str"):
        direction_spread_by_layer("gpt2", [TEXT])  # type: ignore[arg-type]


def test_spreads_are_returned_by_stack_and_layer() -> None:
    (values,) = direction_spread_by_layer(gpt2(), [TEXT]).values()
    assert list(direction_spread_by_layer(gpt2(), [TEXT])) == ["transformer.h"]
    assert len(values) == 4
    assert all(0 < value < 1 for value in values)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model, states = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8)
    (found,) = direction_spread_by_layer(model, [states]).values()
    assert found[0] == pytest.approx(float(direction_spread(states).mean()))
    assert direction_spread_by_layer(model, [(states,)]) == {"layers": found}
