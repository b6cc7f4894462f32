"""Statistics of heads and token states: merged over batches and audits, and measured at initialization."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwise._internals.records import Address, grouped
from rankwise._internals.statistics import Floats, Moments, mean
from rankwise.auditing.examples import NAMES_KEPT, HeadExamples
from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES
from rankwise.auditing.records import (
    AtInit,
    HeadRecord,
    MergeData,
    Provenance,
    Rows,
    StateRecord,
    UncapturedModule,
)
from rankwise.errors import ShapeError
from rankwise.importance.records import Importance

if TYPE_CHECKING:
    from rankwise.auditing.result import Audit
    from rankwise.measures import LogitMoments
    from rankwise.measures.row_moments import RowMoments

RANKS = ("numerical_rank", "rank_low", "rank_high", "random_rank", "uniform_rank")
"""Fields of a head record whose mean is known only if all sequences have a value."""
MEANS = (
    *("tokens", "sources", "full_rank", "one_hot_rank"),
    *(row.name for row in HEAD_MEASURES if not (row.late or row.maximum) and row.name not in RANKS),
)
"""Fields of a head record that are means over the sequences in which the value is known."""
MAXIMA = tuple(row.name for row in HEAD_MEASURES if row.maximum)
"""Fields of a head record that are maxima over the sequences in which the value is known."""
SIZES = ("tokens", "sources", "full_rank")
"""Fields in `MEANS` without a standard deviation in records."""
ERRORS = ("numerical_rank", "scale_free_rank", "effective_rank", "stable_rank", "sigma_max")
"""Measures that have a standard error if they are estimated by random vectors."""
COUNTS = ("nonfinite_sequences", "estimated_sequences")
"""Fields that count sequences: those with NaN or infinity, and those with estimated ranks."""
STATES = ("tokens", *(row.name for row in STATE_MEASURES if not row.late))
POOLED = tuple(row.name for row in STATE_MEASURES if row.late)
"""Measures of the mean tokens of all sequences, an N×D matrix."""
AT_INIT = [*(row.name for row in HEAD_MEASURES if not row.late), "nearest_head_distance"]
"""Measures of heads at initialization: measures of the mixing matrix, but not importance."""


@dataclass
class HeadStatistics:
    """Statistics, over sequences, of the H heads in one call of a mixer (a module that mixes tokens)."""

    mixer: Address
    kind: str
    cross: bool
    heads: list[int]
    """Indices of the heads; not consecutive if channels were sampled."""
    measures: dict[str, Moments]
    """Moments of the fields in `MEANS` and `RANKS`, shape (H,) each."""
    stderr: dict[str, Moments]
    """Standard errors of the measures in `ERRORS`, shape (H,) each; 0 for exact ranks."""
    maxima: dict[str, Floats]
    """Values of the fields in `MAXIMA`, shape (H,) each; NaN if unknown."""
    distances: Moments
    """Distances between heads, shape (H, H)."""
    nonfinite_sequences: Floats
    estimated_sequences: Floats
    """Numbers of sequences with estimated ranks, (H,); an image window counts as a fraction of a sequence.
    ``nonfinite_sequences``: numbers of sequences with NaN or infinity, (H,)."""
    examples: list[HeadExamples]
    head_dim: int | None = None
    heads_per_group: int = 1
    logits: "LogitMoments | None" = None
    """Second moments of queries and keys; None if unknown, as after loading a file."""
    rows: dict[str, "RowMoments"] = field(default_factory=dict)
    """Second moments of the keys and values of each key head, by measure; those that are known."""

    @classmethod
    def empty(cls, mixer: Address, kind: str, cross: bool, heads: list[int]) -> "HeadStatistics":
        """Return statistics to which no sequence has been added."""
        number = len(heads)
        counts: dict[str, Any] = {name: np.zeros(number) for name in COUNTS}
        return cls(
            *(mixer, kind, cross, heads),
            measures={name: Moments.empty(number) for name in (*MEANS, *RANKS)},
            stderr={name: Moments.empty(number) for name in ERRORS},
            maxima={name: np.full(number, np.nan) for name in MAXIMA},
            distances=Moments.empty(number, number),
            **counts,
            examples=[HeadExamples() for _ in heads],
        )

    def merge(self, other: "HeadStatistics") -> None:
        """Add statistics of the same heads over other sequences; raise `ShapeError` if the heads differ."""
        if self.heads != other.heads:
            expected, got = f"{len(self.heads)}, as in the sequences before", str(len(other.heads))
            fix = "Audit batches one by one if the model changes its heads; merge audits of one model."
            raise ShapeError(f"heads of {self.mixer.site!r}", expected=expected, got=got, fix=fix)
        for kind in ("measures", "stderr"):
            for name, moments in getattr(self, kind).items():
                moments.merge(getattr(other, kind)[name])
        for name, values in other.maxima.items():
            self.maxima[name] = np.fmax(self.maxima[name], values)
        self.distances.merge(other.distances)
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for example, more in zip(self.examples, other.examples, strict=True):
            example.merge(more)
        self.head_dim = other.head_dim if self.head_dim is None else self.head_dim
        if self.logits is not None and other.logits is not None:
            self.logits = self.logits + other.logits
        else:
            self.logits = self.logits or other.logits
        for name, rows in other.rows.items():
            both = [self.rows[name], rows] if name in self.rows else [rows]
            fewest = min(len(rows.count) for rows in both)  # with a mask, some models repeat grouped keys
            self.rows[name] = reduce(add, (rows.every(len(rows.count) // fewest) for rows in both))

    def to_records(self, *, keep_moments: bool = False) -> list[HeadRecord]:
        """Return a record per head, with the moments of keys and values if ``keep_moments``."""
        finite = self.measures["sigma_max"].count
        numbers = {
            name: (moments.complete(finite) if name in RANKS else moments).to_record()
            for name, moments in self.measures.items()
        }
        errors = {name: moments.to_record() for name, moments in self.stderr.items()}
        nearest, distance = self._nearest()
        needed = np.full(len(self.heads), np.nan)
        if self.logits is not None:
            from rankwise.measures import required_head_dim

            needed = required_head_dim(self.logits).cpu().numpy()
        late = {"nearest_head_distance": distance, "required_head_dim": needed}
        for name, rows in self.rows.items():
            ranks = rows.effective_rank().numpy()
            late[name] = ranks.repeat(len(self.heads) // len(ranks))
        records = []
        for index, head in enumerate(self.heads):
            sequences, estimated = int(finite[index]), round(float(self.estimated_sequences[index]))
            counts = {name: int(numbers[name][0][index]) for name in MEANS}
            counts |= {f"stderr of {name}": int(errors[name][0][index]) for name in ERRORS}
            example = self.examples[index]
            peak, peak_sequences = example.peak
            fields: dict[str, Any] = {name: float(mean[index]) for name, (_, mean, _) in numbers.items()}
            fields |= {name: float(values[index]) for name, values in (self.maxima | late).items()}
            record = HeadRecord(
                **fields,
                stack=self.mixer.stack, site=self.mixer.site, layer=self.mixer.layer or 0,
                call=self.mixer.call, head=head, kind=self.kind, cross=self.cross, head_dim=self.head_dim,
                heads_per_group=self.heads_per_group,
                mask=example.mask, sequences=sequences, estimated_sequences=estimated,
                nonfinite_sequences=int(self.nonfinite_sequences[index]),
                membership_map=example.membership,
                nearest_head=nearest[index],
                std={name: float(std[index]) for name, (_, _, std) in numbers.items() if name not in SIZES},
                stderr={name: float(errors[name][1][index]) for name in ERRORS} if estimated else {},
                counts={name: count for name, count in counts.items() if 0 < count < sequences},
                max_token=peak, max_token_sequences=peak_sequences, spectrum=example.spectrum,
                attention_map=example.attention_map,
                merging=self._merge_data(index, keep_moments=keep_moments),
            )  # fmt: skip
            records.append(record)
        return records

    @classmethod
    def from_records(cls, records: Sequence[HeadRecord]) -> "HeadStatistics":
        """Restore statistics from the saved records of all heads of one mixer call."""
        first = records[0]
        rows: dict[str, Any] = {}
        for name in first.merging.moments:
            import torch

            from rankwise.measures.row_moments import RowMoments

            kept = [head.merging.moments[name].array() for head in records if name in head.merging.moments]
            packed = torch.from_numpy(np.stack(kept))
            rows[name] = RowMoments(packed[:, :-1], packed[:, -1, 0])
        counts: dict[str, Any] = {
            name: np.array([float(getattr(record, name)) for record in records]) for name in COUNTS
        }

        def moments(key: str, means: list[float]) -> Moments:
            count = [record.counts.get(key, record.sequences) for record in records]
            std = [record.std.get(key, math.nan) for record in records]
            return Moments.from_record(*np.array([count, means, std], dtype=np.float64))

        def errors(name: str) -> list[float]:
            unknown = [math.nan if record.estimated_sequences else 0.0 for record in records]
            return [record.stderr.get(name, none) for record, none in zip(records, unknown, strict=True)]

        return cls(
            *(first.id.at(None), first.kind, first.cross, [record.head for record in records]),
            measures={
                name: moments(name, [getattr(record, name) for record in records])
                for name in (*MEANS, *RANKS)
            },
            stderr={name: moments(f"stderr of {name}", errors(name)) for name in ERRORS},
            maxima={
                name: np.array([getattr(record, name) for record in records], dtype=np.float64)
                for name in MAXIMA
            },
            distances=_distances_of(records),
            **counts,
            examples=[HeadExamples.from_record(record) for record in records],
            head_dim=first.head_dim,
            heads_per_group=first.heads_per_group,
            rows=rows,
        )

    def _nearest(self) -> tuple[list[int | None], Floats]:
        """Return the index of the head nearest to each head, and the distance; None and NaN if unknown."""
        distance = self.distances.to_record()[1].copy()
        np.fill_diagonal(distance, np.nan)
        filled = np.where(np.isnan(distance), np.inf, distance)
        place = filled.argmin(-1)
        least = np.take_along_axis(filled, place[:, None], -1)[:, 0]
        nearest = [
            self.heads[column] if least[row] < np.inf else None for row, column in enumerate(place.tolist())
        ]
        return nearest, np.where(least < np.inf, least, np.nan)

    def _merge_data(self, head: int, *, keep_moments: bool) -> MergeData:
        count, mean, _ = (numbers[head].copy() for numbers in self.distances.to_record())
        mean[head] = np.nan
        known = slice(None if np.isfinite(mean).any() else 0)
        example = self.examples[head]
        moments = {}
        for name, rows in self.rows.items() if keep_moments else ():
            group, place = divmod(head * len(rows.count), len(self.heads))
            if not place:
                number = np.full((1, rows.moments.shape[-1]), rows.count[group])
                moments[name] = Rows.of(np.concatenate([rows.moments[group].numpy(), number]))
        by_frequency = sorted(example.names.items(), key=lambda item: (-item[1], item[0]))
        return MergeData(
            longest=int(example.longest),
            distances=mean[known].tolist(),
            pairs=count[known].astype(int).tolist(),
            named=example.named,
            names=dict(by_frequency[:NAMES_KEPT]),
            moments=moments,
        )


def _distances_of(records: Sequence[HeadRecord]) -> Moments:
    heads = len(records)
    mean = np.array([record.merging.distances or [math.nan] * heads for record in records])
    count = np.array([record.merging.pairs or [0] * heads for record in records], dtype=np.float64)
    np.fill_diagonal(mean, 0.0)
    return Moments.from_record(count, mean, np.full_like(mean, np.nan))


@dataclass
class StateStatistics:
    """Statistics over sequences of the token states after one block."""

    stack: str
    site: str
    blocks: int
    hidden_size: int
    measures: dict[str, Moments] = field(default_factory=lambda: {name: Moments.empty(1) for name in STATES})
    """Moments of the fields in `STATES`, shape (1,) each."""
    nonfinite_sequences: int = 0
    largest_at: Counter[int] = field(default_factory=Counter)
    """Number of sequences by position of the token of largest norm."""
    pooled: dict[str, Floats] = field(default_factory=dict)
    """Mean tokens of the sequences by measure in `POOLED`, or fewer rows with the same singular values; empty
    if unknown, as after loading a file."""

    def merge(self, other: "StateStatistics") -> None:
        """Add statistics of the same token states over other sequences."""
        self.largest_at.update(other.largest_at)
        for name, moments in self.measures.items():
            moments.merge(other.measures[name])
        self.nonfinite_sequences += other.nonfinite_sequences
        for name, rows in other.pooled.items():
            rows = np.concatenate([self.pooled[name], rows]) if name in self.pooled else rows
            # R of a QR decomposition has the singular values of all rows, and bounds the memory.
            self.pooled[name] = np.linalg.qr(rows).R if len(rows) > 2 * self.hidden_size else rows

    def to_record(self, *, keep_moments: bool = False) -> StateRecord:
        """Return the record of the token states: means and standard deviations over sequences."""
        numbers = {name: moments.to_record() for name, moments in self.measures.items()}
        sequences = int(self.measures["norm"].count[0])
        counts = {name: int(count[0]) for name, (count, _, _) in numbers.items()}
        means: dict[str, Any] = {name: float(mean[0]) for name, (_, mean, _) in numbers.items()}
        means |= {name: _effective_rank(rows) for name, rows in self.pooled.items()}
        positions = sorted(self.largest_at.items(), key=lambda item: (-item[1], item[0]))
        return StateRecord(
            **means, stack=self.stack, site=self.site, blocks=self.blocks, hidden_size=self.hidden_size,
            sequences=sequences, nonfinite_sequences=self.nonfinite_sequences,
            std={name: float(std[0]) for name, (_, _, std) in numbers.items() if name != "tokens"},
            counts={name: count for name, count in counts.items() if 0 < count < sequences},
            largest_at=dict(positions[:NAMES_KEPT]),
            pooled={name: Rows.of(rows) for name, rows in self.pooled.items()} if keep_moments else {},
        )  # fmt: skip

    @classmethod
    def from_record(cls, record: StateRecord) -> "StateStatistics":
        """Restore statistics from a saved record."""
        measures = {}
        for name in STATES:
            count, std = record.counts.get(name, record.sequences), record.std.get(name, math.nan)
            measures[name] = Moments.from_record(*np.array([[count], [getattr(record, name)], [std]]))
        place = record.stack, record.site, record.blocks, record.hidden_size
        pooled = {name: rows.array() for name, rows in record.pooled.items()}
        return cls(*place, measures, record.nonfinite_sequences, Counter(record.largest_at), pooled)


def _effective_rank(rows: Floats) -> float:
    """Return exp(entropy of σ/Σσ) of the singular values σ of rows: 0 for zeros, NaN without a row."""
    if not rows.any():
        return 0.0 if len(rows) else math.nan
    sigma = np.linalg.svd(rows, compute_uv=False)
    shares = sigma[sigma > 0] / sigma.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


@dataclass
class ModelStatistics:
    """Statistics of all heads and token states of a model."""

    heads: dict[Address, HeadStatistics] = field(default_factory=dict)
    """Statistics of heads by the address of the mixer call."""
    states: dict[tuple[str, int], StateStatistics] = field(default_factory=dict)
    """Statistics of token states by stack and number of blocks passed."""

    def add_heads(self, heads: HeadStatistics) -> None:
        """Add statistics of a mixer call, merged with earlier statistics of the same call."""
        if (earlier := self.heads.setdefault(heads.mixer, heads)) is not heads:
            earlier.merge(heads)

    def add_states(self, states: StateStatistics) -> None:
        """Add statistics of token states, merged with earlier statistics of the same states."""
        if (earlier := self.states.setdefault((states.stack, states.blocks), states)) is not states:
            earlier.merge(states)

    def merge(self, other: "ModelStatistics") -> None:
        """Add statistics of other sequences; objects of ``other`` are reused, not copied."""
        for heads in other.heads.values():
            self.add_heads(heads)
        for states in other.states.values():
            self.add_states(states)

    def head_records(
        self, fields: Mapping[Address, Mapping[str, Any]] | None = None, *, keep_moments: bool = False
    ) -> list[HeadRecord]:
        """Return the records of all heads in the order of the model.

        ``fields`` contains values by address of the head, which replace fields of the record.

        If each head is a separate module (``heads.0``, ``heads.1``), the records get one site ``heads.*``.
        """
        alone = Counter(_pattern(mixer) for mixer, heads in self.heads.items() if len(heads.heads) == 1)
        met: Counter[Address] = Counter()
        records: list[HeadRecord] = []
        for mixer, heads in self.heads.items():
            together = _pattern(mixer)
            for record in heads.to_records(keep_moments=keep_moments):
                changes = dict((fields or {}).get(mixer.at(record.head), {}))
                if len(heads.heads) == 1 and alone[together] > 1:
                    changes |= {"site": together.site, "head": met[together]}
                    met[together] += 1
                records.append(record.model_copy(update=changes))
        return records


def _pattern(mixer: Address) -> Address:
    return replace(mixer, site=re.sub(r"\d+(?=\D*$)", "*", mixer.site))


@dataclass
class AuditStatistics(ModelStatistics):
    """Statistics of a model, its origin, and copies at initialization: all that an audit is built from."""

    provenance: Provenance = field(kw_only=True)
    complete: bool = True
    keep_moments: bool = False
    """True if records hold the second moments with which audits are merged."""
    uncaptured: list[UncapturedModule] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    """Tokens of the sequences with attention maps, by name of the model input."""
    importance: Importance | None = None
    built: str = ""
    """Description of how the copies at initialization were built."""
    copies: dict[int, ModelStatistics] = field(default_factory=dict)
    """Statistics of the copies at initialization, by random seed."""

    def merge_audit(self, other: "AuditStatistics") -> None:
        """Add a saved audit of other sequences, without its attention maps: `texts` lacks their tokens."""
        for example in chain(*(heads.examples for heads in other.heads.values())):
            example.attention_map = None
        self.merge(other)
        self.keep_moments = self.keep_moments and other.keep_moments
        if not self.keep_moments:  # the ranks of a part are not the ranks of all sequences
            for heads in self.heads.values():
                heads.rows = {}
            for states in self.states.values():
                states.pooled = {}
        self.complete = self.complete and other.complete
        self.uncaptured = list(dict.fromkeys([*self.uncaptured, *other.uncaptured]))
        if self.importance is None or other.importance is None:
            self.importance = None
        else:
            self.importance.merge(other.importance)

    @classmethod
    def from_audit(cls, audit: "Audit") -> "AuditStatistics":
        """Restore statistics from a saved audit, without copies at initialization and required widths."""
        mixers = grouped(audit.heads, lambda record: record.id.at(None))
        importances = {
            record.id: record.importance for record in audit.heads if record.importance is not None
        }
        importance = None if audit.importance is None else Importance(audit.importance, importances)
        return cls(
            heads={mixer: HeadStatistics.from_records(records) for mixer, records in mixers.items()},
            states={
                (state.stack, state.blocks): StateStatistics.from_record(state) for state in audit.states
            },
            provenance=audit.provenance, complete=audit.complete,
            keep_moments=any(state.pooled for state in audit.states)
            or any(head.merging.moments for head in audit.heads),
            uncaptured=audit.uncaptured,
            texts=audit.texts, importance=importance,
        )  # fmt: skip


def heads_at_init(model: ModelStatistics, copies: Sequence[ModelStatistics]) -> dict[Address, AtInit]:
    """Return the measures of heads in copies at initialization, by the address of the head.

    Heads without a finite measure in any copy are left out.
    """
    records_of_copies = [_heads(copy) for copy in copies]
    initial = {}
    for address, record in _heads(model).items():
        records = [heads[address] for heads in records_of_copies if address in heads]
        records = [head for head in records if head.sequences]
        if not records:
            continue
        spectra = [head.spectrum for head in records if len(head.spectrum) == len(record.spectrum)]
        spectrum = np.mean(spectra, axis=0).tolist() if spectra else []
        initial[address] = AtInit(seeds=len(records), **_moments(records, AT_INIT), spectrum=spectrum)
    return initial


def states_at_init(copies: Sequence[ModelStatistics]) -> dict[tuple[str, int], AtInit]:
    """Return measures of token states in copies at initialization, by stack and number of blocks passed."""
    initial = {}
    for address in dict.fromkeys(address for copy in copies for address in copy.states):
        records = [copy.states[address].to_record() for copy in copies if address in copy.states]
        records = [record for record in records if record.sequences]
        if records:
            initial[address] = AtInit(
                seeds=len(records), **_moments(records, [row.name for row in STATE_MEASURES])
            )
    return initial


def _heads(statistics: ModelStatistics) -> dict[Address, HeadRecord]:
    return {
        mixer.at(record.head): record
        for mixer, heads in statistics.heads.items()
        for record in heads.to_records()
    }


def _moments(copies: Sequence[HeadRecord] | Sequence[StateRecord], names: Sequence[str]) -> dict[str, Any]:
    means = {name: np.array([getattr(record, name) for record in copies]) for name in names}
    return {
        "mean": {name: mean(values) for name, values in means.items()},
        "seed_std": {name: _std(values) for name, values in means.items()},
    }


def _std(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.std(ddof=1)) if finite.size > 1 else math.nan
