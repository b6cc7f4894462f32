"""Bring the tensors of an attention call to (B, H, T, ·), whatever layout the model keeps them in."""

from torch import Tensor, nn

from rankwise.capture.frames import Frame

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head")
"""What modules call their number of heads."""


def with_heads(tensor: Tensor, frame: Frame) -> Tensor:
    """(T, ·), (B, T, ·), (B·H, T, ·), (B, H, T, ·) or more leading axes → (B, H, T, ·).

    A three-axis tensor holds one head unless its first axis is a multiple of the batch, or of the head count
    that the module states: models fold B·H with the heads inside.
    """
    if tensor.dim() == 2:
        return tensor[None, None]
    if tensor.dim() == 3:
        heads = _folded_heads(tensor.shape[0], frame)
        return tensor.unflatten(0, (-1, heads))
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor


def _folded_heads(leading: int, frame: Frame) -> int:
    tokens = frame.tokens
    batch = None if tokens is None or tokens.is_nested else tokens.shape[0]
    stated = next(
        (value for name in HEAD_COUNTS if isinstance(value := getattr(frame.module, name, None), int)), None
    )
    if stated and leading % stated == 0 and batch in (None, leading // stated):
        return stated
    if batch and leading % batch == 0:
        return leading // batch
    return stated if stated and leading % stated == 0 else 1


def unpacked_groups(query: Tensor, frame: Frame) -> Tensor:
    """Undo transformers' packing of one query token: (B, Hkv, groups, K) → (B, Hkv·groups, 1, K).

    For a single token it lays the query heads that share a key head where tokens belong.
    """
    groups = getattr(frame.module, "num_key_value_groups", 1)
    tokens = frame.tokens
    packed = (
        isinstance(frame.module, nn.Module)
        and query.dim() == 4
        and query.shape[-2] == groups > 1
        and tokens is not None
        and tokens.shape[1] == 1
    )
    return query.flatten(1, 2).unsqueeze(2) if packed else query
