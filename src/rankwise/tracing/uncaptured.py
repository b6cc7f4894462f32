"""Modules that mix tokens but were not captured, found by name and by the functions that they call."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.tracing.module_calls import ModuleCall, first_tokens, holds
from rankwise.tracing.trace import UncapturedModule

MIXER_NAME = re.compile(
    r"(Attention|SelfAttn|Attn(?![a-z])|Mixer|Mamba|SSM|S4|S4D|StateSpace|Retention|Hyena|RWKV|DeltaNet|LRU"
    r"|Rglru|RNN|LSTM|GRU|FourierTransform|TokenMix|TimeMix|Tmix|ShortConv|SpatialGating)"
)
NO_OPERATOR = re.compile(
    "DeformableAttention$|^(Mra|LSH|Yoso)SelfAttention$|^[xm]LSTMBackend$|^GroupViTAssignAttention$"
)
"""Pattern of classes in `PACKAGES` whose products are only steps of another computation, such as hashing."""
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


def has_no_operator(module: nn.Module) -> bool:
    """Return True for a layer of a known package that mixes tokens, but not by one readable matrix."""
    kind = type(module)
    return kind.__module__.startswith(PACKAGES) and NO_OPERATOR.search(kind.__name__) is not None


@dataclass
class Sightings:
    """Observations about the mixers of a running model, by module name."""

    captured: set[str] = field(default_factory=set)
    """Names of modules in which a mixer was captured."""
    left_out: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Keys (module, reason) of mixers that were not captured. The value is True for a reader's reason."""
    other_mixing: dict[str, str] = field(default_factory=dict)
    """By module name, the name of the torch function that mixed tokens without attention."""

    def leave_out(self, name: str, reason: str, exact: bool = False) -> None:
        """Register why a mixer was not captured. ``exact`` is True if a reader could not read its call."""
        self.left_out.setdefault((name, reason), exact)

    def note_function(self, calls: Sequence[ModuleCall], func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Register a convolution or a linear layer that mixed the tokens of a running call."""
        if func in CONVOLUTIONS or func is F.linear:
            lengths = _mixed_lengths(out, *args, **kwargs)
            call = _whose_tokens(calls, lengths, linear=func is F.linear)
            if call is not None:
                call.other_mixing.setdefault(calls[-1].name, func.__name__)

    def note_other_mixing(self, call: ModuleCall) -> None:
        """Register where a finished call mixed tokens without attention.

        The call must return one vector for each token that it read. If no mixer was captured inside the call,
        register the module of the call. If mixers were captured inside a block, register each mixing module
        that is neither inside nor around a captured mixer. Otherwise register nothing: the mixing, such as a
        short convolution before a scan, belongs to the captured mixer.
        """
        if not call.other_mixing or (call.mixed_inside and call.block is None):
            return
        tokens, output = call.tokens, first_tokens(call.output)
        if EMBEDS.search(type(call.module).__name__) or tokens is None or output is None:
            return
        if output.is_nested or tokens.shape[:2] != output.shape[:2]:
            return
        for inner, function in call.other_mixing.items():
            if not call.mixed_inside:
                self.other_mixing[call.name] = function
            elif not any(_related(inner, site) for site in self.captured):
                self.other_mixing[inner] = function

    def uncaptured(
        self, model: nn.Module, candidates: set[str], called: set[str]
    ) -> Iterator[UncapturedModule]:
        """Yield the outermost modules that look like mixers, except inside or around captured mixers."""
        reasons: dict[str, str] = {}
        for (name, reason), _ in sorted(self.left_out.items(), key=itemgetter(1)):
            reasons.setdefault(name, reason)  # a reader's reason counts only without another reason
        candidates = candidates | set(reasons) | set(self.other_mixing)
        seen = {name for name in candidates if any(_related(name, site) for site in self.captured)}
        outermost: list[str] = []
        for name in sorted(candidates - seen, key=lambda name: (name.count("."), name)):
            if not any(holds(outer, name) for outer in outermost):
                outermost.append(name)
                kind = type(model.get_submodule(name)).__name__
                yield UncapturedModule(name, kind, self._reason(name, called, reasons))

    def _reason(self, name: str, called: set[str], reasons: Mapping[str, str]) -> str:
        inside = [reason for other, reason in reasons.items() if holds(name, other)]
        if inside:
            return inside[0]
        if name not in called:
            return "never called in this capture"
        functions = {function for other, function in self.other_mixing.items() if holds(name, other)}
        return MIXES_BY.format(" and ".join(sorted(functions))) if functions else NOTHING_SEEN


MIXES_BY = (
    "`{}` mixes its tokens, which capture does not turn into an operator; name it in `sites=` with a "
    "function of your own to capture it, or write a reader (CONTRIBUTING.md)"
)
NOTHING_SEEN = (
    "called, but no attention was seen inside it: a recurrent layer, a fused kernel, a custom or compiled "
    "operation, or another kind of mixer; name it in `sites=` with a function of your own to capture it, or, "
    "if torch.compile compiled it, such as flex_attention in transformers, capture inside "
    '`with torch.compiler.set_stance("force_eager"):`'
)


def _related(name: str, site: str) -> bool:
    return holds(name, site) or holds(site, name)


def _whose_tokens(calls: Sequence[ModuleCall], lengths: set[int], linear: bool) -> ModuleCall | None:
    """Return the innermost call, outside of `torch.nn`, whose input (B, T, D) a function mixed along T."""
    for call in reversed(calls):
        tokens = call.tokens
        if tokens is None or tokens.is_nested or type(call.module).__module__.startswith("torch.nn."):
            continue
        count, width = tokens.shape[1:]
        if count > 1 and count in lengths and not (linear and count == width):
            return call
    return None


CONVOLUTIONS = {torch.conv1d, F.conv1d, torch.conv2d, F.conv2d, torch.conv3d, F.conv3d}


def _mixed_lengths(out: Tensor, input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> set[int]:
    """Return the lengths of the axes that a convolution or a linear layer mixes, and that may be tokens."""
    if weight.dim() == 2:  # an MLP-Mixer swaps channels and tokens, so that a linear layer mixes tokens
        return {input.shape[-1]} if input.dim() > 2 and input.shape[-1] != input.shape[-2] else set()
    if prod(weight.shape[2:]) == 1 or input.dim() != weight.dim():
        return set()
    return {prod(input.shape[2:]), prod(out.shape[2:])}
