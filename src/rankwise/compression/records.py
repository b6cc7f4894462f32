"""What a compression says: plain records, safe to save and to read years later."""

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError

from rankwise._internals.files import write_file
from rankwise._internals.records import Number, Record
from rankwise.errors import InputError, RecordError


class HeadWidth(Record):
    """The width of one key head and of the query heads that read it."""

    part: str
    stack: str
    site: str
    layer: int
    head: int
    """Key head: as many as query heads, but where these are grouped."""
    before: int
    width: int
    kl: Number
    """Nats: mean KL(M‖M') over rows of these heads, closed form, on calibration data; NaN where removed."""
    kl_calibrated: Number
    """After calibration; the same as ``kl`` without."""


class BudgetPoint(Record):
    """Attention KL at one budget."""

    width: Number
    """Mean over key heads."""
    kl: Number
    """Nats: mean KL(M‖M') over rows, heads and layers."""


class BudgetCurve(Record):
    """Attention KL against mean width on the calibration data, before calibration."""

    method: str
    points: list[BudgetPoint]


class LatentRank(Record):
    """The latent out of which one layer reads keys and values."""

    part: str
    site: str
    layer: int
    before: int
    """Channels of keys and values of one token, all key heads together."""
    full: int
    """Rank that loses nothing: the least of ``before`` and the width of tokens."""
    rank: int
    nats: Number
    """Of the KL of the model's outputs, a token, that the rank costs: a prediction to second order."""


class LayerPrice(Record):
    """Costs of one layer; fields that older versions wrote are ignored."""

    model_config = ConfigDict(extra="ignore")

    site: str
    layer: int
    kl: Number
    """Nats: attention KL, each layer given what the original gave it; NaN where its part measures none."""
    output_error: Number = float("nan")
    """‖y' − y‖/‖y‖ of the layer's block in the compressed model, all layers before compressed too."""


class Latency(Record):
    """Milliseconds of one forward pass, median over rounds that take turns."""

    phase: Literal["prefill", "decode"]
    tokens: int
    """Read at once, or already in the cache."""
    before: Number
    after: Number
    ratio: Number = float("nan")
    """Median of after/before over rounds."""
    low: Number
    """10th percentile of after/before over rounds."""
    high: Number
    """90th percentile."""


class Compression(Record):
    """Changes of a model, their costs and their savings; fields that older versions wrote are ignored."""

    model_config = ConfigDict(extra="ignore")

    schema_version: Literal[1] = 1
    model: str
    parts: list[str]
    complete: bool = True
    """Whether calibration ran to its end."""
    sequences: int
    """Sequences of the calibration data."""
    tokens: int
    """Real tokens of the calibration data."""
    figures: str
    """Which data the prices were measured on."""
    heads: list[HeadWidth]
    layers: list[LayerPrice]
    curves: list[BudgetCurve] = Field(default_factory=list)
    latents: list[LatentRank] = Field(default_factory=list)
    kl: Number
    """Nats: mean KL(M‖M') over rows, heads and layers, each layer given what the original gave it; NaN where
    no part that was done measures it."""
    output_kl: Number = float("nan")
    """KL(p‖p′) of the outputs in nats, mean over real tokens of up to 16 sequences, p the original's; NaN if
    the model returns no logits."""
    output_error: Number = float("nan")
    """‖y' − y‖/‖y‖ of what the model gives, end to end."""
    loss_before: Number = float("nan")
    """Mean loss on held-out batches with labels, or of the next token; NaN where the model has none."""
    loss_after: Number = float("nan")
    metric: str = ""
    """Where labels of classes are given: ``accuracy`` of sequences or pictures, or ``token accuracy``."""
    metric_before: Number = float("nan")
    metric_after: Number = float("nan")
    parameters_before: int = 0
    parameters_after: int = 0
    cache_bytes_before: int = 0
    """Of keys and values, for each token; 0 where the model keeps none."""
    cache_bytes_after: int = 0
    latency: list[Latency] = Field(default_factory=list)
    left_out: dict[str, str] = Field(default_factory=dict)
    """Attention layers that could not be done, with the reason."""
    notes: list[str] = Field(default_factory=list)
    about: dict[str, str] = Field(default_factory=dict)

    @property
    def mean_width(self) -> float:
        """Mean width of the key heads that are left; of values where heads were removed and nothing else."""
        widths = [head.width for head in self.heads if head.part != "heads"]
        widths = widths or [head.width for head in self.heads if head.width]
        return sum(widths) / max(len(widths), 1)

    def save(self, path: str | Path) -> Path:
        """Write JSON.

        Args:
            path: the file.

        Raises:
            InputError: if it cannot be written.
        """
        return write_file(path, self.model_dump_json(indent=1), "compression")

    def to_html(self, path: str | Path) -> Path:
        """Write a page that needs nothing else.

        Args:
            path: the file.

        Raises:
            InputError: if it cannot be written.
        """
        from rankwise.report import write_page
        from rankwise.report.compression_report import compression_document

        return write_page(compression_document(self), Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "Compression":
        """Read what `save` wrote.

        Args:
            path: the file, or its folder.

        Raises:
            InputError: if it cannot be read.
            RecordError: if it holds something else.
        """
        path = Path(path) / "compression.json" if Path(path).is_dir() else Path(path)
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(
                f"compression {path}",
                expected="a file that can be read",
                got=error.strerror or str(error),
                fix="Check the path.",
            ) from error
        except (ValidationError, UnicodeDecodeError) as error:
            raise RecordError(
                f"compression {path}",
                expected="what `Compression.save` writes",
                got=str(error).splitlines()[0],
                fix="Compress the model again.",
            ) from error
