"""Record of a compression with its costs and savings. This module does not import torch."""

import math
from typing import ClassVar, Literal

from pydantic import Field

from rankwise._internals.files import SavedRecord
from rankwise._internals.records import Number, Record

CACHE_TOKENS = 4096
"""Number of tokens of the sequence to whose cache a share to keep refers, if the model reads as many."""
KEPT_KEY_BYTES = 2**21
"""Bytes of decoded keys that a cache of latents keeps per layer. All other keys are decoded at each step."""


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


class BlockRemoval(Record):
    """Cost of removing one block, on the calibration data."""

    stack: str
    site: str
    """Name of the block in the original model."""
    layer: int
    cost: Number
    """Increase of the loss if only this block is removed, in the unit of the loss. NaN if it has to stay."""
    step: int = 0
    """Number of the step, from 1, in which the block was removed. 0 if it stays."""
    joint_cost: Number = math.nan
    """Increase of the loss without this block and the blocks of earlier steps. NaN if the block stays."""


class MergedKeys(Record):
    """Key heads of one layer that were merged."""

    stack: str
    site: str
    layer: int
    before: int
    """Number of key heads before the merge."""
    after: int
    """Number of key heads that remain. Each was made from equally many adjacent key heads."""


class LayerCost(Record):
    """Cost of one layer."""

    site: str
    layer: int
    attention_kl: Number
    """Attention KL in nats, on the inputs of the original layer. NaN if no part measures it."""


class WindowCost(Record):
    """Cost of a compression on windows (sequences) of about one length."""

    tokens: int = 0
    """Real tokens of the longest window."""
    windows: int = 0
    loss_before: Number = math.nan
    """Mean loss of labels, or of the next token for language models. NaN if there is neither."""
    loss_added: Number = math.nan
    """Mean increase of this loss."""
    spread: Number = math.nan
    """Standard error of `loss_added`, from its differences between windows. NaN for one window."""
    output_kl: Number = math.nan
    """Mean KL(p‖p′) of outputs in nats over the compared tokens, with p of the original model. The compared
    windows are the first 16, or fewer if these have more than 2,048 tokens. NaN without logits."""
    output_error: Number = math.nan
    """‖y′ − y‖/‖y‖ of the model's outputs on the compared tokens."""
    first_error: Number = math.nan
    """‖y′ − y‖/‖y‖ of the first token of each window alone."""
    other_error: Number = math.nan
    """‖y′ − y‖/‖y‖ of all other tokens. NaN if outputs have no token axis."""

    @property
    def loss_after(self) -> float:
        """Loss of the compressed model."""
        return self.loss_before + self.loss_added

    @property
    def cost(self) -> float:
        """Number by which lengths are compared: `loss_added`, or `output_error` if there is no loss."""
        cost = self.loss_added if math.isfinite(self.loss_before) else self.output_error
        return cost if math.isfinite(cost) else math.inf

    @property
    def relative(self) -> float:
        """Cost as a share of the loss, or of the squared norm of the outputs if there is no loss."""
        if not math.isfinite(self.loss_before):
            return self.cost**2
        return self.cost / abs(self.loss_before or math.nan)

    @property
    def relative_spread(self) -> float:
        """Spread as a share of the loss. NaN for one window, 0 without a loss."""
        return self.spread / abs(self.loss_before or math.nan) if math.isfinite(self.loss_before) else 0.0


class CacheSize(Record):
    """Bytes of the cached keys and values of one sequence. Windows are counted as they are kept."""

    tokens: int
    before: int
    after: int
    kept_keys: int = 0
    """Bytes of decoded keys that stay next to the latents of one sequence."""


PAYS_COST, PAYS_SIZE, PAYS_TIME = 0.01, 0.95, 0.9
"""A way pays if it adds at most this share to the loss, two standard errors included, or to the squared norm
of the outputs without a loss, and leaves at most this share of a size, or of the time. Measured times vary by
several percent."""


class PreviewRow(Record):
    """Cost and sizes of one way to make a model smaller, or the reason why it is refused."""

    part: str = ""
    """Part of `compress`. Empty for a quantized cache."""
    keep: Number = math.nan
    uniform: bool = False
    """True if as many heads are removed from each layer."""
    bits: int = 0
    """Bits of keys and values, or of latents, which are simulated. 0 if they are not quantized."""
    cost: WindowCost = Field(default_factory=WindowCost)
    """Largest cost over lengths."""
    parameters: int = 0
    cache_bytes: int = 0
    kept_keys: int = 0
    """Bytes of decoded keys that stay next to the latents of one sequence."""
    time: Number = math.nan
    """Time of a decoding step or of a pass, relative to the original. NaN if it was not measured."""
    refused: str = ""


class Preview(Record):
    """Costs and sizes of all ways to make a model smaller, on the same data."""

    model: str
    measured_on: str
    cache_tokens: int
    """Tokens of the sequence whose cache is counted."""
    parameters: int
    """Parameters of the original."""
    cache_bytes: int
    """Bytes of the cache of the original. 0 without a cache."""
    windowed: bool = False
    """True if a layer keeps a window, which is not quantized. `QuantizedCache` refuses such models."""
    rows: list[PreviewRow] = Field(default_factory=list)

    def recommended(self, purpose: Literal["memory", "size", "speed"]) -> PreviewRow | None:
        """Return the row with the least cache, parameters or time among those that pay. None if none pays.

        Left out are latents in 8 bits, which no cache implements, and keys and values of fewer than 8 bits:
        these rows quantize keys by channel. Caches of transformers, which can do so for some lengths only,
        lose little more by token with 8 bits, and can lose far more with fewer.
        """
        before = {"memory": self.cache_bytes, "size": self.parameters, "speed": 1.0}[purpose]

        def size(row: PreviewRow) -> float:
            return {"memory": row.cache_bytes + row.kept_keys, "size": row.parameters, "speed": row.time}[
                purpose
            ]

        paying = [
            row
            for row in self.rows
            if not row.refused and row.bits in ((0,) if row.part else (8,))
            if row.cost.relative + 2 * row.cost.relative_spread <= PAYS_COST
            if 0 < size(row) <= (PAYS_TIME if purpose == "speed" else PAYS_SIZE) * before
        ]
        return min(paying, key=lambda row: (size(row), row.cost.cost), default=None)


class Compression(SavedRecord):
    """Changes of a model, their costs and their savings."""

    _command: ClassVar[str] = "compress"

    format: Literal["rankwise-compression"] = "rankwise-compression"
    schema_version: Literal[5] = 5
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
    blocks: list[BlockRemoval] = Field(default_factory=list)
    """Costs of blocks, if the part ``blocks`` was done. Then other sites have names of the smaller model."""
    merged: list[MergedKeys] = Field(default_factory=list)
    attention_kl: Number
    """Attention KL(M‖M′) in nats, mean over rows, heads and layers. NaN if no part measures it."""
    costs: list[WindowCost] = Field(default_factory=list)
    """Costs by length of windows, shortest first."""
    parameters_before: int = 0
    parameters_after: int = 0
    cache: list[CacheSize] = Field(default_factory=list)
    """Cache at 1,024, 4,096 and the largest number of tokens that the model reads. Empty without a cache."""
    quantized: list[PreviewRow] = Field(default_factory=list)
    """The original with keys and values of 8 and 4 bits. Empty without latents."""
    timed: str = ""
    """Timed work: "decoding step after N tokens" or "pass". Empty if time was not measured."""
    seconds_before: Number = math.nan
    """Seconds of the original in its fastest round. Both models take turns."""
    seconds_after: Number = math.nan
    left_out: dict[str, str] = Field(default_factory=dict)
    """Attention layers that could not be compressed, each with the reason."""
    notes: list[str] = Field(default_factory=list)
    about: dict[str, str] = Field(default_factory=dict)
    """Command, time, versions and machine."""

    @property
    def worst(self) -> WindowCost:
        """Cost at the length of windows with the largest cost."""
        return max(self.costs, key=lambda cost: cost.cost, default=WindowCost())

    @property
    def kept_cache(self) -> CacheSize:
        """Cache to which the share to keep refers: of 4,096 tokens, or the most that the model reads."""
        sizes = [size for size in self.cache if size.tokens <= CACHE_TOKENS]
        return sizes[-1] if sizes else CacheSize(tokens=0, before=0, after=0)
