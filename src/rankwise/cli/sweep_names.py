"""What the folders and files of a sweep are called; a name that was given stays, whatever is added later."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from rankwise._internals.files import parse_json, write_file
from rankwise.auditing.history import folder_name
from rankwise.errors import InputError, RecordError

FILE = "names.json"
KINDS = ("models", "data")

Given = Iterable[tuple[str, str]]
"""Names as jobs have them, and what each stands for."""
Names = Mapping[str, str]
"""What each name stands for: a model, with its revision, or where data is read."""


def named(wanted: Sequence[str], given: Names) -> list[str]:
    """The names of models or data: those they have; of new ones the last part, whole where it is taken.

    Where whole names are not all different on every disk either, they are numbered.

    Args:
        wanted: models or data.
        given: names of an earlier sweep into the same folder.

    Examples:
        >>> named(["ta/x.txt"], {}), named(["ta/x.txt", "tb/x.txt"], {})
        (['x.txt'], ['ta-x.txt', 'tb-x.txt'])
        >>> named(["ta/x.txt", "tb/x.txt"], {"x.txt": "ta/x.txt"})
        ['x.txt', 'tb-x.txt']
    """
    known = {what: name for name, what in given.items()}
    new = [what for what in dict.fromkeys(wanted) if what not in known]
    taken = {name.lower() for name in given}  # disks may not tell case
    for names_tried in ([what.rstrip("/").rpartition("/")[2] for what in new], new):
        files = [folder_name(name) for name in names_tried]
        different = {name.lower() for name in files}
        if len(different) == len(files) and different.isdisjoint(taken):
            break
    else:
        numbered = (f"{number:03d}-" for number in count(len(given)))
        free = (number for number in numbered if not any(name.startswith(number) for name in taken))
        files = [f"{number}{name}" for number, name in zip(free, files, strict=False)]
    known |= dict(zip(new, files, strict=True))
    return [known[what] for what in wanted]


def read_names(out: Path) -> dict[str, dict[str, str]]:
    """The names that were given in a folder, of models and of data; none in a new folder.

    Args:
        out: the folder of the sweep.

    Raises:
        InputError: if the file of the names cannot be read.
        RecordError: if it is damaged.
    """
    path = out / FILE
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        found = {kind: {str(name): str(what) for name, what in content[kind].items()} for kind in KINDS}
    except (FileNotFoundError, NotADirectoryError):
        return {kind: {} for kind in KINDS}
    except OSError as error:
        raise InputError(
            f"names {path}",
            expected="a file that can be read",
            got=error.strerror or str(error),
            fix="Check its permissions.",
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    for name in (name for names in found.values() for name in names):
        if folder_name(name) != name:
            raise _damaged(path, f"the name {name!r}")
    return found


def _damaged(path: Path, got: str) -> RecordError:
    return RecordError(
        f"names {path}",
        expected="the names of models and data that `rankwise sweep` wrote",
        got=got,
        fix="Remove it: names are given anew, and audits that then have another name are run again.",
    )


def write_names(out: Path, models: Given, data: Given) -> None:
    """Keep names beside those that were given before.

    Args:
        out: the folder of the sweep.
        models: what the folders stand for.
        data: what the files in them stand for.

    Raises:
        InputError: if they cannot be written, or one stands for something else: its audits would be replaced.
        RecordError: if those given before are damaged.
    """
    before = read_names(out)
    names = {kind: dict(before[kind]) for kind in KINDS}
    for kind, given in zip(KINDS, (models, data), strict=True):
        for name, what in given:
            if names[kind].setdefault(name, what) != what:
                raise InputError(
                    f"sweep into {out}",
                    expected=f"{name} to stand for {names[kind][name]}, as in {FILE} or for another job",
                    got=what,
                    fix="Name all jobs in one call, and with the folder: `jobs_of(…, out=out)`.",
                )
    if names != before:
        write_file(out / FILE, json.dumps(names, indent=1, ensure_ascii=False) + "\n", "names")
