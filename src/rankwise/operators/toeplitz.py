"""The same kernel at every token: S4, long convolutions and other time-invariant models."""

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.operators.base import Index, MixingOperator, TensorMap, compute_dtype, leading


class ToeplitzMixing(MixingOperator):
    """A convolution over tokens: ``M[t, s] = kernel[t − s]``, T = S.

    `@` and its transpose go by way of the Fourier transform: O(T log T · V) time, O(T V) memory. Their error
    is about 1e-7·‖kernel‖·‖values‖ in float32 whatever the size of the entry it falls on, also above the
    diagonal; `rows` and `dense` are exact.

    Args:
        kernel: (..., H, T), the lags 0 … T − 1, for a causal operator; (..., H, 2T − 1), the lags −(T − 1) …
            T − 1, for another.
        is_causal: whether M is lower triangular.

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

    def __init__(self, kernel: Float[Tensor, "..."], is_causal: bool = True) -> None:
        _check_kernel(kernel, is_causal)
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
        """The causal convolution of a diagonal state space, as in S4D.

        Formula: ``kernel[l] = Re Σ_n c_n b̄_n exp(l · step · a_n)`` with b̄ = (exp(step · a) − 1)/a · b, a
        zero-order hold (step · b where a = 0); twice that where conjugate states were left out.
        Cost: O(T N) time and O(T) memory for each head.
        Source: A. Gu, A. Gupta, K. Goel and C. Ré, "On the Parameterization and Initialization of Diagonal
        State Space Models", NeurIPS 2022, eq. 4 and listing 1.

        Args:
            a: what the state decays by, real or complex, real parts at most 0.
            b: what enters the state.
            c: what reads the state.
            step: Δ, one a head.
            tokens: T.
            conjugates: whether each complex state stands for itself and its conjugate, as S4D keeps them.

        Raises:
            ShapeError: if they do not fit together, or T is less than 1.

        Examples:
            >>> import torch
            >>> one = torch.ones(1, 1)
            >>> a = torch.tensor([[0.5]]).log()
            >>> operator = ToeplitzMixing.from_ssm(a, one, one, torch.ones(1), tokens=3)
            >>> (operator.kernel / operator.kernel[:, :1]).tolist()
            [[1.0, 0.5, 0.25]]
        """
        _check_ssm(a, b, c, step, tokens)
        a_step = a * step[..., None]
        linear = step[..., None] * torch.ones_like(a)
        held = torch.where(a == 0, linear, torch.expm1(a_step) / torch.where(a == 0, 1, a))
        weights, lags = c * held * b, torch.arange(tokens, device=a.device)
        kernel = step.new_zeros(*step.shape, tokens)
        for weight, rate in zip(weights.unbind(-1), a_step.unbind(-1), strict=True):
            kernel = kernel + (weight[..., None] * (rate[..., None] * lags).exp()).real
        return cls(2 * kernel if conjugates else kernel)

    @property
    def shape(self) -> torch.Size:
        """Leading axes, T, T."""
        lags = self.kernel.shape[-1]
        tokens = lags if self.is_causal else (lags + 1) // 2
        return torch.Size([*self.kernel.shape[:-1], tokens, tokens])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the kernel."""
        return self.kernel.dtype

    @property
    def device(self) -> torch.device:
        """Device of the kernel."""
        return self.kernel.device

    def rows(self, start: int, stop: int) -> Float[Tensor, "*batch R S"]:
        """The kernel, shifted by one lag a row."""
        lag = self._lags(start, stop)
        kernel = self.kernel.to(compute_dtype(self.dtype))
        if self.is_causal:
            return kernel[..., lag.clamp(min=0)].masked_fill(lag < 0, 0)
        return kernel[..., lag + self.shape[-1] - 1]

    def support(self) -> Bool[Tensor, "*batch T S"]:
        """All entries, or those on and below the diagonal."""
        return self.support_rows(0, self.shape[-2])

    def support_rows(self, start: int, stop: int) -> Bool[Tensor, "*batch R S"]:
        """Rows of the support."""
        lag = self._lags(start, stop)
        seen = lag >= 0 if self.is_causal else torch.ones_like(lag, dtype=torch.bool)
        return seen.expand(*self.shape[:-2], -1, -1)

    def __matmul__(self, values: Float[Tensor, "... S V"]) -> Float[Tensor, "... T V"]:
        """M V."""
        self._check(values, self.shape[-1], "M @ values")
        return self._convolve(values, transposed=False)

    def apply_transposed(self, values: Float[Tensor, "... T V"]) -> Float[Tensor, "... S V"]:
        """Mᵀ U: the kernel read backwards."""
        self._check(values, self.shape[-2], "M.mT @ values")
        return self._convolve(values, transposed=True)

    @property
    def may_hide_columns(self) -> bool:
        """It has no mask: every token is seen by itself."""
        return False

    def __getitem__(self, index: Index) -> "ToeplitzMixing":
        """Pick sequences and heads."""
        return ToeplitzMixing(leading(self.kernel[..., None], index)[..., 0], self.is_causal)

    def _map(self, change: TensorMap) -> "ToeplitzMixing":
        return ToeplitzMixing(change(self.kernel), self.is_causal)

    def _lags(self, start: int, stop: int) -> Int64[Tensor, "R S"]:
        tokens = torch.arange(self.shape[-1], device=self.device)
        return tokens[start:stop, None] - tokens

    def _convolve(self, values: Tensor, transposed: bool) -> Tensor:
        work = compute_dtype(torch.promote_types(self.dtype, values.dtype))
        if 0 in values.shape:  # which no FFT takes
            return values.expand(torch.broadcast_shapes(values.shape, (*self.shape[:-1], values.shape[-1])))
        tokens = self.shape[-1]
        length = 1 << (2 * tokens - 2).bit_length()  # ≥ 2T − 1: no lag wraps round onto another
        kernel = torch.fft.rfft(self._circular(self.kernel.to(work), length))[..., None]
        spectrum = torch.fft.rfft(values.to(work), length, dim=-2)
        product = (kernel.conj() if transposed else kernel) * spectrum
        return torch.fft.irfft(product, length, dim=-2)[..., :tokens, :].to(values.dtype)

    def _circular(self, kernel: Tensor, length: int) -> Tensor:
        """The kernel with lag 0 first, zeros, and the negative lags at the end."""
        negative = 0 if self.is_causal else self.shape[-1] - 1
        zeros = kernel.new_zeros(*kernel.shape[:-1], length - kernel.shape[-1])
        return torch.cat([kernel[..., negative:], zeros, kernel[..., :negative]], dim=-1)


def _check_ssm(a: Tensor, b: Tensor, c: Tensor, step: Tensor, tokens: int) -> None:
    if a.ndim == 0 or not (a.shape == b.shape == c.shape and step.shape == a.shape[:-1] and tokens > 0):
        raise ShapeError(
            "`ToeplitzMixing.from_ssm`",
            expected="a, b and c (..., H, N), step (..., H), tokens ≥ 1",
            got=f"a {tuple(a.shape)}, b {tuple(b.shape)}, c {tuple(c.shape)}, step {tuple(step.shape)}, "
            f"tokens {tokens}",
            fix="Expand what heads share.",
        )


def _check_kernel(kernel: Tensor, is_causal: bool) -> None:
    lags = kernel.shape[-1] if kernel.ndim else 0
    if kernel.is_complex():
        raise ShapeError(
            "`ToeplitzMixing` kernel",
            expected="real numbers",
            got=str(kernel.dtype),
            fix="Pass twice its real part where conjugate states were left out.",
        )
    wanted = "(..., T) lags from 0 on, T ≥ 1" if is_causal else "(..., 2T − 1) lags with lag 0 in the middle"
    if lags == 0 or (not is_causal and lags % 2 == 0):
        raise ShapeError(
            "`ToeplitzMixing` kernel",
            expected=wanted,
            got=f"{tuple(kernel.shape)}",
            fix="Pad the kernel with zeros to the lags it lacks.",
        )
