"""The short convolution ahead of a state space, for padded rows and for decoding."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F


class ShortConvolution(nn.Conv1d):
    """A causal convolution over a few tokens, each channel by itself, and SiLU.

    It runs over the real tokens of each row, as if no padding stood between them.

    Args:
        channels: how many.
        tokens: how many each output sees; 1 is a scale and a bias by channel.

    Examples:
        >>> import torch
        >>> convolution, x = ShortConvolution(2, 4), torch.randn(1, 5, 2)
        >>> output, state = convolution(x)
        >>> tuple(output.shape), tuple(state.shape), torch.equal(state, x[:, 2:])
        ((1, 5, 2), (1, 3, 2), True)
    """

    def __init__(self, channels: int, tokens: int) -> None:
        super().__init__(channels, channels, tokens, groups=channels)
        self.reach = tokens - 1

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "B T C"],
        mask: Bool[Tensor, "B T"] | None = None,
        state: Float[Tensor, "B R C"] | None = None,
    ) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B R C"]]:
        """Convolve.

        Args:
            x: the tokens of this call.
            mask: which are real; all where None.
            state: the last inputs of an earlier call.

        Returns:
            The outputs, and the last ``tokens - 1`` real inputs, zeros where there were fewer.
        """
        past = x.new_zeros(len(x), self.reach, x.shape[-1]) if state is None else state.to(x.dtype)
        if mask is None:
            line = torch.cat([past, x], 1)
            return self._convolved(line), line[:, x.shape[1] :]
        real_first = (~mask).long().argsort(dim=1, stable=True)
        line = torch.cat([past, _take(x, real_first)], 1)
        count = mask.long().cumsum(1)
        last = count[:, -1:] + torch.arange(self.reach, device=x.device)
        return _take(self._convolved(line), (count - 1).clamp(min=0)), _take(line, last)

    def _convolved(self, line: Tensor) -> Tensor:
        """The outputs whose inputs are all there."""
        return F.silu(super().forward(line.mT)).mT


def _take(tokens: Tensor, places: Tensor) -> Tensor:
    """The tokens at these places of each row."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))
