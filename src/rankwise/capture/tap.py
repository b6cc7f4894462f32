"""The function mode that sees attention happen, and changes nothing."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rankwise.capture.weights import Mixed, WeightsTap

FusedListener = Callable[[tuple[Any, ...], dict[str, Any], Any], None]
MixedListener = Callable[[Mixed], None]


class AttentionTap(TorchFunctionMode):
    """Runs every torch function as it is, then looks at it.

    Args:
        on_fused: called after `scaled_dot_product_attention`, with its arguments and result.
        on_functional: called after `multi_head_attention_forward`, likewise.
        on_mixed: called when a softmax written by hand meets its values.
    """

    def __init__(
        self, on_fused: FusedListener, on_functional: FusedListener, on_mixed: MixedListener
    ) -> None:
        super().__init__()
        self.weights = WeightsTap()
        self._whole = {
            F.scaled_dot_product_attention: on_fused,
            F.multi_head_attention_forward: on_functional,
        }
        self._on_mixed = on_mixed

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function with this mode off, then take note of it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        listener = self._whole.get(func)
        if listener is not None:
            listener(args, kwargs, out)
            return out
        mixed = self.weights.saw(func, args, kwargs, out)
        if mixed is not None:
            self._on_mixed(mixed)
        return out
