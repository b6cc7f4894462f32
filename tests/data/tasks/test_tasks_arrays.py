"""Pictures in .npz files: the same pixels in every form, or a clear refusal."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.data.tasks.arrays import open_array
from rankwise.errors import InputError


def noise(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


@given(st.sampled_from([(1,), (3,), (4,), ()]), st.booleans())
@settings(max_examples=8, deadline=None)
def test_channels_first_last_or_none_and_shares_of_white_are_the_same_pixels(
    channels: tuple[int, ...], as_shares: bool
) -> None:
    import tempfile

    pixels = noise(3, 7, 9, *channels)
    stored = np.moveaxis(pixels, -1, 1) if channels else pixels
    with tempfile.TemporaryDirectory() as folder:
        for name, values in (("last", pixels), ("first", stored)):
            np.savez(Path(folder) / f"{name}.npz", x=values / 255 if as_shares else values.astype(np.int64))
            assert np.array_equal(open_array(Path(folder) / f"{name}.npz"), pixels)


def test_one_of_several_arrays_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x_train=noise(4, 5, 5), x_test=noise(2, 5, 5), y=np.arange(4))
    assert open_array(f"{path}:x_test").shape == (2, 5, 5)
    with pytest.raises(InputError, match=r"x_test \(2, 5, 5\).*Name one: .*a\.npz:x_train"):
        open_array(path)
    with pytest.raises(InputError, match=r"none of that name\. Did you mean x_test"):
        open_array(f"{path}:x_tset")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.zeros((4, 5)), "expected one array of pictures"),
        (np.zeros((0, 5, 5)), "expected one array of pictures"),
        (np.full((2, 5, 5), 300), "expected pixels from 0 to 255"),
        (np.full((2, 5, 5), -0.5), "expected pixels from 0 to 255"),
        (np.full((2, 5, 5), np.nan), "expected pixels from 0 to 255"),
        (np.zeros((2, 5, 5, 7)), "expected 1, 3 or 4 channels"),
        (np.full((2, 5, 5), "a"), "expected pictures"),
        (np.full((2, 5, 5), None), "cannot be read as one"),
    ],
)
def test_what_is_no_picture_is_refused(values: Any, says: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=values)
    with pytest.raises(InputError, match=says):
        open_array(tmp_path / "a.npz")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        open_array(tmp_path / "none.npz")
    for content in (b"", b"PK\x03\x04broken", b"hello"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(InputError, match="cannot be read as one"):
            open_array(tmp_path / "bad.npz")
