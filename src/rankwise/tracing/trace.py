"""What one run of a model showed."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.operators import MixingOperator
from rankwise.tracing.head_id import CallId, HeadId

UNNUMBERED = CallId("", 0)


@dataclass(frozen=True)
class MixerSite:
    """One call of one mixer: the operator it applied and the tokens that are real."""

    name: str
    """Module that mixed, such as ``encoder.layer.0.attention.self``."""
    layer: int
    """Block of its stack, from 0: it reads token state ``layer`` and writes ``layer + 1``."""
    kind: str
    """softmax, semiseparable, selective, toeplitz, linear or diagonal."""
    operator: MixingOperator
    """Shape (B, H, T, S)."""
    valid_tokens: Bool[Tensor, "B T"]
    """False where a row belongs to padding."""
    valid_sources: Bool[Tensor, "B S"]
    """False where a column belongs to padding."""
    stack: str = ""
    """The blocks it belongs to, such as ``encoder.layer``."""
    cross: bool = False
    """Whether queries and keys come from different sequences."""
    sequences: int = 0
    """Sequences in the batch axis: fewer than B where one sequence gives several windows."""
    forward_pass: int = 0
    """Number of the forward pass in the capture, from 0."""
    call: int = 0
    """Number of the call among the calls of the module in its layer and forward pass, from 0."""
    call_id: CallId = UNNUMBERED
    """Call of the module in the run of the model, as interventions name it."""
    values: Float[Tensor, "B Hv S V"] | None = None
    """What the operator was applied to, if asked for."""
    output: Float[Tensor, "B H T V"] | None = None
    """What the model itself got from it, if asked for and visible."""
    apply_output: Callable[[Tensor], Tensor] | None = None
    """From ``operator @ values`` to what a state-space layer gave: its D-term, gate, norm and output
    projection; kept with the values."""
    projection: Float[Tensor, "B H T K"] | None = None
    """Tokens in the subspaces of the heads, of mixers that have them: what TSSA takes its statistics of."""

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
    """Block that wrote it; for layer 0 the block that reads it."""
    layer: int
    """Blocks that have run before it: 0 is the embedding output."""
    tokens: Float[Tensor, "B T D"]
    mask: Bool[Tensor, "B T"] | None = None
    """False where a token is padding; None where nothing is known to be."""
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
    """Mixing operators and token states of the forward passes of one `capture`, in the order they ran."""

    mixers: list[MixerSite] = field(default_factory=list)
    states: list[StateSite] = field(default_factory=list)
    uncaptured: list[UncapturedModule] = field(default_factory=list)
    """Filled when the capture ends."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know: dropout was on, the model was compiled, …"""

    def __repr__(self) -> str:
        return (
            f"Trace({len(self.mixers)} mixers, {len(self.states)} states, {len(self.uncaptured)} uncaptured)"
        )
