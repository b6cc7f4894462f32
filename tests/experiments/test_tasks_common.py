"""Laws of all tasks: items, masks, batches, records."""

import json

import numpy as np
import torch
from experiments.tasks.mqar import mqar
from experiments.tasks.task import Examples, choose, collate, make_task


def rows() -> Examples:
    ids = np.array([[5, 6, 7, 0, 0], [8, 9, 0, 0, 0]], dtype=np.uint8)
    return Examples({"input_ids": ids, "labels": np.array([1, 0])}, lengths=np.array([3, 2]))


def test_items_are_integers_with_a_mask_over_everything_but_padding() -> None:
    item = rows()[1]
    assert {name: value.dtype for name, value in item.items()} == dict.fromkeys(item, torch.int64)
    assert item["attention_mask"].tolist() == [1, 1, 0, 0, 0]
    assert item["labels"].shape == ()
    assert len(list(rows())) == 2, "iteration ends"


def test_a_batch_omits_columns_that_are_padding_in_all_items() -> None:
    batch = collate(list(rows()))
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert collate([rows()[1]])["input_ids"].shape == (1, 2)


def test_pixels_are_from_minus_one_to_one() -> None:
    pixels = np.array([[[[0, 255]]]], dtype=np.uint8)
    item = Examples({"pixel_values": pixels, "labels": np.array([3])})[0]
    assert item["pixel_values"].tolist() == [[[-1.0, 1.0]]]


def test_a_record_is_json_and_its_checksum_depends_on_every_byte() -> None:
    task = mqar(train=3, test=2, vocab_size=32, length=8, pairs=1)
    assert json.loads(json.dumps(task.record))["options"]["vocab_size"] == 32
    changed = {name: array.copy() for name, array in task.test.arrays.items()}
    changed["input_ids"][-1, -1] += 1
    same, other = (
        make_task("mqar", "language", task.train, test, length=8, source="", seed=0, options={})
        for test in (task.test, Examples(changed))
    )
    assert same.record["sha256"] == task.record["sha256"] != other.record["sha256"]


def test_the_seed_and_the_split_decide_which_examples_are_drawn() -> None:
    assert choose(3, None, 0, 0).tolist() == [0, 1, 2]
    draws = [choose(50, 10, seed, part).tolist() for seed, part in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) == 3
    assert all(len(set(draw)) == 10 for draw in draws)
