"""An audit as its user holds it: records that can be saved, loaded, shown and turned into frames."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rankwise._internals.files import write_file
from rankwise._internals.records import Record, load_record
from rankwise.auditing.baseline import head_baselines, layer_baselines
from rankwise.auditing.findings import diagnose
from rankwise.auditing.frames import Records, csv_text, data_frame, table
from rankwise.auditing.provenance import check_mergeable, check_same, describe_method
from rankwise.auditing.records import (
    SCHEMA_VERSION,
    BaselineRecord,
    Finding,
    HeadRecord,
    LayerRecord,
    Provenance,
    Unseen,
    Verdict,
)
from rankwise.auditing.statistics import AuditStatistics
from rankwise.auditing.upgrade import upgraded
from rankwise.auditing.verdict import verdict_of
from rankwise.errors import InputError, instance_of
from rankwise.importance.records import ImportanceRecord
from rankwise.tracing.head_id import HeadId

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

NO_BASELINE = "baseline left out: differences to fresh weights, sequence by sequence, cannot be merged"
NO_WIDTH = "width needed left out: it rests on second moments of all sequences, which audits do not hold"
ADVISED = "skip connections are to be looked at again: rw.skips.recommend(audit, model, batch)"
_MOST_NAMES = 6
"""Names that an error lists, at most."""


class Audit(Record):
    """Everything that an audit found."""

    format: Literal["rankwise-audit"] = "rankwise-audit"
    schema_version: int = SCHEMA_VERSION
    complete: bool = True
    """False if the audit was interrupted or failed."""
    provenance: Provenance
    heads: list[HeadRecord]
    layers: list[LayerRecord]
    findings: list[Finding]
    uncaptured: list[Unseen] = Field(default_factory=list)
    texts: dict[str, list[str]] = Field(default_factory=dict)
    """Tokens of the sequences that attention maps are of, by the name of the input."""
    importance: ImportanceRecord | None = None
    """Loss without heads and blocks; None if it was not requested."""
    baseline: BaselineRecord | None = None
    """How the copies at initialization were made; None if no baseline was requested."""

    def save(self, path: str | Path) -> Path:
        """Write it as JSON.

        Args:
            path: the file; for an existing folder, ``audit.json`` in it.

        Returns:
            The file written.

        Raises:
            InputError: if it cannot be written.
        """
        path = Path(path)
        path = path / "audit.json" if path.is_dir() else path
        return write_file(path, self.model_dump_json(indent=1) + "\n", "audit")

    @classmethod
    def load(cls, path: str | Path) -> "Audit":
        """Read what `save` wrote.

        Args:
            path: the file, or the folder that holds ``audit.json``.

        Raises:
            InputError: if there is no such file or it cannot be read.
            RecordError: if it is not an audit, is damaged, or was written by a newer Rankwise.
        """
        return load_record(path, cls, "audit.json", upgrade=upgraded)

    @classmethod
    def merge(cls, audits: "Sequence[Audit]", names: Sequence[str] = ()) -> "Audit":
        """Join audits of shards of the data into the audit of all of it.

        Means, standard deviations and counts are those of one audit over all sequences, within rounding, the
        nearest heads too; findings are judged again. Numbers of the first sequence (spectra, maps of
        memberships, pictures) are those of the first audit that has them. Worth is the mean over all tokens,
        without the set of heads that can go together: no run of the model was on all of the data. A baseline
        is left out: its differences are of single sequences. Notes say so where it was there.

        The order of audits changes nothing but what is of the first sequence, and how they are joined in
        turn nothing at all. Of files that Rankwise wrote before it could merge, the nearest heads and the
        tokens at peaks are left out. Names of such tokens are counted among the 16 commonest of each audit.

        What would be counted twice is refused: an audit that is there twice, alone or in a merged audit, and
        audits of the same batches. The same sequences in other batches, or some of them, are not noticed. So
        are audits of other weights, by 64 numbers of each weight. Files that Rankwise wrote before it kept
        digests of both are not checked.

        Cost: linear in the records.

        Args:
            audits: of one model at one δ, each of other sequences.
            names: names of the audits in errors; their numbers by default.

        Raises:
            InputError: if there are none, or one is no audit.
            RecordError: if they differ in model, weights, revision, δ, method, dtype or schema, naming the
                field and both values; if two hold the same sequences, naming both.

        Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances", 1979.

        Examples:
            >>> import torch, rankwise as rw
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            >>> shards = [rw.audit(layer, [torch.randn(2, 5, 8)]) for _ in range(3)]
            >>> merged = rw.Audit.merge(shards)
            >>> merged.provenance.sequences, merged.provenance.audits
            (6, 3)
        """
        if not audits:
            raise InputError(
                "`Audit.merge`", expected="at least one audit", got="none", fix="Pass a list of audits."
            )
        for number, audit in enumerate(audits, 1):
            instance_of(
                f"audit {number} of `Audit.merge`", audit, Audit, "an audit",
                fix="Read a saved one with `rw.Audit.load(path)`.",
            )  # fmt: skip
        if len(audits) == 1:
            return audits[0]
        _check_mergeable(audits, names or [f"audit {number + 1}" for number in range(len(audits))])
        whole, *others = map(AuditStatistics.from_audit, audits)
        for other in others:
            whole.merge_audit(other)
        for note, lost in (
            (NO_BASELINE, any(audit.baseline for audit in audits)),
            (NO_WIDTH, any(head.required_head_dim >= 0 for audit in audits for head in audit.heads)),
            (ADVISED, any(audit.provenance.advised for audit in audits)),
        ):
            if lost:
                whole.note(note)
        return cls.from_statistics(whole)

    @classmethod
    def from_statistics(cls, statistics: AuditStatistics) -> "Audit":
        """Return the audit of statistics: records, their baseline, and findings."""
        about, measured = statistics.provenance, statistics.importance
        known: dict[HeadId, dict[str, Any]] = {}
        for at, head in (measured.heads if measured is not None else {}).items():
            known[at] = {"importance": head, "removal_cost": head.cost}
        copies = list(statistics.copies.values())
        for at, fields in (head_baselines(statistics, copies, about.delta) if copies else {}).items():
            known[at] = known.get(at, {}) | fields
        heads = statistics.head_records(about.delta, known, about.audits)
        baselines = layer_baselines(statistics, copies)
        layers = [
            record.model_copy(update={"baseline": baselines.get((record.stack, record.layer))})
            for record in statistics.layer_records()
        ]
        importance = None if measured is None else measured.record
        made = BaselineRecord(seeds=list(statistics.copies), built=statistics.built)
        return cls(
            complete=statistics.complete,
            provenance=about.model_copy(update={"method": describe_method(heads)}),
            heads=heads,
            layers=layers,
            findings=diagnose(heads, layers, statistics.uncaptured, importance),
            uncaptured=statistics.uncaptured,
            texts=statistics.texts,
            importance=importance,
            baseline=made if copies else None,
        )

    def to_html(self, path: str | Path) -> Path:
        """Write the report: one file that needs nothing else.

        Args:
            path: the file; for an existing folder, ``index.html`` in it.

        Returns:
            The file written.

        Raises:
            InputError: if it cannot be written.
        """
        from rankwise.report import write_html

        return write_html(self, Path(path))

    def to_frame(self, records: Records = "heads") -> "pd.DataFrame":
        """Records as a pandas frame: one row each, one value a cell.

        The standard deviation over sequences of a measure is the column after it, ``numerical_rank_std``;
        what is kept as a list (spectra, maps, thresholds) is in the records only.

        Args:
            records: which of them.

        Raises:
            InputError: if pandas is not installed, or there are no such records.
        """
        return data_frame(*table(records, getattr(self, records, [])))

    def to_csv(self, path: str | Path, records: Records = "heads") -> Path:
        """Write records as CSV, with the columns of `to_frame`; needs no pandas.

        Numbers are written in full and read back equal; what is not known is an empty cell. A text that a
        spreadsheet would run (it begins with = + - @) gets an apostrophe before it.

        Args:
            path: the file; for an existing folder, ``heads.csv`` (or ``layers.csv``, …) in it.
            records: which of them.

        Returns:
            The file written.

        Raises:
            InputError: if it cannot be written, or there are no such records.
        """
        path = Path(path)
        path = path / f"{records}.csv" if path.is_dir() else path
        return write_file(path, csv_text(*table(records, getattr(self, records, []))), "table")

    def head(self, layer: int, head: int, *, stack: str | None = None, site: str | None = None) -> HeadRecord:
        """The record of one head.

        Args:
            layer: its layer, from 0.
            head: its number in that layer, from 0.
            stack: the blocks it belongs to, where several have such a layer.
            site: the module that mixed, where a layer has several (self- and cross-attention).

        Raises:
            InputError: if there is no such head, or there are several.

        Examples:
            >>> import torch, rankwise as rw
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            >>> rw.audit(layer, [torch.randn(1, 5, 8)]).head(0, 1).head
            1
        """
        asked = {"layer": layer, "head": head, "stack": stack, "site": site}
        subject = ", ".join(f"{name} {value!r}" for name, value in asked.items() if value is not None)
        left = self.heads
        for name in ("stack", "layer", "site", "head"):
            known = dict.fromkeys(getattr(record, name) for record in left)
            if asked[name] is not None:
                left = [record for record in left if getattr(record, name) == asked[name]]
            if not left:
                got = f"no {name} {asked[name]!r}"
                raise InputError(subject, expected="a head of this audit", got=got, fix=_known(list(known)))
        if len(left) > 1:
            by = "stack" if len({record.stack for record in left}) > 1 else "site"
            names = list(dict.fromkeys(getattr(record, by) for record in left))
            fix = f"Say which: {', '.join(f'{by}={name!r}' for name in names[:_MOST_NAMES])}."
            if len(names) == 1:
                fix = "Its module runs several times: filter `audit.heads`."
            raise InputError(subject, expected="one head", got=f"{len(left)}", fix=fix)
        return left[0]

    @property
    def verdict(self) -> Verdict:
        """One sentence on the findings, and at most three actions."""
        return verdict_of(self)

    def summary(self, width: int = 100) -> str:
        """What the command prints of it: findings, a table of the layers, where the numbers come from.

        Args:
            width: of a line, in characters.
        """
        from rankwise.report import console_text

        return console_text(self, width)

    def plot(self, measure: str = "numerical_rank") -> "go.Figure":
        """A heat map of one measure of every head, layers down and heads across.

        Args:
            measure: its name, as in `to_frame`.

        Returns:
            A Plotly figure; in a notebook it shows itself, ``.show()`` opens it elsewhere.

        Raises:
            InputError: if plotly is not installed, there is no such measure, or there are no heads.
        """
        from rankwise.report import plot_heads

        return plot_heads(self, measure)

    def plot_depth(self, measure: str | None = None) -> "go.Figure":
        """Curves of the token states through depth, a line for each stack, ± one standard deviation.

        Args:
            measure: the name of one, such as ``relative_spread``; those of the report where none is named.

        Returns:
            A Plotly figure.

        Raises:
            InputError: if plotly is not installed, there is no such measure, or there are no token states.
        """
        from rankwise.report import plot_depth

        return plot_depth(self, measure)

    def _repr_html_(self) -> str:
        """What a notebook shows: a small table and the map of ranks."""
        from rankwise.report import notebook_html

        return notebook_html(self)

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return (
            f"Audit({self.provenance.model or 'model'}: {len(self.heads)} heads, {len(self.layers)} layers, "
            f"{len(self.findings)} findings{'' if self.complete else ', incomplete'})"
        )


def _check_mergeable(audits: Sequence[Audit], names: Sequence[str]) -> None:
    check_same("schema_version", [audit.schema_version for audit in audits])
    check_mergeable([audit.provenance for audit in audits], names)
    alike: dict[tuple[str, str], list[object]] = {}
    for audit in audits:
        for head in audit.heads:
            alike.setdefault((f"head {head.head} of {head.site!r}, call {head.call}", "kind"), []).append(
                head.kind
            )
        for layer in audit.layers:
            states = f"token states of {layer.stack!r} after {layer.layer} blocks"
            for field in ("site", "width"):
                alike.setdefault((states, field), []).append(getattr(layer, field))
    for (subject, field), values in alike.items():
        check_same(field, values, subject=subject)


def _known(known: list[int] | list[str]) -> str:
    if not known:
        return "It has no heads: no mixing operator was captured."
    if isinstance(known[0], int) and len(known) > _MOST_NAMES:
        return f"It has {len(known)} of them, {min(known)} to {max(known)}."
    return f"Known: {', '.join(map(repr, known[:_MOST_NAMES]))}{' …' if len(known) > _MOST_NAMES else ''}."
