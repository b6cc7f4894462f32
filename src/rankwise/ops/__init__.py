"""Token Statistics Self-Attention: one function with several implementations."""

from rankwise.ops.decay import half_lives
from rankwise.ops.token_statistics import TSSAOutput, TSSAState, tssa

__all__ = ["TSSAOutput", "TSSAState", "half_lives", "tssa"]
