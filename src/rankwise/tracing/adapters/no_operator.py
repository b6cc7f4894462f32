"""Layers of transformers that weigh tokens in ways for which there is no adapter, with the reason."""

import re

from torch import nn

from rankwise.tracing.adapters.base import Adapter, CallsInside, NotExactError
from rankwise.tracing.mixing_calls import MixingCall
from rankwise.tracing.module_calls import ModuleCall

REASONS = (
    (
        re.compile(r"DeformableAttention$"),
        "deformable attention: each query reads its values at a few places between them, which it chooses "
        "and weighs from itself alone; no adapter forms the matrix of these interpolations",
    ),
    (
        re.compile(r"^MraSelfAttention$"),
        "multi-resolution attention: scores are exact in a few blocks and one number in each of the others; "
        "no adapter forms the matrix of both",
    ),
    (
        re.compile(r"^LSHSelfAttention$"),
        "hashed attention: tokens are sorted by random hashes, attend within chunks, and rounds of hashes "
        "are averaged; no adapter forms the matrix of all rounds",
    ),
    (
        re.compile(r"^YosoSelfAttention$"),
        "its weights are chances that hashes of queries and keys collide, and its rows are brought to norm 1 "
        "after the values are weighed; no adapter forms its matrix",
    ),
    (
        re.compile(r"^xLSTMBackend$"),
        "the memory of an mLSTM: products of queries and keys that decay, each row divided by its sum where "
        "that is large enough; no adapter forms its matrix",
    ),
    (
        re.compile(r"^GroupViTAssignAttention$"),
        "each of its tokens is given to one group alone, and a group is the mean of its tokens; no adapter "
        "forms the matrix of this choice",
    ),
)


class NoOperatorAdapter(Adapter):
    """Names a layer with what it does, and reads no operator; nor are parts of it taken for mixers."""

    def reads(self, module: nn.Module) -> bool:
        """Whether it is one of these layers of transformers."""
        return _reason(module) is not None

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """What the layer does, in place of an operator.

        Raises:
            NotExactError: always.
        """
        raise NotExactError(_reason(call.module) or "it has no operator")


def _reason(module: nn.Module) -> str | None:
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    return next((reason for pattern, reason in REASONS if pattern.search(kind.__name__)), None)
