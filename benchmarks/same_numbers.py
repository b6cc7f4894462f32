"""Whether another revision measures the same: audits and comparisons of both trees, number by number.

    python -m benchmarks.same_numbers REVISION [--minilm FOLDER] [--gone FIELD REASON]...

REVISION is put into a temporary folder by `git worktree`. Each tree audits, in processes of its own, the
bundled demo, MiniLM if its folder is given, and a Mamba and a Mamba-2 with seeded weights: one batch, two
batches of which the second is padded, and that one with estimated ranks. Then it compares the first two
audits. Exits with 1 if a number differs by more than the tolerance, a record is only on one side, or a field
of REVISION is lost that no `--gone` names. Fields that are new are listed; texts are not compared.
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

TOLERANCE = 1e-9
"""Models run in float64. A product over 512 numbers errs by up to 512·2⁻⁵³ ≈ 6e-14, six blocks of ten such
steps by 3e-12 of the largest entry, and a singular value at a hundredth of the largest by a hundred times
that."""
FLOOR = 1e-6
"""Smaller numbers are compared on this scale: deviations that should be 0 are rounding, and nothing else."""

IDENTITY = ("stack", "layer", "site", "head", "cross", "occurrence", "code", "measure", "name", "delta")
"""What tells records of a list from each other."""
LEFT_OUT = ("provenance", "before", "after", "format", "schema_version")
"""At the top of a file: when, where and by what it was made."""
SHOWN = 12
"""Records of one side that are printed of a file."""
PADDED = 8
"""Tokens of padding at the end of a sequence."""
SUBJECTS = ("demo", "minilm", "mamba", "mamba2")


@dataclass
class Differences:
    """What was found between two JSON values."""

    compared: int = 0
    """How many numbers."""
    largest: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Of each field the largest relative difference, and where."""
    lost: set[str] = field(default_factory=set)
    """Fields that only the revision before has."""
    new: set[str] = field(default_factory=set)
    """Fields that only the revision after has."""
    records: list[str] = field(default_factory=list)
    """That only one side has."""
    texts: set[str] = field(default_factory=set)
    """Fields with other words."""

    def above(self, tolerance: float) -> dict[str, tuple[float, str]]:
        """The fields that differ by more."""
        return {name: found for name, found in self.largest.items() if found[0] > tolerance}


def relative_difference(before: float | None, after: float | None) -> float:
    """|a − b| / max(|a|, |b|, FLOOR); infinite where only one of them is a number."""
    if before is None or after is None:
        return 0.0 if before is after else math.inf
    return abs(after - before) / max(abs(before), abs(after), FLOOR)


def differences(before: dict[str, Any], after: dict[str, Any]) -> Differences:
    """Compare two files, record by record and number by number."""
    found = Differences()
    _compare(_without(before), _without(after), "", "", found)
    return found


def _without(file: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in file.items() if name not in LEFT_OUT}


def _compare(before: Any, after: Any, name: str, where: str, found: Differences) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        found.lost |= {f"{name}.{key}".lstrip(".") for key in before.keys() - after.keys()}
        found.new |= {f"{name}.{key}".lstrip(".") for key in after.keys() - before.keys()}
        for key in before.keys() & after.keys():
            _compare(before[key], after[key], f"{name}.{key}".lstrip("."), where, found)
    elif isinstance(before, list) and isinstance(after, list):
        ours, theirs = _keyed(before), _keyed(after)
        at, measures = f"{name} {where}".strip(), (_measures(before), _measures(after))
        if all(measures):  # an empty list has lost its records, not its fields
            found.lost |= {f"{name} of {measure}" for measure in measures[0] - measures[1]}
            found.new |= {f"{name} of {measure}" for measure in measures[1] - measures[0]}
            apart = measures[0] ^ measures[1]
        else:
            apart = set()
        for side in (ours, theirs):  # a measure that one side has not is a field, not a record
            for key in [key for key, item in side.items() if _measures([item]) & apart]:
                del side[key]
        found.records += [f"{at} {key}, only before" for key in ours if key not in theirs]
        found.records += [f"{at} {key}, only after" for key in theirs if key not in ours]
        for key in ours:
            if key in theirs:
                _compare(ours[key], theirs[key], name, f"{where} {key}".strip(), found)
    elif _is_number(before) and _is_number(after):
        found.compared += 1
        by = relative_difference(before, after)
        if by > found.largest.get(name, (-1.0, ""))[0]:
            found.largest[name] = by, where
    elif before != after:
        if isinstance(before, str) and isinstance(after, str):
            found.texts.add(name)
        else:
            found.largest[name] = math.inf, where


def _measures(items: list[Any]) -> set[str]:
    return {item["measure"] for item in items if isinstance(item, dict) and "measure" in item}


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _keyed(items: list[Any]) -> dict[Hashable, Any]:
    """Items by what tells them apart, or else by their order; same ones are counted."""
    keyed: dict[Hashable, Any] = {}
    for at, item in enumerate(items):
        key = " ".join(_identity(item)) if isinstance(item, dict) else f"[{at}]"
        while key in keyed:
            key += "'"
        keyed[key] = item
    return keyed


def _identity(item: dict[str, Any]) -> Iterator[str]:
    known = {**item.get("where", {}), **item} if isinstance(item.get("where"), dict) else item
    for name in IDENTITY:
        value = known.get(name)
        if value is not None and value is not False and value != "":
            yield f"{name} {value}"


def measure(subject: str, minilm: Path | None, out: Path) -> None:
    """Audit two batches of a subject by the `rankwise` that is imported here; compare the two audits."""
    import torch

    import rankwise as rw
    from rankwise.assets import demo_model, demo_text

    torch.manual_seed(0)
    text = demo_text().read_text(encoding="utf-8")
    if subject in ("demo", "minilm"):
        model, batches = _of_text(demo_model() if subject == "demo" else minilm, subject == "demo", text)
    else:
        model, batches = _state_space(subject), _masked(torch.randint(64, (2, 2, 48)))
    model = model.double().eval()
    batches[1]["attention_mask"][0, -PADDED:] = 0
    alone, both = rw.audit(model, batches[:1]), rw.audit(model, batches)
    alone.save(out / f"{subject}, one batch.json")
    both.save(out / f"{subject}, two batches.json")
    rw.audit(model, batches[1:], method="estimate").save(out / f"{subject}, estimated.json")
    compared = rw.compare(alone, both).model_dump_json()
    (out / f"{subject}, comparison.json").write_text(compared, encoding="utf-8")


def _of_text(folder: Path | None, decodes: bool, text: str) -> tuple[Any, list[dict[str, Any]]]:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = (AutoModelForCausalLM if decodes else AutoModel).from_pretrained(folder)
    ids = torch.tensor(tokenizer(text[:8000], add_special_tokens=False, verbose=False)["input_ids"])
    return model, _masked(ids[: 4 * 64].view(2, 2, 64))


def _masked(parts: Any) -> list[dict[str, Any]]:
    return [{"input_ids": part, "attention_mask": part.new_ones(part.shape)} for part in parts]


def _state_space(subject: str) -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    if subject == "mamba":
        return MambaForCausalLM(MambaConfig(**sizes))
    return Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=4, head_dim=16, n_groups=2, chunk_size=16))


def _run_tree(tree: Path, subjects: list[str], minilm: Path | None, out: Path) -> None:
    for subject in subjects:
        command = [
            sys.executable,
            "-P",
            str(Path(__file__).resolve()),
            "--measure",
            subject,
            "--out",
            str(out),
        ]
        command += ["--minilm", str(minilm)] if minilm else []
        paths = {"PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        subprocess.run(command, check=True, cwd=out, env=os.environ | paths, stdout=subprocess.DEVNULL)


def report(before: Path, after: Path, subjects: list[str], tolerance: float, gone: dict[str, str]) -> bool:
    """Print what differs between two folders of files; whether nothing does that should not."""
    same, lost, new, texts = True, set[str](), set[str](), set[str]()
    for subject in subjects:
        for file in sorted(before.glob(f"{subject},*.json")):
            was, now = (
                json.loads((side / file.name).read_text(encoding="utf-8")) for side in (before, after)
            )
            found = differences(was, now)
            lost |= found.lost
            new |= found.new
            texts |= found.texts
            _print_file(file.stem, found, tolerance)
            same &= bool(found.compared) and not found.records and not found.above(tolerance)
    for name in sorted(lost | gone.keys()):
        why = gone.get(name, "LOST, and no --gone names it")
        print(f"only before: {name} ({why if name in lost else 'named by --gone, but NOT lost'})")
    print(f"only after: {', '.join(sorted(new)) or 'none'}")
    print(f"fields with other words: {', '.join(sorted(texts)) or 'none'}")
    same &= lost == gone.keys()
    print(f"the same within {tolerance:.0e}" if same else f"NOT the same within {tolerance:.0e}")
    return same


def _print_file(title: str, found: Differences, tolerance: float) -> None:
    name, (by, where) = max(found.largest.items(), key=lambda item: item[1][0], default=("", (0.0, "")))
    print(f"{title}: {found.compared} numbers, largest difference {by:.1e} ({name}, {where})")
    for name, (by, where) in sorted(found.above(tolerance).items()):
        print(f"    {name}: {by:.1e} at {where}")
    for record in found.records[:SHOWN]:
        print(f"    {record}")
    if len(found.records) > SHOWN:
        print(f"    … {len(found.records)} records of one side only")


def main() -> int:
    """Run both trees and print what is different; 1 if a number is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD~1", help="what git calls the other tree")
    parser.add_argument("--minilm", type=Path, help="the folder of all-MiniLM-L6-v2")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument(
        "--gone",
        nargs=2,
        action="append",
        default=[],
        metavar=("FIELD", "REASON"),
        help="a field that only REVISION has, as the output names it, and why; may be repeated",
    )
    parser.add_argument("--measure", choices=SUBJECTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.minilm, given.out)
        return 0
    here = Path(__file__).resolve().parents[1]
    subjects = [subject for subject in SUBJECTS if subject != "minilm" or given.minilm]
    with tempfile.TemporaryDirectory() as folder:
        there, before, after = (Path(folder) / name for name in ("tree", "before", "after"))
        before.mkdir()
        after.mkdir()
        git = ["git", "-C", str(here), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(there), given.revision], check=True)
        try:
            _run_tree(there, subjects, given.minilm, before)
            _run_tree(here, subjects, given.minilm, after)
        finally:
            subprocess.run([*git, "remove", "--force", str(there)], check=True)
        return 0 if report(before, after, subjects, given.tolerance, dict(given.gone)) else 1


if __name__ == "__main__":
    sys.exit(main())
