"""Token Statistics Self-Attention: `api` is what users call, `reference` the oracle, the rest is speed."""

from rankwise.ops.tssa.api import TSSAOutput, tssa
from rankwise.ops.tssa.decay import half_lives
from rankwise.ops.tssa.state import TSSAState

__all__ = ["TSSAOutput", "TSSAState", "half_lives", "tssa"]
