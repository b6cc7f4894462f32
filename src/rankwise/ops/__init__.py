"""Operations with several implementations: one documented function each, kernels behind it."""

from rankwise.ops.tssa import TSSAOutput, TSSAState, half_lives, tssa

__all__ = ["TSSAOutput", "TSSAState", "half_lives", "tssa"]
