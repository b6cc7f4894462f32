"""ListOps: a reader with a stack finds every answer, and the draws have the law of the grammar."""

import statistics

import numpy as np
import pytest
from experiments.tasks.listops import CLOSE, TOKENS, Rule, forest, listops

SHA256 = "ec83bfe2792794e19d55b67029770a909aefe1a48be140bf218fb19450791134"
OPERATIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def evaluate(tokens: list[str]) -> tuple[int, int, list[int]]:
    """Value, levels and the counts of arguments of a written expression, by a stack."""
    stack: list[list] = [[]]
    levels, counts = 1, []
    for token in tokens:
        if token in OPERATIONS:
            stack.append([token])
            levels = max(levels, len(stack))
        elif token == "]":
            name, *values = stack.pop()
            counts.append(len(values))
            stack[-1].append(OPERATIONS[name](values))
        else:
            stack[-1].append(int(token))
    [[value]] = stack
    return value, levels, counts


def written(item: dict) -> list[str]:
    return [TOKENS[i] for i in item["input_ids"][item["attention_mask"].bool()].tolist()]


def test_the_reader_reads() -> None:
    assert evaluate(["[MAX", "2", "9", "[MIN", "4", "7", "]", "0", "]"]) == (9, 3, [2, 4])
    assert evaluate(["[MED", "1", "2", "9", "[SM", "5", "6", "]", "]"])[0] == 1
    with pytest.raises(ValueError, match="unpack"):
        evaluate(["[MAX", "2"])


@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 5, "length": 40},
        {"min_length": 20, "length": 60, "max_depth": 3, "max_arguments": 6},
        {"min_length": 500, "length": 2000},
    ],
)
def test_every_label_is_the_value_of_its_expression(options: dict[str, int]) -> None:
    task = listops(train=60, test=20, **options)
    depth, most = options.get("max_depth", 10), options.get("max_arguments", 10)
    for split in (task.train, task.test):
        for item in split:
            tokens = written(item)
            value, levels, counts = evaluate(tokens)
            assert item["labels"] == value
            assert options["min_length"] < len(tokens) < options["length"] == task.length
            assert levels <= depth
            assert 2 <= min(counts) <= max(counts) <= most
            assert (item["input_ids"][~item["attention_mask"].bool()] == task.pad_token_id).all()


def test_the_draws_have_the_law_of_the_grammar() -> None:
    trees = 20_000
    tokens, ends, values = forest(np.random.default_rng(0), trees, Rule(0, 2000, 3, 10))
    first = tokens[np.concatenate([[0], ends[:-1]])]
    share = (first > 10).mean()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / trees) ** 0.5
    counts = np.bincount(tokens, minlength=16)
    assert counts[CLOSE] == counts[11:15].sum()
    for group in (counts[1:11], counts[11:15]):
        p = 1 / len(group)
        assert np.abs(group - group.sum() * p).max() < 5 * (group.sum() * p * (1 - p)) ** 0.5
    names = [TOKENS[i] for i in tokens]
    lengths = np.diff(ends, prepend=0)
    read = [
        evaluate(names[end - length : end]) for end, length in zip(ends[:2000], lengths[:2000], strict=True)
    ]
    assert [value for value, _, _ in read] == values[:2000].tolist()
    arguments = np.bincount([n for _, _, counts in read for n in counts], minlength=11)[2:]
    total = arguments.sum()
    assert np.abs(arguments - total / 9).max() < 5 * (total * (1 / 9) * (8 / 9)) ** 0.5


def test_no_expression_comes_twice_and_the_seed_decides() -> None:
    small = {"min_length": 3, "length": 6, "max_arguments": 3}
    task = listops(train=300, test=60, **small)
    rows = [tuple(written(item)) for split in (task.train, task.test) for item in split]
    assert len(set(rows)) == 360
    longer = listops(train=400, test=60, **small)
    assert np.array_equal(task.test.arrays["input_ids"], longer.test.arrays["input_ids"])
    assert np.array_equal(task.train.arrays["input_ids"], longer.train.arrays["input_ids"][:300])
    assert listops(train=300, test=60, **small, seed=1).record["sha256"] != task.record["sha256"]
    assert task.record["sha256"] == SHA256
    assert "Nangia" in task.record["source"]
    assert "Long Range Arena" not in task.record["source"], "these are not its lengths"
