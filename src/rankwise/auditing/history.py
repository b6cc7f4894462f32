"""Several audits in the order of training, and `compare`, which compares two audits or more."""

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from rankwise._internals.files import WithPage, folder_name, write_file
from rankwise.auditing.comparison import Comparison, LayerKey, compare_two, layer_means, not_compared
from rankwise.auditing.result import LOAD, Audit
from rankwise.auditing.tables import csv_text, table
from rankwise.errors import InputError


class History(WithPage):
    """Audits by training step, sorted by step.

    A training loop adds audits with ``history.add(step, rw.audit(model, batches))``. `save` writes a folder
    per step, which `rankwise compare` and `load` read. An audit without a name is named after its step. If
    ``counted``, the steps only number the audits and are not training steps.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> audit = Audit(provenance=Provenance(model="m", delta=0.01), heads=[], states=[], findings=[])
        >>> History([(200, audit), (100, audit)]).steps
        [100, 200]
    """

    def __init__(
        self, entries: Iterable[tuple[int, Audit]] = (), names: Sequence[str] = (), *, counted: bool = False
    ) -> None:
        self.counted = counted
        self._entries: dict[int, tuple[str, Audit]] = {}
        for number, (step, audit) in enumerate(entries):
            self.add(step, audit, names[number] if number < len(names) else "")

    @classmethod
    def of(cls, audits: Sequence[Audit], names: Sequence[str] = ()) -> "History":
        """Return a history of audits at the steps that their names contain.

        The default names are the names of the models. Without steps in the names, audits are numbered from 0.
        """
        called = list(names) or [audit.provenance.model for audit in audits]
        steps = steps_of(called) if called else None
        numbers = list(range(len(audits))) if steps is None else steps
        return cls(zip(numbers, audits, strict=True), called, counted=steps is None)

    def add(self, step: int, audit: Audit, name: str = "") -> None:
        """Add the audit of a training step, in the order of steps. The default name is ``step-N``.

        Raise `InputError` if the history has an audit of this step.
        """
        if step in self._entries:
            fix = "Choose another step, or keep another `History` for another run."
            raise InputError(f"step {step}", expected="one audit per step", got="a second audit", fix=fix)
        self._entries[step] = (name or f"step-{step}", audit)
        self._entries = dict(sorted(self._entries.items()))

    @property
    def steps(self) -> list[int]:
        """Steps of all audits, in ascending order."""
        return list(self._entries)

    @property
    def names(self) -> list[str]:
        """Names of all audits, in the order of the steps."""
        return [name for name, _ in self._entries.values()]

    @property
    def audits(self) -> list[Audit]:
        """All audits, in the order of the steps."""
        return [audit for _, audit in self._entries.values()]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[int, Audit]]:
        return iter(zip(self.steps, self.audits, strict=True))

    def __getitem__(self, step: int) -> Audit:
        if step not in self._entries:
            fix = f"Known: {', '.join(map(str, self.steps[:12])) or 'none'}."
            raise InputError(f"step {step}", expected="a step of this history", got="none", fix=fix)
        return self._entries[step][1]

    @property
    def comparison(self) -> Comparison:
        """Comparison of the last audit with the first. Raise `InputError` if fewer than two audits exist."""
        if len(self) < 2:
            got, fix = str(len(self)), "Add another: `add`."
            raise InputError("history", expected="two audits to compare", got=got, fix=fix)
        return compare_two(self.audits[0], self.audits[-1])

    @property
    def best(self) -> tuple[str, Audit] | None:
        """Name and audit with the lowest loss.

        None if fewer than two audits have a loss, or if the losses differ in kind or data.
        """
        entries = [(name, audit) for name, audit in self._entries.values() if math.isfinite(audit.loss)]
        losses = {entry.importance.quantity for _, entry in entries if entry.importance}
        alike = len(losses) == len({tuple(audit.provenance.data_digests) for _, audit in entries}) == 1
        return min(entries, key=lambda entry: entry[1].loss) if alike and len(entries) > 1 else None

    def curves(self) -> dict[LayerKey, list[tuple[float, float]]]:
        """Return each measure of each layer over the steps, with its standard deviation over sequences.

        A curve has a pair per step. If an audit does not have the layer, both numbers are NaN. Measures that
        `warnings` name are left out.
        """
        means, left_out = [layer_means(audit) for audit in self.audits], not_compared(self.audits)
        keys = dict.fromkeys(key for of_audit in means for key in of_audit if key.measure not in left_out)
        missing = (float("nan"), float("nan"))
        return {key: [of_audit.get(key, missing) for of_audit in means] for key in keys}

    @property
    def warnings(self) -> list[str]:
        """Sentences that name numbers which are not comparable between the audits."""
        sentences = list(dict.fromkeys(not_compared(self.audits).values()))
        if sum(math.isfinite(audit.loss) for audit in self.audits) > 1 and not self.best:
            sentences.append("Losses do not compare: their kind or the data differ.")
        return sentences

    def to_csv(self, path: str | Path) -> Path:
        """Write the heads of all audits as CSV, and return the path of the file.

        Step and name precede the columns of `Audit.to_csv`. In an existing folder, the file is
        ``history.csv``. Raise `InputError` if the file cannot be written.
        """
        heads = [(step, name, head) for step, (name, audit) in self._entries.items() for head in audit.heads]
        columns, rows = table("heads", [head for *_, head in heads])
        rows = [{"step": step, "name": name} | row for (step, name, _), row in zip(heads, rows, strict=True)]
        text = csv_text(["step", "name", *columns], rows)
        return write_file(path, text, "table", in_folder="history.csv")

    def save(self, folder: str | Path) -> Path:
        """Write each audit as ``NAME/audit.json`` and an HTML page as ``index.html``, and return the folder.

        Raise `InputError` if a file cannot be written.
        """
        folder = Path(folder)
        plain = [folder_name(name) for name in self.names]
        unique = len(set(plain)) == len(plain)
        for name, (step, audit) in zip(plain, self, strict=True):
            name = name if unique else f"{name}-{step}"
            write_file(folder / name / "audit.json", audit.model_dump_json(indent=1) + "\n", "audit")
        self.to_html(folder / "index.html")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "History":
        """Return the audits that `save`, or `rankwise audit` of several models, wrote as ``*/audit.json``.

        Incomplete audits, of runs that failed, are left out with a warning. Raise `InputError` if the folder
        has no complete audit, and `RecordError` if an audit is damaged.
        """
        audits = load_audits(Path(folder))
        complete = {path.name: audit for path, audit in audits.items() if audit.complete}
        if left_out := ", ".join(path.name for path, audit in audits.items() if not audit.complete):
            warnings.warn(f"incomplete audits in {folder} left out: {left_out}", UserWarning, stacklevel=2)
        if not complete:
            expected = "a folder that holds folders with a complete audit.json"
            fix = "Write one: `rankwise audit run/checkpoint-* --text FILE --out DIR`."
            raise InputError(f"history {folder}", expected=expected, got="none", fix=fix)
        return cls.of(list(complete.values()), list(complete))

    def __repr__(self) -> str:
        if not self._entries:
            return "History(no audits)"
        return f"History({len(self)} audits, {self.names[0]!r} to {self.names[-1]!r})"


def load_audits(folder: Path) -> dict[Path, Audit]:
    """Return the audits in the subfolders of a folder, by step, or by time if names contain no steps."""
    audits = {str(file.parent): Audit.load(file) for file in sorted(folder.glob("*/audit.json"))}
    by_time = sorted(audits, key=lambda name: audits[name].provenance.created)
    return {Path(name): audits[name] for name in sort_by_step(by_time)}


def steps_of(names: Sequence[str]) -> list[int] | None:
    """Return from each name the number in which the names differ.

    For a single name, return its last number. Return None if names are equal or differ in anything else.

    Examples:
        >>> steps_of(["run1/checkpoint-500", "run1/checkpoint-1000"])
        [500, 1000]
        >>> steps_of(["gpt2", "bert"]), steps_of(["a-1-b-2", "a-2-b-1"])
        (None, None)
    """
    if len({re.sub(r"\d+", "0", name) for name in names}) != 1:
        return None
    numbers = [[int(number) for number in re.findall(r"\d+", name)] for name in names]
    varied = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    if len(names) == 1:
        return [numbers[0][-1]] if numbers[0] else None
    if len(varied) != 1 or len(set(varied[0])) < len(names):
        return None
    return list(varied[0])


def sort_by_step(names: Sequence[str]) -> list[str]:
    """Return names sorted by their steps (`steps_of`), or in the given order if they contain no steps.

    Examples:
        >>> sort_by_step(["checkpoint-1000", "checkpoint-200"])
        ['checkpoint-200', 'checkpoint-1000']
    """
    steps = steps_of(names)
    return list(names) if steps is None else [name for _, name in sorted(zip(steps, names, strict=True))]


@overload
def compare(before: Audit, after: Audit) -> Comparison: ...
@overload
def compare(before: Audit, after: Audit, third: Audit, /, *more: Audit) -> History: ...
def compare(before: Audit, after: Audit, *more: Audit) -> Comparison | History:
    """Return the `Comparison` of two audits, or three or more audits as a `History`.

    Heads match by stack, site, layer, call, head and cross-attention. If no head matches, they match by kind
    instead of site, and renamed stacks are paired in order. Token states match by stack and layer. Findings
    match by code and by the subject of their rule: head, mixer, block, stack, class of modules or model.

    The size of a change is its share of the range of the measure: 1 for shares and distances, 2 for a cosine,
    min(T, S) for a rank (min(T, D) for token states), log S for the entropy. For σ_max, ‖Y‖ and μ, the
    change is divided by the larger value, and for a cost of removal by the loss of the model. The size does
    not use the standard deviation over sequences, because rounding errors would be the largest change of a
    head that barely varies. Costs of different losses or methods are not compared; a warning names them.
    Models that differ in structure (`Comparison.structure`) are compared by layers, token states and totals.
    Cost: linear in the number of records, plus sorting.

    Args:
        more: later audits. If model names contain steps (``checkpoint-500``), all audits are sorted by step.

    Raises:
        InputError: if an argument is not an audit, such as a path.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> audit = Audit(provenance=Provenance(model="m", delta=0.01), heads=[], states=[], findings=[])
        >>> compare(audit, audit).is_empty
        True
        >>> compare(audit, audit, audit)
        History(3 audits, 'm' to 'm')
    """
    for number, audit in enumerate((before, after, *more), 1):
        if not isinstance(audit, Audit):
            got = repr(audit) if isinstance(audit, str | Path) else type(audit).__name__
            raise InputError(f"audit {number} of `compare`", expected="an audit", got=got, fix=LOAD)
    return History.of([before, after, *more]) if more else compare_two(before, after)
