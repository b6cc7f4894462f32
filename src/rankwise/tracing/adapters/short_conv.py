"""Short causal convolutions, and the gated convolution of LFM2 and LFM3, as transformers computes them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.operators import DiagonalMixing, ProductMixing, ToeplitzMixing
from rankwise.tracing.adapters.base import (
    Adapter,
    CallsInside,
    call_of,
    check_on_device,
    named,
    why_not_from_scratch,
)
from rankwise.tracing.mixing_calls import MixingCall
from rankwise.tracing.module_calls import ModuleCall
from rankwise.tracing.trace import Path


def short_convolution(weight: Tensor, sequences: int, tokens: int) -> ToeplitzMixing:
    """The depthwise causal convolution of `torch.nn.Conv1d`, weights (D, 1, L), for every sequence."""
    taps = weight.detach()[:, 0].flip(-1)
    kernel = F.pad(taps, (0, max(tokens - taps.shape[-1], 0)))[:, :tokens]
    return ToeplitzMixing(kernel.expand(sequences, -1, -1))


def convolved(conv: nn.Conv1d, inner: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The short causal convolution of a layer and its activation, (B, T, C), as transformers has them."""
    weight, bias = conv.weight.detach(), conv.bias
    tokens, channels = inner.shape[1:]
    out = F.conv1d(
        inner.transpose(1, 2).to(weight.dtype),
        weight,
        None if bias is None else bias.detach(),
        padding=weight.shape[-1] - 1,
        groups=channels,
    )
    return activation(out[..., :tokens]).to(inner.dtype).transpose(1, 2)


class ShortConvAdapter(Adapter):
    """One Toeplitz matrix for each channel, from the weights of the convolution alone.

    Values are the channels after the first gate; the convolution's bias, the second gate and the output
    projection come after.
    """

    watched = ("in_proj",)
    classes = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})

    def reads(self, module: nn.Module) -> bool:
        """Whether it is the convolution of transformers' LFM2 or LFM3."""
        return named(module, self.classes)

    def why_not(self, call: ModuleCall) -> str | None:
        """It goes on from earlier tokens, or holds several sequences in a row."""
        return why_not_from_scratch(call)

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """Its channels, after the second gate."""
        return "out_proj", 0

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The convolution of a whole sequence."""
        layer: Any = call.module
        check_on_device(layer.conv.weight, layer.conv.bias)
        enters, leaves, x = call_of(inside, "in_proj").gave.transpose(1, 2).chunk(3, dim=1)
        operator = short_convolution(layer.conv.weight, x.shape[0], x.shape[-1])
        if not values:
            return MixingCall(operator, whole=True)
        bias = x.new_zeros(x.shape[1]) if layer.conv.bias is None else layer.conv.bias.detach()
        path = Path(
            ProductMixing(DiagonalMixing(leaves), operator, DiagonalMixing(enters)),
            x[..., None],
            (leaves * bias[:, None])[..., None],
            lambda gated: layer.out_proj(gated[..., 0].transpose(1, 2)),
        )

        def finish(mixed: Tensor) -> Tensor:
            return path.apply_output(leaves[..., None] * mixed + path.offset)

        return MixingCall(operator, (enters * x)[..., None], apply_output=finish, path=path, whole=True)
