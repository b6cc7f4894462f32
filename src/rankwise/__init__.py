"""Measure, keep and spend the rank of sequence models.

*Measure*: `capture`, `audit`, `compare`, and the measures they use. Everything here works on any PyTorch
module; transformers, pandas and plotly are loaded only by what needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise.audit import Audit, audit, compare
from rankwise.capture import MixerSite, StateSite, Trace, capture
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
from rankwise.operators import DenseMixing, MixingOperator, SoftmaxMixing
from rankwise.theory import rank_barrier

if TYPE_CHECKING:
    from rankwise import models as models
    from rankwise import ops as ops
    from rankwise import surgery as surgery
    from rankwise.plan import plan_head_dim
    from rankwise.surgery import add_lambda_skip, certify_skip, remove_lambda_skip

__version__ = "0.1.0.dev0"
_LATER = {
    "models": "rankwise.models",
    "ops": "rankwise.ops",
    "plan_head_dim": "rankwise.plan",
    "surgery": "rankwise.surgery",
    "add_lambda_skip": "rankwise.surgery",
    "certify_skip": "rankwise.surgery",
    "remove_lambda_skip": "rankwise.surgery",
}
"""What is imported when it is first asked for: it is heavy, or imports what is."""

__all__ = [
    "Audit",
    "DenseMixing",
    "MixerSite",
    "MixingOperator",
    "RankwiseError",
    "SoftmaxMixing",
    "StateSite",
    "Trace",
    "add_lambda_skip",
    "audit",
    "capture",
    "certify_skip",
    "coding_rate",
    "compare",
    "effective_rank",
    "estimate_spectrum",
    "numerical_rank",
    "plan_head_dim",
    "rank_barrier",
    "remove_lambda_skip",
    "singular_values",
    "stable_rank",
    "token_collapse",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'rankwise' has no attribute {name!r}")
    module = import_module(_LATER[name])
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
