"""Operations with several implementations: one documented function each, kernels behind it."""

from rankwise.ops.token_statistics import TSSAOutput, TSSAState, half_lives, tssa

__all__ = ["TSSAOutput", "TSSAState", "half_lives", "tssa"]
