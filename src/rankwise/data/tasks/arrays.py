"""Pictures in a ``.npz`` file, as data sets of small pictures come: one array (N, H, W) or (N, H, W, C)."""

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rankwise.errors import InputError, did_you_mean

Array = TypeVar("Array", bound=np.ndarray)
SUFFIX = ".npz"


def open_array(path: str | Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read the pictures of a ``.npz`` file as bytes (N, H, W) or (N, H, W, C) with C of 1, 3 or 4.

    Channels may also come first. Numbers in [0, 1] are taken for shares of white, whole ones up to 255 for
    bytes.

    Args:
        path: the file; with ``:NAME`` after it where several of its arrays are pictures.

    Raises:
        InputError: if there is no such file or array, several could be meant, or the numbers are no pixels.
    """
    file, name = _split(path)
    if not file.is_file():
        raise InputError(str(file), expected="a file of pictures", got="no such file", fix="Check the path.")
    subject = f"{file}:{name}" if name else str(file)
    return _read(file, lambda arrays: _pixels(arrays[_chosen(arrays, file, name)], subject))


def open_labels(path: str | Path, count: int, classes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read the classes of pictures from a ``.npz`` file: whole numbers (N,) from 0 to ``classes`` − 1.

    Args:
        path: the file and, after a colon, the name of the array.
        count: how many pictures there are.
        classes: how many classes.

    Raises:
        InputError: if the file cannot be read, has no such array, or the array holds something else.
    """
    file, name = _split(path)

    def take(arrays: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        if name not in arrays.files:
            raise InputError(
                f"{file}:{name}",
                expected="an array of the file",
                got="none of that name",
                fix=did_you_mean(name, arrays.files),
            )
        values = arrays[name]
        right = values.shape == (count,) and values.dtype.kind in "iu"
        if not right or (count and (values.min() < 0 or values.max() >= classes)):
            got = f"shape {values.shape}, {values.dtype}"
            got += f", {values.min()} to {values.max()}" if right else ""
            raise InputError(
                f"{file}:{name}",
                expected=f"{count} whole numbers from 0 to {classes - 1}",
                got=got,
                fix="Give each picture its class.",
            )
        return values.astype(np.int64)

    return _read(file, take)


def _read(file: Path, take: Callable[[Any], Array]) -> Array:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return take(arrays)
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            str(file),
            expected="a .npz file of NumPy arrays",
            got=f"a file that cannot be read as one ({error})",
            fix="Write it with `numpy.savez`.",
        ) from error


def _split(path: str | Path) -> tuple[Path, str]:
    """The file, and the name of an array after it."""
    text = str(path)
    head, colon, name = text.rpartition(":")
    return (Path(head), name) if colon and head.lower().endswith(SUFFIX) else (Path(text), "")


def _chosen(arrays: Any, file: Path, name: str) -> str:
    shapes = {key: arrays[key].shape for key in arrays.files}
    pictures = [key for key, shape in shapes.items() if len(shape) in (3, 4) and min(shape) > 0]
    if name in shapes if name else len(pictures) == 1:
        return name or pictures[0]
    held = ", ".join(f"{key} {shape}" for key, shape in shapes.items()) or "no arrays"
    if name:
        raise InputError(
            f"{file}:{name}",
            expected="an array of the file",
            got="none of that name",
            fix=did_you_mean(name, shapes),
        )
    fix = f"Name one: {file}:{pictures[0]}." if pictures else "Give an array (N, H, W) or (N, H, W, C)."
    raise InputError(str(file), expected="one array of pictures", got=held, fix=fix)


def _pixels(values: Any, subject: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if values.ndim not in (3, 4) or values.dtype.kind not in "buif":
        got = f"shape {values.shape}, {values.dtype}"
        fix = "Give an array of numbers (N, H, W) or (N, H, W, C)."
        raise InputError(subject, expected="pictures", got=got, fix=fix)
    if values.ndim == 4 and values.shape[-1] not in (1, 3, 4) and values.shape[1] in (1, 3, 4):
        values = np.moveaxis(values, 1, -1)
    if values.ndim == 4 and values.shape[-1] not in (1, 3, 4):
        got = f"shape {values.shape}"
        raise InputError(
            subject, expected="1, 3 or 4 channels", got=got, fix="Keep the channels of a picture."
        )
    if values.dtype == np.uint8:
        return values
    low, high = float(values.min()), float(values.max())
    scale = 255 if values.dtype.kind in "bf" and high <= 1 else 1
    if not (low >= 0 and high * scale <= 255):  # NaN is in no range
        got = f"{low:.4g} to {high:.4g}"
        raise InputError(
            subject, expected="pixels from 0 to 255, or from 0 to 1", got=got, fix="Scale them first."
        )
    return np.round(values.astype(np.float64) * scale).astype(np.uint8)
