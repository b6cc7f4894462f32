"""Token Statistics Self-Attention (TSSA): the function `tssa`, with implementations for CPUs and GPUs."""

from rankwise.ops.token_statistics import TSSAOutput, TSSAState, half_lives, tssa

__all__ = ["TSSAOutput", "TSSAState", "half_lives", "tssa"]
