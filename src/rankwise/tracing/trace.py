"""Results of a capture: mixers, token states, and modules that were not captured."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Bool, Float
from torch import Tensor

from rankwise._internals.records import Address, UncapturedModule
from rankwise.errors import strip_control
from rankwise.operators import MixingOperator
from rankwise.tracing.module_calls import CallId

UNNUMBERED = CallId("", 0)


@dataclass(frozen=True)
class CapturedMixer:
    """One call of a mixer (a module that mixes tokens): its operator (mixing matrix) and padding masks."""

    name: str
    """Name of the module, such as ``encoder.layer.0.attention.self``."""
    layer: int
    """Index of the block in the stack, from 0. The block reads state ``layer`` and writes ``layer + 1``."""
    kind: str
    """Kind of operator, such as softmax, semiseparable, selective, toeplitz, linear or diagonal."""
    operator: MixingOperator
    """Mixing matrices (B, H, T, S): B sequences, H heads, T rows (tokens), S columns (sources)."""
    valid_tokens: Bool[Tensor, "B T"]
    """True for rows of real tokens, False for padding."""
    valid_sources: Bool[Tensor, "B S"]
    """True for columns of real tokens, False for padding."""
    stack: str = ""
    """Name of the stack (chain of blocks) that contains the module, such as ``encoder.layer``."""
    cross: bool = False
    """True if queries and keys come from different sequences."""
    sequences: int = 0
    """Number of sequences in the batch; smaller than B if each sequence is cut into windows."""
    forward_pass: int = 0
    """Index of the forward pass in the capture, from 0."""
    call: int = 0
    """Index of this call among the module's calls in the same layer and forward pass, from 0. Windows of
    tokens that one module call mixes one by one, in a loop, have the same index."""
    window_of: int | None = None
    """Serial number of the module call if the operator has fewer rows than the call has tokens, else None."""
    call_id: CallId = UNNUMBERED
    """Address of the call, unique in a forward pass; an `Intervention` receives this address too."""
    values: Float[Tensor, "B Hv S V"] | None = None
    """Values V that the operator mixes. None if they are unknown, or `capture` has ``values=False``."""
    output: Float[Tensor, "B H T V"] | None = None
    """Product M V as the model computed it. None if ``values=False``, or a fused layer hides the product."""
    apply_output: Callable[[Tensor], Tensor] | None = None
    """Function that maps ``operator @ values`` to the output of a state-space layer: skip D·x, gate, norm and
    output projection. None for other layers, or if ``values=False``.
    """
    projection: Float[Tensor, "B H T K"] | None = None
    """Tokens projected to the subspace of each head; only for token statistics self-attention (TSSA)."""

    def address(self, head: int | None = None) -> Address:
        """Return the address of a head of this call, or of the whole call if ``head`` is None."""
        return Address(self.stack, self.layer, self.name, self.call, head)

    def __repr__(self) -> str:
        kind, shape = strip_control(self.kind), tuple(self.operator.shape)
        return f"CapturedMixer({self.name!r}, layer {self.layer}, {kind}, operator {shape})"


@dataclass(frozen=True)
class CapturedState:
    """Token states: the residual stream (B, T, D) after ``layer`` blocks of a stack."""

    name: str
    """Name of the block that wrote the state; for layer 0, name of the first block, which reads the state."""
    layer: int
    """Number of blocks of the stack that ran before; state 0 is the output of the embedding."""
    tokens: Float[Tensor, "B T D"]
    mask: Bool[Tensor, "B T"] | None = None
    """True for real tokens, False for padding. None if no padding is known."""
    stack: str = ""
    forward_pass: int = 0

    def __repr__(self) -> str:
        return f"CapturedState({self.name!r}, layer {self.layer}, tokens {tuple(self.tokens.shape)})"


@dataclass
class Trace:
    """Mixers and token states of all forward passes in a `capture`, in the order in which they ran."""

    mixers: list[CapturedMixer] = field(default_factory=list)
    states: list[CapturedState] = field(default_factory=list)
    uncaptured: list[UncapturedModule] = field(default_factory=list)
    """Modules that look like mixers but were not captured; filled when the capture ends."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user, such as that dropout was active or that no token states were found."""

    def __repr__(self) -> str:
        return (
            f"Trace({len(self.mixers)} mixers, {len(self.states)} states, {len(self.uncaptured)} uncaptured)"
        )
