"""Records of a capture: mixers, token states, modules that were not captured."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.operators import MixingOperator
from rankwise.tracing.head_id import CallId, HeadId

UNNUMBERED = CallId("", 0)


@dataclass(frozen=True)
class MixerSite:
    """A call of a mixer: the operator that it applied, and which tokens are real."""

    name: str
    """Module that mixes tokens, such as ``encoder.layer.0.attention.self``."""
    layer: int
    """Number of its block in the stack, from 0: it reads token state ``layer`` and writes ``layer + 1``."""
    kind: str
    """softmax, semiseparable, selective, toeplitz, linear or diagonal."""
    operator: MixingOperator
    """Shape (B, H, T, S)."""
    valid_tokens: Bool[Tensor, "B T"]
    """False for rows of padding."""
    valid_sources: Bool[Tensor, "B S"]
    """False for columns of padding."""
    stack: str = ""
    """Stack of blocks that contains it, such as ``encoder.layer``."""
    cross: bool = False
    """True if queries and keys come from different sequences."""
    sequences: int = 0
    """Number of sequences in the batch axis: fewer than B if a sequence is cut into several windows."""
    forward_pass: int = 0
    """Number of the forward pass in the capture, from 0."""
    call: int = 0
    """Number of the call among the calls of the module in its layer and forward pass, from 0."""
    call_id: CallId = UNNUMBERED
    """Call of the module in the run of the model, as interventions name it."""
    values: Float[Tensor, "B Hv S V"] | None = None
    """Input of the operator, if requested."""
    output: Float[Tensor, "B H T V"] | None = None
    """Output of the operator in the model itself, if requested and visible."""
    apply_output: Callable[[Tensor], Tensor] | None = None
    """Function from ``operator @ values`` to the output of a state-space layer: its D-term, gate, norm and
    output projection. Set only if values are kept.
    """
    projection: Float[Tensor, "B H T K"] | None = None
    """Tokens in the subspaces of the heads, from which TSSA computes its statistics."""

    def head_id(self, head: int | None = None) -> HeadId:
        """Return the address of a head of this call; None addresses the call itself."""
        return HeadId(self.stack, self.layer, self.name, self.call, head)

    def __repr__(self) -> str:
        shape = tuple(self.operator.shape)
        return f"MixerSite({self.name!r}, layer {self.layer}, {self.kind}, operator {shape})"


@dataclass(frozen=True)
class StateSite:
    """The residual stream after ``layer`` blocks of a stack."""

    name: str
    """Block that wrote the state; for layer 0, the block that reads it."""
    layer: int
    """Number of blocks that have run before it: 0 is the output of the embedding."""
    tokens: Float[Tensor, "B T D"]
    mask: Bool[Tensor, "B T"] | None = None
    """False for padding; None if no padding is known."""
    stack: str = ""
    forward_pass: int = 0

    def __repr__(self) -> str:
        return f"StateSite({self.name!r}, layer {self.layer}, tokens {tuple(self.tokens.shape)})"


@dataclass(frozen=True)
class UncapturedModule:
    """A module that looks like a mixer and was not captured."""

    name: str
    type: str
    reason: str


@dataclass
class Trace:
    """Mixing operators and token states of the forward passes in a `capture`, in the order of the model."""

    mixers: list[MixerSite] = field(default_factory=list)
    states: list[StateSite] = field(default_factory=list)
    uncaptured: list[UncapturedModule] = field(default_factory=list)
    """Filled when the capture ends."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader: dropout was on, the model was compiled, …"""

    def __repr__(self) -> str:
        return (
            f"Trace({len(self.mixers)} mixers, {len(self.states)} states, {len(self.uncaptured)} uncaptured)"
        )
