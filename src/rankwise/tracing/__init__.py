"""Run a model and record a `Trace`: its mixing operators (such as attention maps) and its token states.

Names are imported on first use, so that modules of saved records can import `Address` without torch.
"""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise._internals.records import Address, UncapturedModule
    from rankwise.tracing.capture_context import OperatorFunction, capture
    from rankwise.tracing.interventions import BlockOutput, HeadOutputs, Intervention
    from rankwise.tracing.model_checks import compiled_modules
    from rankwise.tracing.module_calls import CallId, RecordedCall, record_calls
    from rankwise.tracing.trace import CapturedMixer, CapturedState, Trace

__all__ = [
    "Address",
    "BlockOutput",
    "CallId",
    "CapturedMixer",
    "CapturedState",
    "HeadOutputs",
    "Intervention",
    "OperatorFunction",
    "RecordedCall",
    "Trace",
    "UncapturedModule",
    "capture",
    "compiled_modules",
    "record_calls",
]

__getattr__, __dir__ = lazy_names(__name__)
