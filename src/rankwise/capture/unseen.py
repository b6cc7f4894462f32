"""Modules that look like mixers, so that what was not captured can be named."""

import re
from collections.abc import Mapping

from torch import nn

from rankwise.capture.trace import UnseenModule

MIXER_NAME = re.compile(
    r"(Attention|SelfAttn|Attn(?![a-z])|Mixer|Mamba|SSM|S4|S4D|StateSpace|Retention|Hyena|RWKV|DeltaNet|LRU"
    r"|Rglru|RNN|LSTM|GRU|FourierTransform|TokenMix|SpatialGating)"
)
WITHOUT_OPERATOR = (
    (
        re.compile("DeltaNet|DeltaAttention|GatedDelta|KimiDelta"),
        "the delta rule multiplies its state by a matrix at each token, which no kind of operator here holds",
    ),
    (
        re.compile("RWKV|Rwkv"),
        "each row of its weights is divided by a decaying sum of them, which no kind of operator here holds",
    ),
    (
        re.compile("LSTM|GRU|RNN"),
        "its state goes through a nonlinear function at each token: no matrix mixes its tokens",
    ),
)
"""Classes of layers of which it is known that capture has no operator for them, with the reason."""
NOT_A_MIXER = re.compile(
    r"(Output|Dropout|Norm|Mask|Embedding|Bias|Config|Pool(ing|er)|Mlp|MLP|Block|Layer|Model|Structure)$"
)
QUERY_KEY = (
    {"q_proj", "k_proj"},
    {"query", "key"},
    {"q_lin", "k_lin"},
    {"to_q", "to_k"},
    {"wq", "wk"},
    {"query_proj", "key_proj"},
)


def looks_like_mixer(module: nn.Module) -> bool:
    """Whether a module's class name or its query and key projections say that it mixes tokens."""
    name = type(module).__name__
    if MIXER_NAME.search(name) and not NOT_A_MIXER.search(name):
        return True
    children = {child for child, _ in module.named_children()}
    return any(pair <= children for pair in QUERY_KEY)


def mixer_like(model: nn.Module) -> set[str]:
    """Names of the modules of a model that look like mixers."""
    return {name for name, module in model.named_modules() if name and looks_like_mixer(module)}


def unseen_modules(
    model: nn.Module, candidates: set[str], captured: set[str], called: set[str], known: Mapping[str, str]
) -> list[UnseenModule]:
    """The mixer-like modules in and around which nothing was captured, outermost only.

    Args:
        model: the model.
        candidates: names of the modules that look like mixers, or were named by hand.
        captured: names of the modules in which a mixer was captured.
        called: names of the modules that were called.
        known: names of modules in which something was seen and left out, with the reason.
    """
    candidates = candidates | set(known)
    seen = {name for name in candidates if any(_related(name, site) for site in captured)}
    missing = sorted(candidates - seen, key=lambda name: (name.count("."), name))
    outermost: list[str] = []
    for name in missing:
        if not any(_holds(outer, name) for outer in outermost):
            outermost.append(name)
    modules = dict(model.named_modules())
    return [
        UnseenModule(name, type(modules[name]).__name__, _reason(name, modules[name], called, known))
        for name in outermost
    ]


def _related(name: str, site: str) -> bool:
    return _holds(name, site) or _holds(site, name)


def _holds(outer: str, inner: str) -> bool:
    """Whether a module is another, or has it inside; the model itself, of empty name, has them all inside."""
    return not outer or f"{inner}.".startswith(f"{outer}.")


def _reason(name: str, module: nn.Module, called: set[str], known: Mapping[str, str]) -> str:
    inside = [reason for other, reason in known.items() if _holds(name, other)]
    if inside:
        return inside[0]
    if name not in called:
        return "never called in this capture"
    for pattern, reason in WITHOUT_OPERATOR:
        if pattern.search(type(module).__name__):
            return f"{reason}; name it in `sites=` with a function of your own to capture it"
    return (
        "called, but no softmax attention was seen inside it: a fused kernel, a custom or compiled "
        "operation, or another kind of mixer; name it in `sites=` to capture it"
    )
