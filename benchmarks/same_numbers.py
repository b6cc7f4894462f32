"""Compare the numbers that two revisions measure.

    python -m benchmarks.same_numbers REVISION                      # this tree against a revision
    python -m benchmarks.same_numbers REVISION --write FOLDER       # keep what a revision measures
    python -m benchmarks.same_numbers --against FOLDER              # this tree against what was kept

Each tree measures all subjects in its own process, in float64, and writes JSON: audits of one batch, of two
batches with padding, with estimated ranks, and merged, and a comparison. Some subjects add importance, a
baseline, attention maps, a history and a monitored training. Then the numbers are compared one by one.

Options name expected changes: `--renamed OLD NEW` and `--gone FIELD REASON`. A name is replaced only if the
second tree has the new name, so that one command serves every step of a change.

The exit status is 1 if a number differs by more than the tolerance, if only one tree has a record, if a field
is lost and not named, or if a subject fails. New fields and changed texts are only listed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measured_numbers import SUBJECTS

TOLERANCE = 1e-9
"""Models run in float64. A product over 512 numbers errs by up to 512·2⁻⁵³ ≈ 6e-14, six blocks of ten such
steps by 3e-12 of the largest entry, and a singular value at a hundredth of the largest by a hundred times
that."""
FLOOR = 1e-6
"""Smaller numbers are compared on this scale: deviations that should be 0 are pure rounding."""
IDENTITY = (
    "stack", "layer", "site", "head", "cross", "occurrence", "call", "of", "code", "measure", "name", "delta",
)  # fmt: skip
"""Fields that tell the records of a list apart, as far as both lists have them; then their order decides."""
WORDS = ("code", "measure", "name", "outcome", "severity", "kind", "mask")
"""Fields whose text is compared, and renamed. Other texts may change."""
LEFT_OUT = ("provenance", "before", "after", "format", "schema_version")
"""Fields at the top of a file that say when, where and by what it was made."""
ROOT = Path(__file__).resolve().parents[1]
SHOWN = 12
"""Records of one side that are printed per file."""


@dataclass
class Differences:
    """Differences between two JSON values."""

    compared: int = 0
    """How many numbers were compared."""
    largest: dict[str, tuple[float, str]] = field(default_factory=dict)
    """The largest relative difference of each field, and its place."""
    lost: set[str] = field(default_factory=set)
    """Fields that only the first tree has."""
    new: set[str] = field(default_factory=set)
    """Fields that only the second tree has."""
    records: list[str] = field(default_factory=list)
    """Records that only one tree has."""
    texts: set[str] = field(default_factory=set)
    """Fields with another text."""

    def above(self, tolerance: float) -> dict[str, tuple[float, str]]:
        """Return the fields that differ by more."""
        return {name: found for name, found in self.largest.items() if found[0] > tolerance}


def relative_difference(before: float | None, after: float | None) -> float:
    """Return |a − b| / max(|a|, |b|, FLOOR); infinite if only one is a finite number."""
    a, b = (math.nan if value is None else value for value in (before, after))
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(b - a) / max(abs(a), abs(b), FLOOR) if math.isfinite(a - b) else math.inf


def differences(before: dict[str, Any], after: dict[str, Any], renamed: dict[str, str]) -> Differences:
    """Compare two files, record by record and number by number."""
    found = Differences()
    was, now = ({k: v for k, v in file.items() if k not in LEFT_OUT} for file in (before, after))
    _compare(_renamed(was, _new_names(was, now, renamed)), now, "", "", found)
    return found


def _new_names(before: Any, after: Any, table: dict[str, str]) -> dict[str, str]:
    """Return the renames of a table that have happened. They apply at once, so `b` may be old and new."""
    old, new = set(_names(before)), set(_names(after))

    def name_now(name: str) -> str:
        to = table.get(name, name)
        return to if to in new and (to not in old or name_now(to) != to) else name

    return {name: name_now(name) for name in old & table.keys()}


def _names(value: Any) -> Iterator[str]:
    """Yield all names in a file: its keys, and the words in fields of words."""
    for key, item in value.items() if isinstance(value, dict) else ():
        yield key
        if key in WORDS and isinstance(item, str):
            yield item
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _names(item)


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        names.get(key, key): names.get(item, item)
        if key in WORDS and isinstance(item, str)
        else _renamed(item, names)
        for key, item in value.items()
    }


def _compare(before: Any, after: Any, name: str, where: str, found: Differences) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        found.lost |= {f"{name}.{key}".lstrip(".") for key in before.keys() - after.keys()}
        found.new |= {f"{name}.{key}".lstrip(".") for key in after.keys() - before.keys()}
        for key in before.keys() & after.keys():
            _compare(before[key], after[key], f"{name}.{key}".lstrip("."), where, found)
    elif isinstance(before, list) and isinstance(after, list):
        _compare_lists(before, after, name, where, found)
    elif _is_number(before) and _is_number(after):
        found.compared += 1
        by = relative_difference(before, after)
        if by > found.largest.get(name, (-1.0, ""))[0]:
            found.largest[name] = by, where
    elif before != after:
        if isinstance(before, str) and isinstance(after, str) and name.rpartition(".")[2] not in WORDS:
            found.texts.add(name)
        else:
            found.largest[name] = math.inf, where


def _compare_lists(before: list[Any], after: list[Any], name: str, where: str, found: Differences) -> None:
    measures = [{_measure(item) for item in items} - {None} for items in (before, after)]
    if all(measures):  # a measure of one side is a field; an empty list has lost its records, not its fields
        found.lost |= {f"{name} of {measure}" for measure in measures[0] - measures[1]}
        found.new |= {f"{name} of {measure}" for measure in measures[1] - measures[0]}
        apart = measures[0] ^ measures[1]
        before, after = ([i for i in items if _measure(i) not in apart] for items in (before, after))
    about = [[_about(item) for item in items if isinstance(item, dict)] for items in (before, after)]
    identity = [
        name for name in IDENTITY if all(not side or any(name in item for item in side) for side in about)
    ]
    ours, theirs, at = _keyed(before, identity), _keyed(after, identity), f"{name} {where}".strip()
    found.records += [f"{at} {key}, only before" for key in ours if key not in theirs]
    found.records += [f"{at} {key}, only after" for key in theirs if key not in ours]
    for key in ours:
        if key in theirs:
            _compare(ours[key], theirs[key], name, f"{where} {key}".strip(), found)


def _measure(item: Any) -> Any:
    return item.get("measure") if isinstance(item, dict) else None


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _keyed(items: list[Any], identity: list[str]) -> dict[Hashable, Any]:
    """Key items by their identity, or else by their order; equal identities are counted."""
    keyed: dict[Hashable, Any] = {}
    for at, item in enumerate(items):
        about = _about(item) if isinstance(item, dict) else {}
        known = [(name, about.get(name)) for name in identity]
        named = [f"{name} {value}" for name, value in known if value not in (None, "") and value is not False]
        key = " ".join(named) if about else f"[{at}]"
        while key in keyed:
            key += "'"
        keyed[key] = item
    return keyed


def _about(item: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record and of its place, or of the finding that it is a change of."""
    inner = [item.get(name) for name in ("before", "after", "where")]
    joined = {key: value for part in inner if isinstance(part, dict) for key, value in _about(part).items()}
    return joined | item


def measure_tree(tree: Path, subjects: list[str], minilm: Path | None, out: Path) -> bool:
    """Write the files of a tree's own `rankwise`; return whether every subject could be measured."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (file for subject in subjects for file in out.glob(f"{subject},*.json")):
        old.unlink()
    script = ROOT / "benchmarks" / "measured_numbers.py"
    command = [sys.executable, "-P", str(script), str(out.resolve()), str(minilm or ""), *subjects]
    paths = {"PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=out, env=os.environ | paths | quiet, stdout=subprocess.DEVNULL)
    return done.returncode == 0


def measure_revision(revision: str, subjects: list[str], minilm: Path | None, out: Path) -> bool:
    """Do the same for a revision, checked out in a temporary folder."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run([*git, "add", "-q", "--detach", str(tree), revision], check=True)
        try:
            return measure_tree(tree, subjects, minilm, out)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def report(
    before: Path,
    after: Path,
    subjects: list[str],
    tolerance: float,
    gone: dict[str, str],
    renamed: dict[str, str],
) -> bool:
    """Print what differs between two folders of files; return whether nothing does that should not.

    Each field in ``gone`` has to be lost; ``renamed`` may name more than has changed.
    """
    same, lost, new, texts = True, set[str](), set[str](), set[str]()
    for subject in subjects:
        numbers, largest = 0, (0.0, "")
        stems = [{file.stem for file in side.glob(f"{subject},*.json")} for side in (before, after)]
        for stem in sorted(stems[0] | stems[1]):
            if stem not in stems[0] & stems[1]:
                same = False
                print(f"{stem}: only {'before' if stem in stems[0] else 'after'}")
                continue
            was, now = (json.loads((side / f"{stem}.json").read_text("utf-8")) for side in (before, after))
            found = differences(was, now, renamed)
            above = found.above(tolerance)
            lost, new, texts = lost | found.lost, new | found.new, texts | found.texts
            numbers += found.compared
            places = ((by, f"{name}, {stem}, {where}") for name, (by, where) in found.largest.items())
            largest = max([largest, *places])
            same &= bool(found.compared) and not found.records and not above
            _print_file(stem, found, above)
        print(f"{subject}: {numbers} numbers, largest difference {largest[0]:.1e} ({largest[1]})")
        same &= bool(numbers)
    for name in sorted(lost | gone.keys()):
        why = gone.get(name, "LOST, and no --gone names it")
        print(f"only before: {name} ({why if name in lost else 'named by --gone, but NOT lost'})")
    print(f"only after: {', '.join(sorted(new)) or 'none'}")
    print(f"fields with other words: {', '.join(sorted(texts)) or 'none'}")
    same &= gone.keys() == lost
    print(f"the same within {tolerance:.0e}" if same else f"NOT the same within {tolerance:.0e}")
    return same


def _print_file(stem: str, found: Differences, above: dict[str, tuple[float, str]]) -> None:
    if above or found.records or not found.compared:
        print(f"{stem}: {found.compared} numbers compared, and these differ:")
    for name, (by, where) in sorted(above.items()):
        print(f"    {name}: {by:.1e} at {where}")
    for record in found.records[:SHOWN]:
        print(f"    {record}")
    if len(found.records) > SHOWN:
        print(f"    … {len(found.records)} records of one side only")


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", help="git name of the other tree (default: HEAD~1)")
    add = parser.add_argument
    add("--write", type=Path, metavar="FOLDER", help="write the files of REVISION, or of this tree")
    add("--against", type=Path, metavar="FOLDER", help="compare with files instead of REVISION")
    add("--subject", action="append", choices=SUBJECTS, help="may be repeated (default: all)")
    add("--minilm", type=Path, metavar="FOLDER", help="folder of all-MiniLM-L6-v2")
    add("--tolerance", type=float, default=TOLERANCE)
    add("--renamed", nargs=2, action="append", default=[], metavar=("OLD", "NEW"))
    add("--gone", nargs=2, action="append", default=[], metavar=("FIELD", "REASON"))
    given = parser.parse_args()
    if given.revision and given.against:
        parser.error("either REVISION or --against")
    subjects = given.subject or [name for name in SUBJECTS if name != "minilm" or given.minilm]
    if given.write:
        asked = subjects, given.minilm, given.write
        written = measure_revision(given.revision, *asked) if given.revision else measure_tree(ROOT, *asked)
        return 0 if written else 1
    with tempfile.TemporaryDirectory() as folder:
        before, after = given.against or Path(folder) / "before", Path(folder) / "after"
        measured = measure_tree(ROOT, subjects, given.minilm, after)
        if not given.against:
            measured &= measure_revision(given.revision or "HEAD~1", subjects, given.minilm, before)
        same = report(before, after, subjects, given.tolerance, dict(given.gone), dict(given.renamed))
    return 0 if same and measured else 1


if __name__ == "__main__":
    sys.exit(main())
