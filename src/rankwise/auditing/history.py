"""Several audits in order, such as of the checkpoints of a training run; and `compare`, of two or more."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from rankwise._internals.files import write_file
from rankwise.auditing.comparison import Comparison, compare_two
from rankwise.auditing.importance_differences import COST, cost_quantity, history_differences
from rankwise.auditing.layer_changes import LayerKey, layer_numbers
from rankwise.auditing.records import AuditRecord
from rankwise.auditing.result import Audit
from rankwise.auditing.steps import steps_of
from rankwise.auditing.tables import Row, csv_text, flat_columns, flat_rows
from rankwise.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

Pair = tuple[float, float]
"""A value, and its standard deviation over the sequences."""


class History:
    """Audits by the step of training they were taken at, always in the order of the steps.

    A training loop adds to it as it goes, ``history.add(step, rw.audit(model, batches))``; `save` writes a
    folder for each step that `rankwise compare` and `load` read.

    Args:
        entries: pairs of a step and its audit.
        names: what to call each of them; its step where none is given.
        counted: whether the steps only number the audits, and say nothing of training.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> audit = Audit(provenance=about, heads=[], layers=[], findings=[])
        >>> History([(200, audit), (100, audit)]).steps
        [100, 200]
    """

    def __init__(
        self,
        entries: Iterable[tuple[int, AuditRecord]] = (),
        names: Sequence[str] = (),
        *,
        counted: bool = False,
    ) -> None:
        self.counted = counted
        self._entries: dict[int, tuple[str, AuditRecord]] = {}
        for at, (step, audit) in enumerate(entries):
            self.add(step, audit, names[at] if at < len(names) else "")

    @classmethod
    def of(cls, audits: Sequence[AuditRecord], names: Sequence[str] = ()) -> "History":
        """Audits by the steps that their names tell, else numbered from 0 as they come.

        Args:
            audits: the audits.
            names: of the audits; those of their models where none are given.
        """
        called = list(names) or [audit.provenance.model for audit in audits]
        steps = steps_of(called) if called else None
        numbers = list(range(len(audits))) if steps is None else steps
        return cls(zip(numbers, audits, strict=True), called, counted=steps is None)

    def add(self, step: int, audit: AuditRecord, name: str = "") -> None:
        """Put in an audit, at its place among the steps.

        Args:
            step: of training.
            audit: taken then.
            name: what to call it; by its step where none is given.

        Raises:
            InputError: if there is one of this step.
        """
        if step in self._entries:
            raise InputError(
                f"step {step}",
                expected="one audit for each step",
                got="a second one",
                fix="Give it another step, or keep another `History` for another run.",
            )
        self._entries[step] = (name or f"step-{step}", audit)
        self._entries = dict(sorted(self._entries.items()))

    @property
    def steps(self) -> list[int]:
        """Of all audits, rising."""
        return list(self._entries)

    @property
    def names(self) -> list[str]:
        """Of all audits, in the order of the steps."""
        return [name for name, _ in self._entries.values()]

    @property
    def audits(self) -> list[AuditRecord]:
        """In the order of the steps."""
        return [audit for _, audit in self._entries.values()]

    @property
    def folders(self) -> list[str]:
        """Names as folders can have them, no two the same."""
        plain = [folder_name(name) for name in self.names]
        alone = len(set(plain)) == len(plain)
        return plain if alone else [f"{name}-{step}" for name, step in zip(plain, self.steps, strict=True)]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[int, AuditRecord]]:
        return iter(zip(self.steps, self.audits, strict=True))

    def __getitem__(self, step: int) -> AuditRecord:
        if step not in self._entries:
            known = ", ".join(map(str, self.steps[:12]))
            raise InputError(
                f"step {step}",
                expected="a step of this history",
                got="none",
                fix=f"Known: {known or 'none'}.",
            )
        return self._entries[step][1]

    @property
    def comparison(self) -> Comparison:
        """The last audit held against the first.

        Raises:
            InputError: if there are fewer than two.
        """
        if len(self) < 2:
            raise InputError(
                "history", expected="two audits to compare", got=str(len(self)), fix="Add another: `add`."
            )
        return compare_two(self.audits[0], self.audits[-1])

    def curves(self) -> dict[LayerKey, list[tuple[float, float]]]:
        """Each measure of each layer over the steps, with its standard deviation over the sequences.

        Returns:
            For each (heads or states, stack, layer, cross, measure) one pair a step; NaN where an audit has
            no such layer. Where costs of removal are of several quantities, such as two losses, each has
            curves of its own, called by it: ``"removal_cost of …"``.
        """
        numbers = [layer_numbers(audit) for audit in self.audits]
        quantities = [cost_quantity(audit) for audit in self.audits]
        if len(set(filter(None, quantities))) > 1:
            numbers = [_called(mine, quantity) for mine, quantity in zip(numbers, quantities, strict=True)]
        keys = dict.fromkeys(key for audit in numbers for key in audit)
        missing = (float("nan"), float("nan"))
        return {key: [audit.get(key, missing) for audit in numbers] for key in keys}

    @property
    def warnings(self) -> list[str]:
        """In what the audits do not compare, a sentence each."""
        return history_differences(self.audits, self.names)

    def to_frame(self) -> "pd.DataFrame":
        """Heads of all audits as a pandas frame, with the step and the name before the columns of an audit.

        Raises:
            InputError: if pandas is not installed.
        """
        columns, rows = self._table()
        try:
            import pandas as pd
        except ImportError:
            raise InputError(
                "`to_frame`",
                expected="pandas",
                got="an environment without it",
                fix="pip install 'rankwise[frames]', or write a file with `to_csv`.",
            ) from None
        return pd.DataFrame(rows, columns=columns)

    def to_csv(self, path: str | Path) -> Path:
        """Write the table of `to_frame` as CSV, as `Audit.to_csv` does.

        Args:
            path: the file; for an existing folder, ``history.csv`` in it.

        Raises:
            InputError: if it cannot be written.
        """
        path = Path(path)
        path = path / "history.csv" if path.is_dir() else path
        return write_file(path, csv_text(*self._table()), "table")

    def _table(self) -> tuple[list[str], list[Row]]:
        heads = [(step, name, head) for step, (name, audit) in self._entries.items() for head in audit.heads]
        flat = flat_rows([head for _, _, head in heads])
        rows = [{"step": step, "name": name} | row for (step, name, _), row in zip(heads, flat, strict=True)]
        empty = flat_columns(type(self.audits[0].heads[0])) if heads else []
        return (list(rows[0]) if rows else ["step", "name", *empty]), rows

    def save(self, folder: str | Path) -> Path:
        """Write each audit as ``NAME/audit.json`` and the page as ``index.html``.

        Args:
            folder: where to; made if it is missing.

        Returns:
            The folder.

        Raises:
            InputError: if it cannot be written.
        """
        folder = Path(folder)
        for name, audit in zip(self.folders, self.audits, strict=True):
            text = audit.model_dump_json(indent=1) + "\n"
            write_file(folder / name / "audit.json", text, "audit")
        self.to_html(folder / "index.html")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "History":
        """Read what `save`, or `rankwise audit` of several models, wrote.

        Args:
            folder: it holds one folder for each audit, with its ``audit.json``.

        Raises:
            InputError: if there is none in it.
            RecordError: if one is damaged.
        """
        folder = Path(folder)
        found = sorted(path.parent for path in folder.glob("*/audit.json"))
        if not found:
            raise InputError(
                f"history {folder}",
                expected="a folder that holds folders with an audit.json",
                got="none",
                fix="Write one: `rankwise audit run/checkpoint-* --text FILE --out DIR`.",
            )
        return cls.of([Audit.load(path) for path in found], [path.name for path in found])

    def to_html(self, path: str | Path) -> Path:
        """Write one page: curves over the steps, what became of the findings, the last against the first.

        Args:
            path: the file; for an existing folder, ``index.html`` in it.

        Returns:
            The file written.

        Raises:
            InputError: if it cannot be written.
        """
        from rankwise.report import write_history

        return write_history(self, Path(path))

    def __repr__(self) -> str:
        if not self._entries:
            return "History(no audits)"
        return f"History({len(self)} audits, {self.names[0]!r} to {self.names[-1]!r})"


def _called(numbers: dict[LayerKey, Pair], quantity: str) -> dict[LayerKey, Pair]:
    """Costs of removal by what they are of, all others as they are called."""
    return {
        key._replace(measure=f"{COST} of {quantity}") if key.measure == COST else key: pair
        for key, pair in numbers.items()
    }


def folder_name(name: str) -> str:
    """A name as a folder can have it.

    Args:
        name: of a model or checkpoint.

    Examples:
        >>> folder_name("org/model"), folder_name("../x"), folder_name("net.py:build"), folder_name("")
        ('org-model', 'x', 'net.py-build', 'model')
    """
    kept = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    return kept.strip(".-")[:100] or "model"


@overload
def compare(before: AuditRecord, after: AuditRecord) -> Comparison: ...
@overload
def compare(
    before: AuditRecord, after: AuditRecord, third: AuditRecord, /, *more: AuditRecord
) -> History: ...
def compare(before: AuditRecord, after: AuditRecord, *more: AuditRecord) -> Comparison | History:
    """List what changed from one audit to another, the largest change first; of more than two, a history.

    Heads are matched by stack, site, layer, head and whether they read another sequence (where no name is the
    same, by their numbers); token states by stack and layer; findings by code and place, those of a layer by
    the layer, of a stack by the stack and those of twins by their group. A change is measured against the
    range that its measure can have there: 1 for shares and distances, 2 for a cosine, min(T, S) for a
    rank (min(T, D) for that of states), log S for the entropy, and the larger of the two values for what
    has no upper bound (σ_max, ‖Y‖, μ), and the loss of the whole model for a cost of removal. Costs of
    another loss, or exact ones and estimates, are not compared: a warning says so. The range is always
    known, where the spread over sequences is not, and a head that hardly varies from text to text would
    turn its rounding errors into the largest change of all. The table of the layers
    (`Comparison.by_layer`) holds each change against that spread.

    Models of different structure are compared by their layers, token states and totals, and
    `Comparison.structure` says in what they differ.

    Cost: linear in the number of records, plus the sorting.

    Args:
        before: the audit to start from.
        after: the audit to hold against it.
        more: any number of others, from earlier to later. Where the names of the models tell steps
            (``checkpoint-500``), these order them.

    Returns:
        Of two audits the differences, `Comparison.is_empty` where there are none; of more a `History`.

    Raises:
        InputError: if one of them is no audit, such as the path of one.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> audit = AuditRecord(provenance=about, heads=[], layers=[], findings=[])
        >>> compare(audit, audit).is_empty
        True
        >>> compare(audit, audit, audit)
        History(3 audits, 'm' to 'm')
    """
    for number, audit in enumerate((before, after, *more), 1):
        if not isinstance(audit, AuditRecord):
            raise InputError(
                f"audit {number} of `compare`",
                expected="an audit",
                got=repr(audit) if isinstance(audit, str | Path) else type(audit).__name__,
                fix="Read a saved one with `rw.Audit.load(path)`.",
            )
    return History.of([before, after, *more]) if more else compare_two(before, after)
