"""Write files atomically, and save and load records. This module does not import torch, which is slow."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import ValidationError
from safetensors import SafetensorError

from rankwise._internals import report_package
from rankwise._internals.records import Record
from rankwise.errors import InputError, RecordError, first_line, readable_file

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

R = TypeVar("R", bound="SavedRecord")


def writable_folder(folder: Path, option: str = "--out") -> None:
    """Create a folder. Raise InputError if it is not writable, before any time is spent on results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(f"{option} {folder}", folder, error, "Choose a folder you may write to.") from error


@contextmanager
def locked(folder: Path, option: str = "--out") -> Iterator[None]:
    """Context manager that locks a folder for one command. Raise InputError if another command uses it.

    Windows and some network file systems have no such locks, so another command can still write.
    """
    with ExitStack() as opened:
        if fcntl is not None:
            try:
                descriptor = os.open(folder, os.O_RDONLY)
                opened.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                expected, got = "a folder that no other command uses", "a folder in use"
                fix = "Wait for the other command, or choose another name."
                raise InputError(f"{option} {folder}", expected=expected, got=got, fix=fix) from error
            except OSError:  # some network file systems have no locks, so continue without a lock
                pass
        yield


def folder_name(name: str) -> str:
    """Convert the name of a model or checkpoint to a valid name of a folder.

    Examples:
        >>> folder_name("org/model"), folder_name("../x"), folder_name("net.py:build"), folder_name("")
        ('org-model', 'x', 'net.py-build', 'model')
    """
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    return kept.strip(".-")[:100] or "model"


def check_unused(folder: Path, option: str = "--out", fix: str = "Choose another name.") -> None:
    """Raise InputError if a path is a file, or a folder that contains files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        got = "a folder with files" if folder.is_dir() else "a file"
        raise InputError(f"{option} {folder}", expected="a new or empty folder", got=got, fix=fix)


def set_default_mode(file: Path) -> None:
    """Set the mode of a new file from the umask, because only the owner can read what safetensors writes."""
    umask = os.umask(0o077)  # the umask can only be read by setting it
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def write_file(
    path: str | Path, content: str | Callable[[Path], object], subject: str, in_folder: str = ""
) -> Path:
    """Write a file under a temporary name, then rename the file; return its path.

    Readers find either the old or the complete new file. After a full disk or Ctrl-C the old file remains.
    Missing folders are created. ``content`` is text, or a function that writes the file to a given path. If
    ``path`` is an existing folder, the file in this folder is named ``in_folder``.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_file(Path(folder) / "a" / "b.txt", "hello", "file").read_text()
        'hello'
    """
    path = Path(path)
    path = path / in_folder if in_folder and path.is_dir() else path
    if path.exists() and not path.is_file():
        raise InputError(
            f"{subject} {path}",
            expected="a file, or an unused name",
            got="a folder or a device",
            fix="Choose another name.",
        )
    path = path.resolve()  # so that a symbolic link remains a link, and its target is written
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            partial.write_text(content, encoding="utf-8", errors="xmlcharrefreplace", newline="\n")
        else:
            content(partial)
            set_default_mode(partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        fix = f"Choose a folder you may write to and that has room, or make {path.parent} writable."
        raise _unwritable(f"{subject} {path}", path, error, fix, "file") from error
    finally:  # Ctrl-C must not leave the temporary file behind
        with suppress(OSError):
            partial.unlink()
    return path


def write_files(folder: Path, write: Callable[[Path], object], subject: str) -> list[Path]:
    """Write several files into a folder, either all or none; return their paths.

    ``write`` gets a hidden folder and writes the files there. Then the files are moved into ``folder``, which
    is created if it is missing. Other files are kept. After an error or Ctrl-C the old files are restored.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".rankwise-") as partial:
            new, old = Path(partial, "new"), Path(partial, "old")
            new.mkdir()
            old.mkdir()
            write(new)
            names = sorted(file.name for file in new.iterdir())
            try:
                for name in names:
                    if (new / name).is_file():
                        set_default_mode(new / name)
                    if (folder / name).exists():
                        (folder / name).replace(old / name)
                    (new / name).replace(folder / name)
            except BaseException:  # includes KeyboardInterrupt, which is not an Exception
                for name in names:
                    if (old / name).exists():
                        (old / name).replace(folder / name)
                    elif not (new / name).exists():  # the moved file replaced no old file
                        (folder / name).unlink(missing_ok=True)
                raise
    except (OSError, SafetensorError) as error:
        fix = "Choose a folder you may write to and that has room."
        raise _unwritable(f"{subject} {folder}", folder, error, fix) from error
    return [folder / name for name in names]


def _unwritable(subject: str, path: Path, error: Exception, fix: str, kind: str = "folder") -> InputError:
    got = getattr(error, "strerror", None) or first_line(error)
    got = "a file" if kind == "folder" and path.is_file() else got
    return InputError(subject, expected=f"a {kind} that can be written", got=got, fix=fix)


class WithPage:
    """Result that `rankwise.report` shows as an HTML page."""

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained HTML file, named ``index.html`` if ``path`` is a folder; return its path.

        Raises:
            InputError: if the file cannot be written.
        """
        report = report_package()
        written: Path = report.write_page(report.document_of(self), Path(path))
        return written


class SavedRecord(Record, WithPage):
    """Base class of records that are saved as JSON, by default in ``NOUN.json``, and shown as an HTML page.

    A subclass has the fields ``format``, which is "rankwise-NOUN", and ``schema_version``.
    """

    _command: ClassVar[str] = ""
    """Command that writes such files. If this is "", the command is named NOUN."""

    @classmethod
    def _noun(cls) -> str:
        return str(cls.model_fields["format"].default).removeprefix("rankwise-")

    def save(self, path: str | Path) -> Path:
        """Write a JSON file (``audit.json``, ``plan.json``, … if ``path`` is a folder); return its path.

        Raises:
            InputError: if the file cannot be written.
        """
        noun = self._noun()
        return write_file(path, self.model_dump_json(indent=1) + "\n", noun, f"{noun}.json")

    @classmethod
    def load(cls: type[R], path: str | Path) -> R:
        """Return the record in a file. If ``path`` is a folder, read ``audit.json``, ``plan.json``, … in it.

        Raises:
            InputError: if the file cannot be read.
            RecordError: if the file has another format, another schema version or damaged content.
        """
        noun, version = cls._noun(), cls.model_fields["schema_version"].default
        path = Path(path)
        path = path / f"{noun}.json" if path.is_dir() else path
        fix = f"Pass a file that Rankwise wrote, such as {noun}.json, or the folder of {noun}.json."
        data = readable_file(path, f"a file with a saved {noun}", fix=fix)
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f"{part}." for part in first["loc"]).removesuffix(".")
            got = ": ".join(text for text in (place, first["msg"]) if text)
            got = got if len(got) <= 200 else f"{got[:200]} …"
            fix = f"To write it in this version, run `rankwise {cls._command or noun}` again."
            expected = f"a saved {noun} of schema version {version}"
            raise RecordError(f"{noun} {path}", expected=expected, got=got, fix=fix) from None
