"""An audit as its user holds it: records that can be saved, loaded, shown and turned into frames."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise._internals.files import write_file
from rankwise._internals.records import load_record
from rankwise.auditing.frames import Records, csv_text, data_frame, table
from rankwise.auditing.records import AuditRecord, HeadRecord, Verdict
from rankwise.auditing.upgrade import upgraded
from rankwise.auditing.verdict import verdict_of
from rankwise.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_MOST_NAMES = 6
"""Names that an error lists, at most."""


class Audit(AuditRecord):
    """Everything an audit found: ``heads``, ``layers``, ``findings``, ``uncaptured``, ``provenance``."""

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
    def merge(cls, audits: "Sequence[Audit]") -> "Audit":
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
        from rankwise.auditing.merge import merge

        return merge(audits)

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


def _known(known: list[int] | list[str]) -> str:
    if not known:
        return "It has no heads: no mixing operator was captured."
    if isinstance(known[0], int) and len(known) > _MOST_NAMES:
        return f"It has {len(known)} of them, {min(known)} to {max(known)}."
    return f"Known: {', '.join(map(repr, known[:_MOST_NAMES]))}{' …' if len(known) > _MOST_NAMES else ''}."
