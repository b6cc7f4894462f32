"""Rankwise measures the rank of sequence models, preserves it, and uses it to size and compress models.

Measure: `audit`, `capture`, `compare`. Preserve: λ-skips. Use: `plan_head_dim`, `compress`, `ops`.
Names are imported on first use, so that `import rankwise` is fast and Ctrl-C ends a command at once.
"""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise import auditing as auditing
    from rankwise import claims as claims
    from rankwise import compression as compression
    from rankwise import errors as errors
    from rankwise import importance as importance
    from rankwise import measures as measures
    from rankwise import models as models
    from rankwise import monitor as monitor
    from rankwise import operators as operators
    from rankwise import ops as ops
    from rankwise import plan as plan
    from rankwise import skips as skips
    from rankwise import theory as theory
    from rankwise import tracing as tracing
    from rankwise.auditing import Audit, audit, compare
    from rankwise.compression import compress, load_compressed
    from rankwise.errors import RankwiseError
    from rankwise.monitor import RankMonitor
    from rankwise.operators import MixingOperator
    from rankwise.plan import plan_head_dim
    from rankwise.skips import add_lambda_skip, certify_skip, remove_lambda_skip
    from rankwise.tracing import Trace, capture

__version__ = "0.1.0.dev0"

__all__ = [
    "Audit",
    "MixingOperator",
    "RankMonitor",
    "RankwiseError",
    "Trace",
    "__version__",
    "add_lambda_skip",
    "audit",
    "capture",
    "certify_skip",
    "compare",
    "compress",
    "load_compressed",
    "plan_head_dim",
    "remove_lambda_skip",
]

__getattr__, __dir__ = lazy_names(__name__)
