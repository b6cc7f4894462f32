"""Token Statistics Self-Attention: `api` is what users call, `reference` the oracle, the rest is speed."""

from rankwise.ops.token_statistics.api import TSSAOutput, tssa
from rankwise.ops.token_statistics.decay import half_lives
from rankwise.ops.token_statistics.state import TSSAState

__all__ = ["TSSAOutput", "TSSAState", "half_lives", "tssa"]
