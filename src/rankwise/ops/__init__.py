"""Token Statistics Self-Attention (TSSA): the function `tssa`, with implementations for CPUs and GPUs."""

from rankwise.ops.decay import half_lives
from rankwise.ops.token_statistics import TSSAOutput, TSSAState, tssa

__all__ = ["TSSAOutput", "TSSAState", "half_lives", "tssa"]
