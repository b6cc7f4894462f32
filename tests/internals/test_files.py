"""Written files have the mode that the umask permits, like files that other programs write."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rankwise._internals.files import write_file, write_files

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes of files")


def save(path: Path) -> None:
    save_file({"x": torch.zeros(1)}, path)  # for its owner alone


WAYS: dict[str, Callable[[Path], object]] = {
    "write_file": lambda folder: write_file(folder / "x.safetensors", save, "weights"),
    "write_files": lambda folder: write_files(folder, lambda new: save(new / "x.safetensors"), "weights"),
}


@pytest.fixture(params=[0o002, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("way", WAYS)
def test_written_files_have_the_mode_of_the_umask(way: str, umask: int, tmp_path: Path) -> None:
    WAYS[way](tmp_path)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert os.umask(umask) == umask
