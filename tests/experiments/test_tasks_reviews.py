"""Reviews as bytes: the first bytes of each review, padded, with its class."""

import gzip
import json
from pathlib import Path

from experiments.tasks.reviews import FILES, imdb_bytes

REVIEWS = [("good ü film", 1), ("bad", 0), ("so so, but long", 1), ("", 0)]


def saved(folder: Path) -> Path:
    for name in FILES:
        with gzip.open(folder / name, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text, "label": label}) + "\n" for text, label in REVIEWS)
    return folder


def test_a_review_has_its_first_bytes_and_a_mask(tmp_path: Path) -> None:
    task = imdb_bytes(saved(tmp_path), length=10)
    for item, (text, label) in zip(list(task.train), REVIEWS, strict=True):
        written = bytes((item["input_ids"][item["attention_mask"].bool()] - 3).tolist())
        assert written == text.encode()[:10]
        assert (item["input_ids"][~item["attention_mask"].bool()] == task.pad_token_id).all()
        assert item["labels"] == label
    assert (task.num_labels, task.vocab_size, task.chance) == (2, 259, 0.5)


def test_the_seed_decides_which_reviews_are_drawn(tmp_path: Path) -> None:
    few = [imdb_bytes(saved(tmp_path), length=20, train_examples=2, seed=seed) for seed in range(9)]
    assert {task.record["train"] for task in few} == {2}
    assert len({task.record["sha256"] for task in few}) > 1
