"""Pictures of CIFAR-10: contents of the file, gray sequences, crops."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.tasks.pictures import cifar10, cifar10_sequence, gray

SIZES = {"train": 12, "test": 5}


def arrays(**changed: Any) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    pixels = {f"x_{split}": draw.integers(0, 256, (n, 8, 8, 3), np.uint8) for split, n in SIZES.items()}
    return {**pixels, **{f"y_{split}": np.arange(n) % 10 for split, n in SIZES.items()}, **changed}


def saved(folder: Path, **changed: Any) -> Path:
    np.savez(folder / "cifar10.npz", **arrays(**changed))
    return folder


def test_pixels_and_classes_equal_the_file(tmp_path: Path) -> None:
    task = cifar10(saved(tmp_path))
    given = arrays()
    for i, item in enumerate(task.train):
        pixels = (item["pixel_values"] + 1) * 127.5
        assert torch.allclose(pixels, torch.tensor(given["x_train"][i]).permute(2, 0, 1).float(), atol=1e-4)
        assert item["labels"] == given["y_train"][i]
    assert (len(task.train), len(task.test), task.image_shape, task.length) == (12, 5, (3, 8, 8), 64)
    assert task.record["seed"] is None


def test_gray_agrees_with_pillow_up_to_rounding() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = arrays()["x_train"]
    theirs = np.stack([np.asarray(image.fromarray(one).convert("L")) for one in pixels])
    assert np.abs(gray(pixels).astype(int) - theirs).max() <= 1  # weights of Pillow have 16 bits
    level = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    assert np.array_equal(gray(level.repeat(3, axis=-1)), level[..., 0])


def test_a_sequence_reads_the_picture_row_by_row(tmp_path: Path) -> None:
    task = cifar10_sequence(saved(tmp_path))
    assert (task.length, task.vocab_size, task.num_labels) == (64, 256, 10)
    assert task.test[2]["input_ids"].tolist() == gray(arrays()["x_test"])[2].ravel().tolist()


def test_a_shrunk_picture_has_means_of_blocks(tmp_path: Path) -> None:
    task = cifar10_sequence(saved(tmp_path), side=2)
    pixels = arrays()["x_test"]
    blocks = [pixels[:, y : y + 4, x : x + 4].mean((1, 2), keepdims=True) for y in (0, 4) for x in (0, 4)]
    means = np.concatenate(blocks, axis=1)
    assert (task.length, task.test[0]["input_ids"].tolist()) == (4, gray(means)[0].ravel().tolist())
    with pytest.raises(ValueError, match="expected a divisor of the edge"):
        cifar10_sequence(tmp_path, side=3)


def test_crops_are_shifts_of_training_pictures_on_black(tmp_path: Path) -> None:
    plain, changed = (cifar10(saved(tmp_path), augment=augment) for augment in (False, True))
    assert plain.record["sha256"] == changed.record["sha256"]
    pairs = zip(list(plain.test), list(changed.test), strict=True)
    assert all(torch.equal(a["pixel_values"], b["pixel_values"]) for a, b in pairs)
    framed = torch.full((3, 16, 16), -1.0)
    framed[:, 4:12, 4:12] = plain.train[0]["pixel_values"]
    shifts = {(framed[:, y : y + 8, x : x + 8]).numpy().tobytes(): (y, x) for y in range(9) for x in range(9)}
    seen, mirrored = set(), 0
    for _ in range(600):
        pixels = changed.train[0]["pixel_values"]
        shift = shifts.get(pixels.numpy().tobytes())
        mirrored += shift is None
        seen.add(shift or shifts[pixels.flip(-1).contiguous().numpy().tobytes()])
    assert len(seen) == 81  # each is missed with probability (80/81)^600 = 6e-4
    assert abs(mirrored - 300) < 5 * 600**0.5 / 2
    torch.manual_seed(3)
    first = changed.train[1]["pixel_values"]
    torch.manual_seed(3)
    assert torch.equal(first, changed.train[1]["pixel_values"])
