"""Modules that mix tokens but were not captured, found by name and by the functions that they call."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.forward import tensors_in
from rankwise.tracing.axes import same_for_all
from rankwise.tracing.explicit_softmax import PRODUCTS, SOFTMAX, matrix_products
from rankwise.tracing.module_calls import ModuleCall, first_tokens, holds
from rankwise.tracing.trace import UncapturedModule

MIXER_NAME = re.compile(
    r"(Attention|SelfAttn|Attn(?![a-z])|Mixer|Mamba|SSM|S4|S4D|StateSpace|Retention|Hyena|RWKV|DeltaNet|LRU"
    r"|Rglru|RNN|LSTM|GRU|FourierTransform|TokenMix|TimeMix|Tmix|ShortConv|SpatialGating)"
)
WITHOUT_OPERATOR = {
    "DeltaNet|DeltaAttention|GatedDelta|KimiDelta": (
        "no reader knows this delta rule, whose operator is a `GatedDeltaMixing`"
    ),
    "RWKV|Rwkv": "no reader knows this RWKV layer, whose weights decay with the distance",
    "MobileViTV2LinearSelfAttention|EfficientAdditiveAttention": (
        "additive attention: one weighted sum over all tokens, which multiplies each token's own vector"
    ),
    "VisionShortConv": (
        "a gated convolution in two dimensions over the patches of a frame: a matrix for each channel, which "
        "no reader knows"
    ),
    "PatchTSMixer": "an MLP across the patches, a nonlinear function of all of them: no matrix mixes them",
    "mLSTM": (
        "the memory of an mLSTM is linear in its values, but is not computed as a matrix in this layer, only "
        "as a state or by a kernel; use the parallel form of the layer"
    ),
    "LSTM|GRU|RNN": "its state goes through a nonlinear function at each token: no matrix mixes its tokens",
}
"""By pattern of class names, the reason why the operator of such layers is not captured."""
NO_OPERATOR = {
    "DeformableAttention$": (
        "deformable attention: each query reads interpolated values at a few places, which are computed from "
        "the query alone; no reader forms the matrix of these interpolations"
    ),
    "^MraSelfAttention$": (
        "multi-resolution attention: scores are exact in a few blocks, and constant within each other block; "
        "no reader forms this matrix"
    ),
    "^LSHSelfAttention$": (
        "hashed attention: tokens are sorted by random hashes, attend within chunks, and rounds of hashes "
        "are averaged; no reader forms the matrix of all rounds"
    ),
    "^YosoSelfAttention$": (
        "its weights are probabilities that hashes of queries and keys collide, and its output rows are "
        "scaled to norm 1; no reader forms its matrix"
    ),
    "^[xm]LSTMBackend$": (
        "the memory of an mLSTM: products of queries and keys that decay, with each row divided by its sum "
        "if the sum is large enough; no reader forms its matrix"
    ),
    "^GroupViTAssignAttention$": (
        "each token is assigned to one group, and a group is the mean of its tokens; no reader forms the "
        "matrix of this assignment"
    ),
}
"""By pattern of class names in `PACKAGES`, the reason why the token mixing of such layers is not read."""
PACKAGES = ("transformers.models.", "mlstm_kernels.")
NOT_A_MIXER = re.compile(
    r"(Output|Dropout|Norm|Mask|Embedding|Bias|Config|Pool(ing|er)|Mlp|MLP|FeedForward|Block|Layer|Model"
    r"|Stack|Structure|Patchify|Scaler)$"
    r"|Channel_?Mix|C[Mm]ix"
)
EMBEDS = re.compile(r"Embed(ding|der)?s?$")
"""Pattern of embedding classes, which may combine several input positions into one token."""
QUERY_KEY = (
    {"q_proj", "k_proj"},
    {"query", "key"},
    {"q_lin", "k_lin"},
    {"to_q", "to_k"},
    {"wq", "wk"},
    {"query_proj", "key_proj"},
)


def looks_like_mixer(module: nn.Module) -> bool:
    """Return True if a module's class name, or query and key projections in it, suggest a mixer."""
    name = type(module).__name__
    if MIXER_NAME.search(name) and not NOT_A_MIXER.search(name):
        return True
    children = {child for child, _ in module.named_children()}
    return any(pair <= children for pair in QUERY_KEY)


def why_no_operator(module: nn.Module) -> str | None:
    """Return why a layer of a known package with its own way to mix tokens cannot be read; None if it can."""
    kind = type(module)
    if not kind.__module__.startswith(PACKAGES):
        return None
    return next((why for pattern, why in NO_OPERATOR.items() if re.search(pattern, kind.__name__)), None)


@dataclass
class Sightings:
    """Observations about the mixers of a running model, by module name."""

    captured: set[str] = field(default_factory=set)
    """Names of modules in which a mixer was captured."""
    left_out: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Pairs (module, reason) of mixers that were not captured; True if a reader could not read the call."""
    other_mixing: dict[str, str] = field(default_factory=dict)
    """By module name, how the module mixed tokens without attention, such as by a convolution."""
    hints: dict[str, str] = field(default_factory=dict)
    """By module name, what the module may mix tokens by, if it looks like a mixer."""

    def leave_out(self, name: str, reason: str, exact: bool = False) -> None:
        """Register the reason why a mixer was not captured; ``exact``: its reader could not read it."""
        self.left_out.setdefault((name, reason), exact)

    def note_function(
        self, calls: Sequence[ModuleCall], func: Any, args: Any, kwargs: Any, out: Any, compares: Any
    ) -> None:
        """Register how a function mixed a running call's tokens; ``compares(out)``: a softmax of Q Kᵀ."""
        for what, read in BY_FUNCTION.get(func, ()):
            lengths = set() if what is ATTENTION and not compares(out) else read(out, *args, **kwargs)
            if what is STATE_SUM and lengths:
                self.hints[calls[-1].name] = what
            if (reader := _whose_tokens(calls, what, lengths)) is not None:
                reader.other_mixing.setdefault(calls[-1].name, what)

    def note_other_mixing(self, call: ModuleCall) -> None:
        """Register the modules that mixed tokens without attention during a finished call.

        They are registered if the call returns one vector for each token that it read. They are not
        registered if a mixer was captured in the call: a short convolution before a scan is a part of the
        mixer. But a block may contain several mixers, so in a block the modules outside of captured mixers
        are registered.
        """
        if not call.other_mixing or (call.mixed_inside and call.block is None):
            return
        tokens, output = call.tokens, first_tokens(call.output)
        if EMBEDS.search(type(call.module).__name__) or tokens is None or output is None:
            return
        if output.is_nested or tokens.shape[:2] != output.shape[:2]:
            return
        for inner, what in call.other_mixing.items():
            if not call.mixed_inside:
                self.other_mixing[call.name] = what
            elif not any(_related(inner, site) for site in self.captured):
                self.other_mixing[inner] = what

    def uncaptured(
        self, model: nn.Module, candidates: set[str], called: set[str]
    ) -> Iterator[UncapturedModule]:
        """Yield the outermost modules that look like mixers, except inside or around captured mixers."""
        known: dict[str, str] = {}
        for (name, reason), _ in sorted(self.left_out.items(), key=itemgetter(1)):
            known.setdefault(name, reason)  # reasons of readers come after others
        candidates = candidates | set(known) | set(self.other_mixing)
        seen = {name for name in candidates if any(_related(name, site) for site in self.captured)}
        outermost: list[str] = []
        for name in sorted(candidates - seen, key=lambda name: (name.count("."), name)):
            if not any(holds(outer, name) for outer in outermost):
                outermost.append(name)
                module = model.get_submodule(name)
                reason = _reason(name, module, called, known, self.other_mixing | self.hints)
                yield UncapturedModule(name, type(module).__name__, reason)


def _whose_tokens(calls: Sequence[ModuleCall], what: str, lengths: set[int]) -> ModuleCall | None:
    """Return the innermost call, outside of `torch.nn`, whose input (B, T, D) a function mixed along T."""
    for call in reversed(calls):
        tokens = call.tokens
        if tokens is None or tokens.is_nested or type(call.module).__module__.startswith("torch.nn."):
            continue
        count, width = tokens.shape[1:]
        if count > 1 and count in lengths and not (what in (LINEAR, CONSTANT) and count == width):
            return call
    return None


def _related(name: str, site: str) -> bool:
    return holds(name, site) or holds(site, name)


def _reason(
    name: str, module: nn.Module, called: set[str], known: Mapping[str, str], others: Mapping[str, str]
) -> str:
    inside = [reason for other, reason in known.items() if holds(name, other)]
    if inside:
        return inside[0]
    if name not in called:
        return "never called in this capture"
    for pattern, reason in WITHOUT_OPERATOR.items():
        if looks_like_mixer(module) and re.search(pattern, type(module).__name__):
            return f"{reason}; name it in `sites=` with a function of your own to capture it"
    does = [what for other, what in others.items() if holds(name, other)]
    if does:
        return (
            f"{' and '.join(dict.fromkeys(does))} was seen in it, which capture does not turn into an "
            "operator; name it in `sites=` with a function of your own to capture it, or write a reader "
            "(CONTRIBUTING.md)"
        )
    return (
        "called, but no softmax attention was seen inside it: a fused kernel, a custom or compiled "
        "operation, or another kind of mixer; name it in `sites=` to capture it, or, if torch.compile "
        "compiled it, such as flex_attention in transformers, capture inside "
        '`with torch.compiler.set_stance("force_eager"):`'
    )


MixedLengths = Callable[..., set[int]]
"""Function (output, *arguments of a torch call) that returns the lengths of the axes that the call mixes."""


def _convolution(out: Tensor, input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> set[int]:
    if prod(weight.shape[2:]) == 1 or input.dim() != weight.dim():
        return set()
    return {prod(input.shape[2:]), prod(out.shape[2:])}


def _shift(out: Tensor, input: Tensor, pad: Sequence[int], *rest: Any, **named: Any) -> set[int]:
    """Return the lengths of axes that `F.pad` shifts: it adds entries on one side, cuts on the other."""
    pairs = zip(pad[::2], pad[1::2], strict=True)
    return {input.shape[-1 - axis] for axis, (left, right) in enumerate(pairs) if left == -right != 0}


def _along(name: str, position: int, default: Any) -> MixedLengths:
    """Return a `MixedLengths` for a torch function whose argument ``name`` lists the mixed axes."""

    def read(out: Tensor, input: Tensor, *args: Any, **named: Any) -> set[int]:
        dims = named.get(name, args[position] if position < len(args) else default)
        axes = range(input.dim()) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
        lengths = [input.shape[axis] for axis in axes]
        return {*lengths, prod(lengths)}

    return read


def _outer_product(out: Tensor, equation: object, *operands: Any, **named: Any) -> set[int]:
    """Return {1} for an einsum that multiplies two vectors of each token to a matrix, K ⊗ V; else {}."""
    inputs, _, result = str(equation).replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    own = set(first) - set(second), set(second) - set(first)
    return {1} if all(own) and set(first + second) == set(result) else set()


def _constant(out: Tensor, *args: Any, **named: Any) -> set[int]:
    """Return the length of the axis that a product sums over, if a factor is the same for every sequence."""
    func = torch.einsum if isinstance(args[0] if args else None, str) else torch.matmul
    for product in matrix_products(func, args, tensors_in((args, named)), out):
        length, states = product.matrix.shape[-1], product.operand
        if states.dim() > 2 and states.shape.count(length) == 1 and same_for_all(product.given, states):
            return {length}
    return set()


def _linear(out: Tensor, input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> set[int]:
    """Return the input width if the last axis may hold tokens, as in the token mixing of an MLP-Mixer."""
    turned = input.dim() > 2 and input.shape[-1] != input.shape[-2]
    return {input.shape[-1]} if turned else set()


LINEAR = "a linear layer over its tokens"
CONSTANT = "a product of its tokens with a matrix that is the same for every sequence"
ATTENTION = "a softmax of products of its tokens, whose weights no captured call multiplies by values,"
STATE_SUM = (
    "a product of keys and values for each token, which a state sums up as in causal linear attention,"
)
CONVOLUTIONS = {torch.conv1d, F.conv1d, torch.conv2d, F.conv2d, torch.conv3d, F.conv3d}
RUNNING = {torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch.logcumsumexp}
FOURIER = "a Fourier transform of its tokens"
FOURIER_PLANES = {torch.fft.fft2, torch.fft.rfft2, torch.fft.fftn, torch.fft.rfftn}
FUNCTIONS: list[tuple[set[Any], str, MixedLengths]] = [
    (CONVOLUTIONS, "a convolution over its tokens", _convolution),
    ({F.avg_pool1d, F.max_pool1d}, "a pooling of its tokens", lambda out, x, *_, **__: {x.shape[-1]}),
    (RUNNING, "a running sum or product along its tokens", _along("dim", 0, -1)),
    ({torch.fft.fft, torch.fft.rfft}, FOURIER, _along("dim", 1, -1)),
    (FOURIER_PLANES, FOURIER, _along("dim", 1, None)),
    ({torch.roll, Tensor.roll}, "a shift of its tokens", _along("dims", 1, None)),
    ({F.pad}, "a shift of its tokens", _shift),
    ({torch.linalg.solve}, "a system of linear equations", lambda out, *_, **__: set(out.shape[-2:-1])),
    (SOFTMAX, ATTENTION, _along("dim", 0, -1)),
    ({F.linear}, LINEAR, _linear),
    (PRODUCTS | {torch.einsum}, CONSTANT, _constant),
    ({torch.einsum}, STATE_SUM, _outer_product),
]
"""Functions that may mix tokens, what they do, and which axes they mix."""
BY_FUNCTION: dict[Any, list[tuple[str, MixedLengths]]] = {
    func: [(what, read) for functions, what, read in FUNCTIONS if func in functions]
    for func in set().union(*(functions for functions, *_ in FUNCTIONS))
}
