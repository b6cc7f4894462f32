"""Associative recall: every answer follows from the sequence, and the draws have the published law."""

import math

import numpy as np
import pytest
import torch
from experiments.tasks.mqar import mqar
from experiments.tasks.task import collate
from experiments.training.train import count_correct

SHA256 = "73bc5a9a44ccc2d88c75b876f452fec0ef319ac205af952dc855e9082bf18c01"


def solve(ids: list[int], pairs: int) -> dict[int, int]:
    """The answers at their positions, from the sequence alone, without notes of the generator."""
    value_of = dict(zip(ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
    return {
        position + 1: value_of[ids[position]]
        for position in range(2 * pairs, len(ids), 2)
        if ids[position] in value_of
    }


@pytest.mark.parametrize(("length", "pairs"), [(16, 4), (64, 4), (65, 7), (4, 1)])
def test_every_label_is_the_value_of_the_key_before_it_and_every_key_is_asked_once(
    length: int, pairs: int
) -> None:
    task = mqar(train=50, test=20, vocab_size=64, length=length, pairs=pairs)
    for split in (task.train, task.test):
        for item in split:
            ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
            answers = solve(ids, pairs)
            assert labels == [answers.get(position, -100) for position in range(length)]
            keys, values = ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2]
            assert len(answers) == len(set(keys)) == len(set(values)) == pairs
            assert 1 <= min(keys) <= max(keys) < 32 <= min(values) <= max(values) < 64
            assert all(ids[p] == 0 or p - 1 not in answers for p in range(2 * pairs + 1, length, 2))


def test_slots_are_drawn_by_the_power_law_without_replacement() -> None:
    rows, power = 20_000, 0.1
    task = mqar(train=rows, test=1, vocab_size=12, length=16, pairs=2, power=power)
    ids = task.train.arrays["input_ids"]
    slots = [np.argmax(ids[:, 4::2] == ids[:, [column]], axis=1) for column in (0, 2)]
    p = np.arange(1, 7) ** (power - 1)
    p /= p.sum()
    second = [sum(p[a] * p[b] / (1 - p[a]) for a in range(6) if a != b) for b in range(6)]
    for drawn, law in zip(slots, (p, second), strict=True):
        counts = np.bincount(drawn, minlength=6)
        for count, expected in zip(counts, law, strict=True):
            assert abs(count - rows * expected) < 5 * math.sqrt(rows * expected * (1 - expected))


def test_keys_and_values_are_uniform() -> None:
    rows = 20_000
    ids = mqar(train=rows, test=1, vocab_size=12, length=8, pairs=2).train.arrays["input_ids"]
    for columns, among in ((ids[:, 0], range(1, 6)), (ids[:, 3], range(6, 12))):
        p = 1 / len(among)
        counts = np.array([(columns == id_).sum() for id_ in among])
        assert counts.sum() == rows
        assert np.abs(counts - rows * p).max() < 5 * math.sqrt(rows * p * (1 - p))


def test_the_seed_decides_and_the_test_split_does_not_depend_on_the_training_split() -> None:
    first, again, longer, other = (
        mqar(train=rows, test=5, vocab_size=32, length=16, pairs=2, seed=seed)
        for rows, seed in ((7, 0), (7, 0), (9, 0), (7, 1))
    )
    assert first.record == again.record
    assert first.record["sha256"] not in (longer.record["sha256"], other.record["sha256"])
    assert np.array_equal(first.test.arrays["input_ids"], longer.test.arrays["input_ids"])
    assert not np.array_equal(first.test.arrays["input_ids"], first.train.arrays["input_ids"][:5])
    assert first.record["sha256"] == SHA256


def share(logits: torch.Tensor, labels: torch.Tensor) -> float:
    right, counted = count_correct(logits, labels).sum(0).tolist()
    return right / counted


def test_a_reader_that_looks_the_keys_up_is_always_right_and_one_that_does_not_is_at_chance() -> None:
    task = mqar(train=1, test=400, vocab_size=64, length=32, pairs=4)
    batch = collate([task.test[i] for i in range(400)])
    logits = torch.zeros(400, 32, 64)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        for position, value in solve(ids, 4).items():
            logits[row, position - 1, value] = 1
    assert share(logits, batch["labels"]) == 1
    assert share(logits.roll(1, dims=1), batch["labels"]) == 0
    most_common = batch["labels"][batch["labels"] != -100].mode().values
    logits = torch.nn.functional.one_hot(most_common.expand(400, 32), 64).float()
    assert share(logits, batch["labels"]) == pytest.approx(task.chance)
