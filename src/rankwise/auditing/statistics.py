"""Statistics of heads and token states, merged over batches and saved audits."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwise._internals.records import Address, grouped
from rankwise._internals.statistics import Floats, Moments
from rankwise.auditing.examples import TOKENS_KEPT, Examples
from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES
from rankwise.auditing.provenance import joined, joined_uncaptured
from rankwise.auditing.records import (
    BAND,
    HeadRecord,
    MergeData,
    Provenance,
    RankAt,
    StateRecord,
    UncapturedModule,
    thresholds,
)
from rankwise.errors import RecordError, ShapeError
from rankwise.importance.records import Importance

if TYPE_CHECKING:
    from rankwise.auditing.result import Audit
    from rankwise.measures import LogitMoments

DELTA_INDEX = BAND.index(1.0)
"""Index of δ in the band (five thresholds around δ)."""
MEANS = (
    *("tokens", "sources", "full_rank", "one_hot_rank"),
    *(row.name for row in HEAD_MEASURES if not row.late and row.name != "numerical_rank"),
)
"""Fields of a head record that are means over the sequences in which the value is known."""
SIZES = ("tokens", "sources", "full_rank")
"""Fields in `MEANS` without a standard deviation in records."""
RANKS = ("numerical_rank", "rank_low", "rank_high", "random_rank", "uniform_rank")
"""Fields with a value at each threshold of the band; the mean is known only if all sequences have a value."""
ERRORS = ("numerical_rank", "scale_free_rank", "effective_rank", "stable_rank", "sigma_max")
"""Measures that have a standard error if they are estimated by random vectors."""
COUNTS = ("nonfinite", "estimated", "fallbacks")
"""Fields that count sequences with NaN, estimated ranks or an SVD."""
STATES = ("tokens", *(row.name for row in STATE_MEASURES))


@dataclass
class HeadStatistics:
    """Statistics over sequences of the H heads of one mixer call (a module that mixes tokens)."""

    mixer: Address
    kind: str
    cross: bool
    heads: list[int]
    """Indices of the heads; not consecutive if channels were sampled."""
    measures: dict[str, Moments]
    """Moments of the fields in `MEANS`, shape (H,) each."""
    ranks: dict[str, Moments]
    """Moments of the fields in `RANKS` at five thresholds around δ, shape (H, 5) each."""
    stderr: dict[str, Moments]
    """Standard errors of the measures in `ERRORS`, shape (H,) each; 0 for exact ranks."""
    distances: Moments | None
    """Distances between heads, shape (H, H); None if read from an older file without distances."""
    nonfinite: Floats
    estimated: Floats
    fallbacks: Floats
    """Numbers of sequences with NaN, estimated ranks or an SVD, (H,) each; a window counts as a fraction."""
    examples: Examples
    head_dim: int | None = None
    heads_per_group: int = 1
    logits: "LogitMoments | None" = None
    """Second moments of queries and keys; None if these are unknown, as in saved files."""
    sequence_ranks: list[Floats] | None = None
    """Lower and upper rank per sequence and threshold, arrays (N, H, 5, 2); kept only for a baseline."""

    @classmethod
    def empty(cls, mixer: Address, kind: str, cross: bool, heads: list[int]) -> "HeadStatistics":
        """Return statistics to which no sequence has been added."""
        number = len(heads)
        counts: dict[str, Any] = {name: np.zeros(number) for name in COUNTS}
        return cls(
            *(mixer, kind, cross, heads),
            measures={name: Moments.empty(number) for name in MEANS},
            ranks={name: Moments.empty(number, len(BAND)) for name in RANKS},
            stderr={name: Moments.empty(number) for name in ERRORS},
            distances=Moments.empty(number, number),
            **counts,
            examples=Examples.empty(number),
        )

    def merge(self, other: "HeadStatistics", *, attention_maps: bool = True) -> None:
        """Add statistics of the same heads over other sequences; raise `ShapeError` if the heads differ."""
        if self.heads != other.heads:
            expected, got = f"{len(self.heads)}, as in the sequences before", str(len(other.heads))
            fix = "Audit batches one by one if the model changes its heads; merge audits of one model."
            raise ShapeError(f"heads of {self.mixer.site!r}", expected=expected, got=got, fix=fix)
        for kind in ("measures", "ranks", "stderr"):
            for name, moments in getattr(self, kind).items():
                moments.merge(getattr(other, kind)[name])
        if self.distances is None or other.distances is None:
            self.distances = None
        else:
            self.distances.merge(other.distances)
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.examples.merge(other.examples, attention_maps=attention_maps)
        self.head_dim = other.head_dim if self.head_dim is None else self.head_dim
        if self.logits is not None and other.logits is not None:
            self.logits = self.logits + other.logits
        else:
            self.logits = self.logits or other.logits
        if self.sequence_ranks is not None:
            more = other.sequence_ranks
            self.sequence_ranks = None if more is None else self.sequence_ranks + more

    def to_records(self, delta: float, audits: int = 1) -> list[HeadRecord]:
        """Return a record per head; it keeps `TOKENS_KEPT` token names for each of the merged ``audits``."""
        finite = self.measures["sigma_max"].count
        numbers = {name: moments.to_record() for name, moments in self.measures.items()}
        band = {name: ranks.complete(finite[:, None]).to_record() for name, ranks in self.ranks.items()}
        for name, (count, mean, std) in band.items():
            numbers[name] = count[:, DELTA_INDEX], mean[:, DELTA_INDEX], std[:, DELTA_INDEX]
        errors = {name: moments.to_record() for name, moments in self.stderr.items()}
        nearest, distance = self._nearest()
        needed = np.full(len(self.heads), np.nan)
        if self.logits is not None:
            from rankwise.measures import required_head_dim

            needed = required_head_dim(self.logits).cpu().numpy()
        records = []
        for at, number in enumerate(self.heads):
            sequences, estimated = int(finite[at]), round(float(self.estimated[at]))
            counts = {name: int(numbers[name][0][at]) for name in MEANS}
            counts |= {f"stderr of {name}": int(errors[name][0][at]) for name in ERRORS}
            peak, peak_sequences = self.examples.peak(at)
            first, second = [*self.examples.attention_maps[at], None, None][:2]
            fields: dict[str, Any] = {name: float(mean[at]) for name, (_, mean, _) in numbers.items()}
            points = [
                RankAt(
                    delta=threshold,
                    one_hot_rank=fields["one_hot_rank"] if threshold <= 1 else math.nan,
                    **{name: float(mean[at, step]) for name, (_, mean, _) in band.items()},
                )
                for step, threshold in enumerate(thresholds(delta))
                if not sequences or not math.isnan(band["rank_low"][1][at, step])
            ]
            record = HeadRecord(
                **fields,
                stack=self.mixer.stack, site=self.mixer.site, layer=self.mixer.layer or 0,
                call=self.mixer.call, head=number, kind=self.kind, cross=self.cross, head_dim=self.head_dim,
                heads_per_group=self.heads_per_group,
                mask=self.examples.masks[at],  # type: ignore[arg-type]
                sequences=sequences, nonfinite=int(self.nonfinite[at]), estimated=estimated,
                fallbacks=round(float(self.fallbacks[at])),
                band=points,
                membership_map=self.examples.memberships[at], membership_grid=self.examples.grid(at),
                nearest_head=nearest[at], nearest_head_distance=float(distance[at]),
                required_head_dim=float(needed[at]),
                std={name: float(std[at]) for name, (_, _, std) in numbers.items() if name not in SIZES},
                stderr={name: float(errors[name][1][at]) for name in ERRORS} if estimated else {},
                counts={name: count for name, count in counts.items() if 0 < count < sequences},
                max_token=peak, max_token_sequences=peak_sequences, attention_map=first,
                second_attention_map=second, spectrum=self.examples.spectra[at],
                merging=self._merge_data(at, audits),
            )  # fmt: skip
            records.append(record)
        return records

    @classmethod
    def from_records(cls, records: Sequence[HeadRecord], delta: float) -> "HeadStatistics":
        """Restore statistics from the saved records of all heads of one mixer call."""
        first = records[0]
        counts: dict[str, Any] = {
            name: np.array([float(getattr(record, name)) for record in records]) for name in COUNTS
        }
        sequences = np.array([record.sequences for record in records], dtype=np.float64)

        def moments(key: str, means: list[float]) -> Moments:
            count = [record.counts.get(key, record.sequences) for record in records]
            std = [record.std.get(key, math.nan) for record in records]
            return Moments.from_record(*np.array([count, means, std], dtype=np.float64))

        def errors(name: str) -> list[float]:
            return [record.stderr.get(name, math.nan if record.estimated else 0.0) for record in records]

        return cls(
            *(first.id.at(None), first.kind, first.cross, [record.head for record in records]),
            measures={name: moments(name, [getattr(record, name) for record in records]) for name in MEANS},
            ranks={name: _ranks_of(records, name, sequences, delta) for name in RANKS},
            stderr={name: moments(f"stderr of {name}", errors(name)) for name in ERRORS},
            distances=_distances_of(records),
            **counts,
            examples=Examples.from_records(records),
            head_dim=first.head_dim,
            heads_per_group=first.heads_per_group,
        )

    def _nearest(self) -> tuple[list[int | None], Floats]:
        """Return the nearest head of each head by mean distance (None if unknown), and the distance."""
        if self.distances is None:
            return [None] * len(self.heads), np.full(len(self.heads), np.nan)
        distance = self.distances.to_record()[1].copy()
        np.fill_diagonal(distance, np.nan)
        filled = np.where(np.isnan(distance), np.inf, distance)
        place = filled.argmin(-1)
        least = np.take_along_axis(filled, place[:, None], -1)[:, 0]
        nearest = [self.heads[at] if least[row] < np.inf else None for row, at in enumerate(place.tolist())]
        return nearest, np.where(least < np.inf, least, np.nan)

    def _merge_data(self, at: int, audits: int) -> MergeData | None:
        names = self.examples.names
        if self.distances is None or names is None:
            return None
        # If every head is a module of its own, the only known distance is to the head itself.
        alone = [at] if "*" in self.mixer.site else slice(None)
        count, mean, _ = (part[at].copy() for part in self.distances.to_record())
        mean[at] = np.nan
        by_frequency = (sorted(kind.items(), key=lambda item: (-item[1], item[0])) for kind in names[at])
        return MergeData(
            longest=int(self.examples.longest[at]),
            distances=mean[alone].tolist(),
            pairs=count[alone].astype(int).tolist(),
            named=self.examples.named[at],
            names=[dict(kind[: TOKENS_KEPT * audits]) for kind in by_frequency],
        )


def _ranks_of(records: Sequence[HeadRecord], name: str, sequences: Floats, delta: float) -> Moments:
    mean = np.full((len(records), len(BAND)), np.nan)
    std = mean.copy()
    for at, record in enumerate(records):
        points = {point.delta: getattr(point, name) for point in record.band}
        mean[at] = [points.get(threshold, math.nan) for threshold in thresholds(delta)]
        mean[at, DELTA_INDEX] = getattr(record, name)
        std[at, DELTA_INDEX] = record.std.get(name, math.nan)
    return Moments.from_record(np.broadcast_to(sequences[:, None], mean.shape), mean, std)


def _distances_of(records: Sequence[HeadRecord]) -> Moments | None:
    heads = len(records)
    count, mean = np.zeros((heads, heads)), np.full((heads, heads), np.nan)
    for at, record in enumerate(records):
        if record.merging is None:
            return None
        held = len(record.merging.distances)
        if held not in (1, heads) or len(record.merging.pairs) != held:
            expected, got = f"distances to {heads} heads", f"{held} and {len(record.merging.pairs)} counts"
            fix = "The file is damaged; run `rankwise audit` again."
            raise RecordError(f"heads of {record.site!r}", expected=expected, got=got, fix=fix)
        to = slice(None) if held == heads else [at]  # one module per head: only the distance to itself
        count[at, to], mean[at, to] = record.merging.pairs, record.merging.distances
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
    nonfinite: int = 0

    def merge(self, other: "StateStatistics") -> None:
        """Add statistics of the same token states over other sequences."""
        for name, moments in self.measures.items():
            moments.merge(other.measures[name])
        self.nonfinite += other.nonfinite

    def to_record(self) -> StateRecord:
        """Return the record of the token states: means and standard deviations over sequences."""
        numbers = {name: moments.to_record() for name, moments in self.measures.items()}
        sequences = int(self.measures["norm"].count[0])
        counts = {name: int(count[0]) for name, (count, _, _) in numbers.items()}
        means: dict[str, Any] = {name: float(mean[0]) for name, (_, mean, _) in numbers.items()}
        return StateRecord(
            **means, stack=self.stack, site=self.site, blocks=self.blocks, hidden_size=self.hidden_size,
            sequences=sequences, nonfinite=self.nonfinite,
            std={name: float(std[0]) for name, (_, _, std) in numbers.items() if name != "tokens"},
            counts={name: count for name, count in counts.items() if 0 < count < sequences},
        )  # fmt: skip

    @classmethod
    def from_record(cls, record: StateRecord) -> "StateStatistics":
        """Restore statistics from a saved record."""
        measures = {}
        for name in STATES:
            count, std = record.counts.get(name, record.sequences), record.std.get(name, math.nan)
            measures[name] = Moments.from_record(*np.array([[count], [getattr(record, name)], [std]]))
        return cls(record.stack, record.site, record.blocks, record.hidden_size, measures, record.nonfinite)


@dataclass
class ModelStatistics:
    """Statistics of all heads and token states of a model."""

    heads: dict[Address, HeadStatistics] = field(default_factory=dict)
    """Statistics of heads by the address of the mixer call."""
    states: dict[tuple[str, int], StateStatistics] = field(default_factory=dict)
    """Statistics of token states by stack and number of blocks passed."""

    def add_heads(self, heads: HeadStatistics, *, attention_maps: bool = True) -> None:
        """Add statistics of a mixer call, merged with earlier statistics of the same call."""
        if (known := self.heads.setdefault(heads.mixer, heads)) is not heads:
            known.merge(heads, attention_maps=attention_maps)

    def add_states(self, states: StateStatistics) -> None:
        """Add statistics of token states, merged with earlier statistics of the same states."""
        if (known := self.states.setdefault((states.stack, states.blocks), states)) is not states:
            known.merge(states)

    def merge(self, other: "ModelStatistics", *, attention_maps: bool = True) -> None:
        """Add statistics of other sequences; objects of ``other`` are reused, not copied."""
        for heads in other.heads.values():
            self.add_heads(heads, attention_maps=attention_maps)
        for states in other.states.values():
            self.add_states(states)

    def head_records(
        self, delta: float, known: Mapping[Address, Mapping[str, Any]] | None = None, audits: int = 1
    ) -> list[HeadRecord]:
        """Return the records of all heads in the order of the model, with the ``known`` fields by address.

        If each head is a separate module (``heads.0``, ``heads.1``), the records get one site ``heads.*``.
        """
        alone = Counter(_pattern(mixer) for mixer, heads in self.heads.items() if len(heads.heads) == 1)
        met: Counter[Address] = Counter()
        records: list[HeadRecord] = []
        for mixer, heads in self.heads.items():
            together = _pattern(mixer)
            for record in heads.to_records(delta, audits):
                fields = dict((known or {}).get(mixer.at(record.head), {}))
                if len(heads.heads) == 1 and alone[together] > 1:
                    fields |= {"site": together.site, "head": met[together]}
                    met[together] += 1
                records.append(record.model_copy(update=fields))
        return records


def _pattern(mixer: Address) -> Address:
    return replace(mixer, site=re.sub(r"\d+(?=\D*$)", "*", mixer.site))


@dataclass
class AuditStatistics(ModelStatistics):
    """Statistics of a model, its origin, and copies at initialization: all that an audit is built from."""

    provenance: Provenance = field(kw_only=True)
    complete: bool = True
    uncaptured: list[UncapturedModule] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    """Tokens of the sequences with attention maps, by name of the model input."""
    importance: Importance | None = None
    built: str = ""
    """Description of how the copies at initialization were built."""
    copies: dict[int, ModelStatistics] = field(default_factory=dict)
    """Statistics of the copies at initialization, by random seed."""

    def merge_audit(self, other: "AuditStatistics") -> None:
        """Add a saved audit of other sequences; take its attention maps if there are none."""
        mapped = any(any(heads.examples.attention_maps) for heads in self.heads.values())
        self.merge(other, attention_maps=not mapped)
        self.texts = self.texts if mapped else other.texts
        self.provenance = joined(self.provenance, other.provenance)
        self.complete = self.complete and other.complete
        self.uncaptured = joined_uncaptured(self.uncaptured, other.uncaptured)
        if self.importance is None or other.importance is None:
            if self.importance is not other.importance:
                self.note("importance left out: not all audits that were merged have it")
            self.importance = None
        else:
            self.importance.merge(other.importance)

    def note(self, text: str) -> None:
        """Add a note to the provenance unless the provenance already has this note."""
        notes = list(dict.fromkeys([*self.provenance.notes, text]))
        self.provenance = self.provenance.model_copy(update={"notes": notes})

    @classmethod
    def from_audit(cls, audit: "Audit") -> "AuditStatistics":
        """Restore statistics from a saved audit, without baseline and required head dimensions."""
        mixers = grouped(audit.heads, lambda record: record.id.at(None))
        delta = audit.provenance.delta
        known = {record.id: record.importance for record in audit.heads if record.importance is not None}
        importance = None if audit.importance is None else Importance(audit.importance, known)
        return cls(
            heads={mixer: HeadStatistics.from_records(records, delta) for mixer, records in mixers.items()},
            states={(one.stack, one.blocks): StateStatistics.from_record(one) for one in audit.states},
            provenance=audit.provenance, complete=audit.complete, uncaptured=audit.uncaptured,
            texts=audit.texts, importance=importance,
        )  # fmt: skip
