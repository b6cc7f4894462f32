"""`Audit`: result of an audit, with methods to save, load, merge, display and export its records."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rankwise._internals import report_package
from rankwise._internals.files import SavedRecord, write_file
from rankwise._internals.records import Address
from rankwise.auditing.findings import diagnose
from rankwise.auditing.head_labels import head_labels
from rankwise.auditing.provenance import check_mergeable, describe_method, merged_provenance
from rankwise.auditing.records import (
    Finding,
    HeadRecord,
    InitialModels,
    Provenance,
    StateRecord,
    UncapturedModule,
    Verdict,
)
from rankwise.auditing.statistics import AuditStatistics, heads_at_init, states_at_init
from rankwise.auditing.tables import Records, Row, csv_text, data_frame, table
from rankwise.auditing.verdict import verdict_of
from rankwise.errors import InputError, instance_of, strip_control
from rankwise.importance.records import ImportanceRecord

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from torch import Tensor

LOAD = "Read a saved audit with `rw.Audit.load(path)`."


class Audit(SavedRecord):
    """Result of an audit: records of heads and token states, findings, and the origin of the numbers."""

    format: Literal["rankwise-audit"] = "rankwise-audit"
    schema_version: Literal[5] = 5
    complete: bool = True
    """False if the audit was interrupted or failed before the last batch."""
    provenance: Provenance
    heads: list[HeadRecord]
    states: list[StateRecord]
    findings: list[Finding]
    uncaptured: list[UncapturedModule] = Field(default_factory=list)
    texts: dict[str, list[str]] = Field(default_factory=dict)
    """Tokens of the sequences with attention maps, by name of the model input."""
    importance: ImportanceRecord | None = None
    """Loss of the model, how costs of removal were measured, and which heads can be removed together."""
    at_init: InitialModels | None = None
    """How the copies at initialization were made; None if they were not requested."""

    @classmethod
    def merge(cls, audits: "Sequence[Audit]") -> "Audit":
        """Merge audits of shards of the data into one audit of all the data.

        Up to rounding, means, standard deviations, counts and nearest heads equal the values of one audit
        over all sequences. Findings are recomputed. Attention maps come from the first audit; spectra and
        membership maps come from the first audit that has them. Importance is the mean over all tokens. The
        set of removable heads, required widths and measures at initialization are omitted, and so are ranks
        of pooled states, keys and values, unless all audits were made with ``keep_moments``.

        Merging in several steps returns the same result as merging at once. Each audit stores only its most
        frequent token names, so counts of rarer names may be missing.
        Cost: linear in the number of records.

        An error is raised if sequences would be counted twice: if an audit is passed twice, alone or as part
        of a merged audit, or if two audits have the same batches. The same sequences in different batches are
        not detected. Equal weights are recognized by 64 entries per weight tensor. Data without
        digests are not checked.

        Args:
            audits: audits of the same model at the same δ, each of different sequences.

        Raises:
            InputError: if ``audits`` is not a list of at least one audit.
            RecordError: if audits differ in model, weights, revision, δ or dtype, or if two audits contain
                the same sequences.

        Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances", 1979.

        Examples:
            >>> import torch, rankwise as rw
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            >>> shards = [rw.audit(layer, [torch.randn(2, 5, 8)]) for _ in range(3)]
            >>> merged = rw.Audit.merge(shards)
            >>> merged.provenance.sequences
            6
        """
        audits = list(audits)
        if not audits:
            fix = "Pass a list of audits."
            raise InputError("`Audit.merge`", expected="at least one audit", got="none", fix=fix)
        for number, audit in enumerate(audits, 1):
            instance_of(f"audit {number} of `Audit.merge`", audit, Audit, "an audit", fix=LOAD)
        if len(audits) == 1:
            return audits[0]
        abouts = [audit.provenance for audit in audits]
        check_mergeable(abouts)
        whole, *others = map(AuditStatistics.from_audit, audits)
        for other in others:
            whole.merge_audit(other)
        whole.provenance = merged_provenance(abouts)
        return cls.from_statistics(whole)

    @classmethod
    def from_statistics(cls, statistics: AuditStatistics) -> "Audit":
        """Return the audit with records and findings computed from statistics."""
        about, measured = statistics.provenance, statistics.importance
        fields_of_heads: dict[Address, dict[str, Any]] = defaultdict(dict)
        for address, head in (measured.heads if measured is not None else {}).items():
            fields_of_heads[address] |= {"importance": head, "removal_cost": head.cost}
        copies = list(statistics.copies.values())
        for address, initial_head in (heads_at_init(statistics, copies) if copies else {}).items():
            fields_of_heads[address]["at_init"] = initial_head
        heads = statistics.head_records(fields_of_heads, keep_moments=statistics.keep_moments)
        initial = states_at_init(copies)
        states = [
            states.to_record(keep_moments=statistics.keep_moments).model_copy(
                update={"at_init": initial.get(address)}
            )
            for address, states in statistics.states.items()
        ]
        importance = None if measured is None else measured.record
        made = InitialModels(seeds=list(statistics.copies), built=statistics.built)
        return cls(
            complete=statistics.complete,
            provenance=about.model_copy(update={"rank_method": describe_method(heads)}),
            heads=heads,
            states=states,
            findings=diagnose(heads, states, statistics.uncaptured, importance, about),
            uncaptured=statistics.uncaptured,
            texts=statistics.texts,
            importance=importance,
            at_init=made if copies else None,
        )

    def to_frame(self, records: Records = "heads") -> "pd.DataFrame":
        """Return records as a pandas data frame, with one row per record.

        The column after a measure is its standard deviation over sequences, such as ``numerical_rank_std``.
        Lists (spectra, maps) are omitted; they are in the records. Raise `InputError` if pandas
        is not installed, or ``records`` is not a kind of records, such as "heads" or "states".
        """
        return data_frame(*table(records, getattr(self, records, []), self.provenance))

    def to_csv(self, path: str | Path, records: Records = "heads") -> Path:
        """Write records as CSV, with the columns of `to_frame`, and return the path; pandas is not required.

        Numbers are written with all digits; unknown values are empty cells. In an existing folder, the file
        is ``heads.csv`` (``states.csv``, …). Raise `InputError` if the file cannot be written, or ``records``
        is not a kind of records.
        """
        text = csv_text(*table(records, getattr(self, records, []), self.provenance))
        return write_file(path, text, "table", in_folder=f"{records}.csv")

    def to_tensor(self, measure: str, stack: str | None = None) -> "Tensor":
        """Return a measure of all heads as a float32 tensor [layers, heads], NaN for heads without a value.

        Args:
            measure: name of a measure of heads, such as "removal_cost".
            stack: stack of blocks, if the audit has several; the error of None names them.

        Raises:
            InputError: if the measure is unknown or was not measured, ``stack`` is not a stack, or a layer of
                the stack has several mixers.
        """
        return report_package().head_tensor(self, measure, stack)

    def head_labels(self) -> list[Row]:
        """Return scores and a label of each head by its attention map of the first sequence, a row per head.

        The label is the first of the scores induction, previous_token and positional that is at least 0.5,
        or "". Columns ``transformer_lens`` and ``nnsight`` name the head's module in these packages. The
        audit needs ``attention_maps`` and sequences of at most 128 tokens. Scores of one text are weak
        evidence of induction: repeated random tokens are the usual test.

        - ``previous_token``: mean weight on the previous token, in [0, 1].
        - ``induction``: mean weight on tokens that followed an earlier copy of the row's token, minus the
          weight that uniform rows have there. In [−1, 1]; NaN if no token is repeated or tokens are unknown.
        - ``positional``: share of the variance of the weights that the offset of row and column explains, in
          [0, 1]; 1 if the offset alone decides the weight.

        Source: `head_detector` of TransformerLens for the first two, whose scores divide by all weights of
        the map instead of the weights of rows with such a token.

        Raises:
            InputError: if no head has such a map.
        """
        return head_labels(self.heads, self.texts)

    def head(self, layer: int, head: int, *, stack: str | None = None, site: str | None = None) -> HeadRecord:
        """Return the record of one head, by the indices of its layer and of the head in the layer, from 0.

        If several heads match, pass the name of the stack of blocks (such as the encoder) or of the site (the
        module that mixes tokens). Raise `InputError` unless exactly one head matches.

        Examples:
            >>> import torch, rankwise as rw
            >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            >>> rw.audit(layer, [torch.randn(1, 5, 8)]).head(0, 1).head
            1
        """
        asked = {"layer": layer, "head": head, "stack": stack, "site": site}
        given = {name: value for name, value in asked.items() if value is not None}
        records = [
            record
            for record in self.heads
            if all(getattr(record, name) == value for name, value in given.items())
        ]
        if len(records) != 1:
            places = dict.fromkeys((record.stack, record.site) for record in records or self.heads)
            listed = "; ".join(f"stack={name!r}, site={site!r}" for name, site in [*places][:6])
            subject = ", ".join(f"{name} {value!r}" for name, value in given.items())
            fix = f"The audit has such heads in {listed}." if listed else "No mixing operator was captured."
            raise InputError(subject, expected="one head of the audit", got=str(len(records)), fix=fix)
        return records[0]

    @property
    def loss(self) -> float:
        """Loss of the model. NaN if no loss was measured, as when costs are changes of the output."""
        return math.nan if self.importance is None else self.importance.value or math.nan

    @property
    def verdict(self) -> Verdict:
        """One sentence on the findings, and at most three actions; see `verdict_of`."""
        return verdict_of(self)

    def summary(self, width: int = 100, *, verbose: bool = False) -> str:
        """Return the text that the command prints: verdict, actions and a table of layers.

        If ``verbose``, the text has all findings, all tables and the origin of the numbers. Lines have at
        most ``width`` characters.
        """
        report = report_package()
        text: str = report.document_text(report.document_of(self), width, verbose=verbose)
        return text

    def plot(self, measure: str = "numerical_rank", *, ax: "Axes | None" = None) -> "Axes":
        """Draw a measure of heads into matplotlib axes: a heat map with a row per layer, a column per head.

        Cells without a value are blank. Values beyond the color scale have its last color (an arrow at the
        scale). Several stacks are drawn one below the other.

        Args:
            measure: name of a measure of heads, such as "effective_rank".
            ax: axes to draw into; by default of a new figure.

        Raises:
            InputError: if matplotlib is not installed, or the measure is unknown or was not measured.
        """
        return report_package().plot_measure(self, measure, "heads", ax)

    def plot_depth(self, measure: str = "direction_spread", *, ax: "Axes | None" = None) -> "Axes":
        """Draw a measure of token states into matplotlib axes: a curve per stack, ± 1 standard deviation.

        Arguments and errors are as for `plot`.
        """
        return report_package().plot_measure(self, measure, "states", ax)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the verdict and the table of layers of `summary`."""
        report = report_package()
        return str(report.notebook_html(report.document_of(self)))

    def __repr__(self) -> str:
        model = strip_control(self.provenance.model) or "model"
        return (
            f"Audit({model}: {len(self.heads)} heads, {len(self.states)} states, "
            f"{len(self.findings)} findings{'' if self.complete else ', incomplete'})"
        )
