"""Pictures from arrays and from `datasets`: the same contents, or a refusal that says what to put where."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rankwise.cli import load_model
from rankwise.data import tasks
from rankwise.data.tasks.pictures import grey
from rankwise.errors import InputError

image = pytest.importorskip("PIL.Image")


def arrays(**changed: Any) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    pixels = {f"x_{split}": draw.integers(0, 256, (n, 8, 8, 3), np.uint8) for split, n in SIZES.items()}
    labels = {f"y_{split}": np.arange(n) % 10 for split, n in SIZES.items()}
    return {name: value for name, value in {**pixels, **labels, **changed}.items() if value is not None}


SIZES = {"train": 12, "test": 5}


def saved(folder: Path, **changed: Any) -> Path:
    np.savez(folder / "cifar10.npz", **arrays(**changed))
    return folder


def test_pixels_and_classes_are_those_of_the_file(tmp_path: Path) -> None:
    task = tasks.cifar10(saved(tmp_path))
    given = arrays()
    for i, item in enumerate(task.train):
        pixels = (item["pixel_values"] + 1) * 127.5
        assert torch.allclose(pixels, torch.tensor(given["x_train"][i]).permute(2, 0, 1).float(), atol=1e-4)
        assert item["labels"] == given["y_train"][i]
    assert (len(task.train), len(task.test), task.image_shape, task.length) == (12, 5, (3, 8, 8), 64)
    assert task.provenance.source == "cifar10.npz"
    assert task.provenance.seed is None


def test_a_folder_of_datasets_gives_the_same_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    given = arrays()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    splits = {
        split: datasets.Dataset.from_dict(
            {
                "image": [image.fromarray(one) for one in given[f"x_{split}"]],
                "label": given[f"y_{split}"].tolist(),
            },
            features=features,
        )
        for split in SIZES
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "svhn")
    np.savez(tmp_path / "svhn.npz", **given)
    kept, plain = tasks.svhn(tmp_path / "svhn"), tasks.svhn(tmp_path / "svhn.npz")
    assert kept.provenance.sha256 == plain.provenance.sha256
    with pytest.raises(InputError, match="expected a column 'img', got image, label"):
        tasks.cifar10(tmp_path / "svhn")


def test_grey_is_pillows_grey_but_for_rounding() -> None:
    pixels = arrays()["x_train"]
    theirs = np.stack([np.asarray(image.fromarray(one).convert("L")) for one in pixels])
    assert np.abs(grey(pixels).astype(int) - theirs).max() <= 1  # Pillow's weights have 16 bits
    level = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    assert np.array_equal(grey(level.repeat(3, axis=-1)), level[..., 0])


def test_a_sequence_reads_the_picture_row_by_row(tmp_path: Path) -> None:
    task = tasks.cifar10_sequence(saved(tmp_path))
    assert (task.length, task.vocab_size, task.num_labels) == (64, 256, 10)
    assert task.test[2]["input_ids"].tolist() == grey(arrays()["x_test"])[2].ravel().tolist()


def test_a_shrunk_picture_has_means_of_blocks(tmp_path: Path) -> None:
    task = tasks.cifar10_sequence(saved(tmp_path), side=2)
    pixels = arrays()["x_test"]
    blocks = [pixels[:, y : y + 4, x : x + 4].mean((1, 2), keepdims=True) for y in (0, 4) for x in (0, 4)]
    means = np.concatenate(blocks, axis=1)
    assert (task.length, task.test[0]["input_ids"].tolist()) == (4, grey(means)[0].ravel().tolist())
    for side in (3, 16):
        with pytest.raises(InputError, match="`side`: expected a divisor of the edge"):
            tasks.cifar10_sequence(tmp_path, side=side)
    for wrong in (0, True):
        with pytest.raises(InputError, match="side: expected a whole number"):
            tasks.cifar10_sequence(tmp_path, side=wrong)


def test_some_examples_are_drawn_by_the_seed(tmp_path: Path) -> None:
    saved(tmp_path)
    some = [tasks.cifar10(tmp_path, train_examples=4, test_examples=2, seed=seed) for seed in (0, 0, 1)]
    assert some[0].provenance == some[1].provenance
    assert some[0].provenance.sha256 != some[2].provenance.sha256
    everything = arrays()["x_train"].transpose(0, 3, 1, 2)
    assert all((everything == one).all((1, 2, 3)).any() for one in some[0].train.arrays["pixel_values"])
    with pytest.raises(InputError, match="train_examples: expected a whole number, from 1 to 12, got 13"):
        tasks.cifar10(tmp_path, train_examples=13)


def test_crops_are_shifts_with_black_and_only_the_training_split_is_changed(tmp_path: Path) -> None:
    plain, changed = (tasks.cifar10(saved(tmp_path), augment=augment) for augment in (False, True))
    assert plain.provenance.sha256 == changed.provenance.sha256
    assert all(torch.equal(a["pixel_values"], b["pixel_values"]) for a, b in zip(plain.test, changed.test))  # noqa: B905
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


def test_digits_are_not_mirrored(tmp_path: Path) -> None:
    saved(tmp_path).joinpath("cifar10.npz").rename(tmp_path / "svhn.npz")
    assert tasks.svhn(tmp_path, augment=True).train.transform is tasks.crop
    np.savez(tmp_path / "svhn.npz", **arrays(y_test=np.array([0, 1, 2, 3, 99])))
    with pytest.raises(InputError, match=r"5 whole numbers from 0 to 9, got .*, 0 to 99"):
        tasks.svhn(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_test": None}, r"cifar10\.npz:x_test: expected an array of the file, got none.*x_train"),
        ({"y_test": None}, r"cifar10\.npz:y_test: expected an array of the file, got none.*y_train"),
        ({"x_train": np.zeros((12, 8, 8, 3), "U1")}, "x_train: expected pictures, got .*<U1"),
        ({"x_train": np.full((12, 8, 8, 3), np.nan)}, "x_train: expected pixels from 0 to 255"),
        ({"x_train": np.zeros((12, 8, 8, 1), np.uint8)}, "x_train: expected colour pictures"),
        ({"x_train": np.zeros((0, 8, 8, 3), np.uint8)}, "x_train: expected colour pictures"),
        ({"x_test": np.zeros((5, 9, 9, 3), np.uint8)}, "cifar10: expected pictures of one size"),
        ({"y_train": np.zeros(12)}, "y_train: expected 12 whole numbers from 0 to 9, got .*float64"),
        (
            {"y_train": np.zeros(11, int)},
            r"y_train: expected 12 whole numbers from 0 to 9, got shape \(11,\)",
        ),
        ({"y_train": np.full(12, -1)}, "y_train: .*, -1 to -1"),
    ],
)
def test_arrays_that_are_no_labelled_pictures_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        tasks.cifar10(saved(tmp_path, **changed))


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "text", "array"])
def test_a_broken_file_is_named(tmp_path: Path, how: str) -> None:
    file = saved(tmp_path) / "cifar10.npz"
    content = file.read_bytes()
    if how == "array":
        np.save(tmp_path / "x.npy", np.zeros(3))
        content = (tmp_path / "x.npy").read_bytes()
    broken = {"cut": content[: len(content) // 2], "flipped": content[:900] + b"?" + content[901:]}
    file.write_bytes({"empty": b"", "text": b"not an archive"}.get(how, broken.get(how, content)))
    with pytest.raises(InputError, match=r"cifar10\.npz: expected a \.npz file of NumPy arrays"):
        tasks.cifar10(tmp_path)


def test_missing_data_says_which_file_how_large_and_which_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        r"cifar10\.npz, a folder written by `datasets`, or uoft-cs/cifar10 \(about 144 MB\), got {got}"
        r".*python -c \"import datasets; "
        r"datasets\.load_dataset\('uoft-cs/cifar10'\)\.save_to_disk\('cifar10'\)\""
    )
    with pytest.raises(InputError, match=command.format(got="no such file or folder")):
        tasks.cifar10(tmp_path / "none")
    (tmp_path / "other.txt").touch()
    with pytest.raises(
        InputError, match=command.format(got=r"a folder without cifar10\.npz \(it holds other\.txt\)")
    ):
        tasks.cifar10(tmp_path)
    monkeypatch.setattr(load_model, "hub_reachable", lambda: False)
    with pytest.raises(InputError, match=command.format(got=".*no answer from https://huggingface.co")):
        tasks.cifar10()
    with pytest.raises(InputError, match=r"ufldl-stanford/svhn', 'cropped_digits'\)\.save_to_disk\('svhn'\)"):
        tasks.svhn()


def test_the_real_file_is_balanced(shared_data: Path) -> None:
    task = tasks.cifar10_sequence(shared_data / "cifar10", train_examples=3000)
    assert (len(task.train), len(task.test), task.chance) == (3000, 2000, 0.1)
    counts = np.bincount(task.train.arrays["labels"], minlength=10)
    assert np.abs(counts - 300).max() < 5 * (3000 * 0.1 * 0.9) ** 0.5
