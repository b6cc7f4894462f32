"""Record of a compression with its costs and savings. This module does not import torch."""

import math
from typing import ClassVar, Literal

from pydantic import Field

from rankwise._internals.files import SavedRecord
from rankwise._internals.records import Number, Record
from rankwise._internals.statistics import mean


class HeadWidth(Record):
    """Width of one key head and of the query heads that read it."""

    part: str
    stack: str
    site: str
    layer: int
    head: int
    """Number of the key head in the original model. For the part ``heads``, number of the query head."""
    before: int
    width: int
    """Remaining width K. 0 if the head was removed."""
    kl: Number
    """Mean KL(M‖M′) over rows in nats, before calibration, on the calibration data. NaN if removed."""
    kl_calibrated: Number
    """Mean KL(M‖M′) after calibration. Equal to ``kl`` without calibration."""


class LatentRank(Record):
    """Rank of the latent from which a layer computes its keys and values."""

    part: str
    site: str
    layer: int
    channels: int
    """Channels of the keys and values of one token, all key heads together."""
    full_rank: int
    """Smallest rank that loses nothing: the minimum of ``channels`` and the width of tokens."""
    rank: int
    output_kl: Number
    """Output KL in nats per token due to this layer, predicted to second order on the calibration data."""


class MergedKeys(Record):
    """Key heads of one layer that were merged."""

    stack: str
    site: str
    layer: int
    groups: list[list[int]]
    """Numbers of the original key heads that became one, in the order of the new key heads."""
    key_error: Number
    """Relative error of logits, ‖L′ − L‖/‖L‖ over all pairs of calibration tokens, before positions."""
    value_error: Number
    """Relative error of the contributions of values to the output, before the least squares."""


class LayerCost(Record):
    """Cost of one layer."""

    site: str
    layer: int
    attention_kl: Number
    """Attention KL in nats, on the inputs of the original layer. NaN if no part measures it."""


class Compression(SavedRecord):
    """Changes of a model, their costs and their savings."""

    _command: ClassVar[str] = "compress"

    format: Literal["rankwise-compression"] = "rankwise-compression"
    schema_version: Literal[3] = 3
    model: str
    parts: list[str]
    sequences: int
    """Sequences of the calibration data."""
    tokens: int
    """Real tokens of the calibration data."""
    measured_on: str
    """Data on which costs were measured: "held-out data" or "the calibration data"."""
    heads: list[HeadWidth]
    layers: list[LayerCost]
    latents: list[LatentRank] = Field(default_factory=list)
    merged: list[MergedKeys] = Field(default_factory=list)
    attention_kl: Number
    """Attention KL(M‖M′) in nats, mean over rows, heads and layers. NaN if no part measures it."""
    output_kl: Number = math.nan
    """Mean KL(p‖p′) of outputs in nats over real tokens of up to 16 sequences, with p of the original model.
    NaN if the model returns no logits."""
    output_error: Number = math.nan
    """‖y′ − y‖/‖y‖ of the model's outputs on the first batch."""
    loss_before: Number = math.nan
    """Mean loss of labels, or of the next token for language models. NaN if there is neither."""
    loss_after: Number = math.nan
    parameters_before: int = 0
    parameters_after: int = 0
    cache_bytes_before: int = 0
    """Bytes of cached keys and values per token. 0 if the model has no cache."""
    cache_bytes_after: int = 0
    timed: str = ""
    """What was timed: "decoding step after N tokens" or "pass". Empty if time was not measured."""
    seconds_before: Number = math.nan
    """Median seconds of the original, over rounds in which both models take turns."""
    seconds_after: Number = math.nan
    left_out: dict[str, str] = Field(default_factory=dict)
    """Attention layers that could not be compressed, each with the reason."""
    notes: list[str] = Field(default_factory=list)
    about: dict[str, str] = Field(default_factory=dict)
    """Command, time, versions and machine."""

    @property
    def mean_width(self) -> float:
        """Mean width of key heads. If only heads were removed, mean width of the remaining heads.

        0 if there are no widths.
        """
        widths = [head.width for head in self.heads if head.part != "heads"]
        widths = widths or [head.width for head in self.heads if head.width]
        return mean(widths) if widths else 0.0
