"""What holds for every task: items, masks, batches, validation, records."""

import inspect
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from tests.unchecked import unchecked

from rankwise.data import tasks
from rankwise.errors import InputError
from rankwise.train.tasks import PLACES, TASKS


def rows() -> tasks.Examples:
    ids = np.array([[5, 6, 7, 0, 0], [8, 9, 0, 0, 0]], dtype=np.uint8)
    return tasks.Examples({"input_ids": ids, "labels": np.array([1, 0])}, lengths=np.array([3, 2]))


def test_items_are_whole_numbers_with_a_mask_over_what_is_no_padding() -> None:
    item = rows()[1]
    assert {name: value.dtype for name, value in item.items()} == dict.fromkeys(item, torch.int64)
    assert item["attention_mask"].tolist() == [1, 1, 0, 0, 0]
    assert item["labels"].shape == ()
    with pytest.raises(IndexError):
        rows()[2]
    assert len(list(rows())) == 2  # iteration ends


def test_a_batch_leaves_out_what_is_padding_in_all_of_it() -> None:
    batch = tasks.collate(list(rows()))
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert tasks.collate([rows()[1]])["input_ids"].shape == (1, 2)


def test_pixels_are_from_minus_one_to_one() -> None:
    pixels = np.array([[[[0, 255]]]], dtype=np.uint8)
    item = tasks.Examples({"pixel_values": pixels, "labels": np.array([3])})[0]
    assert item["pixel_values"].tolist() == [[[-1.0, 1.0]]]


def test_a_transform_sees_items_and_not_the_contents() -> None:
    plain = rows()
    turned = tasks.Examples(plain.arrays, transform=lambda item: {**item, "labels": item["labels"] + 1})
    assert turned[0]["labels"] == plain[0]["labels"] + 1
    assert turned.arrays["labels"] is plain.arrays["labels"]


def test_validation_is_taken_out_of_training_and_noted() -> None:
    task = tasks.mqar(30, 4, vocab_size=32, length=8, pairs=1)
    held = task.with_validation(10, seed=3)
    drawn = [{tuple(item["input_ids"].tolist()) for item in part} for part in (held.train, held.validation)]
    assert len(held.train) == 20
    assert len(held.validation) == 10
    assert drawn[0] | drawn[1] == {tuple(item["input_ids"].tolist()) for item in task.train}
    assert (held.provenance.train, held.provenance.validation, held.provenance.test) == (20, 10, 4)
    assert held.provenance.sha256 == task.provenance.sha256
    assert task.validation is None
    assert held.provenance.options["validation_seed"] == 3, "enough to take them out again"
    with pytest.raises(InputError, match="10 examples taken out already"):
        held.with_validation(5)
    with pytest.raises(InputError, match="examples: expected a whole number, from 1 to 29, got 30"):
        task.with_validation(30)


def test_a_record_is_plain_json_and_its_checksum_sees_every_byte() -> None:
    task = tasks.mqar(3, 2, vocab_size=32, length=8, pairs=1)
    record = json.loads(json.dumps(task.provenance.to_dict()))
    assert record["options"]["vocab_size"] == 32
    changed = {name: array.copy() for name, array in task.test.arrays.items()}
    changed["input_ids"][-1, -1] += 1
    from rankwise.data.tasks.task import make_task

    options = {"length": 8, "source": "", "vocab_size": 32}
    same = make_task("mqar", "language", task.train, task.test, **options)
    other = make_task("mqar", "language", task.train, tasks.Examples(changed), **options)
    assert same.provenance.sha256 == task.provenance.sha256 != other.provenance.sha256


def test_accuracy_counts_no_ignored_label() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert tasks.accuracy(logits, torch.tensor([1, -100, 1])) == 0.5
    assert np.isnan(tasks.accuracy(logits, torch.tensor([-100, -100, -100])))


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_of_another_type_is_refused_before_anything_is_read(name: str) -> None:
    """All tasks that take a seed; the files of those that read some are not there."""
    parameters = inspect.signature(TASKS[name]).parameters
    assert "seed" in parameters
    nowhere = {place: "nowhere" for place in PLACES if place in parameters}
    for seed in ("x", -1, 1.5, True):
        message = f"seed: expected a whole number, 0 or more, got {seed!r}"
        with unchecked(), pytest.raises(InputError, match=re.escape(message)):
            TASKS[name](**nowhere, seed=seed)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (tasks.mqar, {"power": "a"}, "power: expected a number, 0 or more, got 'a'. Give power=0.1"),
        (tasks.needle, {"depth": "half"}, "depth: expected a number, from 0 to 1, got 'half'"),
        (tasks.needle, {"depth": True}, "depth: expected a number, from 0 to 1, got True"),
        (tasks.needle, {"length": "long"}, "length: expected a whole number, 1 or more, got 'long'"),
        (tasks.pathfinder, {"size": [32]}, "size: expected one of 32, 128, 256, got [32]"),
        (tasks.pathfinder, {"size": 32.0}, "size: expected one of 32, 128, 256, got 32.0"),
    ],
)
def test_numbers_of_another_type_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    place = {"source": "nowhere"} if make is tasks.needle else {}
    with unchecked(), pytest.raises(InputError, match=re.escape(message)):
        make(**place, **options)
