"""What a plan says: plain records, safe to save and to read years later."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from rankwise._internals.files import write_file
from rankwise.auditing.records import Number, Record
from rankwise.errors import InputError, RecordError


class LayerCurve(Record):
    """Rank of one layer's heads against their query/key width, at random weights."""

    layer: int
    """From 1: it reads the token states that came in, layer 2 what one random block made of them."""
    points: list[tuple[int, Number, Number]] = Field(min_length=1)
    """(K, mean rank/T, standard deviation of rank/T over trials), K ascending."""
    head_dim: int
    """K*, from which on a unit of width adds less than the tolerance; the widest tried where none does."""
    interval: tuple[int, int]
    """95 % bootstrap interval of K* over trials."""
    saturated: bool
    """Whether the gain fell below the tolerance for good within the widths tried."""
    fall: tuple[int, int, Number] | None = None
    """(K, K', lost rank/T): the largest fall of the mean that chance does not explain; None: monotone."""

    def share_at(self, head_dim: int) -> float:
        """Rank/T at a width, linear between those tried (`tried`); NaN below and above all of them."""
        points = self.points
        for (low, before, _), (high, after, _) in pairwise(points):
            if low <= head_dim <= high:
                return before + (after - before) * (head_dim - low) / (high - low)
        return float("nan")

    def tried(self, head_dim: int) -> bool:
        """Whether rank was counted at this very width."""
        return any(width == head_dim for width, _, _ in self.points)


class LogLaw(Record):
    """K* = intercept + slope·ln T, fitted to simulated lengths."""

    points: list[tuple[int, int, int, int]]
    """(T, K*, lower and upper end of its 95 % bootstrap interval)."""
    intercept: Number
    slope: Number
    residuals: list[Number]
    """K* less the line, for each length."""
    explained: Number
    """R², the share of the variance of K* that the line explains."""
    half: list[Number] = Field(default_factory=list)
    """Width at which rank/T reaches half of the barrier, for each length: another reading of saturation."""
    unsaturated: list[int] = Field(default_factory=list)
    """Lengths left out: their gain stayed above the tolerance at every width tried."""
    notes: list[str] = Field(default_factory=list)
    """Where K* falls as T grows, and whether the intervals allow that it does not."""


class Option(Record):
    """One setting of an attention layer, and what it costs."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    rank_share: Number
    """Mean rank/T of one head at random weights; NaN for a width outside those tried."""
    rank_sum: Number
    """Heads × rank/T: all heads together, in units of T."""
    interpolated: bool = False
    """Whether both ranks are interpolated between the next widths tried."""
    parameters: int
    """Of the four projections of one layer, without biases."""
    flops: int
    """Multiplications and additions of one layer and one sequence of T tokens."""
    cache_bytes: int
    """Of keys and values of one layer and token, at 2 bytes a number."""
    prefill_ms: Number = float("nan")
    """Median time of the layer on ``latency_tokens`` tokens, float32."""
    decode_ms: Number = float("nan")
    """Median time of one more token on as many cached ones."""
    padded: bool = False
    """Whether narrower queries and keys (or values) were filled up with zeros because that was faster."""


class TrainedHead(Record):
    """What one head of a trained model uses of its width: measured, on the tokens given."""

    stack: str
    layer: int
    """Block of its stack, from 0."""
    head: int
    width: int
    """K of its queries and keys."""
    needed: int
    """Least width whose best logits keep the attention within ``tolerance`` nats (KL)."""
    effective_rank: Number
    """Of its attention matrix, in [1, T]."""
    tokens: Number


class HeadDimPlan(Record):
    """A head width to train with, and what it rests on: a statement about random weights.

    ``curve`` is [(K, mean rank/T, std)] of the layer that decides: that with the largest K*.
    """

    format: Literal["rankwise-plan"] = "rankwise-plan"
    schema_version: Literal[1] = 1
    complete: bool = True
    """False where it was stopped before all trials or parts were done."""
    tokens: int
    mask: str
    tolerance: float
    barrier: Number
    """`rankwise.theory.rank_barrier`: the expected rank of hardmax with uniform winners, not divided by T."""
    inputs: str
    """Orthonormal, gaussian, or in words what was given."""
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    value_dim: int | None = None
    positions: str = "none"
    block: str = "pre"
    temperature: float = 0.0
    """In units of √K; 0 is hardmax."""
    delta: float = 1e-2
    trials: int
    seed: int = 0
    layers: list[LayerCurve] = Field(min_length=1)
    law: LogLaw | None = None
    options: list[Option] = Field(default_factory=list)
    fixed_width: list[Option] = Field(default_factory=list)
    """Heads × width at fixed D = H·K."""
    latency_tokens: int = 0
    recommended: dict[str, int] = Field(default_factory=dict)
    """Values of a Hugging Face configuration."""
    reason: str = ""
    trained: list[TrainedHead] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    about: dict[str, str] = Field(default_factory=dict)
    """Command, time, versions, device."""

    @property
    def deciding(self) -> LayerCurve:
        """The layer that needs the widest heads."""
        return max(self.layers, key=lambda layer: layer.head_dim)

    @property
    def head_dim(self) -> int:
        """K* of the deciding layer."""
        return self.deciding.head_dim

    @property
    def interval(self) -> tuple[int, int]:
        """Its 95 % bootstrap interval."""
        return self.deciding.interval

    @property
    def saturated(self) -> bool:
        """Whether every layer's gain fell below the tolerance within the widths tried."""
        return all(layer.saturated for layer in self.layers)

    @property
    def curve(self) -> list[tuple[int, float, float]]:
        """(K, mean rank/T, std) of the deciding layer."""
        return self.deciding.points

    def save(self, path: str | Path) -> Path:
        """Write it as JSON; for an existing folder, as ``plan.json`` in it.

        Raises:
            InputError: if it cannot be written.
        """
        path = Path(path)
        path = path / "plan.json" if path.is_dir() else path
        return write_file(path, self.model_dump_json(indent=1) + "\n", "plan")

    @classmethod
    def load(cls, path: str | Path) -> "HeadDimPlan":
        """Read what `save` wrote: the file, or the folder that holds ``plan.json``.

        Raises:
            InputError: if there is no such file.
            RecordError: if it is no plan.
        """
        path = Path(path)
        path = path / "plan.json" if path.is_dir() else path
        try:
            return cls.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise InputError(
                f"plan {path}",
                expected="a file written by `rankwise plan`",
                got=error.strerror or str(error),
                fix="Check the path.",
            ) from None
        except (ValidationError, ValueError, RecursionError) as error:
            raise RecordError(
                f"plan {path}",
                expected="a file written by `rankwise plan`, schema version 1",
                got=str(error).splitlines()[0][:200],
                fix="Run `rankwise plan` again.",
            ) from None

    def to_html(self, path: str | Path) -> Path:
        """Write the page: one file that needs nothing else; for a folder, ``index.html`` in it.

        Raises:
            InputError: if it cannot be written.
        """
        from rankwise.report import write_page
        from rankwise.report.plan_report import plan_document

        return write_page(plan_document(self), Path(path))
