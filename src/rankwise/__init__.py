"""Measure, keep and spend the rank of sequence models.

*Measure*: `capture`, `audit`, `compare` and the measures they use. *Keep*: λ-skips. *Spend*: `plan_head_dim`,
`compress`, `ops`, `models`.
Everything is imported when it is first asked for, so that `import rankwise` takes no time and a command can
answer Ctrl-C from its first moment on.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankwise import compression as compression
    from rankwise import data as data
    from rankwise import errors as errors
    from rankwise import measures as measures
    from rankwise import models as models
    from rankwise import monitor as monitor
    from rankwise import operators as operators
    from rankwise import ops as ops
    from rankwise import plan as plan
    from rankwise import surgery as surgery
    from rankwise import theory as theory
    from rankwise import worth as worth
    from rankwise.audit import Audit, audit, compare
    from rankwise.capture import MixerSite, StateSite, Trace, capture
    from rankwise.compression import compress, compress_qk, load_compressed
    from rankwise.errors import RankwiseError
    from rankwise.measures import (
        coding_rate,
        effective_rank,
        estimate_spectrum,
        numerical_rank,
        singular_values,
        stable_rank,
        token_collapse,
    )
    from rankwise.monitor import RankMonitor
    from rankwise.operators import DenseMixing, MixingOperator, SoftmaxMixing
    from rankwise.plan import plan_head_dim
    from rankwise.surgery import add_lambda_skip, advise, certify_skip, remove_lambda_skip
    from rankwise.theory import rank_barrier

__version__ = "0.1.0.dev0"

__all__ = [
    "Audit",
    "DenseMixing",
    "MixerSite",
    "MixingOperator",
    "RankMonitor",
    "RankwiseError",
    "SoftmaxMixing",
    "StateSite",
    "Trace",
    "add_lambda_skip",
    "advise",
    "audit",
    "capture",
    "certify_skip",
    "coding_rate",
    "compare",
    "compress",
    "compress_qk",
    "effective_rank",
    "estimate_spectrum",
    "load_compressed",
    "numerical_rank",
    "plan_head_dim",
    "rank_barrier",
    "remove_lambda_skip",
    "singular_values",
    "stable_rank",
    "token_collapse",
]
_PACKAGES = (
    "compression",
    "data",
    "errors",
    "measures",
    "models",
    "monitor",
    "operators",
    "ops",
    "plan",
    "surgery",
    "theory",
    "worth",
)
_HOMES = {
    "audit": ("Audit", "audit", "compare"),
    "capture": ("MixerSite", "StateSite", "Trace", "capture"),
    "compression": ("compress", "compress_qk", "load_compressed"),
    "errors": ("RankwiseError",),
    "measures": (
        "coding_rate",
        "effective_rank",
        "estimate_spectrum",
        "numerical_rank",
        "singular_values",
        "stable_rank",
        "token_collapse",
    ),
    "monitor": ("RankMonitor",),
    "operators": ("DenseMixing", "MixingOperator", "SoftmaxMixing"),
    "plan": ("plan_head_dim",),
    "surgery": ("add_lambda_skip", "advise", "certify_skip", "remove_lambda_skip"),
    "theory": ("rank_barrier",),
}
"""The package of each public name."""


class _Rankwise(ModuleType):
    """`rankwise.audit` and `rankwise.capture` are functions, and packages of these names hold them.

    Python binds a package to its name in the package above when it is imported: not here.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Rankwise


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"rankwise.{name}")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'rankwise' has no attribute {name!r}")
    return getattr(import_module(f"rankwise.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])
