"""Written files have the mode that the umask permits, and are all new or all old."""

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


@pytest.mark.parametrize("broken", ["b", "c"])
def test_a_break_between_two_files_puts_the_old_ones_back(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"a": "old", "b": "old", "other": "own"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if self.parent.name == "new" and self.name == broken:
            raise KeyboardInterrupt
        return replace(self, target)

    def write(folder: Path) -> None:
        for name in "abcd":
            (folder / name).write_text("new")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_files(tmp_path, write, "folder")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before
    assert [file.name for file in write_files(tmp_path, write, "folder")] == list("abcd")
    assert (tmp_path / "b").read_text() == "new"
