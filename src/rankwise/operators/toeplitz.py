"""Convolutions as mixing matrices (operators): S4, long convolutions and other time-invariant layers."""

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import ShapeError
from rankwise.operators.base import FastMixing, compute_dtype


class ToeplitzMixing(FastMixing):
    """Convolution over tokens as a Toeplitz matrix: ``M[t, s] = kernel[t − s]``, T = S.

    `M @ V` and Mᵀ U use the Fourier transform: O(T log T · V) time, O(T V) memory. In float32 each entry of
    the result has an error of about 1e-7·‖kernel‖·‖values‖, even if the exact entry is 0. `rows` and `dense`
    are exact.

    Args:
        kernel: one entry per lag t − s, in ascending order. If causal, the lags are 0 … T − 1 and the shape
            is (..., H, T); otherwise, the lags are −(T − 1) … T − 1 and the shape is (..., H, 2T − 1).
        is_causal: True if M is lower triangular.

    Raises:
        ShapeError: if the kernel is not real, is empty, or has an even number of lags and is not causal.

    Examples:
        >>> import torch
        >>> ToeplitzMixing(torch.tensor([1.0, 0.5, 0.25])).dense().tolist()
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]
        >>> ToeplitzMixing(torch.tensor([4.0, 1.0, 2.0]), is_causal=False).dense().tolist()
        [[1.0, 4.0], [2.0, 1.0]]
    """

    kind = "toeplitz"
    held = ("kernel",)
    options = ("is_causal",)
    may_hide_columns = False

    def __init__(self, kernel: Float[Tensor, "..."], is_causal: bool = True) -> None:
        lags = kernel.shape[-1] if kernel.ndim else 0
        if kernel.is_complex():
            raise ShapeError(
                "`ToeplitzMixing` kernel",
                expected="real numbers",
                got=str(kernel.dtype),
                fix="If conjugate states were left out, pass twice its real part.",
            )
        if lags == 0 or (not is_causal and lags % 2 == 0):
            causal, other = "(..., T) lags from 0 on, T ≥ 1", "(..., 2T − 1) lags with lag 0 in the middle"
            raise ShapeError(
                "`ToeplitzMixing` kernel",
                expected=causal if is_causal else other,
                got=f"{tuple(kernel.shape)}",
                fix="Pad the kernel with zeros to the lags that are missing.",
            )
        self.kernel, self.is_causal = kernel, is_causal

    @classmethod
    def from_ssm(
        cls,
        a: Shaped[Tensor, "*heads N"],
        b: Shaped[Tensor, "*heads N"],
        c: Shaped[Tensor, "*heads N"],
        step: Float[Tensor, "*heads"],
        tokens: int,
        conjugates: bool = False,
    ) -> "ToeplitzMixing":
        """Return the causal convolution of a diagonal state-space model with N states, as in S4D.

        Formula: ``kernel[l] = Re Σ_n c_n b̄_n exp(l · step · a_n)`` with b̄ = (exp(step · a) − 1)/a · b
        (zero-order hold; step · b if a = 0). The kernel is doubled if each state represents a conjugate pair.
        Cost: O(T N) time and O(T) memory per head.
        Source: A. Gu, A. Gupta, K. Goel and C. Ré, "On the Parameterization and Initialization of Diagonal
        State Space Models", NeurIPS 2022, eq. 4 and listing 1.

        Args:
            a: rate of each state, real or complex, with a real part of at most 0.
            b: input weight of each state.
            c: output weight of each state.
            step: step size Δ of each head.
            conjugates: True if each complex state also represents its conjugate, as in S4D.

        Raises:
            ShapeError: if the shapes of the tensors do not fit together, or T is less than 1.

        Examples:
            >>> import torch
            >>> one = torch.ones(1, 1)
            >>> a = torch.tensor([[0.5]]).log()
            >>> operator = ToeplitzMixing.from_ssm(a, one, one, torch.ones(1), tokens=3)
            >>> (operator.kernel / operator.kernel[:, :1]).tolist()
            [[1.0, 0.5, 0.25]]
        """
        if a.ndim == 0 or not (a.shape == b.shape == c.shape and step.shape == a.shape[:-1] and tokens > 0):
            raise ShapeError(
                "`ToeplitzMixing.from_ssm`",
                expected="a, b and c (..., H, N), step (..., H), tokens ≥ 1",
                got=f"a {tuple(a.shape)}, b {tuple(b.shape)}, c {tuple(c.shape)}, step {tuple(step.shape)}, "
                f"tokens {tokens}",
                fix="Expand tensors that heads share.",
            )
        a_step = a * step[..., None]
        linear = step[..., None] * torch.ones_like(a)
        held = torch.where(a == 0, linear, torch.expm1(a_step) / torch.where(a == 0, 1, a))
        weights, lags = c * held * b, torch.arange(tokens, device=a.device)
        kernel = step.new_zeros(*step.shape, tokens)
        for weight, rate in zip(weights.unbind(-1), a_step.unbind(-1), strict=True):  # saves a T×N tensor
            kernel = kernel + (weight[..., None] * (rate[..., None] * lags).exp()).real
        return cls(2 * kernel if conjugates else kernel)

    @property
    def shape(self) -> torch.Size:
        """Shape (..., T, T) for T tokens."""
        lags = self.kernel.shape[-1]
        tokens = lags if self.is_causal else (lags + 1) // 2
        return torch.Size([*self.kernel.shape[:-1], tokens, tokens])

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """Return rows of M: the kernel, shifted by one lag from row to row."""
        lag = self._lags(start, stop)
        kernel = self.kernel.to(compute_dtype(self.dtype))
        if self.is_causal:
            return kernel[..., lag.clamp(min=0)].masked_fill(lag < 0, 0)
        return kernel[..., lag + self.shape[-1] - 1]

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Return rows of the support: True everywhere, or on and below the diagonal if causal."""
        lag = self._lags(start, stop)
        seen = lag >= 0 if self.is_causal else torch.ones_like(lag, dtype=torch.bool)
        return seen.expand(*self.shape[:-2], -1, -1)

    def _lags(self, start: int, stop: int) -> Int64[Tensor, "R S"]:
        tokens = torch.arange(self.shape[-1], device=self.device)
        return tokens[start:stop, None] - tokens

    def _multiply(self, values: Tensor, transposed: bool) -> Tensor:
        """Return values convolved with the kernel, or with the reversed kernel if ``transposed``."""
        if 0 in values.shape:  # the FFT rejects an empty axis
            return values.expand(torch.broadcast_shapes(values.shape, (*self.shape[:-1], values.shape[-1])))
        tokens = self.shape[-1]
        length = 1 << (2 * tokens - 2).bit_length()  # a power of two ≥ 2T − 1, so that no lag wraps around
        spectrum = torch.fft.rfft(self._circular(self.kernel.to(values.dtype), length))[..., None]
        spectrum = spectrum.conj() if transposed else spectrum
        product = spectrum * torch.fft.rfft(values, length, dim=-2)
        return torch.fft.irfft(product, length, dim=-2)[..., :tokens, :]

    def _circular(self, kernel: Tensor, length: int) -> Tensor:
        """Return the kernel in the order of the FFT: lag 0, positive lags, zeros, negative lags."""
        negative = 0 if self.is_causal else self.shape[-1] - 1
        zeros = kernel.new_zeros(*kernel.shape[:-1], length - kernel.shape[-1])
        return torch.cat([kernel[..., negative:], zeros, kernel[..., :negative]], dim=-1)


def short_convolution(weight: Tensor, sequences: int, tokens: int) -> ToeplitzMixing:
    """Return a causal depthwise convolution, weight (D, 1, L) for L tokens, as operators (B, D, T, T)."""
    taps = weight.detach()[:, 0].flip(-1)
    kernel = F.pad(taps, (0, max(tokens - taps.shape[-1], 0)))[:, :tokens]
    return ToeplitzMixing(kernel.expand(sequences, -1, -1))
